#!/usr/bin/env python3
"""Training on several ranks gives the results of one rank: every ZeRO stage, gradient accumulation, masks, clipping, evaluation,
resuming with another number of ranks, and ranks that stop or die. TRAIN_GPT names the driver. mpirun starts its ranks, or --gpus
with the CUDA build (on two GPUs, or four if there are four)."""
import contextlib
import fcntl
import glob
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

import harness
from harness import checkpoints, log
from several_ranks import CUDA, ENVIRONMENT, GPUS, WHY_NOT, command, process_of_rank, run, run_each

COUNTS = (2, 4) if not CUDA or GPUS >= 4 else (2,)
STAGES = (0, 1, 2, 3)
SIDE_BY_SIDE = 8 if CUDA else 4  # concurrent runs: starting one takes longer than its computation
MODEL = ["--layers", 3, "--channels", 32, "--heads", 2, "--max-positions", 64]


def catches(process, number):
    """Whether it does so itself, or has ended."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
            state, caught = re.search(r"^State:\s*(\w)(?s:.*)^SigCgt:\s*([0-9a-f]+)", file.read(), re.M).groups()
    except OSError:
        return True
    return state == "Z" or int(caught, 16) >> (number - 1) & 1


@unittest.skipIf(WHY_NOT, WHY_NOT)
class ParallelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.top = tempfile.mkdtemp(prefix="train_gpt_parallel_")
        cls.data = harness.make_data(cls.top)
        cls.runs = {}
        cls.numbers = itertools.count()

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    def setUp(self):
        kept = ("test_gradient_accumulation", "test_gradients_summed_in_16_bits",
                "test_samples_and_profile_are_printed_once")
        if harness.sanitized() and self._testMethodName not in kept:
            self.skipTest("sanitizers see the same code in fewer runs")

    @classmethod
    def args(cls, name, model, ranks, *args):
        """Options of a run of 10 steps of 8 sequences of 32 tokens, on any number of ranks. Later options take precedence."""
        given = dict(zip(args[::2], args[1::2]))
        defaults = {"--data": cls.data, "--out": os.path.join(cls.top, name), "--steps": 10, "--batch-size": 8 // ranks, "--seq-len": 32,
                    "--total-batch-tokens": 256, "--lr": 3e-3, "--warmup": 2, "--eval-every": 5, "--save-every": 5,
                    "--gemm-tune": "off"}  # runs could choose different algorithms
        defaults = {**dict(zip(MODEL[::2], MODEL[1::2])), **defaults}
        return ["--model", model, *(x for k, v in defaults.items() if k not in given for x in (k, v)), *args]

    @classmethod
    def train(cls, ranks, *args, name=None, model="gpt2-tiny"):
        """The directory of such a run. Equal runs are made only once."""
        key = (name, model, ranks, *args)
        if key not in cls.runs:
            name = name or f"run{next(cls.numbers)}"
            done = run(ranks, *cls.args(name, model, ranks, *args))
            if done.returncode:
                raise AssertionError(f"training on {ranks} ranks with {args} failed: {done.stderr}")
            cls.runs[key] = os.path.join(cls.top, name)
        return cls.runs[key]

    @classmethod
    def train_all(cls, *jobs, **kwargs):
        """The directories of several runs, which run concurrently. Each job is the arguments of train()."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            return list(pool.map(lambda job: cls.train(*job, **kwargs), jobs))

    def expect_same_numbers(self, got, expected, what, tolerance=1e-6):
        """Expects equal losses and norms at each step, within rounding."""
        got, expected = log(got), log(expected)
        self.assertEqual([line["step"] for line in got], [line["step"] for line in expected], what)
        for a, b in zip(got, expected):
            for key in ("loss", "val_loss", "bits_per_byte", "lr"):
                if b.get(key) is not None:
                    self.assertAlmostEqual(a[key] / b[key], 1, delta=tolerance, msg=f"{what}: {key} of step {b['step']}")
            if "grad_norm" in b:
                self.assertAlmostEqual(a["grad_norm"] / b["grad_norm"], 1, delta=10 * tolerance, msg=f"{what}: norm of step {b['step']}")

    def expect_same_bits(self, runs, what, last=10):
        """Expects equal bits in the checkpoints' tensors. MPI sums in rank order, and two ranks have only one order; with NCCL on more
        GPUs the order differs."""
        if not CUDA or GPUS == 2:
            found = [harness.digests(os.path.join(run_dir, f"step_{last:08}")) for run_dir in runs]
            for digests in found[1:]:
                for name in ("model.safetensors", "state.safetensors"):
                    self.assertEqual(digests[name], found[0][name], f"{what}: {name}")

    # ---- the same numbers ------------------------------------------------------------------------------------------------

    def test_every_stage_matches_one_rank(self):
        # Tied and untied heads; each group reduced separately, and all at once; the decay gates and head norms of linear
        # attention, with a document mask; the parameters of architecture options, with the head's bias in its own group or in
        # that of the embedding; norms after attention and the MLP.
        options = ["--head-bias", "yes", "--embedding-norm", "yes", "--qk-norm", "weights", "--logit-softcap", 15]
        for model, bucket, counts, *kinds in (("gpt2-tiny", 0, COUNTS),
                                              ("llama-tiny", 32, COUNTS[:1], "--attention", "LGS", "--document-mask"),
                                              ("gpt2-tiny", 32, COUNTS[:1], *options),
                                              ("gpt2-tiny", 0, COUNTS[:1], "--tied", "no", *options),
                                              ("llama-tiny", 0, COUNTS[:1], "--norm-placement", "after", "--qk-norm", "all-heads",
                                               "--bias", "yes")):
            extra = ["--reduce-bucket-mib", bucket, "--kv-heads", 2, *kinds]
            alone, *runs = self.train_all((1, *extra), *((ranks, *extra, "--zero-stage", stage) for ranks in counts for stage in STAGES),
                                          model=model)
            for i, ranks in enumerate(counts):
                of_ranks = runs[i * len(STAGES):(i + 1) * len(STAGES)]
                for stage, run_dir in zip(STAGES, of_ranks):
                    self.expect_same_numbers(run_dir, alone, f"{model} {kinds}, stage {stage} on {ranks} ranks")
                self.expect_same_bits(of_ranks, f"{model} {kinds} on {ranks} ranks")

    def test_gradient_accumulation(self):
        alone, *runs = self.train_all((1,), *((2, "--batch-size", 1, "--zero-stage", stage) for stage in STAGES))
        for stage, run_dir in zip(STAGES, runs):
            self.expect_same_numbers(run_dir, alone, f"accumulated in stage {stage}")
        # Stages 0 and 1 accumulate all micro-steps before they sum over ranks; stages 2 and 3 sum each micro-step.
        self.expect_same_bits(runs[:2], "accumulated in stages 0 and 1")
        self.expect_same_bits(runs[2:], "accumulated in stages 2 and 3")

    def test_steps_without_loss_tokens(self):
        """A step has none if no rank has one. Half of the sequences have none, so a rank alone often has none."""
        tokens = [(7 * i * i + 3) % 50 for i in range(32 * 100 + 1)]
        data = harness.write_tokens(os.path.join(self.top, "prompts"), tokens, [(i - 1) // 32 % 2 for i in range(len(tokens))])
        options = ["--data", data, "--vocab-size", 50, "--total-batch-tokens", 64, "--steps", 16, "--save-every", 0]
        alone, *runs = self.train_all((1, *options, "--batch-size", 2),
                                      *((2, *options, "--batch-size", 1, "--zero-stage", stage) for stage in (0, 3)))
        marked = {line["step"] for line in log(alone) if line.get("no_loss_tokens")}
        self.assertTrue(1 < len(marked) < 10, marked)
        for run_dir in runs:
            self.assertEqual({line["step"] for line in log(run_dir) if line.get("no_loss_tokens")}, marked)
            for got, expected in zip(log(run_dir), log(alone)):
                self.assertEqual(got["loss"] is None, got["step"] in marked)
                if got["loss"]:
                    self.assertAlmostEqual(got["loss"] / expected["loss"], 1, delta=1e-5)

    def test_ranks_that_differ_are_refused(self):
        """One line names what differs, the rank and both values; nothing is written or disturbed."""
        out = self.train(2, "--zero-stage", 0)
        before = harness.digests(os.path.join(out, "step_00000010"))
        here, there = os.path.join(self.top, "here"), os.path.join(self.top, "there")
        for place in here, there:
            os.mkdir(place)
            shutil.copytree(self.data, os.path.join(place, "data"))
            done = harness.run("train", *self.args(os.path.join(place, "base"), "gpt2-tiny", 1, "--steps", 1))
            self.assertEqual(done.returncode, 0, done.stderr)
        tail = "start all ranks with the same program, options and files"
        size = os.path.getsize(os.path.join(there, "data", "val_000000.bin"))

        def differing(words, second, first=(), others=r"(, and \d more differ)?"):
            commands = []
            for directory, extra in ((here, first), (there, second)):
                args = extra if "--model" in extra else self.args("unused", "gpt2-tiny", 2, *extra)
                commands.append(["env", "-C", directory, harness.DRIVER, "train", *map(str, args)])
            status, said = run_each(*commands)
            self.assertNotEqual(status, 0, said)
            self.assertRegex(said, f"train_gpt: train: rank 1 has {words}{others}; {tail}\n")
            self.assertFalse(os.path.exists(os.path.join(self.top, "unused")))

        for name, value, ours in (("--lr", "0.1", "3e-3|0.003"), ("--seed", "7", "42"), ("--steps", "11", "10"),
                                  ("--head-bias", "yes", "none"), ("--zero-stage", "2", "0"), ("--spike-factor", "9", "0")):
            differing(f"{name} {value}, rank 0 has ({ours})", [name, value], others="")
        differing("--fit given, rank 0 has none", ["--fit"])
        differing(f"--out {self.top}/elsewhere, rank 0 has {self.top}/unused", ["--out", os.path.join(self.top, "elsewhere")])
        differing("--resume given, rank 0 has none", ["--dtype", "fp32", "--out", out, "--resume"],
                  ["--dtype", "fp32", "--out", out])
        self.assertEqual(harness.digests(os.path.join(out, "step_00000010")), before)
        # Files of equal names that hold other bytes.
        options = ["--data", "data"]
        with open(os.path.join(there, "data", "val_000000.bin"), "r+b") as file:
            file.seek(2000)
            file.write(bytes([1, 0]))
        differing(rf"data/val_000000.bin of {size} bytes with checksum \w+, rank 0 has of {size} bytes with checksum \w+",
                  options, options)
        weights = os.path.join(there, "base", "step_00000001", "config.json")
        with open(weights, "a") as file:
            file.write("\n")
        options = ["--model", "base", "--data", "data", "--out", "unused", "--seq-len", 32, "--batch-size", 4]
        differing(r"base/step_00000001/config.json of \d+ bytes .*", options, options)

    def test_gradients_summed_in_16_bits(self):
        # The last run adds each micro-step's sum in fp32.
        alone, *runs, accumulated = self.train_all((1,), *((2, "--zero-stage", stage, "--reduce-dtype", "bf16") for stage in STAGES),
                                                   (2, "--batch-size", 1, "--zero-stage", 2, "--reduce-dtype", "bf16"))
        for stage, run_dir in zip(STAGES, runs):
            self.expect_same_numbers(run_dir, alone, f"bf16 sums in stage {stage}", tolerance=1e-4)
            self.assertNotEqual(log(run_dir)[-2]["loss"], log(alone)[-2]["loss"])
        self.expect_same_bits(runs, "bf16 sums")
        self.expect_same_numbers(accumulated, alone, "bf16 sums, accumulated", tolerance=1e-4)

    def test_gradients_added_in_matmuls(self):
        """The ranks' sums in bf16 are added up once a step. Resumed runs repeat the bits, and stages that add up each micro-step are
        refused."""
        args = ["--grad-dtype", "bf16", "--grad-rounding", "nearest", "--batch-size", 1, *(["--dtype", "bf16"] if CUDA else [])]
        alone, *runs = self.train_all((1, *args), *((2, *args, "--zero-stage", stage) for stage in (0, 1)),
                                      (2, *args, "--reduce-dtype", "bf16"), (2, *args, "--optimizer", "muon"))
        for run_dir in runs[:3]:
            self.expect_same_numbers(run_dir, alone, "sums of matmuls", tolerance=2e-3)
        # The sum of two ranks is rounded once, whether it is exchanged in fp32 or in bf16.
        self.expect_same_bits(runs[:3], "sums of matmuls in stages 0 and 1")
        for run_dir in runs[1], runs[3]:
            last = os.path.join(run_dir, "step_00000010")
            before = harness.digests(last)
            shutil.rmtree(last)
            done = run(2, "--resume", "--out", run_dir)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(harness.digests(last), before)
        refused = run(2, *self.args("refused", "gpt2-tiny", 2, *args, "--zero-stage", 2))
        self.assertIn("--grad-rounding nearest: in --zero-stage 2 the 2 ranks add up the gradients of each micro-step outside the matmuls; "
                      "leave it out or take --zero-stage 1", refused.stderr)

    def test_muon_in_every_stage_matches_one_rank(self):
        """GPT-2 and LLaMA (an untied head, grouped queries, gate and up), and more ranks than there are matrices."""
        for model, counts, *extra in (("gpt2-tiny", COUNTS), ("llama-tiny", COUNTS[:1], "--kv-heads", 1, "--tied", "no"),
                                      ("gpt2-tiny", () if CUDA else (8,), "--layers", 1, "--steps", 4, "--save-every", 4)):
            args = ["--optimizer", "muon", "--lr", 5e-3, "--muon-coefficients", "simple", "--reduce-bucket-mib", 0, *extra]
            if not counts:
                continue
            alone, *runs = self.train_all((1, *args), *((ranks, *args, "--zero-stage", stage) for ranks in counts for stage in STAGES),
                                          model=model)
            for i, ranks in enumerate(counts):
                of_ranks = runs[i * len(STAGES):(i + 1) * len(STAGES)]
                for stage, run_dir in zip(STAGES, of_ranks):
                    self.expect_same_numbers(run_dir, alone, f"{model} {extra} with Muon, stage {stage} on {ranks} ranks", 1e-5)
                self.expect_same_bits(of_ranks, f"{model} {extra} with Muon on {ranks} ranks", last=int(log(alone)[-1]["step"]))

    def test_fp8_in_every_stage_matches_one_rank(self):
        """Scales come from the maxima of all ranks: after 16 steps they are the same on any number of ranks. What differs
        are orders of sums, which tip a few roundings to 8 bits over."""
        def history(run_dir):
            with open(os.path.join(run_dir, "step_00000020", "trainer.json")) as file:
                return json.load(file)["fp8"]["history"]
        args = ["--matmul-dtype", "fp8", "--steps", 20, "--kv-heads", 2, *(["--dtype", "bf16"] if CUDA else [])]
        jobs = [(ranks, *args, "--zero-stage", stage) for ranks in COUNTS for stage in STAGES]
        alone, *runs = self.train_all((1, *args), *jobs, model="llama-tiny")
        for i, ranks in enumerate(COUNTS):
            of_ranks = runs[i * len(STAGES):(i + 1) * len(STAGES)]
            for run_dir in of_ranks:
                self.expect_same_numbers(run_dir, alone, f"fp8 on {ranks} ranks", 5e-3)
                # 0.007 on two ranks. With maxima of each rank alone it would be 0.03.
                changes = [abs(math.log(got / expected)) for got, expected in zip(history(run_dir), history(alone))]
                self.assertLess(sum(changes) / len(changes), 0.02)
            self.expect_same_bits(of_ranks, f"fp8 on {ranks} ranks", last=20)
        resumed = self.resumed(runs[1], 2, "fp8", "--zero-stage", 3, last=20)
        self.expect_same_bits([runs[1], resumed], "fp8 resumed in another stage", last=20)

    def test_gathered_fp8_codes_give_the_bits_of_gathered_weights(self):
        """Stage 3 gathers codes, or weights that it quantises at each use: scales are of the largest weights of all ranks. Biases
        and decay gates, which have no codes; layers in the model's dtype between the others; samples, which read weights."""
        fp8 = ["--matmul-dtype", "fp8", "--batch-size", 1, *(["--dtype", "bf16"] if CUDA else [])]
        stage_3 = [*fp8, "--zero-stage", 3]
        for model, ranks, *kinds in (("gpt2-tiny", COUNTS[-1], "--recompute", "block"),
                                     ("llama-tiny", 2, "--kv-heads", 2, "--attention", "LGS", "--fp8-skip-first", 1),
                                     ("llama-tiny", 2, "--kv-heads", 2, "--fp8-skip-last", 1, "--bias", "yes",
                                      "--optimizer", "muon", "--recompute", "norms")):
            jobs = [(ranks, *stage_3, *kinds, "--fp8-weights", weights) for weights in ("auto", "kept", "use")]
            *kept, used = self.train_all(*jobs, model=model)
            self.expect_same_bits([*kept, used], f"{model} {kinds} on {ranks} ranks")
            self.assertEqual([line.get("loss") for line in log(kept[0])], [line.get("loss") for line in log(used)])
        # Stage 2 does not wait for updated weights that it does not keep.
        self.expect_same_bits(self.train_all(*((2, *fp8, "--zero-stage", 2, "--fp8-weights", weights) for weights in ("kept", "use"))),
                              "codes in stage 2")
        samples, sent = [], []
        for weights in ("kept", "use"):
            args = [*stage_3, "--fp8-skip-last", 1, "--steps", 2, "--sample-every", 1, "--save-every", 0, "--profile", 2]
            done = run(2, *self.args(f"codes_{weights}", "gpt2-tiny", 2, *args, "--fp8-weights", weights))
            self.assertEqual(done.returncode, 0, done.stderr)
            samples.append([line for line in done.stderr.splitlines() if "sample:" in line])
            sent.append({line.split(",")[0][4:] for line in done.stderr.splitlines() if line.startswith("  | all_gather of")})
        self.assertEqual(samples[0], samples[1])
        self.assertEqual(len(samples[0]), 2)
        codes = {f"all_gather of {what}" for what in ("codes of layer 0", "codes of layer 1", "layer 2")}
        self.assertEqual({what for what in sent[0] if "layer" in what}, codes)
        self.assertEqual({what for what in sent[1] if "layer" in what}, {what.replace("codes of ", "") for what in codes})

    def test_muon_resumes_with_any_number_of_ranks_and_any_stage(self):
        args = ["--optimizer", "muon", "--lr", 5e-3, "--kv-heads", 2]
        parted, = self.train_all((2, *args, "--zero-stage", 2), model="llama-tiny")
        jobs = [(2, "--zero-stage", 2), (2, "--zero-stage", 0), (1, "--zero-stage", 0), (COUNTS[-1], "--zero-stage", 3)]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            resumed = list(pool.map(lambda job: self.resumed(parted, job[0], "muon" + "".join(map(str, job)), *job[1:]), jobs))
        self.expect_same_bits([parted, *resumed[:2]], "Muon resumed on as many ranks")
        for run_dir, job in zip(resumed, jobs):
            self.expect_same_numbers(run_dir, parted, f"Muon resumed with {job}", 1e-5)

    def test_optimizer_state_in_bf16(self):
        """The noise of the rounding depends on no division: all stages have the same bits, and so has a resumed run."""
        for optimizer in ("adamw", "muon"):
            args = ["--optimizer", optimizer, "--lr", 5e-3, "--optimizer-dtype", "bf16", "--reduce-bucket-mib", 0, "--kv-heads", 2]
            runs = self.train_all(*((2, *args, "--zero-stage", stage) for stage in STAGES), model="llama-tiny")
            resumed = self.resumed(runs[2], 2, f"bf16_{optimizer}", "--zero-stage", 1)
            self.expect_same_bits([*runs, resumed], f"{optimizer} with moments in bf16")
            elsewhere = self.resumed(runs[1], 1, f"bf16_{optimizer}_alone", "--zero-stage", 0)
            self.expect_same_numbers(elsewhere, runs[1], f"{optimizer} resumed on one rank", 1e-3)

    def test_gradients_in_bf16(self):
        """Sums over ranks are in fp32 and rounded once: with one micro-step all stages have the same bits. With more, stages 2 and 3
        round the sum over all ranks after each."""
        args = ["--grad-dtype", "bf16", "--kv-heads", 2]
        runs = self.train_all(*((2, *args, "--zero-stage", stage) for stage in STAGES), model="llama-tiny")
        self.expect_same_bits(runs, "gradients in bf16")
        args += ["--batch-size", 1]
        runs = self.train_all(*((2, *args, "--zero-stage", stage) for stage in STAGES), model="llama-tiny")
        self.expect_same_bits(runs[:2], "gradients in bf16, several micro-steps")
        self.expect_same_bits(runs[2:], "gradients in bf16, several micro-steps")
        resumed = self.resumed(runs[1], 2, "bf16_gradients", "--zero-stage", 0, batch_size=1)
        self.expect_same_bits([runs[1], resumed], "gradients in bf16, resumed")

    def test_offload(self):
        dtype, everything = ("bf16", "optimizer,master,activations") if CUDA else ("fp32", "optimizer,activations")  # the CPU has no master weights
        args = ["--dtype", dtype, "--optimizer", "muon", "--kv-heads", 2, "--recompute", "block"]
        for stage in (0, 1, 3):
            runs = self.train_all(*((2, *args, "--zero-stage", stage, "--offload", what) for what in ("none", everything)), model="llama-tiny")
            self.expect_same_bits(runs, f"stage {stage}, offloaded")

    def test_masked_tokens_do_not_count(self):
        """The ranks have different numbers of targets, some none. The loss is the mean over the targets of all ranks."""
        data = os.path.join(self.top, "masked")
        shutil.copytree(self.data, data)
        for path in glob.glob(os.path.join(data, "*.bin")):
            with open(path, "rb") as file:
                tokens = struct.unpack("<3i", file.read(12))[2]
            with open(path[:-4] + ".mask", "wb") as file:
                file.write(struct.pack("<3i", 20261121, 1, tokens).ljust(1024, b"\0") + bytes(int(i // 45 % 3 == 0) for i in range(tokens)))
        unmasked, alone, *parted = self.train_all((1,), (1, "--data", data), *((COUNTS[-1], "--data", data, "--zero-stage", stage)
                                                                                 for stage in (0, 3)))
        self.assertNotEqual(log(alone)[0]["loss"], log(unmasked)[0]["loss"])
        for run_dir in parted:
            self.expect_same_numbers(run_dir, alone, "masked")

    def test_recompute_without_clipping(self):
        args = ["--grad-clip", 0, "--recompute", "block"]
        clipped, alone, parted = self.train_all((1,), (1, *args), (2, *args, "--zero-stage", 3))
        self.assertGreater(log(clipped)[0]["grad_norm"], 1)  # as in the other tests
        self.expect_same_numbers(parted, alone, "not clipped")

    @unittest.skipUnless(CUDA, "the CPU computes in fp32")
    def test_16_bit_weights(self):
        for extra in (["--dtype", "bf16"], ["--dtype", "bf16", "--master-weights", "off"], ["--dtype", "bf16", "--attention", "LGS"],
                      ["--dtype", "bf16", "--optimizer", "muon"], ["--dtype", "bf16", "--optimizer", "muon", "--master-weights", "off"]):
            alone, *runs = self.train_all((1, *extra), *((2, *extra, "--zero-stage", stage) for stage in STAGES))
            for stage, run_dir in zip(STAGES, runs):
                self.expect_same_numbers(run_dir, alone, f"{extra} in stage {stage}", tolerance=1e-2)
            self.expect_same_bits(runs, str(extra))

    def test_evaluation_with_more_and_fewer_batches_than_ranks(self):
        for tokens in (20, 700):
            args = ["--eval-tokens", tokens, "--batch-size", 2]
            alone, parted = self.train_all((1, *args), (COUNTS[-1], *args, "--zero-stage", 3))
            self.expect_same_numbers(parted, alone, f"evaluation of {tokens} tokens")

    def test_questions_are_shared_among_ranks(self):
        path = os.path.join(self.top, "questions.jsonl")
        words = "the sea is blue and ships sail over it while gulls cry".split()
        with open(path, "w", encoding="utf-8") as file:
            for i in range(len(words)):
                endings = [f"{words[i - 1]} {words[i - j]}" for j in (2, 3, 4, 5)[:2 + i % 3]]
                file.write(json.dumps({"ctx": words[i], "endings": endings, "label": i % 2}) + "\n")
        for batch_size in (1, 2):  # numbers of passes that the ranks do not divide alike
            args = ["--batch-size", batch_size, "--eval-multiple-choice", path]
            alone, *runs = self.train_all((1, *args), *((ranks, *args, "--zero-stage", stage)
                                                        for ranks in COUNTS for stage in (0, 3)))
            expected = [line["accuracy"] for line in log(alone) if "accuracy" in line]
            self.assertEqual(len(expected), 2)
            for got in runs:
                self.assertEqual([line["accuracy"] for line in log(got) if "accuracy" in line], expected)

    def test_samples_and_profile_are_printed_once(self):
        args = ["--steps", 2, "--batch-size", 2, "--save-every", 0, "--sample-every", 1, "--profile", 2, "--reduce-bucket-mib", 0]
        texts = []
        for ranks, stage in ((1, 0), (2, 0), (2, 3)):
            done = run(ranks, *self.args(f"samples{ranks}{stage}", "gpt2-tiny", ranks, *args, "--zero-stage", stage))
            self.assertEqual(done.returncode, 0, done.stderr)
            texts.append([line for line in done.stderr.splitlines() if "sample:" in line])
            self.assertEqual(len(texts[-1]), 2, done.stderr)
            # The profile shows each transfer between the ranks, and how long the computation waited for it.
            sent = sorted({line.split(",")[0][4:] for line in done.stderr.splitlines() if line.startswith("  | ")})
            groups = ["layer 0", "layer 1", "layer 2", "wte.weight"]
            expected = {(1, 0): [], (2, 0): [f"all_reduce of {group}" for group in (*groups, "fp32 parameters")],
                        (2, 3): [f"all_gather of {group}" for group in groups] + ["all_gather of updated weights"] +
                                [f"reduce_scatter of {group}" for group in (*groups, "fp32 parameters")]}[ranks, stage]
            self.assertEqual([line[:line.find("  ")] if "  " in line else line for line in sent], sorted(expected), done.stderr)
            # With two micro-steps stage 0 sums once, stage 3 twice.
            for group in groups if ranks > 1 else []:
                sums = re.findall(rf"  \| (?:all_reduce|reduce_scatter) of {group},", done.stderr)
                self.assertEqual(len(sums), 2 if stage else 1, done.stderr)
            self.assertEqual(done.stderr.count("wait for gradients"), int(ranks > 1), done.stderr)
            self.assertEqual("wait for weights" in done.stderr, stage == 3, done.stderr)
        self.assertEqual(texts[1], texts[2])

    # ---- checkpoints -----------------------------------------------------------------------------------------------------

    def resumed(self, source, ranks, name, *args, last=10, batch_size=None):
        target = os.path.join(self.top, name)
        shutil.copytree(source, target)
        shutil.rmtree(os.path.join(target, f"step_{last:08}"))
        done = run(ranks, "--resume", "--out", target, "--batch-size", batch_size or 8 // ranks, *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return target

    def test_resume_with_any_number_of_ranks_and_any_stage(self):
        """A resumed run repeats the steps of the run that wrote the checkpoint."""
        model = ["--reduce-bucket-mib", 0, "--kv-heads", 2]
        parted, alone = self.train_all((2, *model, "--zero-stage", 3), (1, *model), model="llama-tiny")
        jobs = [(parted, 2, "same")]
        jobs += [(parted, ranks, f"resumed{ranks}{stage}", "--zero-stage", stage)
                 for ranks, stage in sorted({(1, 0), (2, 0), (COUNTS[-1], 1), (COUNTS[-1], 3)})]
        jobs += [(alone, 2, "from_one", "--zero-stage", 2)]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            resumed = list(pool.map(lambda job: self.resumed(*job), jobs))
        self.expect_same_bits([resumed[0], parted], "resumed alike")
        for run_dir, job in zip(resumed, jobs):
            self.expect_same_numbers(run_dir, job[0], job[2])

    def test_checkpoint_equals_that_of_one_rank(self):
        alone, parted = self.train(1, "--steps", 1), self.train(2, "--steps", 1, "--zero-stage", 3)
        files = [{name: os.path.getsize(os.path.join(run_dir, "step_00000001", name))
                  for name in os.listdir(os.path.join(run_dir, "step_00000001")) if name != "trainer.json"} for run_dir in (alone, parted)]
        self.assertEqual(*files)
        scores = [json.loads(harness.run("eval", "--model", run_dir, "--data", self.data, "--json").stdout)
                  for run_dir in (alone, parted)]
        self.assertAlmostEqual(scores[0]["val_loss"], scores[1]["val_loss"], delta=1e-6)
        self.assertAlmostEqual(scores[1]["val_loss"], log(parted)[-1]["val_loss"], delta=1e-6)
        self.assertEqual([name for name in os.listdir(parted) if name.startswith(".")], [])

    @unittest.skipIf(CUDA, "needs 8 GPUs")
    def test_more_ranks_than_parameter_groups_save_a_checkpoint(self):
        alone = self.train(1, "--steps", 1)
        for parted in self.train_all((8, "--steps", 1, "--zero-stage", 0), (8, "--steps", 1, "--zero-stage", 3)):
            sizes = [{name: os.path.getsize(os.path.join(run_dir, "step_00000001", name))
                      for name in ("model.safetensors", "state.safetensors")} for run_dir in (alone, parted)]
            self.assertEqual(*sizes)
            self.assertEqual([name for name in os.listdir(parted) if name.startswith(".")], [])

    # ---- ranks that stop -------------------------------------------------------------------------------------------------

    def start(self, ranks, name, *args, save_every=0):
        process = subprocess.Popen(command(ranks, *self.args(name, "gpt2-tiny", ranks, "--steps", 1000000, "--eval-every", 0, "--save-every",
                                                             save_every, *args)),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
        path = os.path.join(self.top, name, "log.jsonl")
        end = time.monotonic() + 120
        while not (os.path.exists(path) and os.path.getsize(path)):
            self.assertIsNone(process.poll(), "the run ended by itself")
            self.assertLess(time.monotonic(), end, "the run does not start")
            time.sleep(0.05)
        return process

    def test_signal_to_one_rank_stops_all_after_the_same_step(self):
        with self.start(2, "stopped", "--zero-stage", 2) as process:
            os.kill(process_of_rank(1, process.pid), signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, errors)
        run_dir = os.path.join(self.top, "stopped")
        last = log(run_dir)[-1]["step"]
        self.assertEqual(checkpoints(run_dir), [f"step_{last:08}"])
        self.assertIn(f"stopped at step {last}; ", errors)

    def test_ranks_leave_out_the_same_micro_steps(self):
        """Runs that one rank's signals stop in the middle of steps end with the bits of a run that is not stopped."""
        for stage in (0, 3):
            args = ["--steps", 6, "--batch-size", 1, "--total-batch-tokens", 2 * 32 * 120, "--zero-stage", stage, "--save-every", 0]
            whole, name, delays, stops = self.train(2, *args), f"left_out{stage}", random.Random(stage), 0
            start = command(2, *self.args(name, "gpt2-tiny", 2, *args))
            step_s = statistics.median(step["ms"] for step in log(whole) if "ms" in step) / 1000
            while True:
                with subprocess.Popen(start, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT,
                                      text=True) as process:
                    self.addCleanup(process.kill)
                    self.assertTrue(any("training tokens in" in line for line in process.stderr))
                    rank = process_of_rank(stops % 2, process.pid)
                    while rank and not catches(rank, signal.SIGTERM):  # the other rank may be slower than the one that prints
                        time.sleep(0.005)
                    time.sleep(delays.uniform(0, max(stops - 1, 0) * step_s))  # the first two are stopped at once
                    if rank:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(rank, signal.SIGTERM)
                    _, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 0, errors)
                if "stopped at step" not in errors:
                    break
                stops += 1
                self.assertLess(stops, 100)
                start = command(2, "--resume", "--out", os.path.join(self.top, name), "--zero-stage", stage)
            self.assertGreater(stops, 1)
            digests = [harness.digests(os.path.join(run_dir, "step_00000006"))
                       for run_dir in (whole, os.path.join(self.top, name))]
            self.assertEqual(*digests, f"stage {stage}")

    def test_run_resumes_after_a_rank_is_killed(self):
        """The run resumes from its last checkpoint with the same results on any number of ranks."""
        run_dir = os.path.join(self.top, "killed")
        with self.start(2, "killed", "--zero-stage", 3, "--comm-timeout", 10, save_every=2) as process:
            end = time.monotonic() + 60
            while not checkpoints(run_dir):
                self.assertLess(time.monotonic(), end, "no checkpoint is saved")
                time.sleep(0.02)
            begin = time.monotonic()
            os.kill(process_of_rank(1, process.pid), signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
        self.assertNotEqual(process.returncode, 0)
        self.assertLess(time.monotonic() - begin, 30, errors)
        last, resumed = int(checkpoints(run_dir)[-1][len("step_"):]), []
        for ranks in (1, COUNTS[-1]):
            resumed.append(f"{run_dir}{ranks}")
            shutil.copytree(run_dir, resumed[-1])
            done = run(ranks, "--resume", "--out", resumed[-1], "--batch-size", 8 // ranks, "--steps", last + 2)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(log(resumed[-1])[-1]["step"], last + 2)
        self.expect_same_numbers(*resumed, "after a rank was killed")

    def test_a_run_directory_that_is_in_use(self):
        """Rank 0 looks at the lock; all ranks end with its error."""
        run_dir = self.train(2, name="in_use")
        with open(os.path.join(run_dir, ".lock"), "w") as file:
            file.write("process 12 on otherhost")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            done = run(2, "--out", run_dir, "--resume", "--steps", 12)
        self.assertNotEqual(done.returncode, 0)
        # mpirun mixes the lines of the ranks. None of them reports that another rank ended.
        self.assertIn(f"--out {run_dir} is in use by process 12 on otherhost; wait until it ends", done.stderr)
        self.assertNotRegex(done.stderr, r"rank \d")

    def test_a_flipped_bit_is_noticed_by_all_ranks(self):
        run_dir = os.path.join(self.top, "flipped")
        shutil.copytree(self.train(2, "--zero-stage", 3), run_dir)
        path = os.path.join(run_dir, "step_00000010", "state.safetensors")
        with open(path, "r+b") as file:
            file.seek(-5000, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-5000, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        for ranks, stage in ((1, 0), (2, 0), (2, 3), (4, 1)):
            if ranks not in (1, *COUNTS):
                continue
            done = run(ranks, "--out", run_dir, "--resume", "--steps", 12, "--zero-stage", stage,
                       "--batch-size", 8 // ranks)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(f"{path}: tensor v/", done.stderr)
            self.assertIn("checksum", done.stderr)

    def test_non_finite_steps_are_skipped_by_all_ranks(self):
        done = run(2, *self.args("diverged", "gpt2-tiny", 2, "--lr", 1e6, "--warmup", 0, "--schedule", "constant", "--grad-clip", 0,
                                 "--max-skips", 3, "--eval-every", 0, "--steps", 100, "--zero-stage", 1))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("loss or gradient not finite 3 times in a row", done.stderr)
        self.assertTrue(all(line.get("skipped") for line in log(os.path.join(self.top, "diverged"))[-3:]))

    # ---- options ---------------------------------------------------------------------------------------------------------

    def test_indivisible_batch_is_rejected(self):
        done = run(2, *self.args("odd", "gpt2-tiny", 2, "--batch-size", 3))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--total-batch-tokens 256 is not a multiple of batch-size x seq-len x ranks = 192", done.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.top, "odd")))


class PlanTest(unittest.TestCase):
    def test_each_stage_shards_the_right_memory(self):
        model = ["--model", "gpt2-tiny", *MODEL, "--seq-len", 32]
        plans = [json.loads(harness.run("plan", *model, "--world", 4, "--zero-stage", stage, "--json").stdout)
                 for stage in STAGES]
        whole, parts = plans[0]["bytes"], [plan["bytes"] for plan in plans]
        self.assertEqual([plan["total_bytes"] for plan in plans], plans[0]["total_bytes_by_zero_stage"])
        for stage in STAGES:
            self.assertEqual(parts[stage]["optimizer (m, v)"], whole["optimizer (m, v)"] // (4 if stage >= 1 else 1))
            self.assertEqual(parts[stage]["gradients"], whole["gradients"] // (4 if stage >= 2 else 1))
            self.assertEqual(parts[stage]["weights"], whole["weights"] // (4 if stage >= 3 else 1))
            self.assertEqual("gathered weights" in parts[stage], stage == 3)
            self.assertEqual("gradients in progress" in parts[stage], stage >= 2)
        big = harness.run("plan", "--model", "llama-8B", "--world", 8, "--zero-stage", 3)  # nothing is allocated
        self.assertIn("each of 8 ranks, by --zero-stage", big.stdout)
        self.assertEqual(harness.run("plan", *model, "--zero-stage", 4).returncode, 2)


if __name__ == "__main__":
    unittest.main()

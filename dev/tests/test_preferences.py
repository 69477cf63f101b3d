#!/usr/bin/env python3
"""Training on preference pairs: against trl, packing, checkpoints, ranks, references, defaults, memory, refusals
(TRAIN_GPT names the driver).

dev/fixtures/preferences.json has random pairs and trl's values of 20 steps; dev/peers/make_preference_fixture.py makes
it with the cases and options of this file.
"""
import json
import math
import os
import shutil
import tempfile
import unittest

import numpy as np

import several_ranks
from harness import ROOT, CommandsTest, digest, log, run, write_tokens
from model_files import MODELS, read_json, read_safetensors, write_safetensors
from test_lora_training import make_base

FIXTURE = os.path.join(ROOT, "dev", "fixtures", "preferences.json")
MODEL = os.path.join(MODELS, "llama-gqa")
CASES = {"dpo": {"loss": "dpo", "beta": 0.1}, "smoothed_dpo": {"loss": "dpo", "beta": 0.2, "label_smoothing": 0.1},
         "ipo": {"loss": "ipo", "beta": 0.1}, "simpo": {"loss": "simpo", "beta": 2.0, "simpo_margin": 1.0},
         "smoothed_simpo": {"loss": "simpo", "beta": 2.5, "simpo_margin": 0.5, "label_smoothing": 0.1},
         "orpo": {"loss": "orpo", "beta": 0.1}}
STEPS, BATCH, SEQ_LEN, LR, SEED = 20, 4, 60, 1e-3, 42
ADAPTERS_OFF = ("--lora-rank", 2, "--reference", "adapters-off")
KEYS = {"loss", "rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy", "logp_chosen",
        "logp_rejected", "kl"}
LOSS, EXAMPLE_START, REJECTED = 1, 2, 4  # flags of a token (data/token_files.h)


def write_pairs(data, pairs, split="train"):
    """Makes a split of a data directory of pairs: (prompt, chosen, rejected) as lists of ids."""
    tokens, flags = [], []
    for prompt, *responses in pairs:
        for response, start in zip(responses, (EXAMPLE_START, EXAMPLE_START | REJECTED)):
            tokens += prompt + response
            flags += [start] + [0] * (len(prompt) - 1) + [LOSS] * len(response)
    return write_tokens(data, tokens, flags, mask_version=3, split=split)


def words(options):
    return [word for key, value in options.items() for word in ("--" + key.replace("_", "-"), value)]


class Preferences(CommandsTest):
    @classmethod
    def setUpClass(cls):
        cls.fixture = read_json(FIXTURE)
        cls.shared = tempfile.mkdtemp(prefix="train_gpt_test_")
        cls.addClassCleanup(shutil.rmtree, cls.shared)
        cls.data = write_pairs(os.path.join(cls.shared, "data"), cls.fixture["pairs"])
        write_pairs(cls.data, cls.fixture["pairs"][-5:], split="val")

    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        self.addCleanup(shutil.rmtree, self.top)

    def path(self, name):
        return os.path.join(self.top, name)

    def options(self, out, *args):
        """Those of the fixture, unless others are given."""
        defaults = {"--model": MODEL, "--data": self.data, "--loss": "dpo", "--steps": 4, "--batch-size": BATCH,
                    "--seq-len": SEQ_LEN, "--lr": LR, "--schedule": "constant", "--warmup": 0, "--weight-decay": 0,
                    "--grad-clip": 0, "--seed": SEED, "--dtype": "fp32", "--eval-every": 0, "--save-every": 0}
        return ["--out", self.path(out), *args,
                *(word for option in defaults.items() if option[0] not in args for word in option)]

    def train(self, out, *args):
        done = run("train", *self.options(out, *args), env={"OMP_NUM_THREADS": "1"})  # for so small a model the fastest
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.path(out)

    def steps(self, out):
        return [line for line in log(out) if "loss" in line]

    def same(self, ours, theirs, delta):
        self.assertEqual(len(ours), len(theirs))
        for number, (a, b) in enumerate(zip(ours, theirs), 1):
            # Of a model that is its own reference both rewards are 0, up to the order of sums.
            own = abs(b["rewards_margin"]) < 1e-6
            for key in KEYS & b.keys() - ({"rewards_accuracy"} if own else set()):
                self.assertAlmostEqual(a[key], b[key], delta=delta, msg=f"step {number}: {key}")

    def test_trl(self):
        """With one micro-step of four pairs, or four of one."""
        for number, (name, options) in enumerate(CASES.items()):
            with self.subTest(name):
                micro = ("--batch-size", 1, "--total-batch-tokens", BATCH * SEQ_LEN) if number % 2 else ()
                out = self.train(name, "--steps", STEPS, *words(options), *micro)
                self.assertEqual("kl" in self.steps(out)[0], options["loss"] in ("dpo", "ipo"))
                self.same(self.steps(out), self.fixture[name], 1e-4)
                if options["loss"] == "dpo":
                    self.assertAlmostEqual(self.steps(out)[0]["loss"], math.log(2), delta=1e-6)

    def test_packed_pairs(self):
        """A step of all pairs is the same with one pair in a sequence, with several, and with all in one, where
        attention is within an example and the head's loss within a pair."""
        pairs = len(self.fixture["pairs"])
        for options in ({"loss": "dpo"}, {"loss": "orpo"}):
            runs = []
            for name, seq_len, batch in ("one", SEQ_LEN, pairs), ("micro", SEQ_LEN, 2), ("all", pairs * SEQ_LEN, 1):
                out = f"{name}_{options['loss']}"
                self.train(out, *words(options), "--seq-len", seq_len, "--batch-size", batch, "--total-batch-tokens",
                           pairs * SEQ_LEN)
                runs.append(self.steps(self.path(out)))
            self.assertGreater(runs[0][0]["loss"], runs[0][-1]["loss"])
            for other in runs[1:]:
                self.same(other, runs[0], 2e-5)
                for a, b in zip(other, runs[0]):
                    self.assertAlmostEqual(a["grad_norm"] / b["grad_norm"], 1, delta=1e-4)

    def same_bits(self, ours, theirs):
        """Of the losses, and of the checkpoints after four steps."""
        self.same(self.steps(ours), self.steps(theirs), 0)
        last = [os.path.join(out, "step_00000004") for out in (theirs, ours)]
        for file in os.listdir(last[0]):
            if file.endswith(".safetensors"):
                self.assertEqual(*(digest(os.path.join(folder, file)) for folder in last), file)

    def test_a_resumed_run_has_the_same_bits(self):
        for name, args in ("full", ()), ("lora", ("--lora-rank", 2)), ("off", ADAPTERS_OFF):
            with self.subTest(name):
                whole, half = self.train(name, *args), self.train(name + "_half", "--steps", 2, *args)
                done = run("train", "--resume", "--out", half, "--steps", 4, env={"OMP_NUM_THREADS": "1"})
                self.assertEqual(done.returncode, 0, done.stderr)
                self.same_bits(half, whole)

    def test_recomputation_has_the_same_bits(self):
        """The reference pass of a step shares the buffers of the blocks."""
        for name, args in ("full", ()), ("off", ADAPTERS_OFF):
            whole = self.train(name, *args)
            for level in "activation", "norms", "block":
                with self.subTest(name, level=level):
                    self.same_bits(self.train(f"{name}_{level}", "--recompute", level, *args), whole)

    def test_qlora(self):
        """The reference is that of the quantised base, which another run of the data's dense base does not read."""
        base, data = self.path("base"), write_pairs(self.path("data"), self.fixture["pairs"])
        make_base(base, "llama", C=64, FFN=128)
        args = ("--model", base, "--data", data, "--lora-rank", 2, "--lr", 1e-2)
        dense, whole = self.train("dense", *args), self.train("whole", *args, "--qlora")
        self.assertEqual(len([name for name in os.listdir(data) if name.startswith("reference-")]), 2)
        self.assertGreater(abs(self.steps(dense)[0]["logp_chosen"] - self.steps(whole)[0]["logp_chosen"]), 1e-3)
        for key, value in ("loss", math.log(2)), ("rewards_chosen", 0), ("rewards_rejected", 0):
            self.assertAlmostEqual(self.steps(whole)[0][key], value, delta=1e-6)
        self.assertGreater(abs(self.steps(whole)[-1]["rewards_margin"]), 0.01)
        off = self.train("off", *args, "--qlora", "--reference", "adapters-off")
        self.same(self.steps(off), self.steps(whole), 1e-5)
        self.same_bits(self.train("block", *args, "--qlora", "--recompute", "block"), whole)

    def test_defaults_are_printed(self):
        """One line names what a run was not told; the resumed run has it from its run.toml."""
        length = "--lr 1e-06 --epochs 1 --warmup 0 --weight-decay 0"
        scratch = " (from scratch: 6e-4, 1000 steps, 5% warmup, weight decay 0.1)"
        for name, args, chosen in (("dpo", (), "--beta 0.1"), ("orpo", (), "--beta 0.1"),
                                   ("simpo", (), "--beta 2 --simpo-margin 1"),
                                   ("simpo", ("--simpo-margin", 0.5), "--beta 2"), ("dpo", ("--beta", 0.2), "")):
            with self.subTest(name, args=args):
                out = self.path(f"{name}{len(args)}")
                command = ["--model", MODEL, "--data", self.data, "--loss", name, "--batch-size", BATCH, "--seq-len",
                           SEQ_LEN, "--dtype", "fp32", "--out", out, *args]
                for more, line in (((), f"{length} {chosen}".strip() + scratch),
                                   (("--lr", 1e-6, "--steps", 1, "--warmup", 0, "--weight-decay", 0), chosen)):
                    shutil.rmtree(out, ignore_errors=True)
                    self.assertEqual(self.defaults(*command, *more), [line] if line else [])
                self.assertEqual(self.defaults("--resume", "--out", out, "--steps", 2), [])

    def defaults(self, *args):
        done = run("train", *args, env={"OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        start = "defaults for a run from a checkpoint: "
        return [line.removeprefix(start) for line in done.stderr.splitlines() if line.startswith(start)]

    def test_plan(self):
        """The memory of a run is what `plan` says of its options, but for the copy that saving meanwhile would take."""
        for number, args in enumerate(((), ("--loss", "orpo"), ("--recompute", "block"), ADAPTERS_OFF)):
            with self.subTest(args):
                loss = () if "--loss" in args else ("--loss", "dpo")
                done = run("plan", "--model", MODEL, "--batch-size", BATCH, "--seq-len", SEQ_LEN, "--dtype", "fp32",
                           "--json", *loss, *args)
                self.assertEqual(done.returncode, 0, done.stderr)
                plan = json.loads(done.stdout)
                memory = self.steps(self.train(f"run{number}", "--steps", 1, *args))[0]["memory"]
                self.assertEqual(plan["total_bytes"] - plan["bytes"].get("checkpoint snapshot", 0), memory)

    def test_resuming_without_the_reference(self):
        """The weights that the reference is of are gone, unless the run trains adapters."""
        for args in (), ("--lora-rank", 2):
            data = write_pairs(self.path(f"data{len(args)}"), self.fixture["pairs"])
            out = self.train(f"run{len(args)}", "--data", data, "--steps", 2, *args)
            path = self.reference(data)
            os.remove(path)
            done = run("train", "--resume", "--out", out, "--steps", 4)
            last = done.stderr.splitlines()[-1]
            self.assertEqual((done.returncode, os.path.exists(path)), (0, True) if args else (1, False), last)
            if not args:
                self.assertIn(path + " is missing", last)

    def test_references_of_adapters(self):
        """Stored values, and those of each step with the adapters off, are the same."""
        stored = self.steps(self.train("stored", "--lora-rank", 2, "--lr", 1e-2))
        off = self.steps(self.train("off", "--lora-rank", 2, "--lr", 1e-2, "--reference", "adapters-off"))
        self.same(off, stored, 1e-5)
        for key in "rewards_chosen", "rewards_rejected", "kl":
            self.assertAlmostEqual(stored[0][key], 0, delta=1e-6)
        self.assertGreater(abs(stored[-1]["rewards_margin"]), 0.01)

    @unittest.skipIf(several_ranks.WHY_NOT, several_ranks.WHY_NOT)
    def test_ranks(self):
        whole = self.steps(self.train("one"))
        for stage in range(4):
            with self.subTest(stage):
                # The second run computes its reference, each rank a part of it.
                data = write_pairs(self.path(f"data{stage}"), self.fixture["pairs"])
                out = f"stage{stage}"
                done = several_ranks.run(2, *self.options(out, "--data", data, "--batch-size", BATCH // 2,
                                                          "--zero-stage", stage))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.same(self.steps(self.path(out)), whole, 1e-5)

    @unittest.skipIf(several_ranks.WHY_NOT, several_ranks.WHY_NOT)
    def test_two_ranks_resume(self):
        """To the bit; one rank goes on as well, in two micro-steps."""
        for name, args in ("full", ("--zero-stage", 3)), ("off", ("--zero-stage", 2, *ADAPTERS_OFF)):
            with self.subTest(name):
                half = name + "_half"
                for out, steps in (name, 4), (half, 2):
                    self.on_two_ranks(*self.options(out, "--batch-size", BATCH // 2, "--steps", steps, *args))
                alone = shutil.copytree(self.path(half), self.path(name + "_alone"))
                self.on_two_ranks("--resume", "--out", self.path(half), "--steps", 4)
                self.same_bits(self.path(half), self.path(name))
                done = run("train", "--resume", "--out", alone, "--steps", 4, "--zero-stage", 0,
                           env={"OMP_NUM_THREADS": "1"})
                self.assertEqual(done.returncode, 0, done.stderr)
                self.same(self.steps(alone), self.steps(self.path(name)), 1e-5)

    def on_two_ranks(self, *args):
        done = several_ranks.run(2, *args)
        self.assertEqual(done.returncode, 0, done.stderr)

    def reference(self, data):
        [name] = [name for name in os.listdir(data) if name.startswith("reference-")]
        return os.path.join(data, name)

    def test_the_reference_is_that_of_the_model(self):
        pairs = self.fixture["pairs"][:3]
        data = write_pairs(self.path("data"), pairs)
        self.train("run", "--data", data, "--batch-size", 1, "--steps", 1)
        path = self.reference(data)
        reference = np.array(read_json(path)["train"]).reshape(-1, 2)
        for pair, logps in zip(pairs, reference, strict=True):
            for response, logp in zip(pair[1:], logps):
                tokens, output = pair[0] + response, self.path("logits.npy")
                done = run("logits", "--model", MODEL, "--dtype", "fp32", "--output", output, "--tokens",
                           " ".join(map(str, tokens)))
                self.assertEqual(done.returncode, 0, done.stderr)
                logits = np.load(output).astype(float).reshape(len(tokens), -1)[len(pair[0]) - 1:-1]
                expected = logits[range(len(response)), response] - np.log(np.exp(logits).sum(1))
                self.assertAlmostEqual(logp / expected.sum(), 1, delta=1e-5)
        # Another run reads the file, and another model has a file of its own.
        before = os.stat(path).st_mtime_ns
        self.assertIn(path, run("train", *self.options("again", "--data", data, "--steps", 1)).stderr)
        self.assertEqual(os.stat(path).st_mtime_ns, before)
        other = self.path("other")
        shutil.copytree(MODEL, other)
        tensors = dict(read_safetensors(os.path.join(other, "model.safetensors")))
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(1e-3)
        write_safetensors(os.path.join(other, "model.safetensors"), tensors)
        self.train("third", "--data", data, "--batch-size", 1, "--steps", 1, "--model", other)
        [theirs] = [os.path.join(data, name) for name in os.listdir(data)
                    if name.startswith("reference-") and os.path.join(data, name) != path]
        self.assertGreater(np.abs(np.array(read_json(theirs)["train"]).reshape(-1, 2) - reference).max(), 1e-4)
        # Under the other's name it is refused, and so is a damaged one.
        shutil.copy(theirs, path)
        for said in "is the reference of another model", "JSON":
            done = run("train", *self.options("refused", "--data", data, "--steps", 1))
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(path, done.stderr.splitlines()[-1])
            self.assertIn(said, done.stderr.splitlines()[-1])
            with open(path, "r+", encoding="utf-8") as file:
                file.truncate(40)

    def test_validation_pairs(self):
        """They have references of their own."""
        [unchanged] = [line for line in log(self.train("unchanged", "--lr", 0, "--steps", 1)) if "val_loss" in line]
        self.assertAlmostEqual(unchanged["val_loss"], math.log(2), delta=1e-6)
        for key in "val_rewards_chosen", "val_rewards_rejected", "val_kl":
            self.assertAlmostEqual(unchanged[key], 0, delta=1e-6)
        evaluations = [line for line in log(self.train("run", "--eval-every", 2)) if "val_loss" in line]
        self.assertEqual([line["step"] for line in evaluations], [2, 4])
        for line in evaluations:
            self.assertEqual({"val_" + key for key in KEYS} - line.keys(), set())
        self.assertGreater(evaluations[1]["val_rewards_margin"], evaluations[0]["val_rewards_margin"])

    def test_refusals(self):
        text = write_tokens(self.path("text"), [3 + i % 90 for i in range(500)])
        prompts = [(prompt, chosen) for prompt, chosen, _ in self.fixture["pairs"]]
        tokens = [token for prompt, response in prompts for token in prompt + response]
        flags = [flag for prompt, response in prompts
                 for flag in [EXAMPLE_START] + [0] * (len(prompt) - 1) + [LOSS] * len(response)]
        conversations = write_tokens(self.path("conversations"), tokens, flags, mask_version=2)
        without_loss = self.options("run")
        at = without_loss.index("--loss")
        del without_loss[at:at + 2]
        self.refused(1, [self.data, "pairs", "--loss dpo"], "train", *without_loss)
        for data in text, conversations:
            self.refused(1, ["--loss dpo", data, "holds no preference pairs"], "train",
                         *self.options("run", "--data", data))
        for status, named, *args in (
                (1, ["--pack none"], "--pack", "none"), (1, ["gpt2-tiny"], "--model", "gpt2-tiny"),
                (2, ["--label-smoothing", "ipo"], "--loss", "ipo", "--label-smoothing", 0.1),
                (2, ["--label-smoothing", "orpo"], "--loss", "orpo", "--label-smoothing", 0.1),
                (2, ["--label-smoothing", "0.5"], "--label-smoothing", 0.5),
                (2, ["--simpo-margin", "dpo"], "--simpo-margin", 1), (2, ["--beta"], "--beta", 0),
                (2, ["--beta", "cross-entropy"], "--loss", "cross-entropy", "--beta", 0.1),
                (2, ["--reference", "--lora-rank"], "--reference", "adapters-off"),
                (2, ["--reference", "simpo"], "--loss", "simpo", "--lora-rank", 2, "--reference", "adapters-off"),
                (1, ["24 of 24 pairs", "--seq-len 20", "--too-long skip"], "--seq-len", 20),
                (1, ["of 24 pairs", "--seq-len 50", "60"], "--seq-len", 50)):
            with self.subTest(args):
                self.refused(status, named, "train", *self.options("run", *args))
        out = self.train("first", "--steps", 1)
        for args in ("--beta", 0.2), ("--loss", "ipo"), ("--label-smoothing", 0.1):
            self.refused(1, ["--loss", "cannot change"], "train", "--resume", "--out", out, "--steps", 2, *args)

    def test_eval(self):
        """Without a reference: from the log-probabilities of the reference file, which are the model's own."""
        data = write_pairs(self.path("data"), self.fixture["pairs"])
        write_pairs(data, self.fixture["pairs"][:9], split="val")
        self.train("run", "--data", data, "--steps", 1)
        logps = np.array(read_json(self.reference(data))["val"]).reshape(-1, 2)
        tokens = np.array([[len(response) for response in pair[1:]] for pair in self.fixture["pairs"][:9]])
        done = run("eval", "--model", MODEL, "--data", data, "--seq-len", 2 * SEQ_LEN, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        self.assertEqual(result["pairs"], 9)
        self.assertAlmostEqual(result["accuracy"], np.mean(logps[:, 0] > logps[:, 1]), delta=1e-9)
        means = logps / tokens
        self.assertAlmostEqual(result["accuracy_per_token"], np.mean(means[:, 0] > means[:, 1]), delta=1e-9)
        for side, name in enumerate(("loss_chosen", "loss_rejected")):
            self.assertAlmostEqual(result[name], -logps[:, side].sum() / tokens[:, side].sum(), delta=1e-5)

    def test_pairs_that_are_too_long_are_left_out(self):
        lengths = [2 * len(prompt) + len(chosen) + len(rejected) - 2
                   for prompt, chosen, rejected in self.fixture["pairs"]]
        short = [pair for pair, length in zip(self.fixture["pairs"], lengths) if length <= 50]
        data, shorter = write_pairs(self.path("data"), self.fixture["pairs"]), write_pairs(self.path("shorter"), short)
        skipped = self.train("skipped", "--data", data, "--seq-len", 50, "--too-long", "skip")
        self.same(self.steps(skipped), self.steps(self.train("short", "--data", shorter, "--seq-len", 50)), 0)
        # The reference of those that were left out is computed when a run has them.
        for said in "computed once", "reference log-probabilities: from":
            done = run("train", *self.options(said.split()[0], "--data", data, "--steps", 1))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(said, done.stderr)


if __name__ == "__main__":
    unittest.main()

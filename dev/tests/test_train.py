#!/usr/bin/env python3
"""The files of a run, and options of training: which change no bit, what the others do, what ends a run."""
import json
import math
import os
import re
import resource
import shutil
import time
import unittest

from harness import (MODEL, BaseRunTest, checkpoints, cuda, digests, log, losses, run, sanitized, tensor_bytes,
                     text_of)


class TrainTest(BaseRunTest):
    def test_run_directory(self):
        self.assertEqual(checkpoints(self.base), ["step_00000004", "step_00000008"])
        lines = log(self.base)
        steps = [line for line in lines if "loss" in line]
        self.assertEqual([line["step"] for line in steps], list(range(1, 9)))
        self.assertEqual(set(steps[0]), {"step", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "mfu", "memory",
                                         "epoch"})
        evals = [line for line in lines if "val_loss" in line]
        self.assertEqual([line["step"] for line in evals], [4, 8])
        self.assertEqual(set(evals[0]), {"step", "val_loss", "bits_per_byte"})
        self.assertLess(steps[-1]["loss"], steps[0]["loss"])
        self.assertAlmostEqual(steps[0]["loss"], math.log(257), delta=0.2)  # untrained: a uniform distribution
        self.assertAlmostEqual(steps[0]["lr"], 1.5e-3, delta=1e-8)  # halfway through the warmup
        self.assertAlmostEqual(steps[-1]["lr"], 3e-4, delta=1e-8)  # a tenth, at the last step of the cosine

    def test_config_file_gives_the_same_run(self):
        other = os.path.join(self.top, "from_config")
        done = run("train", "--config", os.path.join(self.base, "run.toml"), "--out", other)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(*(digests(os.path.join(run_dir, "step_00000008")) for run_dir in (other, self.base)))

    def test_recompute_is_bitwise_identical(self):
        expected = digests(os.path.join(self.base, "step_00000008"))
        for level in ("activation", "norms", "block"):
            other = self.train("recompute_" + level, "--steps", 8, "--save-every", 4, "--recompute", level)
            self.assertEqual(digests(os.path.join(other, "step_00000008")), expected, level)

    def test_profile(self):
        args = self.train_args("profile", "--steps", 3, "--profile", 2)
        done = run(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        table = done.stderr[done.stderr.index("profile of step 2"):]
        for part in ("forward", "backward", "update", "attention", "norm", "qkv", "fcproj", "head and loss", "total"):
            self.assertRegex(table, rf"\n *{part} +\d+ +\d+\.\d+ +\d+\.\d%")
        plain = self.train("not_profiled", "--steps", 3)
        self.assertEqual(losses(os.path.join(self.top, "profile")), losses(plain))

    def test_gradient_accumulation(self):
        other = self.train("accumulate", "--steps", 8, "--save-every", 4, "--batch-size", 1,
                           "--total-batch-tokens", 128)
        for step, loss in losses(self.base).items():
            self.assertAlmostEqual(losses(other)[step], loss, delta=2e-5)

    def test_offload(self):
        """Where the state lies changes no bit, neither of a run nor of one that goes on elsewhere."""
        # The CPU has no master weights.
        dtype, everything = ("bf16", "optimizer,master,activations") if cuda() else ("fp32", "optimizer,activations")
        for optimizer in ("adamw", "muon"):
            args = ["--optimizer", optimizer, "--dtype", dtype, "--save-every", 4, "--total-batch-tokens", 256,
                    "--steps", 8, "--recompute", "block", "--gemm-tune", "off"]  # two runs are compared
            runs = [self.train(f"offload_{what}_{optimizer}", *args, "--offload", what)
                    for what in ("none", everything)]
            found = [digests(os.path.join(run_dir, "step_00000008")) for run_dir in runs]
            self.assertEqual(*found)
            out = os.path.join(self.top, f"offload_{everything}_{optimizer}")
            for what in (everything, "optimizer", "activations", "none"):
                shutil.rmtree(os.path.join(out, "step_00000008"))
                done = run("train", "--resume", "--out", out, "--offload", what)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(digests(os.path.join(out, "step_00000008")), found[0])
        refused = run(*self.train_args("offload_fp32", "--offload", "master"))
        self.assertEqual((refused.returncode, refused.stderr.count("\n")), (2, 1))
        self.assertIn("--offload master: there are no master weights with --dtype fp32; leave master out",
                      refused.stderr)

    def test_nondeterministic_changes_nothing_in_fp32(self):
        args = ["--steps", 3]
        any_order, one_order = self.train("any_order", *args, "--nondeterministic"), self.train("one_order", *args)
        self.assertEqual(losses(any_order), losses(one_order))
        with open(os.path.join(self.top, "any_order", "run.toml"), encoding="utf-8") as file:
            self.assertIn("nondeterministic=true", file.read())

    def test_document_mask(self):
        args = ["--steps", 2, "--batch-size", 16, "--seq-len", 64]
        masked, plain = self.train("documents", *args, "--document-mask"), self.train("no_documents", *args)
        self.assertTrue(all(math.isfinite(x) for x in losses(masked).values()))
        # Some training sequences contain the end of a document; the next document must not see the previous one.
        self.assertNotEqual(losses(masked)[1], losses(plain)[1])

    def test_schedules(self):
        def rates(schedule):
            run_dir = self.train("schedule_" + schedule, "--steps", 10, "--warmup", 0, "--lr", 1e-3,
                                 "--schedule", schedule)
            return [line["lr"] / 1e-3 for line in log(run_dir) if "lr" in line]
        for expected, got in ((lambda p: 1, rates("constant")), (lambda p: 1 - 0.9 * p, rates("linear")),
                              (lambda p: 0.1 + 0.45 * (1 + math.cos(math.pi * p)), rates("cosine")),
                              (lambda p: 1 - 0.9 * max(0, (p - 0.8) / 0.2), rates("wsd"))):
            for i, rate in enumerate(got):
                self.assertAlmostEqual(rate, expected(i / 9), places=5)

    def test_rate_groups(self):
        """A group with a learning rate of 0 keeps its weights; the others change. A resumed run uses the same rates."""
        def tensors(run_dir, step):
            return tensor_bytes(os.path.join(run_dir, f"step_{step:08}", "model.safetensors"))
        args = ["--steps", 4, "--save-every", 2, "--model", "llama-tiny", "--layers", 2, "--channels", 32, "--heads", 2,
                "--kv-heads", 1, "--tied", "no"]
        groups = {"--embedding-lr": "model.embed_tokens.weight", "--head-lr": "lm_head.weight",
                  "--vector-lr": "model.norm.weight"}
        for option, frozen in groups.items():
            run_dir = self.train("frozen" + option, *args, option, 0)
            self.assertIn(f"{option[2:]}=0", text_of(os.path.join(run_dir, "run.toml")))
            before, after = tensors(run_dir, 2), tensors(run_dir, 4)
            for name in (*groups.values(), "model.layers.1.mlp.up_proj.weight"):
                self.assertEqual(before[name] == after[name], name == frozen, f"{option}: {name}")
        shutil.rmtree(os.path.join(run_dir, "step_00000004"))
        self.assertEqual(run("train", "--resume", "--out", run_dir).returncode, 0)
        self.assertTrue(tensors(run_dir, 4) == after)
        same = self.train("same_rates", *args[:4],
                          *(x for option in ("--embedding-lr", "--vector-lr") for x in (option, 3e-3)))
        plain = self.train("one_rate", *args[:4])
        self.assertEqual(*(digests(os.path.join(run_dir, "step_00000004"))["state.safetensors"]
                           for run_dir in (same, plain)))
        coarse = self.train("large_epsilon", *args[:4], "--adam-eps", 1)  # steps of about the gradient
        self.assertGreater(losses(coarse)[4], losses(plain)[4])

    def test_dtype_auto(self):
        chosen = "bf16" if cuda() else "fp32"  # tests run on GPUs from sm_80 on
        out = os.path.join(self.top, "auto")
        command = ["train", *MODEL, "--data", self.data, "--out", out, "--seq-len", 32, "--steps", 2]
        done = run(*command)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stderr.split("\n")[0].endswith(f", {chosen} (--dtype auto)"), done.stderr)
        self.assertIn(f'dtype="{chosen}"', text_of(os.path.join(out, "run.toml")))
        self.assertEqual(run(*command).returncode, 1)  # --out holds a checkpoint
        again = run("train", "--out", out, "--resume", "--steps", 3)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertTrue(again.stderr.split("\n")[0].endswith(f", {chosen}"), again.stderr)  # read from run.toml

    def test_overfits_one_batch(self):
        other = self.train("overfit", "--steps", 150, "--lr", 1e-2, "--overfit-one-batch", "--weight-decay", 0,
                           "--batch-size", 1, "--eval-every", 0)
        self.assertLess(losses(other)[150], 0.01)

    def test_non_finite_losses_stop_the_run(self):
        args = self.train_args("diverges", "--steps", 200, "--lr", 1e6, "--warmup", 0, "--grad-clip", 0,
                               "--schedule", "constant", "--max-skips", 3, "--eval-every", 0)
        done = run(*args)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("not finite 3 times in a row", done.stderr)
        lines = log(os.path.join(self.top, "diverges"))
        self.assertTrue(all(line.get("skipped") for line in lines[-3:]))
        self.assertLess(len(lines), 200)

    def test_spikes_are_skipped(self):
        """Far below the median every step is a spike: the log counts them, and --max-skips ends the run."""
        args = ["--steps", 70, "--schedule", "constant", "--eval-every", 0, "--batch-size", 1, "--spike-factor", 1e-3]
        done = run(*self.train_args("spikes", *args, "--max-skips", 4, "--save-every", 65))
        self.assertEqual((done.returncode, done.stderr.count("is a spike; update skipped")), (1, 4), done.stderr)
        self.assertIn("stopped at step 67: the gradient norm was a spike or not finite 4 times in a row", done.stderr)
        lines = log(os.path.join(self.top, "spikes"))
        self.assertEqual([line["step"] for line in lines if line.get("skipped")], [64, 65, 66, 67])
        self.assertEqual([(line["spike"], line["skips"]) for line in lines[-4:]], [(True, n) for n in range(1, 5)])
        # The norms are in the checkpoint: the resumed run judges its first step, and the count goes on.
        done = run("train", "--resume", "--out", os.path.join(self.top, "spikes"), "--max-skips", 100, "--steps", 68)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = log(os.path.join(self.top, "spikes"))
        self.assertEqual([line["skips"] for line in lines if line.get("spike")], [1, 2, 3, 4, 5])
        trainer = json.loads(text_of(os.path.join(self.top, "spikes", "step_00000068", "trainer.json")))
        self.assertEqual((trainer["step"], trainer["adam_steps"], trainer["norm_count"]), (68, 63, 68))
        # Without the option, and with one that nothing exceeds, the steps are the same.
        plain, high = self.train("no_spikes", *args[:8]), self.train("high_factor", *args[:8], "--spike-factor", 1e6)
        self.assertEqual(losses(plain), losses(high))

    def test_the_error_of_too_little_memory_names_options_that_fit(self):
        if cuda():
            self.skipTest("dev/tests/test_backends.py has the GPU's")
        model = ["--model", "gpt2-124M", "--vocab-size", 257, "--seq-len", 1024]
        with open("/proc/meminfo") as f:
            memory = int(re.search(r"MemTotal: *(\d+)", f.read()).group(1)) << 10
        needed = json.loads(run("plan", *model, "--batch-size", 64, "--json").stdout)["total_bytes"]
        # A smaller batch must fit, recomputation alone must not.
        batch_size = 64 * (1 << math.ceil(math.log2(max(2, 16 * memory / needed))))
        for given in ([], ["--optimizer-dtype", "bf16", "--recompute", "block"]):
            done = run("train", *model, "--data", self.data, "--out", os.path.join(self.top, "too_large"),
                       "--batch-size", batch_size, *given)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
            said = re.search(r"this run needs .*iB \(weights .*activations .* and .* are free; (--.*) fits: "
                             r"it needs ([\d.]+) GiB; add these options, or --fit\n", done.stderr)
            self.assertIsNotNone(said, done.stderr)
            options = said.group(1).split()
            changed = dict(zip(options[::2], options[1::2]))
            self.assertEqual(changed.pop("--total-batch-tokens"), str(batch_size * 1024))
            self.assertLess(int(changed["--batch-size"]), batch_size)
            for option in given[::2]:
                changed.setdefault(option, given[given.index(option) + 1])
            options = [word for pair in changed.items() for word in pair]
            plan = json.loads(run("plan", *model, *options, "--json").stdout)
            needs = plan["total_bytes"] - plan["bytes"]["checkpoint snapshot"]  # this run saves at its end only
            self.assertAlmostEqual(needs / 2**30, float(said.group(2)), delta=0.006)
            self.assertFalse(os.path.exists(os.path.join(self.top, "too_large")))

    def test_fit_takes_options_that_fit(self):
        if cuda():
            self.skipTest("dev/tests/test_backends.py has the GPU's")
        if sanitized():
            self.skipTest("the sanitizer needs more address space than this test leaves")
        # 1.43 GiB, or with half the batch 0.73 GiB. The rest of the limit is for the program itself.
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1300 << 20, 1300 << 20))
        args = self.train_args("fit", "--steps", 1, "--batch-size", 16384, "--recompute", "block", "--optimizer-dtype",
                               "bf16", "--grad-dtype", "bf16", "--eval-every", 0)
        without = run(*args, env={"OMP_NUM_THREADS": "2"}, preexec_fn=limit)
        self.assertIn("or --fit", without.stderr)
        done = run(*args, "--fit", env={"OMP_NUM_THREADS": "2"}, preexec_fn=limit)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"--fit: --batch-size 8192, 7[\d.]+ MiB of 1.27 GiB \(")
        toml = text_of(os.path.join(self.top, "fit", "run.toml"))
        self.assertIn("\nbatch-size=8192\n", toml)
        self.assertIn(f"\ntotal-batch-tokens={16384 * 32}\n", toml)
        done = run(*self.train_args("fits", "--steps", 1, "--fit"))
        self.assertRegex(done.stderr, r"--fit: the options as given, [\d.]+ MiB of ")
        self.refused(1, ["--fit: nothing fits into ", "the least is"], *self.train_args(
            "nothing", "--steps", 1, "--fit", "--model", "llama-8B", "--layers", 400, "--batch-size", 1))

    def test_epochs(self):
        done = run(*self.train_args("steps", "--steps", 7))
        epochs, sequences = re.search(r"([\d.]+) epochs of [\d,]+ training tokens in ([\d,]+) training sequences",
                                      done.stderr).groups()
        self.assertAlmostEqual(float(epochs), 7 * 4 / int(sequences.replace(",", "")), delta=0.01)
        for count in (0.5, 2):
            steps = math.ceil(count * int(sequences) / 4)
            out = self.train(f"epochs_{count}", "--epochs", count, "--warmup", 1)
            lines = [line for line in log(out) if "loss" in line]
            self.assertEqual(len(lines), steps)
            for line in lines:
                self.assertAlmostEqual(line["epoch"], line["step"] * 4 / int(sequences), delta=1e-6)
            # The schedule ends with the last epoch, and a run of as many steps is the same.
            self.assertAlmostEqual(lines[-1]["lr"], 3e-4, delta=1e-8)
            self.assertIn(f"\nsteps={steps}\n", text_of(os.path.join(out, "run.toml")))
        self.assertEqual(losses(self.train("as_steps", "--steps", steps, "--warmup", 1)), losses(out))
        # Of a mixture: of its first directory, which has 3 of 4 sequences.
        of_two = self.train("of_two", "--data", f"{self.data}:3,{self.with_another_name(self.data)}:1", "--epochs", 1)
        self.assertEqual(len([1 for line in log(of_two) if "loss" in line]), math.ceil(int(sequences) / 3))

        longer = run("train", "--resume", "--out", out, "--epochs", 2.5)
        self.assertEqual(longer.returncode, 0, longer.stderr)
        self.assertEqual(log(out)[-1]["step"], math.ceil(2.5 * int(sequences) / 4))
        self.refused(2, ["--steps and --epochs both say how long"], *self.train_args("both", "--steps", 3, "--epochs", 1))
        self.refused(2, ["--epochs: 0 "], *self.train_args("none", "--epochs", 0))

    def test_the_time_of_a_step_is_without_evaluations(self):
        """Here an evaluation takes about a hundred times as long as a step, and follows each."""
        begin = time.monotonic()
        run_dir = self.train("timed", "--steps", 20, "--batch-size", 1, "--seq-len", 8, "--eval-every", 1, "--save-every", 5)
        seconds = time.monotonic() - begin
        steps = [line for line in log(run_dir) if "ms" in line]
        self.assertEqual(len(steps), 20)
        self.assertLess(sum(line["ms"] for line in steps) / 1e3, 0.4 * seconds)
        for line in steps:
            self.assertAlmostEqual(line["tokens_per_s"] * line["ms"] / 1e3, 8, places=6)


if __name__ == "__main__":
    unittest.main()

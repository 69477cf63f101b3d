#!/usr/bin/env python3
"""Training with fp8 matmuls: resuming to the same bits, a damaged history of maxima, refusals and plans."""
import json
import os
import shutil
import unittest

from harness import MODEL, TrainingTest, cuda, log, losses, run


class Fp8RunsTest(TrainingTest):
    FP8 = ["--matmul-dtype", "fp8"]

    def fp8_unavailable(self):
        done = run(*self.train_args("fp8_probe", "--steps", 1, *self.FP8, *self.fp8_dtype()))
        return "compute capability 8.9" in done.stderr

    @staticmethod
    def fp8_dtype():
        """That operands are quantised from."""
        return ["--dtype", "bf16"] if cuda() else []

    def test_fp8_resumes_to_the_same_bits(self):
        """Before its history of 16 steps is full and after that, with each method of scaling."""
        if self.fp8_unavailable():
            self.skipTest("this GPU has no fp8 matmuls")
        plain = self.train("fp8_plain", "--steps", 8, *self.fp8_dtype())
        muon = ["--optimizer", "muon", "--lr", 0.02, "--recompute", "block", "--fp8-weights", "use"]
        last = ["--fp8-skip-first", 1, "--fp8-gradients", "e4m3", "--document-mask"]
        for name, steps, every, extra in (("early", 8, 4, []), ("late", 20, 18, []), ("muon", 8, 4, muon),
                                          ("current", 8, 4, ["--fp8-scaling", "current"]), ("last", 8, 4, last)):
            args = ["--steps", steps, "--save-every", every, *self.FP8, *self.fp8_dtype(), *extra]
            whole = self.train("fp8_" + name, *args)
            end = os.path.join(whole, f"step_{steps:08}")
            with open(os.path.join(end, "trainer.json")) as file:
                history = json.load(file)["fp8"]
            self.assertEqual(history["steps"], 0 if name == "current" else steps)
            self.repeats_after_resume(whole, end)
            self.assertLess(losses(whole)[steps], losses(whole)[1])
            if name == "early":
                self.assertNotEqual(losses(whole)[8], losses(plain)[8])
                self.assertAlmostEqual(losses(whole)[8] / losses(plain)[8], 1, delta=0.02)
            for line in log(whole):
                if "loss" in line:
                    self.assertTrue(0 <= line["fp8_saturated"] < 0.01 and 0 <= line["fp8_underflowed"] < 0.5, line)
        for args in (["eval", "--data", self.data], ["sample", "--max-tokens", 8], ["info"]):
            done = run(*args, whole) if args == ["info"] else run(args[0], "--model", whole, *args[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("trainer.fp8.steps 8\n", done.stdout)
        self.assertNotIn("fp8.history", done.stdout)

    def test_fp8_continues_a_run_of_the_model_s_dtype(self):
        if self.fp8_unavailable():
            self.skipTest("this GPU has no fp8 matmuls")
        whole = self.train("fp8_from_model", "--steps", 8, "--save-every", 4, *self.fp8_dtype())
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        before = losses(whole)
        done = run("train", "--out", whole, "--resume", *self.FP8)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([losses(whole)[step] == before[step] for step in range(1, 9)], [True] * 4 + [False] * 4)
        shutil.rmtree(os.path.join(whole, "step_00000008"))
        done = run("train", "--out", whole, "--resume", "--matmul-dtype", "model")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(losses(whole), before)

    def test_damaged_history_of_fp8(self):
        if self.fp8_unavailable():
            self.skipTest("this GPU has no fp8 matmuls")
        whole = self.train("fp8_damaged", "--steps", 2, *self.FP8, *self.fp8_dtype())
        path = os.path.join(whole, "step_00000002", "trainer.json")
        with open(path) as file:
            trainer = json.load(file)
        for history, message in ((trainer["fp8"]["history"][1:], "has 255 numbers, expected 256; the file is damaged"),
                                 ([-1.0], "is [-1.0], expected an array of numbers of at least 0")):
            with open(path, "w") as file:
                json.dump({**trainer, "fp8": {"steps": 2, "history": history}}, file)
            self.refused(1, ["key 'fp8.history' " + message], "train", "--out", whole, "--resume", "--steps", 4)

    def test_fp8_is_refused_or_planned(self):
        dtype = self.fp8_dtype()
        model = {"--model": "gpt2-tiny", "--layers": 2, "--channels": 32, "--heads": 2}
        for args, message in (
            ({"--channels": 40}, "--matmul-dtype fp8: --channels is 40, which is not a multiple of 16"),
            ({"--ffn": 100}, "--matmul-dtype fp8: --ffn is 100, which is not a multiple of 16"),
            ({"--batch-size": 1, "--seq-len": 24}, "--batch-size x --seq-len is 24, which is not a"),
            ({"--norm": "rmsnorm", "--norm-placement": "after"},
             "--matmul-dtype fp8 takes norms before attention and the MLP"),
            ({"--fp8-skip-first": 1, "--fp8-skip-last": 1}, "leave none of the 2 layers in fp8"),
        ):
            options = [*(x for option in {**model, **args}.items() for x in option), *self.FP8, *dtype]
            for command in (self.train_args("fp8_refused", *options), ["plan", *options]):
                self.refused(1, [message], *command)
        self.refused(2, ["--matmul-dtype excludes --inference"], "plan", *MODEL, *self.FP8, "--inference")
        self.refused(1, ["--matmul-dtype fp8 quantises bf16; add --dtype bf16"], "plan", *MODEL, *self.FP8,
                     "--dtype", "fp32", "--gpu", "H100 80GB HBM3")
        self.refused(1, ["need a GPU of compute capability 8.9 or newer (Ada, Hopper), not 8.0"], "plan", *MODEL,
                     *self.FP8, "--dtype", "bf16", "--gpu", "A100-SXM4-80GB")

        def planned(*args):
            return json.loads(run("plan", *MODEL, "--seq-len", 32, "--json", *dtype, *args).stdout)["bytes"]
        plain, kept, used = planned(), planned(*self.FP8), planned(*self.FP8, "--fp8-weights", "use")
        skipped, sharded = planned(*self.FP8, "--fp8-skip-last", 1), planned(*self.FP8, "--world", 2, "--zero-stage", 3)
        sharded_used = planned(*self.FP8, "--world", 2, "--zero-stage", 3, "--fp8-weights", "use")
        # Sharded: half of each layer's codes, which count its biases too (padded, 128 elements each); these biases whole.
        blocks, biases, element = 2 * 12 * 32 * 32, 2 * 4 * 128, 2 if dtype else 4
        self.assertEqual([plan.get("fp8 weights", 0) for plan in (plain, kept, used, skipped, sharded, sharded_used)],
                         [0, 2 * blocks, 0, blocks, (blocks + biases) // 2 + biases * element, 0])
        self.assertGreater(used["activations"], kept["activations"])

    def test_weights_are_kept_where_that_fits(self):
        """--fp8-weights auto; --fit prefers it to recomputation."""
        def planned(*args):
            done = run("plan", "--model", "llama-1B", "--dtype", "bf16", "--seq-len", 1024, "--batch-size", 8, *self.FP8, "--json",
                       "--gpu", "H100 80GB HBM3", *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["bytes"]
        kept, used = planned("--fp8-weights", "kept"), planned("--fp8-weights", "use")
        for args, expected in (([], kept), (["--gpu-memory", "31GiB"], used), (["--gpu-memory", "31GiB", "--fit"], used),
                               (["--gpu-memory", "31GiB", "--fp8-weights", "kept"], kept)):
            self.assertEqual(planned(*args), expected, args)
        if not cuda() or self.fp8_unavailable():  # --gpu-memory is a limit of a GPU
            return
        # A run chooses as plan does.
        args = ["--model", "gpt2-tiny", "--batch-size", 1, "--channels", 256, "--layers", 8, *self.FP8, *self.fp8_dtype()]
        done = run("plan", "--seq-len", 32, *args, "--fp8-weights", "use", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        args += ["--steps", 1, "--gpu-memory", f"{json.loads(done.stdout)['total_bytes'] / 1e6 + 1}MB"]
        kept = run(*self.train_args("fp8_kept", *args, "--fp8-weights", "kept"))
        self.assertIn("--gpu-memory", kept.stderr)
        self.assertNotEqual(kept.returncode, 0)
        done = run(*self.train_args("fp8_auto", *args))
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()

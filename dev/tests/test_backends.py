#!/usr/bin/env python3
"""The CUDA driver (TRAIN_GPT) against the CPU driver (TRAIN_GPT_CPU): the same commands give the same numbers."""
import json
import os
import re
import shutil
import tempfile
import unittest

import harness

GPU, CPU = harness.DRIVER, os.environ.get("TRAIN_GPT_CPU", "")
SHAPES = {
    "gpt2": ["--model", "gpt2-tiny", "--layers", "2", "--channels", "64", "--heads", "4", "--max-positions", "64"],
    "llama": ["--model", "llama-tiny", "--layers", "2", "--channels", "64", "--heads", "4", "--kv-heads", "2", "--max-positions", "64"],
}


@unittest.skipUnless(CPU, "compares the CUDA build with the CPU build (make test BACKEND=cuda)")
class BackendsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.top = tempfile.mkdtemp(prefix="train_gpt_backends_")
        text = os.path.join(cls.top, "text")
        os.mkdir(text)
        for i in range(100):  # documents of a small grammar: something to learn
            with open(os.path.join(text, f"{i:03}.txt"), "w") as file:
                file.writelines(harness.sentence(i, j) for j in range(i % 40 + 1))
        cls.data = harness.tokenize(text, os.path.join(cls.top, "data"), "--val", "0.1")
        cls.start = {}  # a checkpoint of each family after a few steps, from which all runs start
        for name, shape in SHAPES.items():
            cls.train(CPU, f"start-{name}", *shape, "--steps", 4)
            cls.start[name] = os.path.join(cls.top, f"start-{name}")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    @classmethod
    def run_driver(cls, driver, *args):
        done = harness.run(*args, driver=driver, timeout=300)
        if done.returncode:
            raise AssertionError(f"{driver} {' '.join(map(str, args))}: {done.stderr}")
        return done.stdout

    @classmethod
    def train(cls, driver, name, *args):
        """Losses of a run, step by step."""
        out = os.path.join(cls.top, name)
        cls.run_driver(driver, "train", "--data", cls.data, "--out", out, "--batch-size", 8, "--seq-len", 64, "--lr", 1e-3, "--warmup", 5,
                       "--eval-every", 0, *([] if "--dtype" in args else ["--dtype", "fp32"]), *args)
        return list(harness.losses(out).values())

    def logits(self, driver, model, *args):
        # numpy is a dependency of the data tools, so it is there.
        import numpy
        path = os.path.join(self.top, "logits.npy")
        self.run_driver(driver, "logits", "--model", model, "--tokens", " ".join(str((i * 37 + 11) % 256) for i in range(50)), "--output", path,
                        *args)
        return numpy.load(path).astype(numpy.float64)

    def test_fifty_steps_agree(self):
        for family in SHAPES:
            with self.subTest(family):
                args = ["--model", self.start[family], "--steps", 50]
                cpu = self.train(CPU, f"cpu-{family}", *args)
                gpu = self.train(GPU, f"gpu-{family}", *args)
                self.assertEqual(len(cpu), 50)
                self.assertGreater(cpu[0] - cpu[-1], 0.5)
                self.assertLess(max(abs(a - b) for a, b in zip(cpu, gpu)), 1e-4)
                again = self.train(GPU, f"again-{family}", *args)
                self.assertEqual(gpu, again)  # two runs: the same bits
                bf16 = self.train(GPU, f"bf16-{family}", *args, "--dtype", "bf16")
                stochastic = self.train(GPU, f"stochastic-{family}", *args, "--dtype", "bf16", "--master-weights", "off")
                for losses in bf16, stochastic:  # more rounding noise, the same training
                    self.assertLess(abs(sum(losses[-10:]) - sum(cpu[-10:])) / 10, 0.05)

    def test_logits_and_scores(self):
        for family in SHAPES:
            with self.subTest(family):
                model = self.start[family]
                cpu = self.logits(CPU, model)
                for dtype, bound in ("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-2 / 8):
                    error = abs(self.logits(GPU, model, "--dtype", dtype) - cpu).max() / abs(cpu).max()
                    self.assertLess(error, bound, dtype)
                    self.assertGreater(error, 0, dtype)  # the two programs differ
                scores = [json.loads(self.run_driver(driver, "eval", "--model", model, "--data", self.data, "--json")) for driver in (CPU, GPU)]
                self.assertEqual(scores[0]["tokens"], scores[1]["tokens"])
                self.assertAlmostEqual(scores[0]["val_loss"], scores[1]["val_loss"], delta=1e-5 * scores[0]["val_loss"])

    def test_samples(self):
        for family in SHAPES:
            with self.subTest(family):
                args = ["sample", "--model", self.start[family], "--prompt", "The ", "--max-tokens", 30, "--ignore-eos", "--seed", 3]
                for extra in ([], ["--temperature", 0], ["--top-k", 5], ["--top-p", 0.8], ["--top-k", 20, "--min-p", 0.1], ["--repeat-penalty", 1.3],
                              ["--presence-penalty", 1.1, "--frequency-penalty", 0.4],
                              ["--num-samples", 12, "--batch-invariant"]):
                    self.assertEqual(self.run_driver(CPU, *args, *extra), self.run_driver(GPU, *args, *extra))

    def test_documents_agree(self):
        args = [*SHAPES["llama"], "--steps", 10]
        cpu = self.train(CPU, "documents-cpu", *args, "--document-mask")
        gpu = self.train(GPU, "documents-gpu", *args, "--document-mask")
        across = self.train(GPU, "documents-across", *args)
        self.assertLess(max(abs(a - b) for a, b in zip(cpu, gpu)), 1e-4)
        self.assertGreater(max(abs(a - b) for a, b in zip(across, gpu)), 1e-3)  # the mask makes a difference

    def test_checkpoints_move_between_backends(self):
        """A run resumes on the other backend or in another dtype."""
        args = [*SHAPES["gpt2"], "--steps", 8, "--save-every", 4]
        whole = self.train(CPU, "whole", *args)
        for name, first, second, dtype, bound in (("to-gpu", CPU, GPU, "fp32", 1e-4), ("to-cpu", GPU, CPU, "fp32", 1e-4),
                                                  ("to-bf16", GPU, GPU, "bf16", 0.02)):
            self.train(first, name, *args)
            shutil.rmtree(os.path.join(self.top, name, "step_00000008"))
            losses = self.train(second, name, "--resume", *args, "--dtype", dtype)
            self.assertLess(max(abs(a - b) for a, b in zip(whole, losses)), bound, name)

    def test_out_of_memory_error_names_options_that_fit(self):
        model = ["--model", "gpt2-1558M", "--seq-len", "1024", "--dtype", "bf16"]
        too_much = harness.run("train", *model, "--data", self.data, "--out", os.path.join(self.top, "x"),
                               "--batch-size", "512", timeout=300)
        self.assertEqual(too_much.returncode, 1)
        self.assertEqual(too_much.stderr.count("\n"), 1)
        said = re.search(r"needs .*iB \(weights .*activations .* and ([\d.]+) GiB are free; (--.*) fits: it needs ([\d.]+) GiB",
                         too_much.stderr)
        self.assertIsNotNone(said, too_much.stderr)
        self.assertLessEqual(float(said.group(3)), float(said.group(1)))
        # `plan` with the advised options reports the same memory.
        advised = re.sub(r"--total-batch-tokens \d+", "", said.group(2)).split()
        if "--batch-size" not in advised:  # a large GPU: --recompute alone is enough
            advised += ["--batch-size", "512"]
        plan = json.loads(self.run_driver(GPU, "plan", *model, "--vocab-size", 257, *advised, "--json"))
        self.assertEqual(plan["total_bytes"], sum(plan["bytes"].values()))
        self.assertAlmostEqual(plan["total_bytes"] / 2**30, float(said.group(3)), delta=0.01)


if __name__ == "__main__":
    unittest.main()

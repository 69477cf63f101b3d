#!/usr/bin/env python3
"""Training with weights, gradients or the optimizer's state in bf16: resumed runs have the same bits."""
import json
import os
import shutil
import struct
import unittest

from harness import MODEL, TrainingTest, cuda, digest, digests, losses, run, text_of


class Bf16RunsTest(TrainingTest):
    def test_resume_is_bit_exact_in_16_bits(self):
        if not cuda():
            self.skipTest("this backend computes in fp32")
        for name, extra in (("bf16", []), ("bf16_off", ["--master-weights", "off"]),
                            ("bf16_block", ["--recompute", "block"])):
            whole = self.train(name, "--steps", 8, "--save-every", 4, "--dtype", "bf16", *extra)
            expected = digests(os.path.join(whole, "step_00000008"))
            expected_losses = losses(whole)
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--out", whole, "--resume")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(losses(whole), expected_losses, name)
            self.assertEqual(digests(os.path.join(whole, "step_00000008")), expected, name)

    def test_optimizer_state_in_bf16(self):
        """Resumed runs repeat the bits of the run that was not stopped; another dtype can be chosen on resume."""
        def state(name, step):
            with open(os.path.join(self.top, name, f"step_{step:08}", "state.safetensors"), "rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            return {key: value["dtype"] for key, value in header.items() if key != "__metadata__"}

        def planned(*args):
            done = run("plan", *MODEL, "--seq-len", 32, "--vocab-size", 257, *args, "--json")
            return json.loads(done.stdout)["bytes"]
        weights = planned("--dtype", "fp32")["weights"]
        for optimizer in ("adamw", "muon"):
            name = f"bf16_{optimizer}"
            args = ["--optimizer", optimizer, "--optimizer-dtype", "bf16", "--save-every", 4,
                    "--total-batch-tokens", 256]
            whole = self.train(name, "--steps", 8, *args)
            self.assertEqual(set(state(name, 8).values()), {"BF16"})
            exact = self.train(f"fp32_{optimizer}", "--steps", 8, *args[:2], *args[4:])
            self.assertNotEqual(losses(whole), losses(exact))
            files = {file: digest(os.path.join(whole, "step_00000008", file))
                     for file in ("model.safetensors", "state.safetensors")}
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--resume", "--out", whole)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual({file: digest(os.path.join(whole, "step_00000008", file)) for file in files}, files)
            done = run("train", "--resume", "--out", whole, "--steps", 10, "--optimizer-dtype", "fp32")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(set(state(name, 10).values()), {"F32"})
            plans = [planned("--optimizer", optimizer, "--optimizer-dtype", dtype)["optimizer (m, v)"]
                     for dtype in ("fp32", "bf16")]
            self.assertEqual(plans[0], 2 * plans[1])
            if optimizer == "adamw":
                self.assertEqual(plans[1], weights)

    def test_gradients_in_bf16(self):
        """Resumed runs repeat the bits of the run that was not stopped: the rounding is keyed by the number of the
        micro-step."""
        for optimizer in ("adamw", "muon"):
            args = ["--optimizer", optimizer, "--grad-dtype", "bf16", "--save-every", 4, "--total-batch-tokens", 256]
            whole = self.train(f"bf16_gradients_{optimizer}", "--steps", 8, *args)
            exact = self.train(f"fp32_gradients_{optimizer}", "--steps", 8, *args[:2], *args[4:])
            self.assertNotEqual(losses(whole), losses(exact))
            for got, expected in zip(losses(whole), losses(exact)):
                self.assertAlmostEqual(got, expected, delta=1e-2)
            files = {file: digest(os.path.join(whole, "step_00000008", file))
                     for file in ("model.safetensors", "state.safetensors")}
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--resume", "--out", whole)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual({file: digest(os.path.join(whole, "step_00000008", file)) for file in files}, files)
            done = run("train", "--resume", "--out", whole, "--steps", 10, "--grad-dtype", "fp32")
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_gradients_added_in_matmuls(self):
        """They are close to sums in fp32, a resumed run repeats the bits, and what is not possible is refused."""
        args = ["--grad-dtype", "bf16", "--grad-rounding", "nearest", "--save-every", 4, "--total-batch-tokens", 256,
                *(["--dtype", "bf16"] if cuda() else [])]
        for optimizer in ("adamw", "muon"):
            whole = self.train(f"in_matmuls_{optimizer}", "--steps", 8, "--optimizer", optimizer, *args)
            exact = self.train(f"not_in_matmuls_{optimizer}", "--steps", 8, "--optimizer", optimizer, *args[4:])
            self.assertNotEqual(losses(whole), losses(exact))
            for got, expected in zip(losses(whole), losses(exact)):
                self.assertAlmostEqual(got, expected, delta=1e-2)
            self.assertIn('grad-rounding="nearest"', text_of(os.path.join(whole, "run.toml")))
            before = digests(os.path.join(whole, "step_00000008"))
            shutil.rmtree(os.path.join(whole, "step_00000008"))
            done = run("train", "--resume", "--out", whole)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(digests(os.path.join(whole, "step_00000008")), before)
        refused = run(*self.train_args("in_matmuls_refused", "--grad-rounding", "nearest"))
        self.assertEqual((refused.returncode, refused.stderr.count("\n")), (2, 1), refused.stderr)
        self.assertIn("--grad-rounding nearest: gradients in fp32 are not rounded; add --grad-dtype bf16",
                      refused.stderr)


if __name__ == "__main__":
    unittest.main()

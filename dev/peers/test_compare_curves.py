#!/usr/bin/env python3
"""compare_curves.py: its order of training sequences against the driver's, and its tables (needs no PyTorch)."""
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import types
import unittest

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DRIVER = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "train_gpt")))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare_curves  # noqa: E402

T, WINDOWS, EPOCHS, SEED, VOCAB = 8, 23, 3, 987654321098, 64


class Order(unittest.TestCase):
    def test_matches_the_driver(self):
        """With a learning rate of 0 the loss identifies the sequence. In later epochs the driver must repeat each loss of the
        first epoch where permute() puts that sequence."""
        with tempfile.TemporaryDirectory() as folder:
            tokens = np.random.default_rng(0).integers(0, VOCAB, T * WINDOWS + 1).astype("<u2")
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, len(tokens)
            with open(os.path.join(folder, "train_000000.bin"), "wb") as file:
                file.write(header.tobytes() + tokens.tobytes())
            run = os.path.join(folder, "run")
            command = [DRIVER, "train", "--model", "gpt2-tiny", "--layers", "1", "--channels", "32", "--vocab-size", VOCAB, "--data",
                       folder, "--out", run, "--steps", WINDOWS * EPOCHS, "--batch-size", 1, "--seq-len", T, "--lr", 0, "--seed",
                       SEED]
            subprocess.run(list(map(str, command)), check=True, stdin=subprocess.DEVNULL)
            with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as log:
                losses = [json.loads(line)["loss"] for line in log]
        self.assertEqual(len(losses), WINDOWS * EPOCHS)
        order = [compare_curves.window_of_sample(SEED, i, WINDOWS) for i in range(WINDOWS * EPOCHS)]
        for epoch in range(EPOCHS):
            self.assertEqual(sorted(order[epoch * WINDOWS:][:WINDOWS]), list(range(WINDOWS)))
        of_window = dict(zip(order[:WINDOWS], losses))
        self.assertEqual(len(set(of_window.values())), WINDOWS)
        self.assertEqual([of_window[window] for window in order], losses)

    def test_other_sizes(self):
        for n in (1, 2, 3, 4, 5, 16, 17, 1000):
            self.assertEqual(sorted(compare_curves.permute(7, 1, i, n) for i in range(n)), list(range(n)))


class Tokens(unittest.TestCase):
    def test_read(self):
        with tempfile.TemporaryDirectory(suffix=" [1]") as folder:
            with self.assertRaisesRegex(compare_curves.CurvesError, "no train_"):
                compare_curves.read_tokens(folder, "train")
            header = np.zeros(256, "<i4")
            header[:3] = 20240801, 7, 3
            path = os.path.join(folder, "train_000000.bin")
            for content in b"", b"text", header.tobytes(), np.zeros(300, "<i4").tobytes():
                with open(path, "wb") as file:
                    file.write(content)
                with self.assertRaisesRegex(compare_curves.CurvesError, "000000.bin: not a token file"):
                    compare_curves.read_tokens(folder, "train")
            with open(path, "wb") as file:
                file.write(header.tobytes() + np.array([5, 70000, 6], "<u4").tobytes())
            self.assertEqual(compare_curves.read_tokens(folder, "train").tolist(), [5, 70000, 6])


class Schedule(unittest.TestCase):
    def test_ends(self):
        args = types.SimpleNamespace(lr=2.0, warmup=4, steps=11)
        self.assertEqual([compare_curves.learning_rate(args, step) for step in range(5)], [0.5, 1.0, 1.5, 2.0, 2.0])
        self.assertAlmostEqual(compare_curves.learning_rate(args, 7), 2 * (0.1 + 0.9 / 2))
        self.assertAlmostEqual(compare_curves.learning_rate(args, 10), 0.2)


class Log(unittest.TestCase):
    def test_losses_of_a_pytorch_run(self):
        with tempfile.TemporaryDirectory() as folder:
            lines = [{"loss": loss, "lr": 1e-4, "grad_norm": 1.0} for loss in (3.0, 2.5)]
            compare_curves.write_log(os.path.join(folder, "torch-fp32"), lines, 0.25)
            found = compare_curves.losses_of(os.path.join(folder, "torch-fp32"), 2)
            self.assertEqual(list(found), [3.0, 2.5])
            self.assertIsNone(compare_curves.losses_of(os.path.join(folder, "torch-fp32"), 3))
            self.assertIsNone(compare_curves.losses_of(os.path.join(folder, "none"), 2))


class Report(unittest.TestCase):
    def judge(self, **losses):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            good = compare_curves.report({name.replace("_", "-"): values for name, values in losses.items()}, 100, 0.01)
        return good, text.getvalue()

    def test_bar(self):
        base = np.linspace(5, 4, 100)
        tail = np.zeros(100)
        tail[-5:] = 0.011  # the last twentieth alone
        self.assertTrue(self.judge(ours_fp32=base, ours_bf16=base + 0.009)[0])
        for change in (0.011, -0.011, tail):
            good, text = self.judge(ours_fp32=base, ours_bf16=base + change)
            self.assertFalse(good)
            self.assertIn("MISSED", text)
        # The bar is bf16's: what fp32 does elsewhere is shown, not judged.
        self.assertTrue(self.judge(ours_fp32=base, torch_fp32=base + 1)[0])
        self.assertTrue(self.judge(ours_bf16=base, ours_bf16_nudged=base + 1)[0])


if __name__ == "__main__":
    unittest.main()

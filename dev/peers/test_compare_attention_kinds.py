#!/usr/bin/env python3
"""compare_attention_kinds.py: a comparison of tiny models, and invalid options."""
import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DRIVER = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "train_gpt")))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare_attention_kinds as kinds  # noqa: E402


def write_data(folder):
    """A data directory with a repeating byte sequence, which any model learns."""
    for split, n in ("train", 4000), ("val", 400):
        tokens = (np.arange(n) * 7 % 31).astype("<u2")
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, n
        with open(os.path.join(folder, split + "_000000.bin"), "wb") as file:
            file.write(header.tobytes() + tokens.tobytes())
    with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as file:
        json.dump({"vocab_size": 32, "end_of_text": 31, "train": {"bytes": 4000, "documents": 1, "tokens": 4000},
                   "val": {"bytes": 400, "documents": 1, "tokens": 400}}, file)


class Comparison(unittest.TestCase):
    def test_tiny_models(self):
        with tempfile.TemporaryDirectory() as folder:
            write_data(folder)
            out = os.path.join(folder, "out")
            args = kinds.parse(["--driver", DRIVER, "--data", folder, "--out", out, "--model", "gpt2-tiny", "--layers", "2", "--dtype", "fp32",
                                "--kinds", "S", "LG", "--steps", "6", "--batch-size", "2", "--seq-len", "16", "--eval-every", "3",
                                "--lengths", "16", "32", "--speed-tokens", "64"])
            with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(kinds.compare(args), 0)
                with mock.patch.object(kinds.subprocess, "run", side_effect=AssertionError("a run was repeated")):
                    self.assertEqual(kinds.compare(args), 0)
            self.assertIn("| attention | bits per byte |", text.getvalue())
            with open(os.path.join(out, "kinds.json"), encoding="utf-8") as file:
                results = json.load(file)
            self.assertEqual(list(results["runs"]), ["S", "LG"])
            for kind, letters in ("S", "SS"), ("LG", "LG"):
                run = results["runs"][kind]
                self.assertEqual([step for step, _ in run["curve"]], [3, 6])
                self.assertLess(run["loss"][-1], run["loss"][0])
                self.assertEqual(list(results["speeds"][kind]), ["16", "32"])
                with open(os.path.join(out, kind, "command.json"), encoding="utf-8") as file:
                    self.assertIn(letters, json.load(file))
            # The same tokens: kinds begin alike, knowing nothing.
            self.assertAlmostEqual(results["runs"]["S"]["loss"][0], np.log(32), delta=0.3)
            self.assertAlmostEqual(results["runs"]["LG"]["loss"][0], np.log(32), delta=0.3)

    def test_patterns(self):
        self.assertEqual(kinds.pattern("G", 3), "GGG")
        self.assertEqual(kinds.pattern("GGGS", 6), "GGGSGG")

    def test_invalid_options_are_rejected(self):
        for words, part in (["--lengths", "1000"], "does not divide"), (["--kinds", "SX"], "letters are"), (["--kinds", ""], "letters are"):
            with contextlib.redirect_stderr(io.StringIO()) as text, self.assertRaises(SystemExit):
                kinds.parse(["--data", "d", "--out", "o", *words])
            self.assertIn(part, text.getvalue())

    def test_failed_run_is_a_one_line_error(self):
        with tempfile.TemporaryDirectory() as folder:
            words = ["compare_attention_kinds.py", "--driver", DRIVER, "--data", os.path.join(folder, "nothing"), "--out", folder]
            with mock.patch.object(sys, "argv", words), contextlib.redirect_stderr(io.StringIO()) as text:
                self.assertEqual(kinds.main(), 1)
            self.assertEqual(text.getvalue().splitlines()[-1], f"compare_attention_kinds: {DRIVER} failed; its own message is above")


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""compare_track3.py: which differences it accepts (needs neither PyTorch nor the script)."""
import contextlib
import io
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare_track3  # noqa: E402

SCRIPT = ([5.0, 4.0, 3.0, 2.0], 2.5)


def moved(by, validation=0.0):
    """SCRIPT with the third and the fourth loss moved, and the validation loss."""
    return [5.0, 4.0, 3.0 + by, 2.0 + by], SCRIPT[1] + validation


def agree(dtype, ours, half=None):
    results = {"ours": ours, "script": SCRIPT}
    if half:
        results["script-half"] = half
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return compare_track3.agree(results, dtype, 3, 4, 0.01), printed.getvalue()


class Agree(unittest.TestCase):
    def test_differences(self):
        step, mean, val = compare_track3.differences(([5.0, 4.5, 3.0, 2.2], 2.4), SCRIPT, 3, 4)
        for got, expected in ((step, 0.5), (mean, 0.1), (val, 0.1)):
            self.assertAlmostEqual(got, expected)

    def test_fp32_looks_at_each_step(self):
        self.assertTrue(agree("fp32", moved(0.009))[0])
        self.assertFalse(agree("fp32", moved(0.011))[0])
        self.assertFalse(agree("fp32", moved(-0.011))[0])

    def test_bf16_looks_at_the_means_and_the_validation_loss(self):
        self.assertTrue(agree("bf16", moved(0.009, -0.009))[0])
        self.assertTrue(agree("bf16", ([5.5, 4.0, 3.1, 1.9], 2.5))[0])  # single steps differ, means do not
        self.assertFalse(agree("bf16", moved(0.011))[0])
        self.assertFalse(agree("bf16", moved(0, 0.011))[0])

    def test_bf16_accepts_what_rounding_alone_does(self):
        accepted, printed = agree("bf16", moved(0.02, 0.02), half=moved(-0.03, 0.03))
        self.assertTrue(accepted)
        self.assertIn("script - script-half: mean of steps 3 to 4 0.030000, validation 0.030000", printed)
        self.assertFalse(agree("bf16", moved(0.02, 0.02), half=moved(0.03, 0.01))[0])
        self.assertFalse(agree("bf16", moved(0.02, 0.02), half=moved(0.01, 0.03))[0])


if __name__ == "__main__":
    unittest.main()

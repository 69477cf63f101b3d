#!/usr/bin/env python3
"""scripts/soak.py: a round passes, and fails with a driver whose disturbed runs end with other weights."""
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DRIVER = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "train_gpt")))

# The campaign disturbs runs in directories named round1, and compares them with runs in others.
WRONG_DRIVER = """#!/bin/sh
case "$*" in */round*) [ "$1" = train ] && set -- "$@" --lr 1e-4;; esac
exec {} "$@"
"""


class SoakTest(unittest.TestCase):
    def soak(self, driver):
        return subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "soak.py"), "--seed", "3", "--round", "1"],
                              env={**os.environ, "TRAIN_GPT": driver}, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=300)

    def test_a_round_passes(self):
        done = self.soak(DRIVER)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("nothing lost", done.stdout)

    def test_other_weights_are_found(self):
        with tempfile.TemporaryDirectory() as top:
            driver = os.path.join(top, "train_gpt")
            with open(driver, "w") as file:
                file.write(WRONG_DRIVER.format(DRIVER))
            os.chmod(driver, 0o755)
            os.symlink(os.path.join(os.path.dirname(os.path.realpath(DRIVER)), "dev"), os.path.join(top, "dev"))
            done = self.soak(driver)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("LOST in round 1 (repeat it with --seed 3 --round 1)", done.stdout)
        self.assertIn("model.safetensors", done.stdout)


if __name__ == "__main__":
    unittest.main()

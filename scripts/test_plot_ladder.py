#!/usr/bin/env python3
"""Tests of scripts/plot_ladder.py: it plots the CSV files of ladders, and any other file is a one-line error."""
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "plot_ladder.py")
HEADER = "ladder,rung,ms,rate,unit,limit_name,limit,fraction,factor\n"
ROWS = ('matmul fp32,"naive",300,0.5,TFLOP/s,cuBLASLt,50,0.01,\n'
        'matmul fp32,"tiled, padded",3,45,TFLOP/s,cuBLASLt,50,0.9,100\n'
        'matmul bf16,"mma.sync",0.3,450,TFLOP/s,cuBLASLt,700,0.64,\n')


class PlotLadder(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.csv = os.path.join(self.directory.name, "matmul.csv")

    def run_script(self, text, *options):
        if text is not None:
            with open(self.csv, "w", encoding="utf-8") as file:
                file.write(text)
        return subprocess.run([sys.executable, SCRIPT, self.csv, *options], capture_output=True, text=True, check=False)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_draws_every_ladder(self):
        done = self.run_script(HEADER + ROWS)
        picture = os.path.join(self.directory.name, "matmul.png")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, picture + "\n", ""))
        with open(picture, "rb") as file:
            self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")

    def expect_error(self, done, text):
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn(text, done.stderr)

    def test_bad_files(self):
        self.expect_error(self.run_script(None), "cannot be read")
        self.expect_error(self.run_script(HEADER), "holds no rungs")
        self.expect_error(self.run_script("a,b\n1,2\n"), ":2: not a rung")
        self.expect_error(self.run_script(HEADER + ROWS + "matmul bf16,x,fast\n"), ":5: not a rung")
        for rate in ("0", "nan", "inf"):
            self.expect_error(self.run_script(HEADER + ROWS.replace("0.5,TFLOP", f"{rate},TFLOP")), ":2: not a rung")
        self.expect_error(self.run_script(HEADER + "x" * 200000), "cannot be read (field larger than field limit")


if __name__ == "__main__":
    unittest.main()

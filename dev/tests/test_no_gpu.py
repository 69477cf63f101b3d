#!/usr/bin/env python3
"""The CUDA driver (TRAIN_GPT) without a GPU fails with one line that names the CPU build. TRAIN_GPT_CPU is set if the driver is
the CUDA build. A GPU of this machine is hidden, so `make test BACKEND=cuda OP=no_gpu` runs on any machine."""
import os
import tempfile
import unittest

from harness import ROOT, run, tokenize

MODEL = os.path.join(ROOT, "dev", "fixtures", "models", "gpt2-plain")


@unittest.skipUnless(os.environ.get("TRAIN_GPT_CPU"), "about the CUDA build (make test BACKEND=cuda)")
class NoGpuTest(unittest.TestCase):
    def run_driver(self, *args):
        return run(*args, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=60)

    def assert_refused(self, *args):
        done = self.run_driver(*args)
        self.assertEqual(done.returncode, 1, done)
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\A[^\n]*no usable NVIDIA GPU[^\n]*BACKEND=cpu[^\n]*\n\Z")

    def test_commands_fail_with_one_line_that_names_the_cpu_build(self):
        with tempfile.TemporaryDirectory(prefix="train_gpt_no_gpu_") as top:
            text, out = (os.path.join(top, name) for name in ("text.txt", "out"))
            with open(text, "w") as file:
                file.write("The cat sees the red stones.\n" * 400)
            data = tokenize(text, os.path.join(top, "data"), "--val", "0.1")
            self.assert_refused("train", "--model", "gpt2-tiny", "--data", data, "--out", out, "--steps", "2",
                                "--seq-len", "64")
            self.assertFalse(os.path.exists(out), "a run that did not start left its directory")
            self.assert_refused("eval", "--model", MODEL, "--data", data)
            self.assert_refused("logits", "--model", MODEL, "--tokens", "1 2 3", "--output", os.path.join(top, "logits.npy"))

    def test_help_and_info_need_no_gpu(self):
        for args in (["--help"], ["train", "--help"], ["eval", "--help"], ["sample", "--help"], ["info", MODEL]):
            done = self.run_driver(*args)
            self.assertEqual(done.returncode, 0, done)
            self.assertEqual(done.stderr, "")
            self.assertNotEqual(done.stdout, "")


if __name__ == "__main__":
    unittest.main()

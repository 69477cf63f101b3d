#!/usr/bin/env python3
"""`train --gpus N` end to end (TRAIN_GPT): training on two GPUs, an interrupt, a killed rank, and invalid requests. Only the
last runs with the CPU build."""
import glob
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import mpi
from harness import DRIVER, run, tokenize

LIBRARY = mpi.collectives()
MODEL = ("--model", "gpt2-tiny", "--layers", "2", "--channels", "64", "--heads", "2", "--batch-size", "2", "--seq-len", "64")


class GpusTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="train_gpt_gpus_")
        cls.addClassCleanup(directory.cleanup)
        cls.top = directory.name
        text = os.path.join(cls.top, "text.txt")
        with open(text, "w", encoding="utf-8") as file:
            file.write("".join(f"The cat sees {n} red stones.\n" for n in range(2000)))
        cls.data = tokenize(text, os.path.join(cls.top, "data"), "--val", "0.1")

    def args(self, out, *options, data=None):
        return ["train", *MODEL, "--dtype", "fp32", "--data", data or self.data, "--out", os.path.join(self.top, out),
                *options]

    def refused(self, *options, **variables):
        done = run(*self.args("refused", *options), env=variables, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), done)
        self.assertFalse(os.path.exists(os.path.join(self.top, "refused")), "a run that did not start left its directory")
        return done.stderr

    def test_too_many_gpus(self):
        self.assertRegex(self.refused("--gpus", "1000", "--steps", "2"),
                         r"--gpus 1000: (this is the CPU build.*mpirun|\d+ GPUs? visible here)")

    def test_incomplete_launcher_variables(self):
        self.assertIn("torchrun: RANK is set but WORLD_SIZE is not", self.refused("--steps", "2", RANK="0"))

    def test_gpus_option_inside_another_launcher(self):
        self.assertIn("--gpus 2: torchrun has already started 2 ranks; remove --gpus", self.refused(
            "--gpus", "2", "--steps", "2", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500"))


class TwoGpusTest(GpusTest):
    def start(self, out, *options):
        """Starts a run without end and waits for its first steps. Returns it and the process ids of its ranks."""
        self.errors = open(os.path.join(self.top, out + ".txt"), "w+", encoding="utf-8")
        self.addCleanup(self.errors.close)
        process = subprocess.Popen([DRIVER, *self.args(out, "--gpus", "2", "--steps", "10000000", *options)],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors)
        self.addCleanup(process.kill)
        end = time.monotonic() + 100
        while not re.search(r"step \d+/10000000", self.said()):
            self.assertIsNone(process.poll(), self.said())
            self.assertLess(time.monotonic(), end, self.said())
            time.sleep(0.1)
        with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="utf-8") as children:
            pids = children.read().split()
        ranks = {}
        for pid in pids:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                ranks[int(re.search(rb"\0TRAIN_GPT_RANK=(\d+)\0", b"\0" + environ.read())[1])] = int(pid)
        self.assertEqual(sorted(ranks), [0, 1])
        return process, ranks

    def said(self):
        with open(self.errors.name, encoding="utf-8") as file:
            return file.read()

    def test_errors_are_printed_once(self):
        self.assertIn("--total-batch-tokens 100 is not a multiple",
                      self.refused("--gpus", "2", "--steps", "2", "--total-batch-tokens", "100"))

    def test_ranks_that_fail_alike_print_their_errors(self):
        data = os.path.join(self.top, "damaged")
        shutil.copytree(self.data, data)
        for path in glob.glob(os.path.join(data, "train_*.bin")):
            with open(path, "r+b") as file:
                size = os.path.getsize(path) - 1024
                file.seek(1024)
                file.write(b"\xff" * size)
        done = run(*self.args("damaged_run", "--gpus", "2", "--steps", "20", data=data))
        said = [line for line in done.stderr.splitlines() if "train_gpt:" in line]
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertTrue(said and all("outside the vocabulary" in line for line in said), done.stderr)

    def test_trains_to_completion(self):
        done = run(*self.args("whole", "--gpus", "2", "--steps", "20"), timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("[rank", done.stderr)
        self.assertEqual(done.stderr.count("memory plan"), 1)
        self.assertTrue(os.path.exists(os.path.join(self.top, "whole", "step_00000020", "trainer.json")))

    def test_interrupt_saves_a_checkpoint(self):
        process, _ = self.start("interrupted")
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), 0, self.said())
        self.assertRegex(self.said(), r"stopped at step \d+; 'train --resume")
        self.assertTrue([name for name in os.listdir(os.path.join(self.top, "interrupted")) if name.startswith("step_")])

    def test_killed_rank_ends_all_ranks_with_one_error(self):
        for rank in (0, 1):
            process, ranks = self.start(f"killed{rank}")
            os.kill(ranks[rank], signal.SIGKILL)
            self.assertEqual(process.wait(timeout=30), 128 + signal.SIGKILL, self.said())
            ends = [line for line in self.said().splitlines() if "train_gpt:" in line]
            self.assertEqual(ends, [f"train_gpt: rank {rank} was ended by signal 9 (Killed)"])
            self.assertFalse(os.path.exists(f"/proc/{ranks[1 - rank]}"))

    def test_ranks_end_with_their_parent(self):
        process, ranks = self.start("orphans")
        process.kill()
        process.wait()
        end = time.monotonic() + 30
        while any(os.path.exists(f"/proc/{pid}") for pid in ranks.values()):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)


# Without GPUs the tests that need them are not listed as skipped.
if LIBRARY.startswith("NCCL") and mpi.gpus() >= 2:
    del GpusTest
else:
    del TwoGpusTest


if __name__ == "__main__":
    unittest.main()

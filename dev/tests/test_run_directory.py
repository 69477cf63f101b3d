#!/usr/bin/env python3
"""A run directory has one run. Leftovers of killed runs are removed, and it is noticed if others remove or cut off
files."""
import os
import shutil
import signal
import subprocess
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

from harness import DRIVER, ENVIRONMENT, BaseRunTest, checkpoints, digests, log, losses, run


class RunDirectoryTest(BaseRunTest):
    def start(self, name, *args, data=None):
        """A run that goes on until it is ended. Returns after its first step."""
        out = os.path.join(self.top, name)
        args = self.train_args(name, "--steps", 1000000, "--eval-every", 0, "--save-every", 0, *args)
        if data:
            args[args.index("--data") + 1] = data
        process = subprocess.Popen([DRIVER, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self.addCleanup(lambda: process.stderr.close() or process.wait())
        self.addCleanup(process.kill)
        self.wait_for(lambda: os.path.exists(out + "/log.jsonl") and os.path.getsize(out + "/log.jsonl"))
        return process, out

    def wait_for(self, condition):
        deadline = time.time() + 60
        while not condition():
            self.assertLess(time.time(), deadline, "it did not happen")
            time.sleep(0.02)

    def test_a_run_directory_has_one_run(self):
        process, out = self.start("locked")
        words = [f"--out {out} is in use by process {process.pid} on {os.uname().nodename}; wait"]
        self.refused(1, words, *self.train_args("locked", "--steps", 3))
        self.refused(1, words, "train", "--out", out, "--resume")
        self.assertIsNone(process.poll())
        process.kill()
        process.wait()
        self.assertTrue(os.path.exists(out + "/.lock"))  # the file of a dead process does not block
        done = run(*self.train_args("locked", "--steps", 3))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertFalse(os.path.exists(out + "/.lock"))

    def test_of_two_resumed_runs_one_continues(self):
        other = self.copy_with_checkpoint("resumed_twice", 4)
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda _: run("train", "--out", other, "--resume"), range(4)))
        for process in done:  # the one that holds the lock may not have written its number yet
            self.assertTrue(process.returncode == 0 or "is in use by " in process.stderr, process.stderr)
        self.assertIn(0, [process.returncode for process in done])
        self.assertEqual(losses(other), losses(self.base))
        end, expected = (os.path.join(run_dir, "step_00000008") for run_dir in (other, self.base))
        self.assertEqual(digests(end), digests(expected))

    def test_leftovers_are_removed_whatever_process_has_their_number(self):
        other = os.path.join(self.top, "leftovers")
        shutil.copytree(self.base, other)
        dead = subprocess.Popen(["true"])
        dead.wait()
        for name in (".old-step_00000002", f".tmp-step_00000009-{dead.pid}", f".tmp-step_00000009-{os.getpid()}"):
            shutil.copytree(os.path.join(other, "step_00000004"), os.path.join(other, name))
        for name in (".tmp-log.jsonl", ".tmp-run.toml"):
            with open(os.path.join(other, name), "w") as file:
                file.write("half")
        self.assertEqual(run("train", "--out", other, "--resume").returncode, 0)  # the run is done: nothing is saved
        self.assertEqual([name for name in os.listdir(other) if name[0] == "."], [])

    def test_a_log_that_disappears_is_written_again(self):
        process, out = self.start("lost_log")
        path = os.path.join(out, "log.jsonl")
        for round in range(2):
            os.remove(path)
            self.wait_for(lambda: os.path.exists(path))
        process.send_signal(signal.SIGTERM)
        stderr = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 0, stderr)
        self.assertEqual([line["step"] for line in log(out)], list(range(1, int(checkpoints(out)[0][5:]) + 1)))
        self.assertEqual(stderr.count("log.jsonl was gone; it is written again"), 1, stderr)

    def test_a_token_file_that_is_truncated_is_an_error(self):
        data = os.path.join(self.top, "shrinking")
        shutil.copytree(self.data, data)
        process, out = self.start("shrinking_run", data=data)
        path = os.path.join(data, "train_000000.bin")
        os.truncate(path, 3000)
        stderr = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 1, stderr)
        self.assertRegex(stderr.splitlines()[-1], rf"^train_gpt: train: {path}: has 3000 bytes, .* truncated")
        self.assertEqual([name for name in os.listdir(out) if "tmp" in name or name == ".lock"], [])


if __name__ == "__main__":
    unittest.main()

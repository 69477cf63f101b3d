#!/usr/bin/env python3
"""Runs that are killed at each file operation, full disks, limits on files and memory, a file system that hangs: every
checkpoint is complete, and a resumed run has the same bits."""
import os
import re
import shutil
import subprocess
import unittest
from concurrent.futures import ThreadPoolExecutor

from harness import DRIVER, SHIM, BaseRunTest, checkpoints, cuda, digest, digests, log, run, sanitized


class CrashesTest(BaseRunTest):
    def shim(self, mode, directory, n):
        if sanitized():
            self.skipTest("a preloaded library and the sanitizers' run-time don't mix")
        self.assertTrue(os.path.exists(SHIM), f"{SHIM} is not built")
        return {"LD_PRELOAD": SHIM, "CRASH_SHIM_MODE": mode, "CRASH_SHIM_DIR": os.path.realpath(directory),
                "CRASH_SHIM_AT": str(n)}

    def break_saves(self, mode):
        """Breaks a resumed run at its n-th file operation, for every n; then resuming must give the same result."""
        expected = digests(os.path.join(self.base, "step_00000008"))
        # Step 6 is written in the background.
        args = ["--resume", "--eval-every", 8, "--save-every", 2, "--on-save-error", "stop"]
        unbroken = self.copy_with_checkpoint(f"{mode}_unbroken", 4)
        self.assertEqual(run("train", "--out", unbroken, *args).returncode, 0)

        def files(run_dir, checkpoint):
            path = os.path.join(run_dir, checkpoint)
            return {name: digest(os.path.join(path, name)) for name in os.listdir(path)}
        whole = {name: files(unbroken, name) for name in checkpoints(unbroken)}
        self.assertEqual(sorted(whole), [f"step_{n:08}" for n in (4, 6, 8)])

        def broken_at(n):
            run_dir = self.copy_with_checkpoint(f"{mode}_{n}", 4)
            done = run("train", "--out", run_dir, *args, env=self.shim(mode, run_dir, n))
            if done.returncode == 0:
                return False
            if mode == "enospc":
                self.assertEqual(done.returncode, 1, done.stderr)
                last = done.stderr.rstrip("\n").split("\n")[-1]
                self.assertIn("No space left on device", last)
                self.assertIn(run_dir, last)
            for name in checkpoints(run_dir):  # every checkpoint is complete
                if name in whole:
                    self.assertEqual(files(run_dir, name), whole[name])
                else:  # a run that stops saves where it is
                    info = run("info", os.path.join(run_dir, name), "--json")
                    self.assertEqual(info.returncode, 0, info.stderr)
            self.assertIn("step_00000004", checkpoints(run_dir))
            if mode == "enospc":
                self.assertFalse([name for name in os.listdir(run_dir) if "tmp" in name], "half-written files are left")
            if n % 8 == 1 or "step_00000008" in checkpoints(run_dir):  # resuming takes long, so not after every failure
                again = run("train", "--out", run_dir, *args)
                self.assertEqual(again.returncode, 0, again.stderr)
                self.assertEqual(digests(os.path.join(run_dir, "step_00000008")), expected)
                self.assertFalse([name for name in os.listdir(run_dir) if "tmp" in name],
                                 "temporary files of a killed run are left")
            shutil.rmtree(run_dir)
            return True

        at_once = os.cpu_count()
        broken = []
        with ThreadPoolExecutor(at_once) as pool:
            while all(broken):
                self.assertLess(len(broken), 2000)
                broken += pool.map(broken_at, range(len(broken) + 1, len(broken) + 1 + at_once))
        operations = broken.index(False)
        self.assertFalse(any(broken[operations:]), "a run failed after one that succeeded")
        self.assertGreater(operations, 10)

    def test_kill_at_every_file_operation(self):
        self.break_saves("kill")

    def test_full_disk_at_every_file_operation(self):
        self.break_saves("enospc")

    def test_a_save_that_fails_does_not_stop_the_run(self):
        """A full disk at operations of a save in the background."""
        def run_with(n, *args):
            run_dir = self.copy_with_checkpoint(f"goes_on_{n}", 4)
            done = run("train", "--out", run_dir, "--resume", "--eval-every", 8, "--save-every", 2, *args,
                       env=self.shim("enospc", run_dir, n))
            left = [name for name in os.listdir(run_dir) if "tmp" in name]
            return done, checkpoints(run_dir), left
        failed = 0
        for n in range(2, 40, 3):
            done, saved, left = run_with(n)
            if "the checkpoint of step 6 failed: " in done.stderr:
                failed += 1
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertRegex(done.stderr, "step 6 failed: .*No space left on device; free some disk space; "
                                              "the run goes on\n")
                self.assertEqual((saved, left), (["step_00000004", "step_00000008"], []))
                self.assertEqual(log(os.path.join(self.top, f"goes_on_{n}"))[-1]["step"], 8)
            shutil.rmtree(os.path.join(self.top, f"goes_on_{n}"))
        self.assertGreater(failed, 3)

    def resume_with_failing_log(self, name, calls, *args):
        """The base run from step 4 on; its log cannot be written from a call on, for some calls."""
        out = self.copy_with_checkpoint(name, 4)
        at, times = calls
        env = {**self.shim("enospc", os.path.join(out, "log.jsonl"), at), "CRASH_SHIM_FOR": str(times)}
        return out, run("train", "--out", out, "--resume", *args, env=env)

    def numbers(self, out):
        return [{k: v for k, v in line.items() if k not in ("ms", "tokens_per_s", "mfu")} for line in log(out)]

    def test_a_log_that_cannot_be_written_for_a_while(self):
        expected = digests(os.path.join(self.base, "step_00000008"))
        for calls in (1, 1), (1, 3), (2, 4), (5, 1), (5, 5):  # 5: the line of the last evaluation
            out, done = self.resume_with_failing_log("full_for_a_while", calls)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"{out}/log.jsonl: cannot write: No space left on device; free some disk space; the lines are "
                          "kept and written when that is possible\n", done.stderr)
            self.assertIn(f"{out}/log.jsonl is written again; no line is lost\n", done.stderr)
            self.assertEqual(self.numbers(out), self.numbers(self.base))
            self.assertEqual(digests(os.path.join(out, "step_00000008")), expected)
            shutil.rmtree(out)

    def test_a_log_that_cannot_be_written_until_the_end(self):
        out, done = self.resume_with_failing_log("full_to_the_end", (3, 100000))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], "^train_gpt: train: .*/log.jsonl: cannot write: No space left on "
                                                       "device; .*; the last lines of the log are lost$")
        self.assertEqual(checkpoints(out)[-1], "step_00000008")
        self.assertEqual(self.numbers(out), self.numbers(self.base)[:len(log(out))])

    def test_stops_at_a_log_that_cannot_be_written_but_saves_first(self):
        out, done = self.resume_with_failing_log("full_stops", (1, 1), "--on-save-error", "stop")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], "^train_gpt: train: .*/log.jsonl: cannot write: No space left")
        step = log(out)[-1]["step"]
        self.assertLess(step, 8)
        self.assertEqual(checkpoints(out)[-1], f"step_{step:08}")
        again = run("train", "--out", out, "--resume")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(self.numbers(out), self.numbers(self.base))
        self.assertEqual(digests(os.path.join(out, "step_00000008")), digests(os.path.join(self.base, "step_00000008")))

    def fails_to_read(self, n, where, *args):
        """A run whose n-th read below a path fails, or none. A failed read is no content: the line says so."""
        done = run("train", *args, env=self.shim("eio", where, n))
        if done.returncode:
            last = done.stderr.splitlines()[-1]
            self.assertRegex(last, "^train_gpt: train: .*cannot (read|look up|open): Input/output error; check the disk")
            self.assertEqual(done.stderr.count("train_gpt: "), 1, done.stderr)
            for advice in "remove", "damaged", "start again", "make some", "restore":
                self.assertNotIn(advice, last)
        return done

    def test_a_checkpoint_that_cannot_be_read(self):
        """At every read of the only checkpoint: nothing advises to remove it, and a run that goes on keeps it."""
        checkpoint = os.path.join(self.copy_with_checkpoint("unreadable", 4), "step_00000004")
        expected, failed = digests(checkpoint), 0
        out = os.path.dirname(checkpoint)
        for n in range(1, 400):
            done = self.fails_to_read(n, checkpoint, "--resume", "--out", out, "--steps", 8, "--keep", 1)
            if not done.returncode and "older checkpoints stay: " not in done.stderr:
                break  # it was removed, because the one of step 8 is better
            self.assertEqual(digests(checkpoint), expected)
            failed += 1
            shutil.rmtree(out)
            self.copy_with_checkpoint("unreadable", 4)
        self.assertGreater(failed, 10)

    def test_other_files_that_cannot_be_read(self):
        config = os.path.join(self.top, "config.toml")
        with open(config, "w") as file:
            file.write("steps = 2\nlr = 1e-3\n" + "# comment\n" * 20000)
        args, out = self.train_args("unread", "--config", config), os.path.join(self.top, "unread")
        for n in 1, 2:  # the second read finds the end
            done = run(*args, env=self.shim("eio", config, n))
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("Input/output error", done.stderr)
            self.assertFalse(os.path.exists(out))
        for n in range(1, 400, 4):
            done = self.fails_to_read(n, self.data, *self.train_args("unread", "--steps", 2)[1:])
            shutil.rmtree(out, ignore_errors=True)
            if not done.returncode:
                break
        self.assertGreater(n, 30)
        out = self.copy_with_checkpoint("unread_options", 4)
        done = self.fails_to_read(2, os.path.join(out, "run.toml"), "--resume", "--out", out)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(checkpoints(out), ["step_00000004"])

    def test_free_space_is_checked_before_a_save(self):
        if os.geteuid() != 0:
            self.skipTest("mounting a small file system needs root")
        out = os.path.join(self.top, "small_disk")
        os.makedirs(out)
        mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", out]
        if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
            self.skipTest("tmpfs cannot be mounted here")
        try:
            done = run(*self.train_args("small_disk", "--steps", 8, "--save-every", 3))
            self.assertEqual(done.returncode, 1, done.stderr)
            message = (r"small_disk/step_0000000\d: a checkpoint takes \S+ KiB and \S+ KiB of the disk are free; "
                       "free some disk space")
            for step in 3, 6:
                self.assertRegex(done.stderr, f"the checkpoint of step {step} failed: .*{message}; the run goes on")
            self.assertRegex(done.stderr.splitlines()[-1], f"^train_gpt: train: .*{message}$")
            self.assertEqual(sorted(os.listdir(out)), ["log.jsonl", "run.toml"])
            self.assertEqual(log(out)[-1]["step"], 8)
        finally:
            subprocess.run(["umount", out], check=True)

    def test_limit_on_file_sizes(self):
        def limited(*args):
            return subprocess.run(["bash", "-c", 'ulimit -f 20; exec "$@"', "limited", DRIVER, *map(str, args)],
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        before, out = sorted(os.listdir(self.top)), os.path.join(self.top, "small_files")
        done = limited(*self.train_args("small_files", "--steps", 2))
        self.assertEqual(done.returncode, 1, done.stderr)
        message = r"model\.safetensors: cannot write: File too large; raise the limit on file sizes \(ulimit -f\)$"
        self.assertRegex(done.stderr.splitlines()[-1], message)
        self.assertEqual(sorted(os.listdir(out)), ["log.jsonl", "run.toml"])
        shutil.rmtree(out)
        for args in (["convert", self.base, out], ["convert", self.base, out + ".bin"],
                     ["logits", "--model", self.base, "--tokens", "1 " * 60, "--output", out + ".npy"]):
            done = limited(*args)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
            self.assertIn("ulimit -f", done.stderr)
            self.assertEqual(sorted(os.listdir(self.top)), before)

    def test_too_little_memory_for_a_snapshot(self):
        """The run says so and waits for each save; its checkpoints are the same."""
        if cuda() or sanitized():
            self.skipTest("CUDA and the address sanitizer reserve more address space than any limit leaves")
        env = {**os.environ, "OMP_NUM_THREADS": "2"}  # each thread reserves address space

        def limited(name, kilobytes):
            args = self.train_args(name, "--model", "gpt2-tiny", "--layers", 12, "--channels", 256, "--save-every", 1,
                                   "--steps", 2)
            return subprocess.run(["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "limited", DRIVER,
                                   *map(str, args)],
                                  env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        # 9.6 million weights: 150 MiB and a snapshot of 110 MiB, and what libraries and threads reserve of the address
        # space.
        outcomes = set()
        for kilobytes in range(300000, 1000000, 25000):
            done = limited(f"memory_{kilobytes}", kilobytes)
            if done.returncode or "the checkpoint of step 1 failed: " in done.stderr:  # the limit is too low for a save
                continue
            waits = "training waits while a checkpoint is written" in done.stderr
            saved = checkpoints(os.path.join(self.top, f"memory_{kilobytes}"))
            self.assertEqual(saved, ["step_00000001", "step_00000002"])
            outcomes.add(waits)
            if not waits:
                break
        self.assertEqual(len(outcomes), 2, outcomes)

    def test_too_few_threads(self):
        """One line, whatever number of threads the system allows; a save that gets no thread is written by the run."""
        if cuda():
            self.skipTest("CUDA starts threads of its own")
        env = {"LD_PRELOAD": self.shim("enospc", self.top, 0)["LD_PRELOAD"], "OMP_NUM_THREADS": "2"}
        done = run("info", env={**env, "CRASH_SHIM_THREADS": "0"})
        message = "cannot start a thread: Resource temporarily unavailable; raise the limit on processes (ulimit -u)"
        self.assertEqual((done.returncode, done.stderr), (1, f"train_gpt: {message}\n"))
        expected, waited = digests(os.path.join(self.base, "step_00000008")), 0
        for threads in range(12):
            out = self.copy_with_checkpoint(f"threads_{threads}", 4)
            done = run("train", "--out", out, "--resume", "--save-every", 2,
                       env={**env, "CRASH_SHIM_THREADS": str(threads)})
            self.assertIn(done.returncode, (0, 1), done.stderr)
            self.assertNotIn("terminate called", done.stderr)
            if done.returncode:
                self.assertEqual((waited, done.stderr.count("Resource temporarily unavailable")), (0, 1), done.stderr)
                continue
            waits = f"training waits while {out}/step_00000006 is written: cannot start a thread: " in done.stderr
            waited += waits
            self.assertIn(f"saved {out}/step_00000006\n", done.stderr)
            self.assertEqual(digests(os.path.join(out, "step_00000008")), expected)
            if not waits:
                break
        self.assertGreater(waited, 0)
        self.assertGreater(threads, 3)

    def test_step_timeout(self):
        """A process that hangs ends with one line that names the state. Here the file system hangs."""
        out = os.path.join(self.top, "hangs")
        # The first checkpoint is written in the background: what hangs is the save that waits for it.
        for path, state in (("log.jsonl", "writing log.jsonl"), (".tmp-step_00000002-*", "saving a checkpoint")):
            shutil.rmtree(out, ignore_errors=True)
            args = self.train_args("hangs", "--steps", 4, "--save-every", 2, "--eval-every", 0, "--step-timeout", 4)
            done = run(*args, env=self.shim("hang", os.path.join(out, path), 1))
            self.assertEqual(done.returncode, 1, (path, done.stderr))
            last = done.stderr.splitlines()[-1]
            self.assertRegex(last, rf"^train_gpt: train: no progress for 4 s in step \d \({re.escape(state)}\) "
                                   rf"\(--step-timeout\); 'train --resume --out {re.escape(out)}' continues from the "
                                   "last checkpoint$")
        shutil.rmtree(out)
        self.assertEqual(run(*self.train_args("hangs", "--steps", 2, "--step-timeout", 60)).returncode, 0)


if __name__ == "__main__":
    unittest.main()

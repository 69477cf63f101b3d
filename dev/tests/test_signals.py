#!/usr/bin/env python3
"""Signals, closed streams and terminals: a run that is told to stop saves its last complete step, one whose output goes
away goes on, and a terminal is shown no control characters. TRAIN_GPT names the driver."""
import contextlib
import glob
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import tempfile
import termios
import time
import unittest

import harness
from harness import DRIVER, MODEL, checkpoints, cuda, digests, log, make_data, sanitized, text_of, tokenize

ENVIRONMENT = {**harness.ENVIRONMENT, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
MICRO_STEP = 4 * 32  # tokens


class SignalsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # runs inherit it; nohup would have them ignore the signal
        cls.top = tempfile.mkdtemp(prefix="train_gpt_signals_")
        cls.data = make_data(cls.top)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    def args(self, name, *args):
        return [DRIVER, "train", *MODEL, "--data", self.data, "--out", os.path.join(self.top, name),
                "--batch-size", "4", "--seq-len", "32", "--gemm-tune", "off", *map(str, args)]

    def start(self, command, **streams):
        """A run, once it catches signals: then it says what it trains on."""
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **streams}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=ENVIRONMENT, text=True, **streams)
        self.addCleanup(process.kill)
        for line in process.stderr:
            if "training tokens in" in line:
                return process
        self.fail(f"{command} ended by itself")

    def wait_for_a_step(self, name):
        path = os.path.join(self.top, name, "log.jsonl")
        end = time.monotonic() + 60
        while not (os.path.exists(path) and os.path.getsize(path)):
            self.assertLess(time.monotonic(), end, "no step is logged")
            time.sleep(0.02)

    def expect_saved(self, name, process):
        errors = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 0, errors)
        (checkpoint,) = checkpoints(os.path.join(self.top, name))
        self.assertIn(f"stopped at step {int(checkpoint[5:])}; ", errors)
        self.assertIn("--resume", errors)
        return int(checkpoint[5:])

    def send(self, process, number):
        """Returns when the process has taken the signal: one that is sent before does not count."""
        process.send_signal(number)
        pending = 1
        while pending and process.poll() is None:
            with contextlib.suppress(OSError, TypeError):  # it has ended
                pending = int(re.search(r"^ShdPnd:\s*(\w+)", text_of(f"/proc/{process.pid}/status"), re.M)[1], 16) >> (number - 1) & 1
            time.sleep(0.001)

    def test_each_signal_saves_a_checkpoint(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            name = f"signal_{number}"
            process = self.start(self.args(name, "--steps", 100000, "--save-every", 0))
            self.wait_for_a_step(name)
            # One thread receives signals, so that no handler's frame overwrites a buffer (runtime/signals.h).
            blocked = [int(re.search(r"^SigBlk:\s*(\w+)", text_of(path), re.M)[1], 16)
                       for path in glob.glob(f"/proc/{process.pid}/task/*/status")]
            self.assertGreaterEqual(len(blocked), 3)
            self.assertEqual(sum(mask >> (number - 1) & 1 == 0 for mask in blocked), 1, blocked)
            process.send_signal(number)
            if number == signal.SIGHUP:  # a closing terminal sends it more than once
                time.sleep(0.001)
                process.send_signal(number)
            self.assertEqual(self.expect_saved(name, process), log(os.path.join(self.top, name))[-1]["step"])

    def test_a_second_signal_waits_for_the_checkpoint(self):
        """Saving 30 million weights takes long enough; the process ends by the signal when it has its name."""
        out = os.path.join(self.top, "second")
        command = [DRIVER, "train", "--model", "gpt2-mini", "--vocab-size", "50000", "--data", self.data, "--out", out, "--batch-size", "1",
                   "--seq-len", "16", "--gemm-tune", "off", "--steps", "100000", "--save-every", "2", "--keep", "100"]
        for times in 2, 3:
            process = self.start(command)
            before = checkpoints(out) if os.path.isdir(out) else []
            end = time.monotonic() + 60
            while not (unfinished := glob.glob(os.path.join(out, ".tmp-step_*"))):
                self.assertLess(time.monotonic(), end, "nothing is being saved")
                time.sleep(0.001)
            name = os.path.basename(unfinished[0]).split("-")[1]
            for i in range(times):
                self.send(process, signal.SIGTERM)
            errors = process.communicate(timeout=60)[1]
            self.assertEqual(process.returncode, -signal.SIGTERM, errors)
            self.assertIn("waiting for the checkpoint that is being written", errors)
            if times == 2:
                self.assertIn(name, checkpoints(out))
                self.assertFalse(glob.glob(os.path.join(out, ".tmp-step_*")))
                command = [DRIVER, "train", "--out", out, "--resume"]
            else:
                self.assertGreaterEqual(len(checkpoints(out)), len(before))

    def test_nohup_ignores_the_closed_terminal(self):
        process = self.start(["nohup", *self.args("nohup", "--steps", 100000, "--save-every", 0)])
        self.wait_for_a_step("nohup")
        process.send_signal(signal.SIGHUP)
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGTERM)
        self.expect_saved("nohup", process)

    def test_a_closed_terminal_ends_other_commands(self):
        """A library that catches SIGHUP while it is loaded changes nothing."""
        for prefix, status in ((), -signal.SIGHUP), (("nohup",), -signal.SIGTERM):
            process = subprocess.Popen([*prefix, DRIVER, "sample", "--model", "gpt2-tiny", "--random-weights", "--ignore-eos",
                                        "--max-tokens", "1000", "--num-samples", "10000"], env=ENVIRONMENT,
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.addCleanup(process.kill)
            end = time.monotonic() + 60
            while len(os.listdir(f"/proc/{process.pid}/task")) < 2:  # the thread that takes signals is there
                self.assertLess(time.monotonic(), end, "no second thread")
                time.sleep(0.02)
            process.send_signal(signal.SIGHUP)
            if prefix:
                with self.assertRaises(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5)
                process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(timeout=60), status)

    def test_stops_between_micro_steps(self):
        """A step of two million micro-steps would take many minutes."""
        process = self.start(self.args("long_step", "--steps", 2, "--total-batch-tokens", 2000000 * MICRO_STEP))
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(self.expect_saved("long_step", process), 0)
        self.assertEqual(log(os.path.join(self.top, "long_step")), [])

    def test_unfinished_steps_leave_no_trace(self):
        """A run that is stopped in the middle of its steps ends with the bits and the log of one that is not."""
        micro_steps = 600 if cuda() else 30 if sanitized() else 120  # a step takes long enough to be stopped in it
        options = ["--steps", 8, "--save-every", 3, "--eval-every", 4, "--keep", 100,
                   "--total-batch-tokens", micro_steps * MICRO_STEP]
        done = subprocess.run(self.args("whole", *options), env=ENVIRONMENT, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        delays, stops = random.Random(5), 0
        command = self.args("stopped", *options)
        while True:
            process = self.start(command)
            time.sleep(delays.uniform(0, 0.1 * max(stops - 1, 0)))  # the first two are stopped at once
            process.send_signal((signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[stops % 3])
            errors = process.communicate(timeout=60)[1]
            self.assertEqual(process.returncode, 0, errors)
            if "stopped at step" not in errors:
                break
            stops += 1
            self.assertLess(stops, 100)
            command = [DRIVER, "train", "--out", os.path.join(self.top, "stopped"), "--resume"]
        self.assertGreater(stops, 1)
        whole, stopped = (os.path.join(self.top, name) for name in ("whole", "stopped"))
        self.assertEqual(*(digests(os.path.join(run, "step_00000008")) for run in (whole, stopped)))
        keys = ("step", "loss", "grad_norm", "lr", "val_loss")
        self.assertEqual(*([{key: line.get(key) for key in keys} for line in log(run)] for run in (whole, stopped)))

    # ---- output that goes away ---------------------------------------------------------------------------------------

    def test_training_goes_on_without_its_output(self):
        for name in "stdout", "stderr":
            reader, writer = os.pipe()
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, name: writer}
            process = subprocess.Popen(self.args("pipe_" + name, "--steps", 6), env=ENVIRONMENT,
                                       stdin=subprocess.DEVNULL, **streams)
            os.close(writer)
            os.close(reader)
            self.assertEqual(process.wait(timeout=120), 0)
            self.assertEqual(checkpoints(os.path.join(self.top, "pipe_" + name)), ["step_00000006"])

    def test_missing_streams_are_not_taken_by_files(self):
        """Otherwise the first file that is opened would be stdin, stdout or stderr, and get its text."""
        for i, closed in enumerate(("2>&-", ">&- 2>&-", "<&- >&- 2>&-")):
            name = f"no_streams_{i}"
            done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *self.args(name, "--steps", 3)], env=ENVIRONMENT,
                                  timeout=120)
            self.assertEqual(done.returncode, 0, closed)
            self.assertEqual([line["step"] for line in log(os.path.join(self.top, name))], [1, 2, 3, 3])
            self.assertEqual(checkpoints(os.path.join(self.top, name)), ["step_00000003"])

    def test_results_whose_reader_has_gone(self):
        """The command ends soon and quietly, with the status of a process that SIGPIPE ended."""
        subprocess.run(self.args("text", "--steps", 1), env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True,
                       check=True)
        command = [DRIVER, "sample", "--model", os.path.join(self.top, "text"), "--max-tokens", "1000000000",
                   "--ignore-eos"]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        process.stdout.read(1)
        process.stdout.close()
        self.assertEqual((process.wait(timeout=60), process.stderr.read()), (128 + signal.SIGPIPE, b""))
        process.stderr.close()

    def test_results_that_cannot_be_written(self):
        """Each fails with one line: on a full disk, and without stdout."""
        for args in (["--help"], ["train", "--help"], ["info"], ["plan", "--model", "gpt2-tiny"],
                     ["sample", *MODEL, "--random-weights", "--max-tokens", "4"]):
            for target in "/dev/full", "&-":
                done = subprocess.run(["sh", "-c", f'"$@" >{target}', "sh", DRIVER, *args], env=ENVIRONMENT,
                                      stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual(done.returncode, 1, args)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertIn("standard output: cannot write", done.stderr)

    # ---- limits ------------------------------------------------------------------------------------------------------

    def test_many_threads_and_small_stacks(self):
        """Each of them crashed: a table of 100,000 threads, and kernels' tiles on a stack of 512 KiB."""
        for i, limits in enumerate(("", "ulimit -s 512;", "ulimit -Ss 512;")):
            for threads in ("2", "100000"):
                command = self.args(f"limits{i}{threads}", "--steps", 1)
                done = subprocess.run(["sh", "-c", limits + '"$@"', "sh", *command],
                                      env={**ENVIRONMENT, "OMP_NUM_THREADS": threads}, stdin=subprocess.DEVNULL,
                                      capture_output=True, text=True, timeout=120)
                self.assertEqual(done.returncode, 0, (limits, threads, done.stderr))

    # ---- a terminal --------------------------------------------------------------------------------------------------

    def on_terminal(self, *args):
        """What a command prints to a terminal."""
        terminal, device = pty.openpty()
        attributes = termios.tcgetattr(device)
        attributes[1] &= ~termios.OPOST  # "\n" stays as it is
        termios.tcsetattr(device, termios.TCSANOW, attributes)
        process = subprocess.Popen([DRIVER, *map(str, args)], env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=device,
                                   stderr=device)
        self.addCleanup(process.kill)
        os.close(device)
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # the terminal's other end is closed
            pass
        os.close(terminal)
        process.wait(timeout=60)
        return shown

    def test_control_characters_are_escaped_on_a_terminal(self):
        """Those of generated text, file names and error messages. Elsewhere results are written as they are, and messages
        are escaped too, because a log is shown on a terminal later."""
        def controls(shown):
            return [c for c in shown if c < 32 and c not in b"\n\t"]

        def piped(*args):
            return subprocess.run([DRIVER, *map(str, args)], env=ENVIRONMENT, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=60)

        model = os.path.join(self.top, "escapes")
        trained = self.on_terminal(*self.args("escapes", "--steps", 2, "--sample-every", 1)[1:])
        self.assertIn(b"sample: ", trained)
        self.assertEqual(controls(trained.replace(b"\r\x1b[K", b"")), [])  # but the one that clears the progress line
        sample = ["sample", "--model", model, "--max-tokens", 60, "--ignore-eos"]
        raw = controls(piped(*sample).stdout)
        self.assertTrue(raw, "an untrained model samples control characters")
        shown = self.on_terminal(*sample)
        self.assertEqual(controls(shown), [])
        self.assertIn(b"\\x%02x" % raw[0], shown)
        missing = ["eval", "--model", "no\x1b[31msuch", "--data", self.data]
        self.assertIn(b"no\\x1b[31msuch: no such model", self.on_terminal(*missing))
        self.assertIn(b"no\\x1b[31msuch: no such model", piped(*missing).stderr)
        # Names that come from files: in errors, and in the lines of info.
        adapter = os.path.join(self.top, "adapter")
        os.mkdir(adapter)
        with open(os.path.join(adapter, "adapter_config.json"), "w") as file:
            json.dump({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
                       "base_model_name_or_path": "base\x1b]0;title\x07\x9b31m\nforged line"}, file)
        for args in ["eval", "--model", adapter, "--data", self.data], ["info", adapter]:
            shown = piped(*args)
            text = shown.stdout + shown.stderr
            self.assertIn(b"base\\x1b]0;title\\x07\\x9b31m", text)
            self.assertNotIn(b"\nforged", text)
            self.assertEqual(controls(text), [])

    def test_loss_tokens_are_coloured_on_a_terminal(self):
        source = os.path.join(self.top, "pairs.jsonl")
        with open(source, "w") as file:
            file.write('{"prompt": "1 + 1 = ", "response": "2\\u001b[31m"}\n')
        data = tokenize(source, os.path.join(self.top, "pairs"), "--val", "0")
        shown = self.on_terminal("info", "--data", data, "--show", 1)
        self.assertIn(b"1 + 1 = \x1b[1;32m2\\x1b[31m<|endoftext|>\x1b[0m", shown)


if __name__ == "__main__":
    unittest.main()

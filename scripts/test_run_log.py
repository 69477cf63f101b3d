#!/usr/bin/env python3
"""Tests of the scripts that show runs, plot_log.py, watch.py and log_to_tensorboard.py, and errors of invalid logs."""
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(__file__))
STEPS = [{"step": n, "loss": 5.0 - n, "lr": 1e-3, "grad_norm": 1.5, "ms": 1800.0, "tokens_per_s": 1000.0 * n, "mfu": 0.25 * n}
         for n in (1, 2, 3)]
SKIPPED = {"step": 4, "loss": None, "lr": 1e-3, "grad_norm": None, "ms": 1800.0, "tokens_per_s": 4000.0, "mfu": 1.0, "skipped": True}
EVALUATIONS = [{"step": 2, "val_loss": 3.25, "bits_per_byte": 1.5}, {"step": 4, "val_loss": 3.5, "bits_per_byte": 1.6}]
LOG = [STEPS[0], STEPS[1], EVALUATIONS[0], STEPS[2], SKIPPED, EVALUATIONS[1]]


class RunLogTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.top = directory.name

    def write_run(self, name, lines, torn=""):
        run = os.path.join(self.top, name)
        os.makedirs(run)
        with open(os.path.join(run, "log.jsonl"), "w", encoding="utf-8") as log:
            log.write("".join(json.dumps(line) + "\n" for line in lines) + torn)
        return run

    def run_script(self, script, *args):
        return subprocess.run([sys.executable, os.path.join(SCRIPTS, script), *args], capture_output=True, text=True, check=False,
                              timeout=120)

    def expect_error(self, done, text):
        self.assertEqual(done.returncode, 1, done)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn(text, done.stderr)


# Of `rl`: the second update of a rollout has none of its own.
ROLLOUTS = [{**STEPS[0], "reward": 0.5, "completion_length": 9, "rollout_seconds": 1000.0, "scoring_seconds": 500.0,
             "log_probability_seconds": 298.2}, {**STEPS[1], "reward": 0.5, "completion_length": 9}]

# Lines that no run writes, and what the error shows of them.
INVALID = {"deep": "[" * 100000 + "]" * 100000, "deep_key": '{"step": 1, "x": ' + "[" * 100000 + "]" * 100000 + "}",
           "text": "hello", "list": "[1]", "nostep": '{"loss": 1}', "textstep": '{"step": "1"}', "boolstep": '{"step": true}',
           "textrollout": '{"step": 2, "ms": 1, "rollout_seconds": "1"}', "hugestep": '{"step": 1' + 30 * "0" + "}", "textloss": '{"step": 2, "loss": "1", "ms": 1}',
           "listlr": '{"step": 2, "loss": 1, "lr": [1], "ms": 1}', "objectms": '{"step": 2, "ms": {}}',
           "nan": '{"step": 2, "loss": NaN, "ms": 1}', "infinite": '{"step": 2, "loss": 1e999, "ms": 1}',
           "long": '{"step": 2, "loss": 1' + 400 * "0" + ', "ms": 1}', "boolval": '{"step": 2, "val_loss": false}',
           "digits": '{"step": 2, "loss": ' + 5000 * "9" + "}", "escape": "\x1b[31m", "nul": "\0"}
SCRIPTS_THAT_READ = [("plot_log.py", "matplotlib"), ("watch.py", "rich"), ("log_to_tensorboard.py", "tensorboardX")]


class InvalidLogTest(RunLogTest):
    """Each script that reads logs prints one line about an invalid one; watch.py in the run's panel."""
    def scripts(self):
        return [script for script, package in SCRIPTS_THAT_READ if importlib.util.find_spec(package)]

    def expect_fault(self, script, run, text):
        done = self.run_script(script, run)
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotIn("\x1b", done.stdout + done.stderr)
        if script == "watch.py":
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(text.split(";")[0], re.sub(r"[│\s]+", " ", done.stdout))
        else:
            self.expect_error(done, text)

    def test_lines_that_no_run_writes(self):
        sys.path.insert(0, SCRIPTS)
        from run_log import LogError, read_log
        for name, line in INVALID.items():
            run = self.write_run(name, STEPS[:1], torn=line + "\n")
            with self.subTest(name):
                self.assertRaisesRegex(LogError, "log.jsonl:2: not a log line: ", read_log, run)
            for script in self.scripts() if name in ("deep", "listlr", "escape") else []:
                with self.subTest(f"{script} {name}"):
                    self.expect_fault(script, run, "not a log line")

    def test_files_that_are_no_logs(self):
        os.mkfifo(os.path.join(self.top, "log.jsonl"))
        for script in self.scripts():
            with self.subTest(script):
                self.expect_fault(script, self.top, "cannot be read (not a regular file)")
        with open(os.path.join(self.write_run("huge", STEPS), "log.jsonl"), "ab") as log:
            log.truncate(1 << 40)  # a hole: one line without an end
        for script in self.scripts():
            with self.subTest(script):
                self.expect_fault(script, os.path.join(self.top, "huge"), "line 4 has 16 MiB or more")

    def test_names_do_not_reach_the_terminal_as_they_are(self):
        name = "\x1b]0;title\x07\x9b31m\nforged"
        for script in self.scripts():
            with self.subTest(script):
                run = self.write_run(script + name, [], torn="x\n")
                self.expect_fault(script, run, "not a log line")
                with open(os.path.join(run, "log.jsonl"), "w", encoding="utf-8") as log:
                    log.writelines(json.dumps(line) + "\n" for line in STEPS)
                done = self.run_script(script, run)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertNotRegex(done.stdout, "[\x00-\x09\x0b-\x1f\x7f-\x9f]|\nforged")
        from printable import printable
        self.assertEqual(printable("a\x1b[1m\n\x7f\x9b\u00e9"), "a\\x1b[1m\\x0a\\x7f\\x9b\u00e9")

    def test_lines_with_fewer_keys(self):
        few = self.write_run("few", [{"step": 1, "loss": 2.5, "ms": 10.0}, {"step": 2, "loss": None, "lr": None, "ms": None}])
        validation = self.write_run("validation", EVALUATIONS)
        for script in self.scripts():
            for run in (few, validation):
                with self.subTest(f"{script} {run}"):
                    done = self.run_script(script, run)
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                    if script == "watch.py":
                        self.assertRegex(done.stdout, r"lr +-" if run == few else r"no training step yet, val_loss 3\.5000")

    @unittest.skipUnless(all(map(importlib.util.find_spec, ("matplotlib", "plotly"))), "plotly is not installed")
    def test_page_of_evaluations_alone(self):
        run = self.write_run("a", EVALUATIONS)
        done = self.run_script("plot_log.py", run, "--html")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        with open(os.path.join(run, "loss.html"), encoding="utf-8") as file:
            self.assertIn("a: validation", file.read())
        run = self.write_run("b", [{"step": 1, "other": 1}])
        self.expect_error(self.run_script("plot_log.py", run, "--html"), "the logs hold no number to draw")

    @unittest.skipUnless(importlib.util.find_spec("rich"), "rich is not installed")
    def test_watch_reads_any_run_toml(self):
        run = self.write_run("a", STEPS)
        path = os.path.join(run, "run.toml")
        for content in (b"\xff\nsteps=12\n", b"steps=" + b"9" * 400 + b"\n"):
            with open(path, "wb") as file:
                file.write(content)
            done = self.run_script("watch.py", run)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual("3 of 12" in done.stdout, b"12" in content)
        os.remove(path)
        os.mkfifo(path)
        self.assertRegex(self.run_script("watch.py", run).stdout, r"step +3 ")


class PlotLogTest(RunLogTest):
    def rows(self, done):
        return [[cell for cell in line.split("  ") if cell.strip()] for line in done.stdout.splitlines()[:-1]]

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_compares_runs(self):
        a, b = self.write_run("a", LOG), self.write_run("b", STEPS[:1], torn='{"step": 2, "lo')
        output = os.path.join(self.top, "both.png")
        done = self.run_script("plot_log.py", a, os.path.join(b, "log.jsonl"), "--output", output, "--x", "hours", "--show", "loss", "lr",
                               "grad_norm", "tokens_per_s", "mfu", "ms")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = [[cell.strip() for cell in row] for row in self.rows(done)]
        self.assertEqual(rows, [["run", "steps", "tokens", "hours", "loss", "best val_loss", "tokens/s", "mfu"],
                                ["a", "3", "1.8e+04", "0.00", "2.0000", "3.2500 at 2", "2,500", "0.625"],
                                ["b", "1", "1800", "0.00", "4.0000", "-", "1,000", "0.250"]])
        self.assertEqual(done.stdout.splitlines()[-1], output)
        with open(output, "rb") as file:
            self.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_hours_have_rollouts_in_them(self):
        done = self.run_script("plot_log.py", self.write_run("rl", ROLLOUTS), "--show", "rollout_seconds", "scoring_seconds")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        row = [cell.strip() for cell in self.rows(done)[1]]
        self.assertEqual(row[2:4], ["5400", "0.50"])  # 1.8 s of training a step; tokens are those of training

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_plot_of_one_run_is_written_beside_its_log(self):
        run = self.write_run("a", EVALUATIONS)
        done = self.run_script("plot_log.py", run)
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, os.path.join(run, "loss.png")))
        self.assertTrue(os.path.exists(os.path.join(run, "loss.png")))

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_names(self):
        a, b = self.write_run("x/seed-1", LOG), self.write_run("y/seed-1", STEPS)
        output = os.path.join(self.top, "both.png")
        done = self.run_script("plot_log.py", a, b, "--names", "AdamW", "Muon", "--top", "3", "--output", output)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual([row[0].strip() for row in self.rows(done)], ["run", "AdamW", "Muon"])
        done = self.run_script("plot_log.py", a, b, "--names", "AdamW")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--names has 1 names for 2 runs; give one for each", done.stderr)

    @unittest.skipUnless(all(map(importlib.util.find_spec, ("matplotlib", "plotly"))), "plotly is not installed")
    def test_page(self):
        a = self.write_run("a", [*LOG, {"step": 5, "accuracy": 0.5, "accuracy_norm": 0.25}])
        b = self.write_run("<b>", STEPS)
        done = self.run_script("plot_log.py", a, b, "--html", "--output", os.path.join(self.top, "both.png"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        with open(os.path.join(self.top, "both.html"), encoding="utf-8") as file:
            text = file.read()
        self.assertIn("<tr><td>a</td><td>3</td>", text)
        self.assertIn("<tr><td>&lt;b&gt;</td><td>3</td>", text)
        body = text[text.rindex("Plotly.newPlot"):]
        for label in ("loss (nats per token)", "learning rate", "gradient norm", "tokens per second", "MFU",
                      "accuracy per character", "a: validation"):
            self.assertIn(label, body)
        # One page without other files or a network: plotly's script is inside, and no tag loads anything.
        self.assertGreater(len(text), 1_000_000)
        self.assertNotRegex(text, r"<(script|link|img)[^>]* (src|href)=")

    def test_invalid_logs_are_one_line_errors(self):
        self.expect_error(self.run_script("plot_log.py", self.top), "log.jsonl: cannot be read")
        self.expect_error(self.run_script("plot_log.py", self.write_run("empty", [])), "holds no steps yet")
        run = self.write_run("text", STEPS[:1], torn="hello\n")
        self.expect_error(self.run_script("plot_log.py", run), "log.jsonl:2: not a log line: 'hello'")


@unittest.skipUnless(importlib.util.find_spec("rich"), "rich is not installed")
class WatchTest(RunLogTest):
    def test_shows_runs_beside_each_other(self):
        a, b = self.write_run("first", LOG), self.write_run("second", STEPS[:1])
        with open(os.path.join(a, "run.toml"), "w", encoding="utf-8") as file:
            file.write('model="gpt2-tiny"\nsteps=1000\n')
        done = subprocess.run([sys.executable, os.path.join(SCRIPTS, "watch.py"), a, b], check=False,
                              capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        lines = done.stdout.splitlines()
        self.assertRegex(lines[0], r"─ first ─+╮╭─+ second ─")
        for words in (r"step +4 of 1,000 .*step +1 ", r"loss +3\.0000 .*loss +4\.0000",
                      r"val_loss +3\.5000, best 3\.2500 at 2 ", r"lr +0\.001 .*lr +0\.001", r"tokens/s +2,500 ",
                      r"MFU +62\.5%.*MFU +25\.0%", r"skipped +1 step ", r"ETA +29:53"):
            self.assertTrue(any(re.search(words, line) for line in lines), (words, done.stdout))

    def test_counts_rollouts(self):
        run = self.write_run("rl", ROLLOUTS)
        with open(os.path.join(run, "run.toml"), "w", encoding="utf-8") as file:
            file.write("steps=4\n")
        shown = self.run_script("watch.py", run).stdout
        for words in r"trained +30:02 ", r"ETA +30:02 ", r"reward +0\.5000 ":  # 901 s a step
            self.assertRegex(shown, words)

    def test_follows_a_log(self):
        sys.path.insert(0, SCRIPTS)
        from run_log import RunLog
        run = self.write_run("a", STEPS[:1], torn='{"step": 2, "lo')
        path, log = os.path.join(run, "log.jsonl"), RunLog(run)
        log.update()
        self.assertEqual([line["step"] for line in log.training], [1])
        with open(path, "w", encoding="utf-8") as file:  # cut back, as a resumed run does
            file.write(json.dumps(STEPS[0]) + "\n")
        with open(path, "a", encoding="utf-8") as file:
            log.update()
            for line in (STEPS[1], EVALUATIONS[0]):
                file.write(json.dumps(line) + "\n")
        log.update()
        self.assertEqual(([line["step"] for line in log.training], len(log.validation)), ([1, 2], 1))
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": 2, "samples": []}) + "\n")
        log.update()
        self.assertEqual((len(log.training), len(log.validation)), (2, 1))
        os.replace(self.write_run("b", STEPS) + "/log.jsonl", path)  # another file
        log.update()
        self.assertEqual(([line["step"] for line in log.training], len(log.validation)), ([1, 2, 3], 0))

    def test_errors_are_one_line(self):
        done = self.run_script("watch.py", os.path.join(self.top, "nowhere"))
        self.expect_error(done, "nowhere: no such file; give a run directory")
        run = self.write_run("a", STEPS)
        for interval in "0", "nan", "inf":
            done = self.run_script("watch.py", run, "--interval", interval)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"--interval is {float(interval)}; it must be more than 0", done.stderr)
        done = self.run_script("watch.py", self.write_run("bad", [], torn="hello\n"))
        self.assertIn("not a log line", done.stdout)


@unittest.skipUnless(importlib.util.find_spec("tensorboardX"), "tensorboardX is not installed")
class LogToTensorBoardTest(RunLogTest):
    def events(self, folder):
        """Reads the records of TensorBoard: a length, its checksum, a protocol buffer and its checksum."""
        from tensorboardX.crc32c import crc32c
        from tensorboardX.proto.event_pb2 import Event

        def masked(data):
            crc = crc32c(data)
            return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

        files = os.listdir(folder)
        self.assertEqual(len(files), 1)
        with open(os.path.join(folder, files[0]), "rb") as file:
            data = file.read()
        found, at = [], 0
        while at < len(data):
            length, length_crc = struct.unpack_from("<QI", data, at)
            self.assertEqual(length_crc, masked(data[at:at + 8]))
            record = data[at + 12:at + 12 + length]
            self.assertEqual(struct.unpack_from("<I", data, at + 12 + length)[0], masked(record))
            event = Event.FromString(record)
            found += [(value.tag, event.step, value.simple_value, event.wall_time) for value in event.summary.value]
            at += 16 + length
        return found

    def test_every_number_is_exported(self):
        run = self.write_run("a", LOG)
        for _ in range(2):  # exported again, the numbers are there once
            done = self.run_script("log_to_tensorboard.py", run)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, os.path.join(run, "tensorboard") + "\n", ""))
        events = self.events(os.path.join(run, "tensorboard"))
        expected = [(f"train/{key}", step["step"], value) for step in STEPS for key, value in step.items() if key != "step"]
        expected += [("train/lr", 4, 1e-3), ("train/ms", 4, 1800.0), ("train/tokens_per_s", 4, 4000.0), ("train/mfu", 4, 1.0)]
        expected += [(tag, e["step"], e[key]) for e in EVALUATIONS
                     for tag, key in (("val/loss", "val_loss"), ("val/bits_per_byte", "bits_per_byte"))]
        got = sorted((tag, step) for tag, step, _, _ in events)
        self.assertEqual(got, sorted((tag, step) for tag, step, _ in expected))
        values = {(tag, step): value for tag, step, value, _ in events}
        for tag, step, value in expected:
            self.assertAlmostEqual(values[tag, step], value, delta=1e-6 * abs(value))
        times = {step: time for tag, step, _, time in events if tag == "train/lr"}
        self.assertAlmostEqual(times[4], os.path.getmtime(os.path.join(run, "log.jsonl")), delta=0.01)
        self.assertAlmostEqual(times[4] - times[1], 3 * 1.8, delta=0.01)

    def test_several_runs_into_one_folder(self):
        a, b, output = self.write_run("a", LOG), self.write_run("b", STEPS[:2]), os.path.join(self.top, "tb")
        done = self.run_script("log_to_tensorboard.py", a, os.path.join(b, "log.jsonl"), "--output", output)
        self.assertEqual((done.returncode, done.stdout), (0, "".join(os.path.join(output, n) + "\n" for n in ("a", "b"))))
        self.assertEqual({step for _, step, _, _ in self.events(os.path.join(output, "b"))}, {1, 2})

    def test_invalid_logs_are_one_line_errors(self):
        self.expect_error(self.run_script("log_to_tensorboard.py", os.path.join(self.top, "nowhere")), "cannot be read")
        with open(os.path.join(self.top, "taken"), "w", encoding="utf-8"):
            pass
        done = self.run_script("log_to_tensorboard.py", self.write_run("a", LOG), "--output", os.path.join(self.top, "taken"))
        self.expect_error(done, "cannot be written")


class SmoothingTest(unittest.TestCase):
    def test_the_smoothed_curve_does_not_lag(self):
        sys.path.insert(0, SCRIPTS)
        from run_log import smoothed
        falling = [8.3 * 0.98 ** i + 1.9 for i in range(1000)]  # as steep as the quick start's first steps
        worst = max(abs(a - b) for a, b in zip(smoothed(falling), falling))
        self.assertLess(worst, 0.25)  # curvature: 8.3 ln(0.98)² · 20 · 21 / 6; a mean of 20 past points is off by 1.3
        line = [5 - 0.01 * i for i in range(500)]
        self.assertLess(max(abs(a - b) for a, b in zip(smoothed(line), line)), 1e-12)
        noise = [(-1) ** i for i in range(1001)]
        self.assertLess(max(map(abs, smoothed(noise)[20:-20])), 0.03)  # 1/41
        self.assertEqual(smoothed([]), [])
        self.assertEqual(smoothed([3.0]), [3.0])


del RunLogTest  # only what derives from it is a test


if __name__ == "__main__":
    unittest.main()

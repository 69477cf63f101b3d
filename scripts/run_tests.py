#!/usr/bin/env python3
"""Runs GoogleTest binaries, test_gpt and Python unittest files and closes with one line: N passed, N failed, N skipped.

    scripts/run_tests.py TRAIN_GPT=build/cpu/train_gpt build/cpu/dev/test_layernorm ... data/test_make_data.py ...

NAME=VALUE sets an environment variable for the files after it; NAME= unsets it. Each file gets a line with its counts and
time. The output of failed tests is printed in full, skipped tests with their reasons. If a test crashes its binary, it and
the tests that did not run count as failed. A binary without tests fails. Exit status 1 after a failure.

Files run side by side, except those whose source has a line that begins with

    // run_tests.py: alone, because ...                (# in Python)
    // run_tests.py: alone on a GPU, because ...

The second counts for a CUDA build only: the test needs the GPU's memory, or times what others would slow down. On many
cores long Python files are split: their tests run in several processes.
"""
import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field


CACHE = tempfile.TemporaryDirectory(prefix="train_gpt_cache_")


ALONE = re.compile(r"^(?://|#) run_tests\.py: alone( on a GPU)?, because ", re.M)
TESTS_OF_A_SLICE = 12  # of a Python file; it sets up its class again in each


@dataclass
class Job:
    """A file, or with count > 1 every count-th test of a Python file, from number index on."""
    path: str
    variables: dict
    index: int = 0
    count: int = 1

    def __str__(self):
        return self.path if self.count == 1 else f"{self.path} {self.index + 1}/{self.count}"

    def is_test_gpt(self):
        return os.path.basename(self.path) == "test_gpt"

    def source(self):
        """The text that the job's tests are written in; of a binary the file in dev/tests/ of the same name."""
        name = os.path.join("dev", "tests", os.path.basename(self.path))
        for path in (self.path, name + ".cpp", name + ".cu"):
            if path.endswith((".py", ".cpp", ".cu")) and os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    return file.read()
        return ""

    def runs_alone(self):
        found = ALONE.search(self.source())
        builds = self.path, self.variables.get("TRAIN_GPT", "")
        return bool(found) and (not found[1] or any(path.startswith("build/cuda") for path in builds))

    def slices(self):
        tests = len(re.findall(r"^    def test_", self.source(), re.M)) if self.path.endswith(".py") else 0
        count = max(1, tests // TESTS_OF_A_SLICE)
        return [Job(self.path, self.variables, index, count) for index in range(count)]


@dataclass
class Outcome:
    passed: int = 0
    failed: list = field(default_factory=list)   # names, or what went wrong
    skipped: list = field(default_factory=list)  # (name, reason)
    output: str = ""


def run(command, variables, timeout):
    """The command's output, standard error included, and how it ended (None: normally)."""
    # Threads that wait must not spin: tests are short, and on a busy machine spinning starves the threads waited for.
    # Nor may they find or leave anything in the user's cache.
    env = {"OMP_WAIT_POLICY": "passive", **variables, "XDG_CACHE_HOME": CACHE.name}
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        return (expired.stdout or b"").decode(errors="replace"), f"no end after {round(timeout, 1):g} s"
    except OSError as error:
        return "", str(error)
    ending = None
    if done.returncode:
        ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return done.stdout.decode(errors="replace"), ending


def run_gtest(job, fail_fast, timeout):
    output, ending = run([job.path, "--gtest_color=no", *["--gtest_fail_fast"] * fail_fast], job.variables, timeout)
    outcome = Outcome(output=output)
    announced = re.search(r"^\[==========\] Running (\d+) tests?", output, re.M)
    announced = int(announced.group(1)) if announced else 0
    running, reason = None, []
    for line in output.splitlines():
        # A test may leave its own output without a newline, so the marks are looked for anywhere in a line.
        mark = re.search(r"\[( RUN      |       OK |  FAILED  |  SKIPPED )\] (\S+?)(?:,.*)?(?: \(\d+ ms\))?$", line)
        if not mark or (running is None and "RUN" not in mark.group(1)):
            reason.append(line)
            continue
        kind, name = mark.group(1).strip(), mark.group(2)
        if kind == "RUN":
            running, reason = name, []
            continue
        if name != running:
            continue
        running = None
        if kind == "OK":
            outcome.passed += 1
        elif kind == "FAILED":
            outcome.failed.append(name)
        else:
            text = [part for part in reason if part.strip() and not part.endswith(": Skipped")]
            outcome.skipped.append((name, " ".join(text) or "no reason given"))
    if running:
        outcome.failed.append(f"{running} ({ending or 'did not finish'})")
    unrun = announced - outcome.passed - len(outcome.failed) - len(outcome.skipped)
    outcome.failed += [f"a test that did not run ({ending or 'unknown reason'})"] * unrun
    if not announced:
        outcome.failed.append(f"ran no test ({ending or 'none in it'})")
    elif ending and not outcome.failed:
        outcome.failed.append(f"after the tests: {ending}")  # a leak report, a crash in a destructor
    return outcome


def run_test_gpt(job, _, timeout):
    """The program prints the name of a model, then a line for each check of it, "  okay  logits ..." or "  FAIL  ..."."""
    output, ending = run([job.path], job.variables, timeout)
    outcome, model = Outcome(output=output), ""
    for line in output.splitlines():
        check = re.match(r"  (okay|FAIL)  (.*?)(?:  |$)", line)
        if not check:
            model = line
        elif check[1] == "okay":
            outcome.passed += 1
        else:
            outcome.failed.append(f"{model}: {check[2]}")
    if not outcome.failed and (ending or model != "overall okay: 1"):
        outcome.failed.append(f"did not end with overall okay: 1 ({ending or 'no reason given'})")
    return outcome


def run_python(job, fail_fast, timeout):
    """The file in a process of its own, which reports on its last lines (see report_unittest)."""
    output, ending = run([sys.executable, "-X", "faulthandler", os.path.abspath(__file__), "--unittest",
                          *["--fail-fast"] * fail_fast, job.path, str(job.index), str(job.count)],
                         job.variables, timeout)
    outcome = Outcome(output=output)
    for kind, name, reason in re.findall(r"^@@(\w+)\t(.*?)\t(.*)$", output, re.M):
        if kind == "passed":
            outcome.passed += 1
        elif kind == "failed":
            outcome.failed.append(name)
        else:
            outcome.skipped.append((name, reason))
    if not outcome.passed and not outcome.failed and not outcome.skipped:
        outcome.failed.append(f"ran no test ({ending or 'none in it'})")
    elif ending and not outcome.failed:
        outcome.failed.append(f"after the tests: {ending}")
    return outcome


class Reporter(unittest.TextTestResult):
    """Also keeps the tests that passed, which unittest only counts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passed = []

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed.append(test)


def tests_of(suite):
    """Its single tests; those of a class stay side by side, so that the class is set up once."""
    return [test for part in suite for test in (tests_of(part) if isinstance(part, unittest.TestSuite) else [part])]


def report_unittest(path, index, count, fail_fast):
    folder, name = os.path.split(os.path.abspath(path))
    sys.path.insert(0, folder)
    suite = unittest.defaultTestLoader.loadTestsFromName(name[: -len(".py")])
    suite = unittest.TestSuite(tests_of(suite)[int(index)::int(count)])
    runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, failfast=fail_fast, resultclass=Reporter)
    result = runner.run(suite)
    for test in result.passed + result.expectedFailures:
        print(f"@@passed\t{test.id()}\t")
    for test, _ in result.failures + result.errors:
        print(f"@@failed\t{test.id()}\t")
    for test in result.unexpectedSuccesses:
        print(f"@@failed\t{test.id()} (expected to fail)\t")
    for test, reason in result.skipped:
        print(f"@@skipped\t{test.id()}\t{reason}")


def main():
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="test binaries, test_*.py files and NAME=VALUE")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each file (default %(default)s)")
    parser.add_argument("--limit", type=float, default=math.inf,
                        help="seconds for all files: those that run then are ended, those that have not begun are left out")
    parser.add_argument("--jobs", type=int, default=max(2, min(8, cores // 2 + 2)),
                        help="files at a time (default: half of the cores and two, 2 to 8)")
    parser.add_argument("--fail-fast", action="store_true", help="end with the first failure; later tests do not run")
    parser.add_argument("--unittest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unittest:
        report_unittest(*args.files, args.fail_fast)
        return 0
    jobs, variables = [], dict(os.environ)
    for path in args.files:
        variable = re.fullmatch(r"([A-Z_]+)=(.*)", path)
        if not variable:
            jobs.append(Job(path, dict(variables)))
        elif variable[2]:
            variables[variable[1]] = variable[2]
        else:
            variables.pop(variable[1], None)

    passed, failed, skipped, left_out = 0, [], [], []
    end = time.monotonic() + args.limit
    printing = threading.Lock()

    def run_job(job):
        nonlocal passed
        if failed and args.fail_fast:
            return
        start = time.monotonic()
        if start >= end:
            left_out.append(str(job))
            return
        run_file = run_python if job.path.endswith(".py") else run_test_gpt if job.is_test_gpt() else run_gtest
        outcome = run_file(job, args.fail_fast, min(args.timeout, end - start))
        seconds = time.monotonic() - start
        counts = f"{outcome.passed} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
        with printing:
            if outcome.failed:
                print(outcome.output, end="" if outcome.output.endswith("\n") else "\n")
            print(f"{str(job):44} {counts}  ({seconds:.1f} s)", flush=True)
            passed += outcome.passed
            failed.extend(f"{job}: {name}" for name in outcome.failed)
            skipped.extend(f"{job}: {name}: {reason}" for name, reason in outcome.skipped)

    alone = [job for job in jobs if job.runs_alone()]
    others = [job for job in jobs if job not in alone]
    if cores > 4:  # each slice sets up again: on few cores that would cost more than it saves
        others = [piece for job in others for piece in job.slices()]
    # Python files first: they start many processes and take the longest, and no job should be left alone with one.
    # With --fail-fast they are last, because a GoogleTest binary finds the same mistake sooner.
    others.sort(key=lambda job: job.path.endswith(".py") == args.fail_fast)
    # With a thread on each core for each of many files, references of GPU kernels wait for each other's threads.
    threads = str(max(2, cores // args.jobs))
    for job in others:
        job.variables.setdefault("OMP_NUM_THREADS", threads)
    for job in alone:
        run_job(job)
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in [pool.submit(run_job, job) for job in others]:
            done.result()
    print()
    for line in skipped:
        print("skipped", line)
    for line in failed:
        print("FAILED ", line)
    for name in left_out:
        print("left out", name)
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped"
          + (f", {len(left_out)} files left out: the limit of {args.limit:g} s was reached" if left_out else ""))
    return 1 if failed or left_out else 0


if __name__ == "__main__":
    sys.exit(main())

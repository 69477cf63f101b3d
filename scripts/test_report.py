#!/usr/bin/env python3
"""scripts/report.sh and report.py: with a build of stub programs, whose tests fail, hang or print what is private."""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEMPLATE = os.path.join(ROOT, ".github", "ISSUE_TEMPLATE", "machine_report.md")

# A driver that plans, trains and samples at once. A batch of more than 16 fits only with options.
DRIVER = r"""
command=$1 batch=1 sequences=1
while [ $# -gt 0 ]; do
    case $1 in --out) out=$2;; --batch-size) batch=$2;; --num-samples) sequences=$2;; --max-tokens) tokens=$2;; esac
    shift
done
decoded=$((sequences * (tokens - 1)))
case $command in
--version) printf 'train_gpt 1.2.3\nbackend stub\n';;
plan) options=; if [ "$batch" -gt 16 ]; then options='--recompute norms'; fi
    printf '{"flop_per_token": 1e9, "weights": 1000, "fit": {"options": "%s"}}\n' "$options";;
train) mkdir -p "$out"; echo '--fit: the options as given, 1 GiB of 2 GiB (nothing is recomputed)'
    echo 'MFU is a fraction of 200,000 GFLOP/s, the data sheet'
    for ms in 900 900 900 100 100 100 100 100 100 100 100 100 100 100 100 100 100 100 100 100 100 100 100; do
        echo '{"step": 1, "ms": '$ms', "mfu": 0.5}' >>"$out/log.jsonl"; done; sleep 600;;
sample) echo 'a line on stderr' >&2
    echo '{"samples": [], "statistics": {"decode_tokens": '$decoded', "decode_seconds": 0.5, "decode_bytes": 1e9}}';;
esac
"""
BENCH = r"""
echo 'limits measured now: copy 3000.0 GB/s, triad 2900.0 GB/s, 400000 GFLOP/s fp32, 800000 GFLOP/s bf16 (a stub)'
echo 'forward/bf16/N:65536/C:768/OC:2304                           0.3920 ms     592.0 TFLOP/s    74% of peak'
"""
GTEST = r"""
echo '[==========] Running 2 tests from 1 test suite.'
echo '[ RUN      ] Softmax.Good'
echo '[       OK ] Softmax.Good (0 ms)'
echo '[ RUN      ] Softmax.{name}'
{last}
"""
FAILS = GTEST.format(name="Wrong", last=r"""
echo 'expected 1, got 2'
echo '[  FAILED  ] Softmax.Wrong (0 ms)'
echo '[ RUN      ] Softmax.Last'
echo '[       OK ] Softmax.Last (0 ms)'
echo '[  FAILED  ] 1 test, listed below:'
echo '[  FAILED  ] Softmax.Wrong'
exit 1
""")
HANGS = GTEST.format(name="Endless", last="sleep 600 & wait")


def runs(process):
    """Whether it is there, and not only because nobody has asked yet how it ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class ReportTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.top = directory.name
        # A tree of its own, because reports share build/report.
        self.tree = os.path.join(self.top, "tree")
        for folder in "scripts", "kernels", ".github":
            shutil.copytree(os.path.join(ROOT, folder), os.path.join(self.tree, folder),
                            ignore=shutil.ignore_patterns("__pycache__"))
        os.makedirs(os.path.join(self.tree, "dev", "tests"))
        for op in "softmax", "rope":
            open(os.path.join(self.tree, "dev", "tests", f"test_{op}.cpp"), "w", encoding="utf-8").close()
        self.build = os.path.join(self.tree, "build", "cuda")
        self.out = os.path.join(self.top, "report.md")
        self.log = os.path.join(self.top, "build.log")
        self.program("train_gpt", DRIVER)
        self.program("dev/bench_matmul", BENCH)
        self.program("dev/test_softmax", GTEST.format(name="Better", last="echo '[       OK ] Softmax.Better (0 ms)'"))
        self.program("dev/test_rope", GTEST.format(name="Better", last="echo '[       OK ] Softmax.Better (0 ms)'"))
        self.program("test_gpt", "echo a model; echo '  okay  logits  0'; echo 'overall okay: 1'")

    def program(self, name, text):
        path = os.path.join(self.build, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write("#!/bin/bash\n" + text)
        os.chmod(path, 0o755)

    def driver(self, case):
        """The driver with another command, or another way of one."""
        self.program("train_gpt", DRIVER.replace("case $command in", f"case $command in\n{case}"))

    def run_script(self, *arguments, **variables):
        return subprocess.run([os.path.join(self.tree, "scripts", "report.sh"), *arguments], cwd=self.top,
                              env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120, check=False)

    def start(self, limit):
        command = [sys.executable, os.path.join(self.tree, "scripts", "report.py"), "--build", "build/cuda",
                   "--build-log", self.log, "--limit", str(limit), self.out]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True)

    def read(self):
        with open(self.out, encoding="utf-8") as file:
            return file.read()

    def report(self, limit=120):
        process = self.start(limit)
        output, _ = process.communicate(timeout=400)
        self.assertEqual(process.returncode, 0, output)
        return self.read()

    def section(self, text, name):
        return re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]

    def test_fills_the_template(self):
        text = self.report()
        with open(TEMPLATE, encoding="utf-8") as file:
            template = file.read()
        self.assertEqual(re.findall("^## .*", text, re.M), re.findall("^## .*", template, re.M))
        self.assertTrue(text.startswith("## Machine\n"), text)
        for name in "Machine", "Tests of the kernels", "Limits", "Tokens per second":
            self.assertNotEqual(self.section(text, name).strip(), "", name)
        self.assertIn("train_gpt 1.2.3\nbackend stub", self.section(text, "Machine"))
        tests = self.section(text, "Tests of the kernels")
        self.assertIn("5 passed, **0 failed**, 0 skipped in 3 of 3 programs", tests)
        limits = self.section(text, "Limits")
        self.assertIn("| copy, bytes read + written | 3,000 GB/s |", limits)
        self.assertIn("| a large matmul, bf16 | 800.0 TFLOP/s |", limits)
        self.assertIn("bf16, [65536, 768] × [768, 2304] + bias | 592.0 TFLOP/s, 0.392 ms |", limits)
        self.assertFalse(os.path.exists(os.path.join(self.tree, "build", "report")))

    def test_speed(self):
        speed = self.section(self.report(), "Tokens per second")
        # 0.4 · 800 TFLOP/s are 320,000 tokens/s: in 3 seconds the largest step. A batch of 16 needs no options.
        self.assertIn("| gpt2-124M | train | bf16, B16 T1024, 524,288 tokens a step, AdamW | 5,242,880 | "
                      "median of 20 steps after 3 (100 ms); MFU 50.0% of 200.0 TFLOP/s, the data sheet; "
                      "memory planned by --fit: the options as given, 1 GiB of 2 GiB (nothing is recomputed) |", speed)
        for sequences, rate in ("1 sequence", "510.0"), ("64 sequences", "32,640.0"):
            self.assertIn(f"| qwen2.5-0.5B | decode | bf16, {sequences} of 256 tokens, greedy, no prompt | {rate} | "
                          "all sequences together, 0.50 s, 2.0 GB/s of weights and cache |", speed)
        self.assertIn("./train_gpt sample --model gpt2-124M --random-weights", speed)

    def test_slow_machines_take_smaller_steps(self):
        self.program("dev/bench_matmul", BENCH.replace("800000 GFLOP/s bf16", "10000 GFLOP/s bf16"))
        self.program("train_gpt", DRIVER.replace('"decode_seconds": 0.5', '"decode_seconds": 1.5'))
        speed = self.section(self.report(limit=60), "Tokens per second")
        self.assertIn("B8 T1024, 8,192 tokens a step", speed)  # 4,000 tokens/s
        # By the 15 tokens of the first run 256 take 25.6 s: more than the part has, also with what others left.
        self.assertRegex(speed, r"gpt2-124M \| decode \| bf16, 1 sequence of (32|64|128) tokens")
        self.assertRegex(speed, r"sample --model gpt2-124M .*--max-tokens (32|64|128)\n")

    def test_failing_tests_are_named(self):
        self.program("dev/test_softmax", FAILS)
        tests = self.section(self.report(), "Tests of the kernels")
        self.assertIn("5 passed, **1 failed**, 0 skipped in 3 of 3 programs", tests)
        self.assertIn("- FAILED test_softmax: Softmax.Wrong\n", tests)
        self.assertNotIn("Softmax.Good", tests)
        self.assertNotIn("Softmax.Last", tests)
        self.assertIn("expected 1, got 2", tests)

    def test_hanging_tests_are_cut(self):
        self.program("dev/test_softmax", HANGS)
        begin = time.monotonic()
        text = self.report(limit=20)
        self.assertLess(time.monotonic() - begin, 30)
        tests = self.section(text, "Tests of the kernels")
        self.assertRegex(tests, r"not finished: test_softmax, in Softmax\.Endless \(no end after [\d.]+ s\)")
        self.assertIn("**0 failed**", tests)
        self.assertIn("| qwen2.5-0.5B | decode |", text)

    def test_hanging_parts_are_cut(self):
        self.program("dev/bench_matmul", "sleep 600")
        child = os.path.join(self.top, "child")
        self.driver(f"train) sleep 600 & echo $! >{child}; wait;;")
        begin = time.monotonic()
        text = self.report(limit=20)
        self.assertLess(time.monotonic() - begin, 30)
        self.assertRegex(text, r"\| gpt2-124M \| train \| \| \| no step: no end after [\d.]+ s "
                               r"\(bf16, B1 T1024, 1,024 tokens a step, AdamW\) \|")
        self.assertIn("no end after", self.section(text, "Limits"))
        self.assertIn("5 passed, **0 failed**", text)
        self.assertEqual(text.count(" tokens, greedy"), 4)
        with open(child, encoding="ascii") as file:
            self.assertFalse(runs(file.read().strip()), "what a part started outlives it")

    def test_failing_parts_cost_no_others(self):
        self.driver("sample) echo 'no | <memory>' >&2; exit 1;;")
        self.program("dev/bench_matmul", "kill -SEGV $$")
        text = self.report()
        self.assertIn("| gpt2-124M | decode, 64 | | | exit status 1: no \\| &lt;memory> |", text)
        self.assertIn("signal 11", self.section(text, "Limits"))
        # Nothing is known of the limits.
        self.assertIn("| gpt2-124M | train | bf16, B1 T1024, 1,024 tokens a step, AdamW |", text)

    def test_a_longer_run_that_fails_is_told(self):
        self.driver("sample) [ $tokens = 16 ] || { echo 'out of luck' >&2; exit 1; };;&")
        self.assertIn("1 sequence of 16 tokens, greedy, no prompt | 30.0 | all sequences together, 0.50 s; 256 tokens: exit "
                      "status 1: out of luck, 2.0 GB/s", self.report())

    def test_nothing_private(self):
        uuid = "GPU-0a1b2c3d-1111-2222-3333-444455556666"
        host = socket.gethostname()
        said = (f"{self.tree}/x.cpp:7:/home/somebody/secret.bin /opt/private/place -I/opt/private on {host} of "
                f"nobody_else {uuid} at 3 GB/s, https://example.org/a/b")
        self.driver(f"sample|--version) echo '{said}'; exit 1;;")
        self.program("dev/test_softmax", FAILS.replace("expected 1, got 2", said))
        os.environ["LOGNAME"] = "nobody_else"
        self.addCleanup(os.environ.pop, "LOGNAME")
        text = self.report()
        for private in self.tree, "somebody", "private", "place", "nobody_else", uuid, self.top:
            self.assertNotIn(private, text)
        host = host if len(host) < 2 or host == "localhost" else "[host]"
        for section in "Machine", "Tests of the kernels", "Tokens per second":
            self.assertIn(f"./x.cpp:7:[path]/secret.bin [path] -I[path] on {host} of [user] [uuid] at 3 GB/s, "
                          "https://example.org/a/b", self.section(text, section))

    def test_an_interrupt_writes_what_there_is(self):
        self.driver(f"train) touch {self.top}/training; sleep 600 & wait;;")
        # A shell that starts this in the background makes it ignore SIGINT, which the report would inherit.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        for number in signal.SIGINT, signal.SIGTERM:
            process = self.start(300)
            self.addCleanup(process.stdout.close)
            while not os.path.exists(os.path.join(self.top, "training")):
                self.assertIsNone(process.poll())
                time.sleep(0.05)
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 130, output)
            text = self.read()
            self.assertIn("| copy, bytes read + written | 3,000 GB/s |", text)
            self.assertIn("| gpt2-124M | train | | | interrupted |", text)
            self.assertIn("| qwen2.5-0.5B | decode, 1 | | | not reached |", text)
            self.assertIn("not reached", self.section(text, "Tests of the kernels"))
            self.assertFalse(os.path.exists(self.out + ".tmp"))
            os.remove(os.path.join(self.top, "training"))
            os.remove(self.out)

    def test_a_failed_build_is_reported(self):
        """report.sh from the beginning, with a make that fails."""
        tools = os.path.join(self.top, "tools")
        os.mkdir(tools)
        with open(os.path.join(tools, "make"), "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\necho '  compile runtime/error.cpp'\n"
                       f"echo '{self.tree}/kernels/x.cu:3: error: no such thing'\necho 'make: *** Error 1'\nexit 2\n")
        os.chmod(os.path.join(tools, "make"), 0o755)
        done = self.run_script("here.md", PATH=f"{tools}:{os.environ['PATH']}")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.out = os.path.join(self.top, "here.md")
        text = self.read()
        for section in "Machine", "Tests of the kernels", "Limits", "Tokens per second":
            self.assertIn("is not built: ./kernels/x.cu:3: error: no such thing", self.section(text, section))

    def test_a_report_that_cannot_be_written(self):
        self.out = os.path.join(self.top, "nowhere", "report.md")
        process = self.start(120)
        output, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1)
        self.assertEqual(output, f"report: {self.out} cannot be written: No such file or directory\n")

    def test_usage(self):
        for arguments, limit in (["--help"], "300"), (["a", "b"], "300"), ([], "soon"):
            done = self.run_script(*arguments, LIMIT=limit)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn("scripts/report.sh [FILE]", done.stderr)


if __name__ == "__main__":
    unittest.main()

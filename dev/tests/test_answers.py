#!/usr/bin/env python3
"""`eval --answers`: completions that verifiers score, those of the program and other programs."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest

from harness import DRIVER, ENVIRONMENT, BaseRunTest, checkpoints, run, text_of

# A verifier that gives 0.5 for each completion. What MODE says happens at the third line that a process reads.
VERIFIER = """
import json, os, sys, time
mode, count = sys.argv[1], 0
if mode == "environment":
    assert sorted(map(int, os.listdir("/proc/self/fd")))[:3] == [0, 1, 2]
    assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")  # the fourth reads the directory
    import signal
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
if mode == "grandchild":
    ready, wrote = os.pipe()
    if os.fork() == 0:
        open(sys.argv[2], "w").write(str(os.getpid()))
        os.close(wrote)
        time.sleep(600)
    os.close(wrote)
    os.read(ready, 1)  # until it is written
for line in sys.stdin:
    row = json.loads(line)
    assert sorted(row) == ["answer", "completion", "id", "prompt"], row
    count += 1
    if count == 3:
        if mode == "dies":
            raise ValueError("third")
        if mode == "killed":
            os.kill(os.getpid(), 9)
        if mode == "hangs":
            time.sleep(600)
        if mode == "floods":
            sys.stderr.write("x" * 1000000)
        if mode == "closes stdin":
            os.close(0)
            os.close(1)
            time.sleep(600)
        out = {"nonsense": "good", "nan": '{"id": %d, "reward": NaN}' % row["id"], "unknown id": '{"id": 99, "reward": 1}',
               "too much": '{"id": %d, "reward": 1.5}' % row["id"], "endless": "y" * 3000000, "array": "[]"}.get(mode)
        if out:
            print(out, flush=True)
            continue
    print(json.dumps({"id": row["id"], "reward": 0.5}), flush=True)
"""


class AnswersTest(BaseRunTest):
    def setUp(self):
        self.rows = os.path.join(self.top, "rows.jsonl")
        self.verifier = os.path.join(self.top, "verifier.py")
        with open(self.verifier, "w") as file:
            file.write(VERIFIER)

    def write(self, *rows):
        with open(self.rows, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def eval(self, *args, **kwargs):
        return run("eval", "--model", self.base, "--answers", self.rows, "--max-tokens", 8, "--json", *args, **kwargs)

    def result(self, *args):
        done = self.eval(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_scores_are_those_of_sample(self):
        prompts = ["The cat sees ", "The owl sees ", "The dog"]
        texts = [json.loads(run("sample", "--model", self.base, "--prompt", p, "--max-tokens", 8, "--temperature", 0,
                                "--json").stdout)["samples"][0]["text"] for p in prompts]
        self.write(*({"prompt": p, "answer": t if i else "no", "verifier": "exact_match"}
                     for i, (p, t) in enumerate(zip(prompts, texts))))
        output = os.path.join(self.top, "out.jsonl")
        result = self.result("--output", output)
        self.assertEqual(list(result), ["accuracy", "reward", "mean_tokens", "truncated", "count"])
        self.assertAlmostEqual(result["accuracy"], 2 / 3)
        self.assertEqual((result["count"], result["mean_tokens"], result["truncated"]), (3, 8, 1))
        with open(output) as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual([line["completion"] for line in lines], texts)
        self.assertEqual([line["reward"] for line in lines], [0, 1, 1])
        self.assertEqual(lines[0]["scores"], {"exact_match": 0})
        plain = run("eval", "--model", self.base, "--answers", self.rows, "--max-tokens", 8)
        self.assertEqual(plain.stdout.split()[::2], list(result))
        self.assertIn("completion: 24 tokens", plain.stderr)

    def test_several_samples(self):
        self.write({"prompt": "The ", "answer": ".*", "verifier": [{"name": "regex", "weight": 0.25},
                                                                  {"name": "length", "min": 1000}]},
                   {"prompt": "A", "answer": "c", "verifier": "regex"})
        result = self.result("--num-samples", 16)
        self.assertEqual(list(result)[:5], ["accuracy", "pass@16", "reward", "length", "regex"])
        self.assertEqual(result["length"], 0)
        output = os.path.join(self.top, "out.jsonl")
        self.assertEqual(result, self.result("--num-samples", 16, "--batch-size", 3, "--output", output))
        with open(output) as file:
            lines = [json.loads(line) for line in file]
        self.assertEqual([line["reward"] for line in lines[:16]], [0.25] * 16)
        correct = [line["reward"] >= 1 for line in lines]
        self.assertEqual(result["accuracy"], sum(correct) / 32)
        self.assertEqual(result["pass@16"], any(correct) / 2)
        self.assertGreater(len({line["completion"] for line in lines[:16]}), 1)  # the temperature is 1
        greedy = self.result("--num-samples", 2, "--temperature", 0, "--output", output)
        with open(output) as file:
            lines = [json.loads(line)["completion"] for line in file]
        self.assertEqual(lines[0], lines[1])
        self.assertIn("pass@2", greedy)

    def test_chat_template(self):
        self.write({"messages": [{"role": "user", "content": "Hi"}], "answer": "x", "verifier": "regex"})
        self.refused(1, ["rows.jsonl: has messages, which need a chat template", "give each line a prompt"], "eval",
                     "--model", self.base, "--answers", self.rows)
        model = os.path.join(self.top, "chat")
        shutil.copytree(os.path.join(self.base, checkpoints(self.base)[-1]), model)
        with open(os.path.join(model, "chat_template.jinja"), "w") as file:
            file.write("{% for m in messages %}{{ m.content }}{% endfor %}, ")
        answered = {}
        for name, row in {"messages": {"messages": [{"role": "user", "content": "Hi"}]}, "prompt": {"prompt": "Hi"},
                          "text": {"prompt": "Hi, "}}.items():
            self.write({**row, "answer": "x", "verifier": "regex"})
            output = os.path.join(self.top, name + ".jsonl")
            self.base, base = model, self.base
            self.result("--output", output, *(["--chat-template", "off"] if name == "text" else []))
            self.base = base
            with open(output) as file:
                answered[name] = json.loads(file.read())["completion"]
        self.assertEqual(len(set(answered.values())), 1, answered)

    def command(self, mode, *more, processes=2):
        words = f"{sys.executable} '{self.verifier}' '{mode}' {' '.join(more)}"
        return ["--verifier", words, "--verifier-processes", processes]

    def test_a_command(self):
        self.write(*({"prompt": f"The {i}", "answer": i} for i in range(20)))
        for mode in "works", "environment", "floods":
            with self.subTest(mode):
                result = self.result(*self.command(mode))
                self.assertEqual((result["reward"], result["accuracy"]), (0.5, 0))
        pid = os.path.join(self.top, "pid")
        self.result(*self.command("grandchild", pid, processes=1))
        self.assertGone(int(text_of(pid)))
        self.write({"prompt": "A", "answer": "1", "verifier": [{"name": "command", "weight": 2}]},
                   {"prompt": "B", "answer": "q" * 200000, "verifier": [{"name": "exact_match", "weight": 0},
                                                                      {"name": "command"}]})
        result = self.result(*self.command("works"))
        self.assertEqual((result["accuracy"], result["reward"], result["command"]), (0.5, 0.75, 0.5))

    def assertGone(self, pid):
        for _ in range(200):
            try:
                if text_of(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[0] == "Z":
                    return  # of init, which has not looked yet
            except (FileNotFoundError, ProcessLookupError):
                return
            time.sleep(0.05)
        self.fail(f"process {pid} still runs")

    def test_a_command_that_fails(self):
        self.write(*({"prompt": f"The {i}", "answer": i} for i in range(6)))
        for mode, words in {"dies": "it ended with status 1, after \"ValueError: third\" on stderr",
                            "killed": "it was ended by signal 9 (Killed)",
                            "hangs": "it took longer than --verifier-timeout 3 s",
                            "closes stdin": "it closed its output",
                            "nonsense": "it wrote 'good', expected {\"id\": ",
                            "array": "it wrote '[]', expected {\"id\": ",
                            "nan": "\"reward\": NaN}', expected {\"id\": ",
                            "unknown id": "it wrote '{\"id\": 99, \"reward\": 1}', expected {\"id\": ",
                            "too much": "\"reward\": 1.5}', expected",
                            "endless": "it wrote more than 1048576 bytes without a line's end"}.items():
            with self.subTest(mode):
                args = [*self.command(mode, processes=1), "--verifier-timeout", 3 if mode == "hangs" else 60]
                done = self.eval(*args)
                self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                for word in "train_gpt: eval: --verifier ", mode, words, "; --on-verifier-error zero":
                    self.assertIn(word, done.stderr)
                done = self.eval(*args, "--on-verifier-error", "zero")
                self.assertEqual(done.returncode, 0, done.stderr)
                result = json.loads(done.stdout)
                self.assertEqual(result["verifier_errors"], 2)  # the third of each process
                self.assertAlmostEqual(result["reward"], 0.5 * 4 / 6)
                self.assertIn("reward 0 for 2 verifier errors; the first: --verifier ", done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_a_command_that_is_interrupted(self):
        self.write({"prompt": "A", "answer": "1"})
        pid = os.path.join(self.top, "interrupted")
        code = f"import os, time; open({pid!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        with subprocess.Popen([DRIVER, "eval", "--model", self.base, "--answers", self.rows, "--max-tokens", "4",
                               "--verifier", f"{sys.executable} -c \"{code}\""], stderr=subprocess.PIPE, text=True,
                              env=ENVIRONMENT) as process:
            for _ in range(600):
                if os.path.exists(pid) and text_of(pid):
                    break
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            errors = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 1, errors)
        self.assertIn("interrupted", errors)
        self.assertGone(int(text_of(pid)))

    def test_bad_input(self):
        self.write({"prompt": "A", "answer": "1", "verifier": "exact_match"})
        answers = ["eval", "--model", self.base, "--answers", self.rows]
        self.refused(1, ["--verifier: cannot start no_such_program: No such file"], *answers[:-1], self.other_rows(),
                     "--verifier", "no_such_program")
        self.refused(2, ["--verifier", "a quote ' is not closed in a 'b"], *answers, "--verifier", "a 'b")
        self.refused(1, ["every line names its verifiers", "--verifier has no effect"], *answers, "--verifier", "cat")
        self.refused(1, ["there is no directory", "nowhere"], *answers, "--output", os.path.join(self.top, "nowhere", "x"))
        self.refused(2, ["--answers"], *answers, "--data", self.data)
        self.refused(2, ["--verifier-timeout", "--verifier"], *answers, "--verifier-timeout", 3)
        self.refused(2, ["--num-samples", "--answers"], "eval", "--model", self.base, "--data", self.data,
                     "--num-samples", 3)
        self.refused(2, ["--data, --multiple-choice or --answers is required"], "eval", "--model", self.base)

    def other_rows(self):
        path = os.path.join(self.top, "other.jsonl")
        with open(path, "w") as file:
            file.write('{"prompt": "A", "answer": "1"}\n')
        return path


if __name__ == "__main__":
    unittest.main()

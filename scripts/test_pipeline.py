#!/usr/bin/env python3
"""Tests of scripts/run_pipeline.sh with a tiny model, and of its task, scripts/sums_task.py (TRAIN_GPT names the driver)."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(SCRIPTS, "..", "dev", "tests"))
import sums_task  # noqa: E402
from harness import DRIVER, cuda, run, sanitized  # noqa: E402

PIPELINE, TASK = os.path.join(SCRIPTS, "run_pipeline.sh"), os.path.join(SCRIPTS, "sums_task.py")
STAGES = ["the model itself", "finetuning", "preferences (DPO)", "reinforcement learning", "int4 GGUF", "the server"]


def read(folder, name):
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path, rows):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def has_server():
    return run("serve", "--help").returncode == 0


class PipelineTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.top = directory.name

    def pipeline(self, *args, **variables):
        env = {**os.environ, "TINY": "1", "DRIVER": DRIVER, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run([PIPELINE, *args], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=600, check=False)

    def task(self, *args):
        return subprocess.run([sys.executable, TASK, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=120, check=False)

    @unittest.skipIf(sanitized(), "it starts only what other tests start")
    def test_every_stage(self):
        out = os.path.join(self.top, "out")
        done = self.pipeline(OUT=out)
        self.assertEqual(done.returncode, 0, done.stderr)
        table = {line[:24].rstrip(): float(line[24:]) for line in done.stdout.splitlines()}
        self.assertEqual(list(table), STAGES if has_server() else STAGES[:-1])
        for accuracy in table.values():
            self.assertIn(accuracy, (0, 0.25, 0.5, 0.75, 1))
        for name, steps in ("finetuned", 30), ("preferred", 2), ("reinforced", 2):
            last = read(os.path.join(out, name), "log.jsonl")[-1]
            self.assertEqual(last["step"], steps, name)
        self.assertEqual(table["int4 GGUF"], table.get("the server", table["int4 GGUF"]))
        # What the model says is right for half of the sums, less those where it says no number.
        folder, model, output = os.path.join(out, "data"), os.path.join(out, "model.gguf"), os.path.join(out, "said.jsonl")
        held_out = os.path.join(folder, sums_task.HELD_OUT)
        evaluate = ("eval", "--model", model, "--answers", held_out, "--max-tokens", 24, "--json", "--output", output)
        self.assertEqual(run(*evaluate).returncode, 0)
        rows, said = read(folder, sums_task.HELD_OUT), read(out, "said.jsonl")
        right = 0
        for i, (row, line) in enumerate(zip(rows, said)):
            number = sums_task.last_number(line["completion"])
            row["answer"] = int(number or 0) + i % 2
            right += number == row["answer"]
        if not cuda():  # in bf16 the tiny model may say no numbers
            self.assertEqual(right, len(rows) / 2, said)
        write(held_out, rows)
        self.assertEqual(json.loads(run(*evaluate).stdout)["accuracy"], right / len(rows))
        if has_server():
            done = self.task("serve", folder, "--model", model, "--driver", DRIVER)
            self.assertEqual((done.returncode, done.stdout), (0, f"accuracy {right / len(rows):g}\n"), done.stderr)
        done = self.pipeline(OUT=out)  # nothing is written over
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (1, "", f"run_pipeline.sh: {out} exists: remove it, or set OUT.\n"))

    def test_what_is_missing_is_named(self):
        out, nowhere = os.path.join(self.top, "out"), os.path.join(self.top, "nowhere")
        done = self.pipeline(nowhere, OUT=out)
        self.assertEqual((done.returncode, done.stderr),
                         (1, f"run_pipeline.sh: there is no {nowhere}: run `make smollm2`, or name a model directory.\n"))
        done = self.pipeline(OUT=out, DRIVER=nowhere)
        self.assertEqual((done.returncode, done.stderr), (1, f"run_pipeline.sh: there is no {nowhere}: run make first.\n"))
        self.assertEqual(os.listdir(self.top), [])

    def test_sums(self):
        folders = [os.path.join(self.top, name) for name in "abc"]
        for folder, seed in zip(folders, (1, 1, 2)):
            done = self.task("make", folder, "--largest", 20, "--train", 300, "--held-out", 40, "--seed", seed)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        names = sorted(os.listdir(folders[0]))
        self.assertEqual(names, ["conversations.jsonl", "held_out.jsonl", "pairs.jsonl", "prompts.jsonl"])
        files = [[read(folder, name) for name in names] for folder in folders]
        self.assertEqual(files[0], files[1])
        self.assertNotEqual(files[0], files[2])
        conversations, held_out, pairs, prompts = files[0]
        self.assertEqual([len(rows) for rows in files[0]], [300, 40, 300, 300])
        self.assertFalse({row["prompt"] for row in held_out} & {row["prompt"] for row in prompts + conversations + pairs})
        for row in prompts + held_out:
            a, b = row["prompt"].removeprefix("What is ").removesuffix("?").split(" plus ")
            self.assertEqual((row["answer"], row["verifier"]), (int(a) + int(b), "last_number"))
        for row, conversation, pair in zip(prompts, conversations, pairs):
            self.assertEqual([row["prompt"]] * 2, [conversation["prompt"], pair["prompt"]])
            self.assertEqual([sums_task.last_number(text) for text in (conversation["response"], pair["chosen"])],
                             [row["answer"]] * 2)
            self.assertNotIn(sums_task.last_number(pair["rejected"]), (row["answer"], None))
        done = self.task("make", folders[0], "--largest", 1, "--held-out", 4)
        self.assertEqual(done.returncode, 1)
        self.assertIn("--held-out 4 leaves none of the 4 sums to train on", done.stderr)

    def test_last_number(self):
        for text, number in (("3 + 4 = 7.", 7), ("1,234", 1234), ("It is -5", -5), ("2.50!", 2.5), ("none", None)):
            self.assertEqual(sums_task.last_number(text), number, text)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Tests of scripts/preference_task.py: its rows are right, seeded and apart, and it counts a model's right answers."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "preference_task.py")
# A chat model that is right where the prompt has three words, with a full stop.
CHAT = '''#!/usr/bin/env python3
import sys
for line in sys.stdin:
    words = line.strip().split(": ")[-1].split(", ")
    print("> " if line.startswith("/") else "> " + ", ".join(words[::-1 if len(words) == 3 else 1]) + ".\\n",
          end="")
print("> ")
'''


class PreferenceTask(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def run_script(self, *args):
        return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, check=False)

    def make(self, name, seed):
        folder = os.path.join(self.directory, name)
        done = self.run_script("make", folder, "--train", 300, "--val", 40, "--both", 50, "--seed", seed)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return [self.rows(name, split) for split in ("train", "val")]

    def rows(self, folder, name):
        with open(os.path.join(self.directory, folder, name + ".jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def test_pairs(self):
        train, val = self.make("a", 1)
        self.assertEqual((len(train), len(val)), (300, 40))
        self.assertEqual(len({pair["prompt"] for pair in train + val}), 340)
        unchanged = 0
        for pair in train + val:
            words = pair["prompt"].split(": ")[1].split(", ")
            self.assertEqual(pair["chosen"].split(", "), words[::-1])
            self.assertEqual(sorted(pair["rejected"].split(", ")), sorted(words))
            self.assertNotEqual(pair["rejected"], pair["chosen"])
            unchanged += pair["rejected"].split(", ") == words
        self.assertTrue(0.4 < unchanged / 340 < 0.6, unchanged)
        self.assertEqual(self.make("again", 1), [train, val])
        self.assertNotEqual(self.make("other", 2)[0], train)

    def test_both_responses_and_answers(self):
        """Of each prompt that no pair has, one response in three is right."""
        train, val = self.make("a", 1)
        both = self.rows("a", "both")
        self.assertEqual(len(both), 150)
        for first, second, third in zip(both[::3], both[1::3], both[2::3]):
            words = first["prompt"].split(": ")[1].split(", ")
            self.assertEqual(first["response"].split(", "), words[::-1])
            self.assertEqual(second, third)
            self.assertEqual((second["prompt"], sorted(second["response"].split(", "))), (first["prompt"], sorted(words)))
            self.assertNotEqual(first["response"], second["response"])
        self.assertEqual(len({row["prompt"] for row in both + train + val}), 390)
        self.assertEqual(self.rows("a", "answers"),
                         [{"prompt": pair["prompt"], "answer": pair["chosen"], "verifier": "exact_match"} for pair in val])

    def test_score(self):
        _, val = self.make("a", 1)
        driver = os.path.join(self.directory, "chat")
        with open(driver, "w", encoding="utf-8") as file:
            file.write(CHAT)
        os.chmod(driver, 0o755)
        done = self.run_script("score", os.path.join(self.directory, "a"), "--model", "m", "--driver", driver,
                               "--prompts", 30, "--show", 1)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        right = sum(pair["chosen"].count(",") == 2 for pair in val[:30])
        self.assertEqual(done.stdout.splitlines()[:2], [f"{right} of 30 answers are right", "  " + val[0]["prompt"]])
        self.assertTrue(0 < right < 30)
        # A driver that fails, or says too little, has no score.
        for text in "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho '> '\n":
            with open(driver, "w", encoding="utf-8") as file:
                file.write(text)
            done = self.run_script("score", os.path.join(self.directory, "a"), "--model", "m", "--driver", driver)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)


if __name__ == "__main__":
    unittest.main()

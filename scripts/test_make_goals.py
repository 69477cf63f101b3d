#!/usr/bin/env python3
"""Make goals whose recipes depend on variables. Nothing is built: goals run with make -n or end with an error."""
import os
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class MakeGoalsTest(unittest.TestCase):
    def make(self, *args):
        makes = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "TEXT", "NAME", "TOKENIZER", "VOCAB", "VAL")
        env = {name: value for name, value in os.environ.items() if name not in makes}
        return subprocess.run(["make", "DEPS=no", *args], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=120)

    def test_data_without_text_makes_the_quick_starts(self):
        done = self.make("-n", "data")
        self.assertEqual(done.returncode, 0, done.stdout)
        commands = [line for line in done.stdout.splitlines() if line.strip() and "scripts/venv.sh" not in line]
        self.assertEqual(commands, [".venv/bin/python data/quickstart.py"])

    def test_data_with_text(self):
        done = self.make("-n", "data", "TEXT=book.txt", "NAME=book")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn('data/make_data.py --text "book.txt" --name "book"', done.stdout)

    def test_data_options_need_text(self):
        for option in "NAME=book", "TOKENIZER=byte", "VOCAB=300", "VAL=0.1":
            done = self.make("data", option)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("NAME, TOKENIZER, VOCAB and VAL need TEXT=file|folder.\n", done.stdout)


if __name__ == "__main__":
    unittest.main()

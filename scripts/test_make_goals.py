#!/usr/bin/env python3
"""Make goals whose recipes depend on variables. Nothing is built: goals run with make -n or end with an error."""
import os
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class MakeGoalsTest(unittest.TestCase):
    def make(self, *args):
        makes = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "CORPUS", "TEXT", "VAL_TEXT", "NAME",
                 "TOKENIZER", "VOCAB", "VAL")
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

    def test_data_with_validation_text(self):
        done = self.make("-n", "data", "TEXT=a", "VAL_TEXT=b")
        self.assertIn('data/make_data.py --text "a"', done.stdout)
        self.assertIn('--val-text "b"', done.stdout)

    def test_data_with_corpus(self):
        done = self.make("-n", "data", "CORPUS=linux", "NAME=set", "VOCAB=300")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("scripts/fetch_linux.py &&", done.stdout)
        self.assertIn('--name "set" --text data/text/linux/train', done.stdout)
        self.assertIn('--val-text data/text/linux/val --tokenizer "bpe" --vocab 300', done.stdout)
        for options, message in ((["CORPUS=pile"], "CORPUS=pile is unknown: it is linux, or give TEXT=file|folder.\n"),
                                 (["CORPUS=linux", "TEXT=a"], "leave out TEXT, VAL_TEXT and VAL.\n")):
            done = self.make("data", *options)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(message, done.stdout)

    def test_another_pcre2(self):
        done = self.make("-n", "BACKEND=cpu", "BUILD=build/none", "PCRE2=/opt/pcre2", "train_gpt")
        self.assertEqual(done.returncode, 0, done.stdout)
        commands = done.stdout.splitlines()
        compiled = next(line for line in commands if "-c data/tokenizer.cpp" in line)
        linked = next(line for line in commands if "-o build/none/train_gpt " in line)
        self.assertIn(" -isystem /opt/pcre2/include ", compiled)
        self.assertIn(" -L/opt/pcre2/lib -Wl,-rpath,/opt/pcre2/lib -lpcre2-8 ", linked)

    def test_data_options_need_text(self):
        for option in "VAL_TEXT=a", "NAME=book", "TOKENIZER=byte", "VOCAB=300", "VAL=0.1":
            done = self.make("data", option)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("VAL_TEXT, NAME, TOKENIZER, VOCAB and VAL need TEXT=file|folder.\n", done.stdout)


if __name__ == "__main__":
    unittest.main()

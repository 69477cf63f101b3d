#!/usr/bin/env python3
"""Make goals: each that `make help` lists and each command of the docs is one that make and a shell can read, and those
whose recipes depend on variables. Nothing is built: goals run with make -n or end with an error."""
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import check_docs  # noqa: E402


def documented():
    """The make commands that README.md and docs/ print, in code blocks and between backquotes, each once."""
    commands = {}
    for page in check_docs.pages("README.md docs/*/*.md"):
        for _, words in check_docs.page_commands(check_docs.read(page)):
            # Of alternatives the first, without optional parts and words that stand for any; x is any op.
            words = [re.sub(r"\|.*", "", word).replace("OP=x", "OP=layernorm") for word in words
                     if not word.startswith("[") and word != "..."]
            if words and words[0] == "make":
                commands[" ".join(words)] = page
    return commands


class MakeGoalsTest(unittest.TestCase):
    def make(self, *args, variables=()):
        # Variables of the make that runs this test arrive in the environment; the commands are to stand alone, with
        # these variables at most. JUMBO stays: other objects would replace the programs that other tests run.
        makes = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "CORPUS", "TEXT", "VAL_TEXT", "NAME",
                 "TOKENIZER", "VOCAB", "VAL", "EXT", "ARCH", "BACKEND", "BUILD", "OP", "SANITIZE")
        env = {name: value for name, value in os.environ.items() if name not in makes or name in variables}
        env.update({} if "DEPS" in variables else {"DEPS": "no"})
        return subprocess.run(["make", *args], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=600)

    dry_runs = {}  # of the arguments, because many goals stand in the docs, too

    def dry_run(self, *args):
        """What make would do; a shell must be able to read it."""
        if args not in self.dry_runs:
            self.dry_runs[args] = self.read_dry_run(*args)
        return self.dry_runs[args]

    def read_dry_run(self, *args):
        done = self.make("-n", *args)
        self.assertEqual(done.returncode, 0, f"make {' '.join(args)}: {done.stdout}")
        said = ("make", "There is", "Building")  # by make itself
        recipes = "\n".join(line for line in done.stdout.splitlines() if not line.startswith(said))
        read = subprocess.run(["bash", "-n"], input=recipes, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
        self.assertEqual((read.returncode, read.stdout), (0, ""), f"make {' '.join(args)}: {recipes}")
        return recipes

    def needs_nvcc(self, command):
        """Goals of the CUDA build stop where there is no nvcc, in a dry run, too."""
        found = subprocess.run([os.path.join(ROOT, "scripts", "find_cuda.sh"), "nvcc"], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
        return found.returncode != 0 and re.search(r"BACKEND=cuda|\brelease\b", command)

    def test_every_goal_of_help(self):
        goals = re.findall(r"^make ([a-z-]+) ", self.make("help").stdout, re.MULTILINE)
        self.assertGreater(len(goals), 15)
        for goal in goals:
            with self.subTest(goal):
                if not self.needs_nvcc(goal):
                    self.assertTrue(self.dry_run(goal).strip())

    def test_every_command_of_the_docs(self):
        commands = documented()
        self.assertGreater(len(commands), 25)
        for command, path in commands.items():
            with self.subTest(f"{path}: {command}"):
                if not self.needs_nvcc(command):
                    self.dry_run(*shlex.split(command)[1:])

    def test_goals_that_only_print(self):
        self.assertIn("make data ", self.make("help").stdout)
        self.assertIn(self.make("cuda-info").returncode, (0, 2))  # 2: no nvcc

    def test_data_without_text_makes_the_quick_starts(self):
        done = self.make("-n", "data")
        self.assertEqual(done.returncode, 0, done.stdout)
        commands = [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/python")]
        self.assertEqual(commands, [".venv/bin/python data/quickstart.py"])

    def test_headers_without_root(self):
        """nvcc hands the option that finds what `make deps` unpacked on to the compiler; it has none of that name."""
        done = self.make("-n", "-B", "V=1", "BACKEND=cuda", "CUDA=nvcc=/opt/nvcc arch=90a", "UNPACKED=/opt/deps", "CXX=g++",
                         "build/cuda/kernels/accumulate.cu.o", "build/cuda/kernels/scratch.cpp.o")
        self.assertEqual(done.returncode, 0, done.stdout)
        nvcc, = re.findall("^/opt/nvcc .*", done.stdout, re.MULTILINE)
        self.assertEqual(nvcc.replace("-Xcompiler -idirafter -Xcompiler /opt/deps/include", "").count("-idirafter"), 0)
        self.assertIn("-Xcompiler /opt/deps/include", nvcc)
        self.assertRegex(done.stdout, "(?m)^[^/ ]+ .* -idirafter /opt/deps/include .* -c kernels/scratch.cpp")

    def python_arguments(self, *args):
        """The arguments with which a goal calls Python, here a script that prints them. None if it does not."""
        with tempfile.TemporaryDirectory() as folder:
            stub = os.path.join(folder, "python")
            with open(stub, "w", encoding="utf-8") as file:
                file.write(f"#!{sys.executable}\nimport json, os, sys\nprint('ARGV', json.dumps(sys.argv[1:]))\n"
                           "assert ('MAKE_DATA_VARIABLES' in os.environ) == (sys.argv[1] == 'data/make_data.py')\n")
            os.chmod(stub, 0o755)
            done = self.make(f"PYTHON={stub}", *args)
        self.assertEqual(done.returncode, 0, done.stdout)
        return json.loads(re.search("^ARGV (.*)$", done.stdout, re.MULTILINE).group(1))

    def test_parts_of_the_tests(self):
        def files(*part):
            done = self.make("-n", "BACKEND=cpu", "test", *part)
            self.assertEqual(done.returncode, 0, done.stdout)
            return re.search(r"^\S+ scripts/run_tests\.py (.*)$", done.stdout, re.MULTILINE).group(1).split()
        every = [name for name in files() if "=" not in name]
        parts = [[name for name in files(f"PART={part}/3") if "=" not in name] for part in (1, 2, 3)]
        self.assertEqual(sorted(sum(parts, [])), sorted(every))
        for names in parts:
            self.assertGreater(4 * len(names), len(every))
        for wrong in "4/3", "0/3", "3", "1/3/3", "a/b":
            done = self.make("-n", "BACKEND=cpu", "test", f"PART={wrong}")
            self.assertIn(f"PART={wrong}: write it as in 1/3", done.stdout)

    def test_data_with_text(self):
        self.assertEqual(self.python_arguments("data", "TEXT=book.txt", "NAME=book"),
                         ["data/make_data.py", "--text=book.txt", "--name=book"])

    def test_data_with_validation_text(self):
        self.assertEqual(self.python_arguments("data", "TEXT=a", "VAL_TEXT=b", "EXT=.c,.h"),
                         ["data/make_data.py", "--text=a", "--val-text=b", "--ext=.c,.h"])

    def test_data_with_corpus(self):
        done = self.make("-n", "data", "CORPUS=linux", "NAME=set", "VOCAB=300")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("scripts/fetch_linux.py &&", done.stdout)
        self.assertIn('--name="$name" --text data/text/linux/train', done.stdout)
        self.assertIn('--val-text data/text/linux/val --tokenizer="${TOKENIZER:-bpe}" --vocab="${VOCAB:-32768}"',
                      done.stdout)
        for options, message in ((["CORPUS=pile"], "CORPUS=pile is unknown: it is linux, or give TEXT=file|folder.\n"),
                                 (["CORPUS=linux", "TEXT=a"], "leave out TEXT, VAL_TEXT, VAL and EXT.\n")):
            done = self.make("data", *options)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(message, done.stdout)

    def test_values_are_no_commands(self):
        """Every variable of `make help`, with a value that make or a shell would run: it arrives unchanged in the
        environment of recipes and stands in none, or is one line of error."""
        names = sorted(set(re.findall(r"\b([A-Z][A-Z0-9_]+|V)=", self.make("help").stdout)) | {"OUT", "STEPS"})
        self.assertGreater(len(names), 25)
        with open(os.path.join(ROOT, "Makefile"), encoding="utf-8") as file:
            data = re.search("^DATA_VARIABLES := (.*)$", file.read(), re.MULTILINE).group(1).split()
        self.assertEqual((len(data), set(data) - set(names)), (13, set()))
        with tempfile.TemporaryDirectory() as folder:
            ran, show = os.path.join(folder, "ran"), os.path.join(folder, "show.mk")
            value = f"\" '; touch {ran}; ` touch {ran}`$$(touch {ran}) $(shell touch {ran})${{x}} %*\\ #"

            def forms(names):
                """On the command line, in the environment, and there with several lines."""
                lines = f"a\n{value}\nb"
                return (([f"{name}={value}" for name in names], {}, value), ([], dict.fromkeys(names, value), value),
                        ([], dict.fromkeys(names, lines), lines))
            for name in sorted(set(names) - set(data)):
                for args, more, _ in forms([name]):
                    with self.subTest(name=name, args=args), mock.patch.dict(os.environ, more):
                        done = self.make("-n", *args, "data", variables=more)
                        self.assertRegex(done.stdout, rf"^Makefile:\d+: \*\*\* {name}=.* which a shell does not "
                                                      r"leave as it is: use names without\.  Stop\.\n$")
                        self.assertFalse(os.path.exists(ran))
            with open(show, "w", encoding="utf-8") as file:
                file.write(f"show:\n\t@printenv --null {' '.join(data)}\n")
            goals = ("data", "test", "bench", "ladder", "mutants", "train", "hellaswag", "deps")
            # The recipe of `make data` depends on whether there is a CORPUS, else on whether there is a TEXT.
            for left_out in (), ("CORPUS",), ("CORPUS", "TEXT"):
                for args, more, expected in forms([name for name in data if name not in left_out]):
                    with self.subTest(left_out=left_out, args=args), mock.patch.dict(os.environ, more):
                        if not left_out:
                            done = self.make("-f", "Makefile", "-f", show, *args, "show", variables=more)
                            self.assertEqual(done.stdout, (expected + "\0") * len(data))
                        done = self.make("-n", "BACKEND=cpu", *args, *goals, variables=more)
                        self.assertEqual(done.returncode, 0, done.stdout)
                        self.assertNotIn("touch", done.stdout)
                        self.assertFalse(os.path.exists(ran))
            for name, option in (("NAME", "--name"), ("TOKENIZER", "--tokenizer"), ("VOCAB", "--vocab"),
                                 ("VAL", "--val"), ("VAL_TEXT", "--val-text"), ("EXT", "--ext")):
                self.assertEqual(self.python_arguments("data", f"TEXT={value}", f"{name}={value}"),
                                 ["data/make_data.py", f"--text={value}", f"{option}={value}"])
            done = self.make("data", f"CORPUS={value}")
            self.assertIn(f"CORPUS={value} is unknown: it is linux", done.stdout)
            self.make("data", "CORPUS=linux", f"NAME={value}", "PYTHON=false")
            self.assertFalse(os.path.exists(ran))

    def test_text_does_not_recompile(self):
        """The stamps of flags and sources do not depend on the variables of `make data`."""
        with tempfile.TemporaryDirectory() as build:
            stamps = [os.path.join(build, name) for name in ("flags", "sources")]
            contents = []
            for variables in ([], ["TEXT=book.txt", "NAME=book", "VOCAB=300"]):
                done = self.make("BACKEND=cpu", f"BUILD={build}", *variables, *stamps)
                self.assertEqual(done.returncode, 0, done.stdout)
                contents.append([open(stamp, encoding="utf-8").read() for stamp in stamps])
            self.assertEqual(*contents)
            self.assertIn("-std=c++20", contents[0][0])

    def test_install(self):
        with tempfile.TemporaryDirectory() as root:
            variables = (f"DESTDIR={root}", "PREFIX=/opt/a b", "BACKEND=cpu", "DEPS=no")
            self.assertIn("install -D -m 755 build/cpu/train_gpt", self.dry_run("install", *variables))
            program = os.path.join(root, "opt", "a b", "bin", "train_gpt")
            os.makedirs(os.path.dirname(program))
            with open(program, "w", encoding="utf-8"):
                pass
            self.make("uninstall", *variables)
            self.assertFalse(os.path.exists(program))

    def test_another_pcre2(self):
        done = self.make("-n", "BACKEND=cpu", "BUILD=build/none", "PCRE2=/opt/pcre2", "train_gpt")
        self.assertEqual(done.returncode, 0, done.stdout)
        commands = done.stdout.splitlines()
        compiled = next(line for line in commands if re.search(r" -c .*/data/(tokenizer|library/jumbo)\.cpp\.o", line))
        linked = next(line for line in commands if "-o build/none/train_gpt " in line)
        self.assertIn(" -isystem /opt/pcre2/include ", compiled)
        self.assertIn(" -L/opt/pcre2/lib -Wl,-rpath,/opt/pcre2/lib -lpcre2-8 ", linked)

    def test_data_options_need_text(self):
        for option in "VAL_TEXT=a", "NAME=book", "TOKENIZER=byte", "VOCAB=300", "VAL=0.1":
            done = self.make("data", option)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("VAL_TEXT, NAME, TOKENIZER, VOCAB, VAL and EXT need TEXT=file|folder.\n", done.stdout)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Tests of the lists of mutants in dev/mutants/ and of run_mutants.py, which runs them: on a program of two lines."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(__file__))
SEEN = [("answer.cpp", "+ 2;", "+ 3;"), ("answer.h", "TENS = 4", "TENS = 5")]
NOTICED = (True, "test_answer.AnswerTest.test_answer")
PROJECT = {
    ".gitignore": "/build/\n",
    "Makefile": """
B := build/$(BACKEND)
$(B)/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	@$(CXX) -fPIC -I. -MMD -MP -c $< -o $@
$(B)/libtrain_gpt.a: $(B)/answer.cpp.o $(B)/unused.cpp.o
	@rm -f $@ && ar rcs $@ $^
$(B)/train_gpt: $(B)/main.cpp.o $(B)/libtrain_gpt.a
	@$(CXX) $^ -o $@
$(B)/libtrain_gpt_%.so: $(B)/answer.cpp.o
	@$(CXX) -shared $^ -o $@
$(B)/dev/crash_shim.so:
	@mkdir -p $(@D) && touch $@
""",
    "answer.h": "constexpr int TENS = 4;\nint answer();\n",
    "answer.cpp": '#include "answer.h"\nint answer() { return 10 * TENS + 2; }\nint other() { return 2; }\n',
    "unused.cpp": "int unused() { return 7; }\n",
    "main.cpp": '#include <cstdio>\n#include "answer.h"\nint main() { std::printf("%d", answer()); }\n',
    "dev/tests/test_answer.py": """
import os, subprocess, unittest
class AnswerTest(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(subprocess.check_output([os.environ["TRAIN_GPT"]]), b"42")
""",
}


def run(directory, *args):
    return subprocess.run([sys.executable, os.path.join(SCRIPTS, "run_mutants.py"), *args], cwd=directory,
                          capture_output=True, text=True, check=False)


class ListsTest(unittest.TestCase):
    def test_every_fragment_occurs_once_and_has_a_test(self):
        for backend in ("cpu", "cuda"):
            with self.subTest(backend=backend):
                done = run(os.path.dirname(SCRIPTS), "--list", "--backend", backend)
                bad = [line for line in done.stdout.splitlines() if line.startswith(" ")]
                self.assertEqual((done.returncode, done.stderr, bad), (0, "", []))


@unittest.skipUnless(shutil.which("git") and shutil.which("make"), "git or make is missing")
class RunMutantsTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.top = directory.name
        for name, text in PROJECT.items():
            self.write(name, text)
        os.makedirs(os.path.join(self.top, "scripts"))
        shutil.copy(os.path.join(SCRIPTS, "run_tests.py"), os.path.join(self.top, "scripts"))
        subprocess.run(["git", "init", "--quiet", self.top], check=True)

    def write(self, name, text):
        path = os.path.join(self.top, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def run_mutants(self, *mutants, backend="cpu"):
        """Runs mutants (file, fragment, replacement): the exit status, whether each was noticed and what is said of it,
        and all output."""
        name = "dev/mutants/cuda.txt" if backend == "cuda" else "dev/mutants/list.txt"
        self.write(name, "".join(f"{file} answer\n- {old}\n+ {new}\n\n" for file, old, new in mutants))
        done = run(self.top, "--jobs", "1", "--backend", backend)
        lines = done.stdout.splitlines()
        verdicts = [(line.startswith("noticed"), after.strip())
                    for line, after in zip(lines, lines[1:]) if line.startswith(("noticed", "NOT OK"))]
        return done.returncode, verdicts, done.stdout + done.stderr

    def test_mistakes_in_a_source_and_in_a_header_are_noticed(self):
        status, verdicts, output = self.run_mutants(*SEEN)
        self.assertEqual((status, verdicts), (0, [NOTICED] * 2), output)
        self.assertIn("2 mutants: 2 noticed, 0 not", output)

    def test_the_list_of_cuda_runs_with_the_objects_of_cuda(self):
        self.write("dev/mutants/list.txt", "missing.cpp answer\n- a\n+ b\n")
        status, verdicts, output = self.run_mutants(SEEN[1], backend="cuda")
        self.assertEqual((status, verdicts), (0, [NOTICED]), output)
        self.assertEqual(os.listdir(os.path.join(self.top, "build", "mutants-0", "build")), ["cuda"])

    # One job runs them in this order. The second survives only if nothing is left of the first.
    def test_a_mutant_that_survives_is_a_failure(self):
        status, verdicts, output = self.run_mutants(SEEN[0], ("answer.cpp", "return 2;", "return 3;"), SEEN[1])
        survives = (False, "dev/mutants/list.txt:5: the tests of answer did not notice")
        self.assertEqual((status, verdicts), (1, [NOTICED, survives, NOTICED]), output)
        self.assertIn("3 mutants: 2 noticed, 1 not", output)

    def test_a_mutant_that_does_not_compile_is_a_failure(self):
        status, verdicts, output = self.run_mutants(("answer.cpp", "TENS", "ONES"))
        self.assertEqual((status, verdicts), (1, [(False, "dev/mutants/list.txt:1: does not build:")]), output)
        self.assertIn("error", output)

    def test_a_file_that_no_test_links_is_a_failure(self):
        status, verdicts, output = self.run_mutants(("unused.cpp", "7", "8"))
        unlinked = (False, "dev/mutants/list.txt:1: no test of answer links unused.cpp")
        self.assertEqual((status, verdicts), (1, [unlinked]), output)

    def test_fragments_that_cannot_be_replaced_are_failures(self):
        mutants = [("answer.cpp", "- 2;", "- 3;"), ("answer.cpp", "return", "throw"), ("answer.cpp", "+ 2;", "+ 2;"),
                   ("missing.cpp", "a", "b")]
        complaints = ["the fragment occurs 0 times in answer.cpp, not once: - 2;",
                      "the fragment occurs 2 times in answer.cpp, not once: return", "the replacement changes nothing",
                      "cannot read missing.cpp: No such file or directory"]
        complaints = [f"dev/mutants/list.txt:{1 + 4 * i}: {text}" for i, text in enumerate(complaints)]
        status, verdicts, output = self.run_mutants(*mutants)
        self.assertEqual((status, verdicts), (1, [(False, text) for text in complaints]), output)
        listed = run(self.top, "--list")
        self.assertEqual(listed.returncode, 1)
        self.assertEqual([line.strip() for line in listed.stdout.splitlines() if line.startswith(" ")], complaints)

    def test_an_op_without_tests_is_an_error(self):
        self.write("dev/mutants/list.txt", "answer.cpp question\n- + 2;\n+ + 3;\n")
        listed = run(self.top, "--list")
        self.assertEqual(listed.returncode, 1)
        self.assertIn("list.txt:1: there is no dev/tests/test_question.cpp and no test_question.py", listed.stdout)

    def test_tests_that_fail_without_a_mutant_are_an_error(self):
        self.write("answer.cpp", PROJECT["answer.cpp"].replace("+ 2", "+ 1"))
        status, verdicts, output = self.run_mutants(("answer.cpp", "+ 1;", "+ 3;"))
        self.assertEqual((status, verdicts), (1, []), output)
        self.assertIn("The tests of answer fail without any mutant.", output)


if __name__ == "__main__":
    unittest.main()

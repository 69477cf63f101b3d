#!/usr/bin/env python3
"""pack_text.py: packed text gives the same tokens as the text itself, files keep their limit, errors are one line."""
import contextlib
import io
import json
import lzma
import os
import random
import shutil
import sys
import tempfile
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import make_data  # noqa: E402
import text_input  # noqa: E402
import pack_text  # noqa: E402


class PackTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.text, self.out = self.path("text"), self.path("packed")
        os.mkdir(self.text)
        noise = random.Random(1)
        self.documents = ["".join(noise.choices("abcdefgh \né", k=noise.randrange(1, 4000))) for _ in range(300)]
        for i, document in enumerate(self.documents[:100]):
            self.write(f"a{i:03d}.txt", document)
        self.write("b.jsonl", "".join(json.dumps({"text": d}) + "\n" for d in self.documents[100:]))

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write(self, name, data):
        with open(os.path.join(self.text, name), "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())

    def run_main(self, module, *arguments):
        err = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = module.main([str(a) for a in arguments])
            except SystemExit as error:
                status = error.code
        return status, err.getvalue()

    def pack(self, *arguments):
        status, err = self.run_main(pack_text, "--text", self.text, "--out", self.out, *arguments)
        self.assertEqual((status, err), (0, ""))
        return [os.path.join(self.out, name) for name in sorted(os.listdir(self.out))]

    def refused(self, words, module, *arguments, status=1):
        got, err = self.run_main(module, *arguments)
        last = err.splitlines()[-1]
        self.assertEqual((got, [word for word in words if word not in last]), (status, []), err)
        self.assertEqual([name for name in os.listdir(self.folder) if name != "text"], [])

    def tokens(self, out, *arguments):
        status, err = self.run_main(make_data, "--tokenizer", "byte", "--out", self.path(out), "--name", "set",
                                    *arguments)
        self.assertEqual(status, 0, err)
        self.assertFalse([name for name in os.listdir(self.path(out)) if "input" in name])
        found = {}
        for name in sorted(os.listdir(self.path(out))):
            if name != "meta.json":
                with open(self.path(out, name), "rb") as file:
                    found[name] = file.read()
        return found

    def test_documents_come_back(self):
        with mock.patch.object(pack_text, "BLOCK", 20_000):
            files = self.pack("--chunks-mb", 0.05, "--jobs", 1)
        self.assertGreater(len(files), 3)
        self.assertLessEqual(max(map(os.path.getsize, files)), 50_000)
        # Less than a block (at most 24 kB of text, which compresses to about half) is free in each file but the last.
        self.assertGreater(min(map(os.path.getsize, files[:-1])), 50_000 - 15_000)
        texts = []
        for path in files:
            with lzma.open(path, "rt", encoding="utf-8") as lines:
                texts += [json.loads(line)["text"] for line in lines]
        self.assertEqual(texts, self.documents)

    def test_tokens_of_packed_text_are_those_of_the_text(self):
        plain = self.tokens("plain", "--text", self.text, "--val-text", os.path.join(HERE, "..", "README.md"))
        for jobs in 1, 2:
            self.pack("--jobs", jobs)
            packed = self.tokens("tokens", "--text", self.out, "--val-text", os.path.join(HERE, "..", "README.md"),
                                 "--jobs", jobs)
            self.assertEqual(packed, plain)
            shutil.rmtree(self.out)

    def test_packed_text_can_be_packed_again(self):
        path, = self.pack()
        with open(path, "rb") as file:
            once = file.read()
        shutil.rmtree(self.text)
        os.rename(self.out, self.text)
        path, = self.pack()
        with open(path, "rb") as file:
            self.assertEqual(file.read(), once)

    def test_result_does_not_depend_on_the_number_of_processes(self):
        found = []
        for jobs in 1, 3:
            with mock.patch.object(pack_text, "BLOCK", 20_000):
                files = self.pack("--jobs", jobs, "--chunks-mb", 0.05)
            found.append(b"")
            for path in files:
                with open(path, "rb") as file:
                    found[-1] += file.read() + b"end of file"
            shutil.rmtree(self.out)
        self.assertEqual(found[0], found[1])

    def test_prompts_and_long_documents(self):
        shutil.rmtree(self.text)
        os.mkdir(self.text)
        pair = {"prompt": "Why?", "response": "é\n"}
        preference = {"system": "S", "prompt": "Why?", "chosen": "é", "rejected": "no"}
        self.write("a.jsonl", json.dumps(pair) + "\n" + json.dumps({**preference, "score": 1}) + "\n")
        self.write("b.txt", "long text\n" * 2000)
        with mock.patch.object(text_input, "INPUT_CHUNK", 8192), mock.patch.object(text_input, "PACKAGE_CHUNK", 1024):
            path, = self.pack("--jobs", 1)
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            self.assertEqual([json.loads(line) for line in lines], [pair, preference, {"text": "long text\n" * 2000}])

    def test_half_a_surrogate_pair(self):
        shutil.rmtree(self.text)
        os.mkdir(self.text)
        self.write("a.jsonl", '{"prompt": "\\ud800", "response": "b"}\n{"text": "\\udc00"}\n{"text": "c"}\n')
        path, = self.pack("--jobs", 1)
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            self.assertEqual([json.loads(line) for line in lines],
                             [{"prompt": "?", "response": "b"}, {"text": "?"}, {"text": "c"}])

    def test_refusals(self):
        arguments = ["--text", self.text, "--out", self.out, "--jobs", 1]
        self.refused(["takes 0.3 MB", "give --chunks-mb 1 or more"], pack_text, *arguments, "--chunks-mb", "0.0001")
        for size in "0", "inf", "nan":
            self.refused(["more than 0"], pack_text, *arguments, "--chunks-mb", size, status=2)
        self.refused(["no such file"], pack_text, "--text", self.path("none"), "--out", self.out)
        self.write("c.txt", b"caf\xe9")
        self.refused(["c.txt", "not UTF-8"], pack_text, *arguments)
        self.refused(["exists"], pack_text, "--text", self.text, "--out", self.text)
        for name in os.listdir(self.text):
            self.write(name, "")
        self.refused(["no text"], pack_text, *arguments)

    def test_damaged_files_are_named(self):
        shutil.rmtree(self.text)
        os.mkdir(self.text)
        good = lzma.compress(b'{"text": "a"}\n' * 100)
        for data in good[:-10], good[:40] + b"????" + good[44:], b"", b"not xz":
            self.write("a.jsonl.xz", data)
            self.refused(["a.jsonl.xz", "damaged", "copy it again"], make_data, "--text", self.text,
                         "--tokenizer", "byte", "--out", self.path("tokens"))
            self.refused(["a.jsonl.xz", "damaged"], pack_text, "--text", self.text, "--out", self.out)


if __name__ == "__main__":
    unittest.main()

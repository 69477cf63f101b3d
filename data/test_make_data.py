#!/usr/bin/env python3
"""Tests of make_data.py: the tokens encode the whole text, the splits do not overlap, and each error is one line."""
import array
import contextlib
import fcntl
import glob
import gzip
import importlib.util
import io
import itertools
import json
import lzma
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import make_data  # noqa: E402
import text_input  # noqa: E402

HAVE_TOKENIZERS = importlib.util.find_spec("tokenizers") is not None
HAVE_PYARROW = importlib.util.find_spec("pyarrow") is not None
needs_numpy = unittest.skipUnless(importlib.util.find_spec("numpy"), "the Python package numpy is missing")
needs_tokenizers = unittest.skipUnless(HAVE_TOKENIZERS, "the Python package tokenizers is missing")


class DataTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.out = self.path("out", "set")

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write(self, name, data):
        path = self.path("in", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)
        return path

    def write_jsonl(self, name, texts):
        return self.write(name, "".join(json.dumps({"id": 1, "text": t}) + "\n" for t in texts).encode())

    def run_main(self, *arguments):
        """(exit status, stderr)"""
        err, out = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a terminal
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            try:
                status = make_data.main([*arguments, "--out", self.out])
            except SystemExit as e:
                status = e.code
        return status, err.getvalue()

    def make(self, *arguments):
        status, err = self.run_main(*arguments)
        self.assertEqual(status, 0, err)
        with open(os.path.join(self.out, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        for side in ("train", "val"):
            tokens = self.tokens(side)
            self.assertEqual(meta[side]["tokens"], len(tokens))
            starts = self.flags(side).count(2)  # of a pair that of the chosen response
            self.assertEqual(meta[side]["documents"], starts or tokens.count(meta["end_of_text"]))
            self.assertTrue(all(t < meta["vocab_size"] for t in tokens))
        return meta

    def shards(self, side):
        return sorted(n for n in os.listdir(self.out) if n.startswith(side) and n.endswith(".bin"))

    def mask(self, side):
        """Whether each token is a loss token. Without a mask file all are."""
        return [flags & 1 for flags in self.flags(side)]

    def flags(self, side):
        mask = []
        for name in self.shards(side):
            count, path = len(self.tokens(side, [name])), os.path.join(self.out, name[:-4] + ".mask")
            if not os.path.exists(path):
                mask += [1] * count
                continue
            with open(path, "rb") as f:
                header = list(array.array("i", f.read(1024)))[:5]
                payload = list(f.read())
            pairs = header[1] == 3
            self.assertEqual(header, [20261121, 3 if pairs else 2, count, 0, 0])
            self.assertEqual(len(payload), count)
            self.assertLessEqual(set(payload), {0, 1, 2, 6} if pairs else {0, 1, 2})
            mask += payload
        return mask

    def tokens(self, side, shards=None):
        tokens = []
        for name in shards or self.shards(side):
            with open(os.path.join(self.out, name), "rb") as f:
                header = array.array("i", f.read(1024))
                payload = array.array({20240520: "H", 20240801: "I"}[header[0]], f.read())
            self.assertEqual(list(header[:4]), [header[0], {20240520: 1, 20240801: 7}[header[0]], len(payload), 0])
            self.assertGreater(len(payload), 0)
            tokens += payload
        return tokens

    def documents(self, side, end=256):
        """The documents of a split made with byte tokens."""
        documents, current = [], bytearray()
        for token in self.tokens(side):
            if token == end:
                documents.append(bytes(current))
                current = bytearray()
            else:
                current.append(token)
        self.assertEqual(current, b"", "the last document has no end")
        return documents

    def refused(self, part, *arguments, status=1):
        before = self.contents()
        got, err = self.run_main(*arguments)
        self.assertEqual(got, status, err)
        self.assertIn(part, err)
        if status == 1:
            self.assertEqual(err.count("\n"), 1, err)
        self.assertEqual(self.contents(), before, "something was written")

    def contents(self):
        found = {}
        for folder, _, names in os.walk(os.path.dirname(self.out)):
            for name in names:
                with open(os.path.join(folder, name), "rb") as f:
                    found[os.path.join(folder, name)] = f.read()
        return found


class ByteTokens(DataTest):
    def test_endings_of_text_files(self):
        for name in ("a.c", "b.H", "c.rst", "d.txt", "e.py"):
            self.write(name, name.encode())
        self.make("--text", self.path("in"), "--tokenizer", "byte", "--val", "0", "--ext", ".c,.h,.rst")
        self.assertEqual(self.documents("train"), [b"a.c", b"b.H", b"c.rst", b"d.txt"])
        self.refused("name the endings of other text files by --ext", "--text", self.path("in", "e.py"))
        for wrong in ("c", "", ".c,", ".jsonl", ".tar.gz", ".c;.h"):
            self.refused("is not the ending of a text file", "--text", self.path("in"), "--ext", wrong, status=2)

    def write_tar(self, name, mode, members):
        path = self.path("in", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with tarfile.open(path, mode) as archive:
            for member, data in members:
                info = tarfile.TarInfo(member)
                if data is None:
                    info.type = tarfile.DIRTYPE
                else:
                    info.size = len(data)
                archive.addfile(info, data and io.BytesIO(data))
        return path

    def test_archives(self):
        long = b"".join(b"line %d\n" % i for i in range(3000))
        members = [("top", None), ("top/a.txt", b"text"), ("top/b.c", b"int x;"), ("top/c.png", b"picture"),
                   ("top/empty.md", b""), ("top/" + "x" * 150 + ".md", long), ("top/b.jsonl", b'{"text": "line"}\n')]
        expected = [b"text", b"int x;", long]
        for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tgz", "w:gz"), ("a.tar.xz", "w:xz")):
            path = self.write_tar(name, mode, members)
            with mock.patch.multiple(text_input, INPUT_CHUNK=8192, PACKAGE_CHUNK=512):
                meta = self.make("--text", path, "--tokenizer", "byte", "--val", "0", "--ext", ".c", "--jobs", "1")
            self.assertEqual(self.documents("train"), expected, name)
            self.assertEqual(meta["left_out"], {"empty": 1, "files of other kinds in archives": 2})
            self.assertFalse(os.path.exists(os.path.join(self.out, "input")))
        # What a folder leaves out, an archive leaves out.
        hidden = ["._a.txt", "top/.git/a.txt", "__MACOSX/top/a.txt", "top/.ipynb_checkpoints/a.md", "./.a.txt"]
        members = [*((name, b"hidden") for name in hidden), ("./b/../a.txt", b"text"), ("./top/b.md", b"more")]
        meta = self.make("--text", self.write_tar("h.tar", "w", members), "--tokenizer", "byte", "--val", "0")
        self.assertEqual((self.documents("train"), meta["left_out"]), ([b"text", b"more"], {}))
        for name in [*hidden, "a.txt"]:
            self.write("folder/" + name, name.encode())
        self.make("--text", self.path("in", "folder"), "--tokenizer", "byte", "--val", "0")
        self.assertEqual(self.documents("train"), [b"a.txt"])
        # Each document of an archive is on one side of the split; the only one of an archive is split as a file is.
        whole = self.write_tar("b.tar", "w", [(f"{i}.txt", b"document %d" % i) for i in range(200)])
        self.make("--text", whole, "--tokenizer", "byte", "--val", "0.1")
        self.assertEqual(sorted(self.documents("train") + self.documents("val")),
                         sorted(b"document %d" % i for i in range(200)))
        self.make("--text", self.write_tar("c.tar", "w", [("a.txt", long)]), "--tokenizer", "byte", "--val", "0.1")
        self.assertEqual(b"".join(self.documents("train") + self.documents("val")), long)
        with open(whole, "rb") as f:
            data = f.read()
        for name, content in (("cut.tar", data[:5000]), ("no.tar", b"x" * 2000)):
            self.refused(f"{name}: not a readable .tar archive", "--text", self.write(name, content))
        self.refused("no.tar.gz: damaged", "--text", self.write("no.tar.gz", b"x" * 2000), "--tokenizer", "byte")

    def test_lengths(self):
        texts = ["x" * n for n in range(1, 41)]
        self.write_jsonl("a.jsonl", texts)
        self.write("b.txt", b"x" * 5)
        self.write("c.txt", b"y" * 30)
        limits = ["--min-bytes", "10", "--max-bytes", "35"]
        meta = self.make("--text", self.path("in"), "--tokenizer", "byte", "--val", "0", *limits)
        self.assertEqual(self.documents("train"), [t.encode() for t in texts[9:35]] + [b"y" * 30])
        self.assertEqual(meta["left_out"], {"shorter than 10 bytes": 10, "longer than 35 bytes": 5})
        # The only one that is left is split, and its parts may be shorter.
        self.make("--text", self.path("in", "b.txt"), self.path("in", "c.txt"), "--tokenizer", "byte", *limits)
        self.assertEqual(b"".join(self.documents("train") + self.documents("val")), b"y" * 30)

    @needs_numpy
    def test_duplicates(self):
        long = b"".join(b"line %d\n" % i for i in range(3000))
        self.write_jsonl("a.jsonl", [f"text {i % 40}" for i in range(100)])
        self.write("b.txt", b"text 7")
        self.write("c.txt", long)
        self.write("d.txt", long[:-1] + b"!")
        self.write("e.txt", long)
        arguments = ("--text", self.path("in"), "--tokenizer", "byte", "--val", "0.2")
        kept = sorted([b"text %d" % i for i in range(40)] + [long, long[:-1] + b"!"])
        meta = self.make(*arguments, "--drop-duplicates")
        self.assertEqual(sorted(self.documents("train") + self.documents("val")), kept)
        self.assertEqual(meta["left_out"], {"duplicates": 62})
        whole = self.contents()
        with mock.patch.object(text_input, "INPUT_CHUNK", 8192), mock.patch.object(text_input, "PACKAGE_CHUNK", 512):
            self.make(*arguments, "--drop-duplicates", "--jobs", "2")
        self.assertEqual(self.contents(), whole)
        meta = self.make(*arguments)
        self.assertEqual(meta["train"]["documents"] + meta["val"]["documents"], 104)
        # Conversations are duplicates if all their turns are.
        lines = [{"prompt": "a", "response": r} for r in "xyx"] + [{"prompt": "ax", "response": "x"}]
        path = self.write("conversations.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.make("--text", path, "--tokenizer", "byte", "--val", "0", "--drop-duplicates")
        self.assertEqual(self.documents("train"), [b"ax", b"ay", b"axx"])

    def test_goes_on_after_an_interruption(self):
        """From the last note, whatever was written after it; to the same files as at once."""
        lines = b"".join(json.dumps({"prompt": f"{i} ", "chosen": "is " + "x" * (i % 70), "rejected": "y"}).encode() +
                         b"\n" for i in range(4000))
        path = self.write("a.jsonl.gz", gzip.compress(lines))
        self.write("empty.txt", b"")
        arguments = ["--text", self.path("in"), "--tokenizer", "byte", "--shard-tokens", "30000", "--jobs", "1"]
        temporary, encode_task = os.path.join(os.path.dirname(self.out), ".set.tmp"), make_data.encode_task

        def run(interrupted_after=None, seconds=0):
            done = 0

            def counted(task):
                nonlocal done
                done += 1
                if done == interrupted_after:
                    os.kill(os.getpid(), signal.SIGTERM)
                return encode_task(task)

            with mock.patch.multiple(make_data, encode_task=counted, NOTE_SECONDS=seconds), \
                    mock.patch.object(text_input, "INPUT_CHUNK", 8192):
                return (*self.run_main(*arguments), done)

        status, err, tasks = run()
        self.assertEqual((status, err), (0, ""))
        whole = self.contents()
        self.assertGreater(tasks, 20)
        shutil.rmtree(self.out)
        went_on = 0
        for after in (1, 5, 8, 2, 3):
            status, err, _ = run(after)
            self.assertEqual((status, err.splitlines()[-1]),
                             (143, "make_data: interrupted; the same command goes on from there"))
            self.assertEqual("make_data: going on after" in err, went_on > 0)
            went_on += after - 1
            self.assertFalse(os.path.exists(self.out))
            for kind in ("bin", "mask"):  # tokens after the note
                for last in sorted(glob.glob(os.path.join(temporary, f"train_*.{kind}")))[-1:]:
                    with open(last, "ab") as f:
                        f.write(b"later")
        status, err, done = run()
        self.assertEqual((status, done), (0, tasks - went_on), err)
        self.assertEqual(self.contents(), whole)
        # With other options or input it starts anew.
        shutil.rmtree(self.out)
        for change in (lambda: arguments.extend(["--val", "0.06"]), lambda: os.utime(path, (1, 1))):
            self.assertEqual(run(8)[0], 143)
            change()
            status, err, done = run()
            self.assertEqual((status, err, done), (0, "make_data: what was interrupted had other options or input; "
                                                      "starting anew\n", tasks))
        # Without a note there is nothing to go on from.
        self.write("a.jsonl.gz", b"")
        os.remove(path)
        self.write("a.jsonl", lines)
        before = self.contents()
        self.assertEqual(run(8, seconds=60)[:2], (143, "make_data: interrupted; nothing was written\n"))
        self.assertEqual(self.contents(), before)

    def test_two_processes(self):
        path = self.write("a.txt", b"text\n" * 100)
        temporary = os.path.join(os.path.dirname(self.out), ".set.tmp")
        os.makedirs(temporary)
        lock = os.open(temporary, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.refused("another make_data writes it", "--text", path, "--tokenizer", "byte")
        os.close(lock)
        self.make("--text", path, "--tokenizer", "byte")
        self.assertFalse(os.path.exists(temporary))

    def test_summary(self):
        path = self.write_jsonl("a.jsonl", ["", *(f"document {i}" for i in range(2000))])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(make_data.main(["--text", path, "--tokenizer", "byte", "--out", self.out]), 0)
        lines = out.getvalue().splitlines()
        self.assertTrue(lines[0].endswith("set: 1 file, vocabulary of 257 (byte)"), lines)
        self.assertEqual(lines[1].split(), ["documents", "bytes", "tokens", "bytes", "per", "token"])
        rows = [line.replace(",", "").split() for line in lines[2:4]]
        self.assertEqual(sum(int(row[1]) for row in rows), 2000)
        for name, documents, size, tokens, ratio in rows:
            self.assertEqual((int(tokens), name), (int(size) + int(documents), "train" if name == "train" else "val"))
            self.assertAlmostEqual(float(ratio), int(size) / int(tokens), places=3)
        self.assertEqual(lines[4:], ["left out           1  empty"])

    def test_files_come_back_byte_by_byte(self):
        texts = {"a.txt": bytes(range(256)) * 3, "b.md": b"# x\r\n\r\n", "d.txt": b"\xff\xfe\x00",
                 "deep/er/c.txt": "ü\u0301 \U0001F600".encode()}
        for name, text in texts.items():
            self.write(name, text)
        self.write("empty.txt", b"")
        self.write("other.pdf", b"not text")
        self.write(".hidden.txt", b"not text")
        meta = self.make("--text", self.path("in"), "--tokenizer", "byte", "--val", "0")
        self.assertEqual(sorted(self.documents("train")), sorted(texts.values()))
        self.assertEqual(meta["train"]["bytes"], sum(map(len, texts.values())))
        self.assertEqual((meta["vocab_size"], meta["end_of_text"], meta["lost_bytes"]), (257, 256, 0))
        self.assertEqual(self.shards("val"), [])

    def test_shards(self):
        texts = [b"12345678901234567890123456789", b"abc", b"x" * 40]
        for i, text in enumerate(texts):
            self.write(f"{i}.txt", text)
        self.make("--text", self.path("in"), "--tokenizer", "byte", "--val", "0", "--shard-tokens", "10")
        self.assertEqual(self.documents("train"), texts)
        sizes = [len(self.tokens("train", [name])) for name in self.shards("train")]
        self.assertEqual(sizes, [10] * 7 + [5])
        self.assertEqual(self.shards("train")[7], "train_000007.bin")

    def test_split_takes_whole_documents(self):
        texts = [f"document {i} " + "x" * (i % 50) for i in range(400)]
        path = self.write_jsonl("a.jsonl", texts)
        meta = self.make("--text", path, "--tokenizer", "byte")
        train, val = self.documents("train"), self.documents("val")
        self.assertEqual(sorted(train + val), sorted(t.encode() for t in texts))
        total = sum(map(len, texts))
        self.assertAlmostEqual(meta["val"]["bytes"] / total, 0.05, delta=0.01)
        self.assertEqual(meta["train"]["bytes"] + meta["val"]["bytes"], total)
        self.assertEqual(meta["train"]["documents"] + meta["val"]["documents"], 400)
        first = self.contents()
        self.make("--text", path, "--tokenizer", "byte")  # again: replaces the data set
        self.assertEqual(self.contents(), first)

    def test_split_is_a_share_of_conversations(self):
        """Whatever file they are in, and however long one of them is."""
        for count, fraction, expected in ((20, "0.2", 4), (20, "0.05", 1), (20, "0.01", 1), (30, "0.05", 2), (17, "0.1", 2)):
            for longest in 1, 5000:
                rows = [{"prompt": f"{i}", "response": "long " * longest if i == 7 else "short"} for i in range(count)]
                for name, text in (("a.jsonl", "\n".join(map(json.dumps, rows))), ("a.json", json.dumps(rows))):
                    with self.subTest(count=count, fraction=fraction, longest=longest, name=name):
                        meta = self.make("--text", self.write(name, text.encode()), "--tokenizer", "byte", "--val", fraction)
                        documents = meta["train"]["documents"], meta["val"]["documents"]
                        self.assertEqual(documents, (count - expected, expected))

    def test_messages_for_make_name_its_variables(self):
        text = self.write("a.txt", b"a" * 1000)
        tools = self.write("tools.jsonl", b'{"prompt": "a", "response": "b", "tools": [{}]}\n' * 2)
        for arguments, by_option, by_make in (
                (["--text", "none"], "check --text and --val-text", "check TEXT and VAL_TEXT"),
                (["--text", "/dev/null"], "files by --ext .c,.h", "files by EXT=.c,.h"),
                (["--text", text, "--val", "2"], "argument --val: must be", "make_data: VAL: must be 0 or more and less than 1"),
                (["--text", text, "--tokenizer", "none"], "--tokenizer none: no such file", "TOKENIZER=none: no such file"),
                (["--text", text, "--val-text", text], "given as --text and as --val-text", "given as TEXT and as VAL_TEXT"),
                (["--text", tools], "give --tokenizer DIR", "give TOKENIZER=DIR")):
            for expected, variables in (by_option, {}), (by_make, {"MAKE_DATA_VARIABLES": "yes"}):
                with self.subTest(expected):
                    done = subprocess.run([sys.executable, os.path.join(HERE, "make_data.py"), "--tokenizer", "byte",
                                           "--out", self.out, *arguments], env={**os.environ, **variables},
                                          capture_output=True, text=True)
                    self.assertIn(expected, done.stderr)
                    self.assertEqual(done.stderr.count("\n") == 1, "usage" not in done.stderr, done.stderr)
                    if variables:
                        self.assertNotIn(" --", done.stderr)

    def test_split_by_hash_alone(self):
        texts = [f"document {i}" for i in range(2000)]
        path = self.write_jsonl("a.jsonl", texts)
        with mock.patch.object(make_data, "EXACT_SPLIT", 100):
            meta = self.make("--text", path, "--tokenizer", "byte", "--val", "0.1")
        self.assertEqual(sorted(self.documents("train") + self.documents("val")), sorted(t.encode() for t in texts))
        self.assertAlmostEqual(meta["val"]["documents"] / 2000, 0.1, delta=0.03)

    def test_two_documents(self):
        self.write("a.txt", b"long " * 1000)
        self.write("b.txt", b"short")
        self.make("--text", self.path("in"), "--tokenizer", "byte")
        self.assertEqual((self.documents("train"), self.documents("val")), ([b"long " * 1000], [b"short"]))

    def test_one_document_is_split_between_lines(self):
        for lines, name in ((b"a line of text\n" * 1000, "a.txt"), (b"one line only " * 500, "b.txt")):
            path = self.write(name, lines)
            self.make("--text", path, "--tokenizer", "byte", "--val", "0.1")
            (train,), (val,) = self.documents("train"), self.documents("val")
            self.assertEqual(train + val, lines)
            self.assertAlmostEqual(len(val) / len(lines), 0.1, delta=0.01)
            if name == "a.txt":
                self.assertTrue(train.endswith(b"\n"))

    def test_one_document_of_jsonl(self):
        self.write("0.txt", b"")
        self.write_jsonl("a.jsonl", ["", "a line\n" * 100])
        self.write("b.jsonl", b"\n\n")
        self.make("--text", self.path("in"), "--tokenizer", "byte", "--val", "0.2")
        self.assertEqual(self.documents("train") + self.documents("val"), [b"a line\n" * 80, b"a line\n" * 20])
        self.assertEqual([n for n in os.listdir(self.out) if n.endswith(".txt")], [])

    def test_validation_text_of_its_own(self):
        train, val = self.write("train/a.txt", b"train"), self.write("val/b.txt", b"val")
        self.make("--text", train, "--val-text", val, "--tokenizer", "byte")
        self.assertEqual((self.documents("train"), self.documents("val")), ([b"train"], [b"val"]))
        self.refused("must not overlap", "--text", self.path("in"), "--val-text", val, "--tokenizer", "byte")

    def test_result_does_not_depend_on_chunks_and_processes(self):
        self.write("a.txt", b"".join(b"line %d of a long text\n" % i for i in range(3000)))
        self.write_jsonl("b.jsonl", [f"text {i}\n" * 20 for i in range(300)])
        for i in range(20):
            self.write(f"many/{i}.md", b"# %d\n" % i)
        self.make("--text", self.path("in"), "--tokenizer", "byte")
        whole = self.contents()
        with mock.patch.object(text_input, "INPUT_CHUNK", 8192), mock.patch.object(text_input, "PACKAGE_CHUNK", 512):
            self.make("--text", self.path("in"), "--tokenizer", "byte", "--jobs", "2")
        self.assertEqual(self.contents(), whole)

    def test_jsonl_text(self):
        path = self.write("a.jsonl", b'{"text": "\\u00e9\\n\\ud83d\\ude00"}\n\n{"text": ""}\n{"text": null}\r\n'
                                     b'{"text": "\\ud800!", "x": [1]}')
        self.make("--text", path, "--tokenizer", "byte", "--val", "0")
        self.assertEqual(self.documents("train"), ["é\n\U0001F600".encode(), b"?!"])

    def test_json_files(self):
        """A list of rows, or rows one after the other; other .json files of a folder are left out and counted."""
        rows = [{"text": 'a "b" \n\u00e9'}, {"text": "x" * 300_000}, {"text": "c", "n": [1, {}]}]
        texts = [row["text"].encode() for row in rows]
        for name, data in (("a.json", json.dumps(rows)), ("b.json", json.dumps(rows, indent=1, ensure_ascii=False)),
                           ("c.json", "\ufeff\r\n[]"), ("d.json", "\n".join(map(json.dumps, rows)) + "\n"),
                           ("e.json", json.dumps(rows[0], indent=2)), ("f.json", "".join(map(json.dumps, rows)))):
            self.write("many/" + name, data.encode())
        self.write("many/package.json", b'{"name": "x", "text_files": []}')
        self.write("many/numbers.json", b"[1, 2, 3]")
        self.write("many/damaged.json", b"{")
        self.write("many/g.json.gz", gzip.compress(json.dumps(rows).encode()))
        arguments = ("--text", self.path("in", "many"), "--tokenizer", "byte", "--val", "0")
        meta = self.make(*arguments)
        self.assertEqual(self.documents("train"), texts * 3 + texts[:1] + texts * 2)
        self.assertEqual(meta["left_out"], {".json files without rows of text": 4})
        whole = self.contents()
        with mock.patch.object(text_input, "INPUT_CHUNK", 8192):
            self.make(*arguments, "--jobs", "2")
        self.assertEqual(self.contents(), whole)
        for data, part in ((b'[{"text": "a"}, {"txt": 1}]', "row 2: has the fields 'txt'; give one of"),
                           (b'[{"text": "a"}, 7]', "row 2: holds int"), (b'7', "row 1: holds int"),
                           (b'[{"text": "a"}, {"text": 1}]', "row 2: 'text' holds int, not a string"),
                           (b'[{"text": "a"}', "row 2 is not JSON (the file ends within the list)"),
                           (b'[{"text": "a"} {', "row 2 is not JSON (a comma is missing before it)"),
                           (b'[{"text": "a"},]', "row 2 is not JSON (Expecting value)"),
                           (b'[{"text": "a"}] {}', "row 2 is not JSON (it follows the list's end)"),
                           (b'[{"text": "a\xff"}]', "row 1 is not JSON (not UTF-8 text)"),
                           (b"[" * 100_000, "row 1 is not JSON"), (b'{"text": "a', "row 1 is not JSON (Unterminated")):
            path = self.write("bad.json", data)
            self.refused(f"{path}: {part}", "--text", path, "--tokenizer", "byte", "--val", "0")
        self.write("only/package.json", b'{"name": "x"}')
        self.refused("the .json files there hold no rows with the fields of a text or a conversation", "--text",
                     self.path("in", "only"), "--tokenizer", "byte")
        self.refused("is not the ending of a text file", "--text", path, "--ext", ".json", status=2)

    def test_prompts_are_not_loss_tokens(self):
        pairs = [("1+1=", "2"), ("", "no prompt"), ("only a prompt", ""), ("\u00fc?", " \u00fc!")]
        lines = [{"prompt": p, "response": r, "id": 1} for p, r in pairs]
        path = self.write("a.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
        meta = self.make("--text", path, "--tokenizer", "byte", "--val", "0")
        self.assertEqual(meta["left_out"], {"conversations without a response": 1})
        self.assertEqual(self.documents("train"), [b"1+1=2", b"no prompt", "\u00fc? \u00fc!".encode()])
        # 2: the first token of an example, which nothing predicts.
        self.assertEqual(self.flags("train"), [2, 0, 0, 0, 1, 1] + [2] + [1] * 9 + [2, 0, 0] + [1] * 5)
        self.assertEqual(meta["train"]["loss_tokens"], 2 + 9 + 5)
        whole = self.flags("train")
        self.make("--text", path, "--tokenizer", "byte", "--val", "0", "--shard-tokens", "7")
        self.assertEqual(self.flags("train"), whole)
        # The split keeps each prompt with its response.
        lines = [{"prompt": f"{i} ", "response": "is " + "x" * (i % 9)} for i in range(300)]
        path = self.write("b.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.make("--text", path, "--tokenizer", "byte", "--val", "0.1")
        self.assertEqual(sorted(self.documents("train") + self.documents("val")),
                         sorted(f"{i} is {'x' * (i % 9)}".encode() for i in range(300)))
        self.assertGreater(len(self.documents("val")), 10)
        self.assertEqual(len(self.mask("val")) - sum(self.mask("val")),
                         sum(d.index(b"is") for d in self.documents("val")))
        self.refused("a single conversation cannot be split", "--tokenizer", "byte",
                     "--text", self.write("one.jsonl", json.dumps(lines[0]).encode()))

    def test_shapes_of_conversations(self):
        """Each shape in each format has the tokens of its prompt and response."""
        turns = [("user", "2+2?"), ("assistant", "4")]
        records = {
            "messages": {"messages": [{"role": r, "content": c} for r, c in turns], "text": "formatted"},
            "prompt": {"prompt": "2+2?", "response": "4", "messages_count": 2},
            "alpaca": {"instruction": "2+2?", "output": "4", "input": "", "text": "formatted"},
            "alpaca-input": {"instruction": "Add.", "input": "2+2", "output": "4"},
            "sharegpt": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
                         "text": ""},
            "roles": {"conversations": [{"role": r, "content": c} for r, c in turns], "system": None, "tools": None},
            "trl": {"prompt": "2+2?", "completion": "4", "tools": "[]"},
            "trl-messages": {"prompt": [{"role": "user", "content": "2+2?"}],
                             "completion": [{"role": "assistant", "content": "4"}], "documents": []},
            "parts": {"messages": [{"role": r, "content": [{"type": "text", "text": c}]} for r, c in turns]},
        }
        expected = {name: (b"2+2?4", 4) for name in records}
        expected.update({"alpaca": (b"2+2?\n\n4", 6), "alpaca-input": (b"Add.\n\n2+2\n\n4", 11)})
        for name, record in records.items():
            data = (json.dumps(record) + "\n").encode() * 3
            paths = [self.write(name + ".jsonl", data), self.write(name + ".jsonl.gz", gzip.compress(data)),
                     self.write(name + ".jsonl.xz", lzma.compress(data))]
            if HAVE_PYARROW:
                import pyarrow
                import pyarrow.parquet
                paths += [self.path("in", name + ending) for ending in (".jsonl.zst", ".parquet")]
                with pyarrow.CompressedOutputStream(paths[-2], "zstd") as f:
                    f.write(data)
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record] * 3), paths[-1])
            for path in paths:
                text, inputs = expected[name]
                self.make("--text", path, "--tokenizer", "byte", "--val", "0")
                self.assertEqual(self.documents("train"), [text] * 3, path)
                self.assertEqual(self.flags("train"), ([2] + [0] * (inputs - 1) + [1, 1]) * 3, path)

    def test_refused_records(self):
        good = b'{"prompt": "a", "response": "b"}\n'
        for line, part in (
                (b'{"prompt": "x"}', "bad.jsonl:3: has the fields 'prompt'; give one of 'prompt' and 'chosen' and "
                                     "'rejected', 'chosen' and 'rejected', 'messages', 'conversations', "
                                     "'prompt' and 'response', 'prompt' and 'completion', 'instruction' and 'output', "
                                     "'text'"),
                (b'{"conversations": 1}', "bad.jsonl:3: 'conversations' is not a list"),
                (b'{"conversations": [{"from": "alien", "value": "a"}]}',
                 "bad.jsonl:3: message 1 has the role 'alien'; give system, developer, user, assistant, tool, "
                 "function, ipython, observation, human, gpt"),
                (b'{"conversations": [{"from": "human"}]}', "bad.jsonl:3: message 1 has no 'content'"),
                (b'{"prompt": [{"role": "user", "content": "x"}], "completion": {}}',
                 "bad.jsonl:3: 'completion' holds dict, not a string"),
                (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]}',
                 "bad.jsonl:3: message 1 has a part of the type 'image_url'; a language model reads text"),
                (b'{"messages": [{"role": "user", "content": ["a"]}]}',
                 "bad.jsonl:3: message 1 has a part of the type 'str'"),
                (b'{"messages": [], "tools": "{"}', "bad.jsonl:3: 'tools' is a string that is not JSON"),
                (b'{"messages": [], "tools": {}}', "bad.jsonl:3: 'tools' holds dict, not a list of objects"),
                (b'{"messages": [], "documents": ["x"]}', "bad.jsonl:3: 'documents' holds str, not objects"),
                (b'{"messages": [], "chat_template_kwargs": {"tools": 1}}',
                 "bad.jsonl:3: 'chat_template_kwargs' sets 'tools', which is a field of its own"),
                (b'{"messages": [{"role": "user", "content": "a", "n": 99999999999999999999}]}',
                 "bad.jsonl:3: holds a value that a template cannot be given (99999999999999999999 has more than 64"),
                (b'{"messages": [{"role": "user", "content": "a", "n": NaN}]}',
                 "bad.jsonl:3: holds a value that a template cannot be given"),
                (b'{"prompt": "a", "response": "b", "tools": [{}]}',
                 "bad.jsonl:3: 'tools' of a conversation needs a chat template"),
                (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", '
                 b'"reasoning": "c"}]}', "bad.jsonl:3: 'reasoning_content' of a conversation needs a chat template"),
                (b'{"prompt": "x", "response": 1}', "bad.jsonl:3: 'response' holds int, not a string"),
                (b'{"messages": "x"}', "bad.jsonl:3: 'messages' is not a list"),
                (b'{"messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]}',
                 "bad.jsonl:3: message 2 has the role 'gpt'; give system, developer, user, assistant, tool, "),
                (b'{"messages": [{"role": "user", "content": null}]}', "bad.jsonl:3: message 1 has no 'content'"),
                (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
                 b'{"role": "user", "content": "c"}]}', "bad.jsonl:3: a conversation of other turns than"),
                (b'{"prompt": "a<|endoftext|>", "response": "b"}',
                 "bad.jsonl:3: a message holds the special token <|endoftext|> as text; remove it")):
            path = self.write("bad.jsonl", good + b"\n" + line + b"\n" + good)
            self.refused(part, "--text", path, "--tokenizer", "byte", "--val", "0")
            with mock.patch.object(text_input, "INPUT_CHUNK", 8):
                self.refused(part, "--text", path, "--tokenizer", "byte", "--val", "0", "--jobs", "1")
        # A compressed file is named, not its copy.
        packed = self.write("bad.jsonl.gz", gzip.compress(good + b'{"prompt": "x"}\n'))
        self.refused(f"make_data: {packed}:2: has the fields", "--text", packed, "--tokenizer", "byte")
        for name in ("bad.jsonl.gz", "bad.jsonl.zst", "bad.jsonl.xz"):
            if HAVE_PYARROW or not name.endswith("zst"):
                self.refused(f"{name}: damaged", "--text", self.write(name, b"no archive"), "--tokenizer", "byte")
        packed = self.write("bad.jsonl.gz", gzip.compress(good * 1000)[:-20])
        self.refused("bad.jsonl.gz: damaged", "--text", packed, "--tokenizer", "byte")
        self.write("both/a.jsonl", good)
        self.write("both/b.txt", b"text")
        self.refused("b.txt has plain text and", "--text", self.path("in", "both"), "--tokenizer", "byte")
        pair = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
        for data, part in ((good + pair, "mixed.jsonl:1 has a conversation and"),
                           (b'{"text": "a"}\n' + pair, "mixed.jsonl:1 has plain text and"),
                           (pair * 2 + b'{"text": "a"}\n', "mixed.jsonl:3 has plain text and")):
            path = self.write("mixed.jsonl", data)
            line = 1 if data.startswith(pair) else 2
            for chunk in (text_input.INPUT_CHUNK, 8):
                with mock.patch.object(text_input, "INPUT_CHUNK", chunk):
                    self.refused(f"{part} {path}:{line} a preference pair; make two data sets\n", "--text", path,
                                 "--tokenizer", "byte", "--val", "0", "--jobs", "1")

    def test_missing_library_is_named(self):
        path = self.write("a.txt", b"text\n" * 100)
        with mock.patch.dict(os.environ, {"TRAIN_GPT_DATA_LIB": self.path("none.so")}):
            self.refused("none.so is missing: run `make lib` to build it", "--text", path, "--tokenizer", "byte")

    def test_parquet(self):
        path = self.path("a.parquet")
        if not HAVE_PYARROW:
            with open(path, "wb") as f:
                f.write(b"PAR1")
            self.refused("needs the Python package pyarrow", "--text", path, "--tokenizer", "byte")
            return
        import pyarrow
        import pyarrow.parquet
        texts = [f"row {i} é" for i in range(50)]
        table = pyarrow.table({"id": list(range(51)), "text": [*texts, None]})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
        self.make("--text", path, "--tokenizer", "byte")
        self.assertEqual(sorted(self.documents("train") + self.documents("val")), sorted(t.encode() for t in texts))
        pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), path)
        self.refused("has the fields 'body'; give one of", "--text", path, "--tokenizer", "byte")
        with open(path, "wb") as f:
            f.write(b"PAR1 nonsense")
        self.refused("not a readable .parquet", "--text", path, "--tokenizer", "byte")
        # Every mutation of a file is either read or refused with the file's name.
        pyarrow.parquet.write_table(table, path, row_group_size=20)
        with open(path, "rb") as f:
            whole = f.read()
        for begin in range(0, len(whole), 37):
            with open(path, "wb") as f:
                f.write(whole[:begin] + b"\xa5" * 9 + whole[begin + 9:])
            status, err = self.run_main("--text", path, "--tokenizer", "byte", "--jobs", "1")
            self.assertTrue(status == 0 or err.startswith(f"make_data: {path}: ") and err.count("\n") == 1, err)

    def test_fifos_and_devices_are_not_opened(self):
        self.write("a.txt", b"text\n" * 100)
        os.mkfifo(self.path("in", "b.txt"))
        for link, target in (("zero.txt", "/dev/zero"), ("c.txt", self.path("in", "b.txt"))):
            os.symlink(target, self.path(link))
            self.refused("is a FIFO, a socket or a device", "--text", self.path(link), "--tokenizer", "byte")
        self.refused(f"{self.path('in', 'b.txt')}: is a FIFO", "--text", self.path("in"), "--tokenizer", "byte")

    def test_failed_writes_name_the_file(self):
        path = self.write("a.txt", b"some text\n" * 5000)
        for limit, name in ((20000, "train_000000.bin"), (20, "tokenizer.json")):
            done = subprocess.run([sys.executable, os.path.join(HERE, "make_data.py"), "--text", path, "--tokenizer",
                                   "byte", "--out", self.out],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), done.stderr)
            self.assertIn(f"{name}: File too large", done.stderr)
            self.assertNotIn("Errno", done.stderr)
            self.assertEqual(os.listdir(os.path.dirname(self.out)), [])

    def test_interrupted(self):
        """Ctrl-C reaches the whole process group at any time: while worker processes start, and later."""
        paths = [self.write(f"{i}.txt", b"some text\n" * 1000000) for i in range(3)]
        temporary = os.path.join(os.path.dirname(self.out), ".set.tmp")
        for delay in (0, 0.02, 0.05, 0.1, 0.2):
            process = subprocess.Popen([sys.executable, os.path.join(HERE, "make_data.py"), "--text", *paths, "--jobs",
                                        "3", "--tokenizer", "byte", "--out", self.out], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, start_new_session=True,
                                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
            while not os.path.exists(temporary) and process.poll() is None:
                time.sleep(0.001)
            time.sleep(delay)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate()
            self.assertEqual((process.returncode, err), (130, "make_data: interrupted; nothing was written\n"), delay)
            self.assertEqual(os.listdir(os.path.dirname(self.out)), [])

    def test_large_shards_have_a_header_of_64_bits(self):
        path = self.path("large.bin")
        writer = make_data.ShardWriter(path, 2, 1 << 40)
        writer.in_shard = (5 << 32) + 7
        writer.close(open(path, "wb"), make_data.MAGIC[2])
        with open(path, "rb") as f:
            self.assertEqual(list(array.array("I", f.read()))[:5], [20240520, 1, 7, 5, 0])

    def test_bare_python(self):
        """With byte tokens, the program needs only the standard library."""
        path = self.write("a.txt", b"some text\n" * 50)
        done = subprocess.run([sys.executable, "-E", "-s", "-S", os.path.join(HERE, "make_data.py"), "--text", path,
                               "--tokenizer", "byte", "--out", self.out],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertIn(b"vocabulary of 257 (byte)", done.stdout)
        self.assertEqual(b"".join(self.documents("train") + self.documents("val")), b"some text\n" * 50)

    def test_refusals(self):
        good = self.write("good.txt", b"text\n" * 100)
        byte = ("--tokenizer", "byte")
        self.refused("no such file", "--text", self.path("none"), *byte)
        os.makedirs(self.path("nothing"))
        self.refused("no .txt, .md, .jsonl, .jsonl.gz, .jsonl.zst, .jsonl.xz, .json, .json.gz, ", "--text",
                     self.path("nothing"), *byte)
        self.refused("every file is empty", "--text", self.write("empty.txt", b""), *byte)
        self.refused("the input has no text", "--text", self.write("empty.jsonl", b'{"text": ""}\n\n'), *byte)
        self.refused("no text is left", "--text", self.write("empty.jsonl", b'{"text": ""}\n'), *byte, "--val", "0")
        self.refused("unknown file format", "--text", self.write("a.pdf", b"x"), *byte)
        self.refused("given twice", "--text", good, good, *byte)
        self.refused("too few for a validation split", "--text", self.write("one.txt", b"x"), *byte)
        self.refused("bad.jsonl:2: the line is not JSON", "--text", self.write("bad.jsonl", b'{"text": "a"}\n{"text": \n'), *byte)
        self.refused("not JSON", "--text", self.write("deep.jsonl", b"[" * 100000), *byte)
        self.refused("field.jsonl:1: has the fields 'txt'", "--text", self.write("field.jsonl", b'{"txt": "a"}\n'), *byte)
        self.refused("list.jsonl:1: holds list", "--text", self.write("list.jsonl", b'["text"]\n'), *byte)
        self.refused("holds int", "--text", self.write("int.jsonl", b'{"text": 5}\n'), *byte)
        self.refused("no validation text", "--text", good, "--val-text", self.write("void.txt", b""), *byte)
        self.refused("no such file", "--text", good, "--tokenizer", self.path("nothing"))
        for wrong in (["--val", "1"], ["--val", "-0.1"], ["--val", "x"], ["--vocab", "256"],
                      ["--vocab", "1000000000"], ["--jobs", "0"], ["--shard-tokens", "0"], ["--name", "../x"],
                      ["--name", ""], ["--unknown"], ["--tokenizer", ""], ["--val-text", ""], ["--out", ""]):
            self.refused("usage", "--text", good, *wrong, status=2)
        out, self.out = self.out, os.path.join(good, "set")
        self.refused(f"{good}: File exists; a part of the path is a file", "--text", good, *byte)
        self.out = out
        self.make("--text", good, *byte)
        self.refused("no such file", "--text", self.path("none"), *byte)  # the old data set stays
        os.remove(os.path.join(self.out, "meta.json"))
        self.refused("not a data set", "--text", good, *byte)


@needs_tokenizers
class OtherTokenizers(DataTest):
    TEXT = "".join(f"The {i}th line's words, and über-words\U0001F600; it's {i * i}.\n\n  Indented (twice)\r\n"
                   for i in range(3000))

    def tokenizer(self):
        import tokenizers
        tokenizer = tokenizers.Tokenizer.from_file(os.path.join(self.out, "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        return tokenizer

    def test_few_conversations_want_the_models_own_tokenizer(self):
        for name, row, own in (("a.jsonl", {"text": self.TEXT}, False),
                               ("b.jsonl", {"prompt": "Who?", "response": "Mara."}, True)):
            path = self.write(name, (json.dumps(row) + "\n").encode() * 3)
            status, err = self.run_main("--text", path, "--vocab", "20000")
            self.assertEqual(status, 0, err)
            self.assertIn("the text is too short for a vocabulary of 20000 tokens; the vocabulary has ", err)
            self.assertEqual("; to finetune a checkpoint give --tokenizer DIR, its directory\n" in err, own, err)

    def test_bpe_round_trip(self):
        path = self.write("a.txt", self.TEXT.encode())
        meta = self.make("--text", path, "--vocab", "400", "--val", "0.1")
        self.assertEqual((meta["tokenizer"], meta["vocab_size"]), ("bpe", 400))
        tokenizer, end = self.tokenizer(), meta["end_of_text"]
        self.assertEqual(tokenizer.get_vocab_size(), 400)
        self.assertEqual(tokenizer.token_to_id("<|endoftext|>"), end)
        both = ""
        for side in ("train", "val"):
            tokens = self.tokens(side)
            text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
            self.assertEqual(tokens[:-1], tokenizer.encode(text, add_special_tokens=False).ids)  # as in one call
            self.assertEqual(meta[side]["bytes"], len(text.encode()))
            both += text
        self.assertEqual(both, self.TEXT)
        first = self.contents()
        self.make("--text", path, "--vocab", "400", "--val", "0.1")
        self.assertEqual(self.contents(), first)

    def test_vocabulary_of_a_sample(self):
        self.write_jsonl("a.jsonl", [self.TEXT[i * 100:i * 100 + 100] for i in range(1000)])
        with mock.patch.object(make_data, "BPE_TEXT", 40000), mock.patch.object(text_input, "INPUT_CHUNK", 8192):
            status, err = self.run_main("--text", self.path("in"), "--vocab", "300", "--val", "0.1")
        self.assertEqual(status, 0, err)
        self.assertRegex(err, r"^make_data: the vocabulary is learnt from a sample of 0 of 0 MB: one of every 4 blocks ")
        with open(os.path.join(self.out, "meta.json"), encoding="utf-8") as f:
            sample = json.load(f)["vocabulary_sample"]
        self.assertEqual(sample["of"], os.path.getsize(self.path("in", "a.jsonl")))
        self.assertTrue(30000 < sample["bytes"] <= 50000, sample)

    def test_bpe_learns_from_training_text_only(self):
        train = self.write("train.txt", b"one two three four five six\n" * 50)
        val = self.write("val.txt", b"zebra zebra zebra\n" * 500)
        self.make("--text", train, "--val-text", val, "--vocab", "1000")
        vocab = self.tokenizer().get_vocab()
        self.assertTrue(any("three" in token for token in vocab))
        self.assertFalse(any("ze" in token for token in vocab))

    def test_special_tokens_in_the_text_stay_text(self):
        path = self.write("a.txt", b"a <|endoftext|> b\n" * 50)
        meta = self.make("--text", path, "--vocab", "300", "--val", "0")
        self.assertEqual(self.tokens("train").count(meta["end_of_text"]), 1)

    def test_names_that_are_no_utf8(self):
        path = os.fsencode(self.write("a.txt", b"some text\n" * 9))
        name = os.fsdecode(path[:-5] + b"caf\xe9 \xff.txt")
        os.rename(path, name)
        self.out = self.path("out", os.fsdecode(b"\xe9"))
        meta = self.make("--text", name, "--tokenizer", "byte")
        self.assertEqual(meta["source"], [os.fsdecode(path[:-5]) + "caf? ?.txt"])
        self.assertEqual(os.listdir(self.path("out")), [os.fsdecode(b"\xe9")])

    def test_bytes_that_are_no_utf8(self):
        path = self.write("a.txt", b"caf\xe9 \xff\xfe ok\n" * 20)
        meta = self.make("--text", path, "--vocab", "300", "--val", "0")
        text = self.tokenizer().decode(self.tokens("train")[:-1])  # the package writes U+FFFD for them
        self.assertEqual(text, "caf\ufffd \ufffd\ufffd ok\n" * 20)
        self.assertEqual((meta["lost_bytes"], meta["train"]["bytes"]), (0, os.path.getsize(path)))

    def test_bytes_that_the_vocabulary_lacks(self):
        root = json.loads(make_data.byte_tokenizer())
        for character in ("\u0104", "\u00f1"):  # bytes 04 and F1
            del root["model"]["vocab"][character]
        folder = os.path.dirname(self.write("tok/tokenizer.json", json.dumps(root).encode()))
        path = self.write("a.txt", b"ma\xf1ana\x04 the\x04 end\n")
        status, err = self.run_main("--text", path, "--tokenizer", folder, "--val", "0")
        self.assertEqual(status, 0, err)
        self.assertIn("make_data: 3 bytes of the text are not in the tokenizer's vocabulary", err)
        self.assertEqual(self.tokens("train"), [*b"maana the end\n", 256])
        with open(os.path.join(self.out, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        self.assertEqual((meta["lost_bytes"], meta["train"]["bytes"]), (3, 14))

    def test_byte_tokenizer_is_one_for_the_package(self):
        self.make("--text", self.write("a.txt", self.TEXT.encode()), "--tokenizer", "byte", "--val", "0")
        tokenizer = self.tokenizer()
        text = "".join(map(chr, range(300))) + "\U0001F600"
        self.assertEqual(tokenizer.encode(text).ids, list(text.encode()))
        self.assertEqual(tokenizer.decode(list(text.encode())), text)
        self.assertEqual(self.tokens("train")[:-1], tokenizer.encode(self.TEXT).ids)

    def test_tokenizer_of_a_directory(self):
        path = self.write("a.txt", b"hello world\n" * 20)
        root = json.loads(make_data.byte_tokenizer())
        root["model"]["vocab"]["hello"] = 70000
        root["model"]["vocab"].update({"he": 65600, "ll": 65601, "llo": 65602})
        root["model"]["merges"] = [["h", "e"], ["l", "l"], ["ll", "o"], ["he", "llo"]]
        folder = os.path.dirname(self.write("tok/tokenizer.json", json.dumps(root).encode()))
        meta = self.make("--text", path, "--tokenizer", folder, "--val", "0")
        self.assertEqual((meta["vocab_size"], meta["end_of_text"]), (70001, 256))
        self.assertEqual(self.tokens("train"), ([70000] + list(b" world\n")) * 20 + [256])  # as uint32
        root["added_tokens"][0]["content"] = "<other>"
        root["model"]["vocab"]["<other>"] = root["model"]["vocab"].pop("<|endoftext|>")
        self.write("tok/tokenizer.json", json.dumps(root).encode())
        self.refused("name it as eos_token in tokenizer_config.json beside tokenizer.json",
                     "--text", path, "--tokenizer", folder)
        self.write("tok/tokenizer.json", b"{")
        self.refused("not a valid tokenizer.json", "--text", path, "--tokenizer", folder)
        self.write("tok/tokenizer.json", b'{"model": {"vocab": {"</s>": 1}}}')
        self.refused("without a ByteLevel pre_tokenizer is not supported", "--text", path, "--tokenizer", folder)

    def test_declared_special_tokens(self):
        path = self.write("a.txt", b"hello <extra> world\n")
        root = json.loads(make_data.byte_tokenizer())
        root["added_tokens"].append({**root["added_tokens"][0], "id": 257, "content": "<eos>"})
        folder = os.path.dirname(self.write("tok/tokenizer.json", json.dumps(root).encode()))
        self.write("tok/tokenizer_config.json", json.dumps({"chat_template": "x", "eos_token": "<eos>"}).encode())
        self.write("tok/added_tokens.json", b'{"<extra>": 258}')
        for tokenizer in (folder, os.path.join(folder, "tokenizer.json")):
            meta = self.make("--text", path, "--tokenizer", tokenizer, "--val", "0")
            self.assertEqual((meta["vocab_size"], meta["end_of_text"]), (259, 257))
            self.assertEqual(self.tokens("train"), [*b"hello ", 258, *b" world\n", 257])
            # The data's tokenizer is the same, without the template: the text is no conversation.
            names = {name for name in os.listdir(self.out) if not name.startswith("train_")}
            self.assertEqual(names, {"meta.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json"})
            with open(os.path.join(self.out, "tokenizer_config.json"), encoding="utf-8") as f:
                self.assertEqual(json.load(f), {"eos_token": "<eos>"})
        self.write("tok/added_tokens.json", b'{"<eos>": 258}')
        self.refused("added_tokens.json: token '<eos>' has the id 258, but", "--text", path, "--tokenizer", folder)

    def test_prompts_of_a_folder(self):
        with open(os.path.join(HERE, "..", "dev", "fixtures", "tokenizer", "tokenizers.json"), encoding="utf-8") as f:
            cases = {case["name"]: case["tokenizer"] for case in json.load(f)["cases"]}
        pairs = [("it was", " the best"), ("the ", "worst of times"), ("a", "b")]
        lines = [json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs]
        path = self.write("a.jsonl", "".join(lines).encode())
        start = {"type": "TemplateProcessing",
                 "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                 "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                 "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
        for name, first in (("gpt2", []), ("llama2", [1])):
            tokenizer_json = {**cases[name], "post_processor": first and start or None}
            folder = os.path.dirname(self.write(name + "/tokenizer.json", json.dumps(tokenizer_json).encode()))
            meta = self.make("--text", path, "--tokenizer", folder, "--val", "0")
            tokenizer = self.tokenizer()
            expected, mask = [], []
            for prompt, response in pairs:
                ids = tokenizer.encode(prompt + response, add_special_tokens=False).ids
                alone = tokenizer.encode(prompt, add_special_tokens=False).ids
                read = 0
                while read < len(alone) and alone[read] == ids[read]:
                    read += 1
                expected += first + ids + [meta["end_of_text"]]
                mask += [0] * (len(first) + read) + [1] * (len(ids) - read + 1)
            self.assertEqual(self.tokens("train"), expected)
            self.assertEqual(self.mask("train"), mask)

    def test_chat_template(self):
        root = json.loads(make_data.byte_tokenizer())
        for i, token in enumerate(("<|im_start|>", "<|im_end|>"), 257):
            root["added_tokens"].append({**root["added_tokens"][0], "id": i, "content": token})
        folder = os.path.dirname(self.write("tok/tokenizer.json", json.dumps(root).encode()))
        config = {"bos_token": {"content": "<|im_start|>"}, "chat_template": "old"}
        self.write("tok/tokenizer_config.json", json.dumps(config).encode())
        self.write("tok/chat_template.jinja", b"""
{%- for m in messages %}{{ bos_token + m.role }}|{{ m.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant|{% endif %}""")
        turns = [("system", "S"), ("user", " 1+1"), ("assistant", "2 "), ("user", "<|endoftext"), ("assistant", "|>")]
        several = {"messages": [{"role": role, "content": content} for role, content in turns]}
        path = self.write("a.jsonl", b'{"prompt": " 1+1", "response": "2 "}\n' + json.dumps(several).encode() + b"\n")

        def turn(role, content, learns=False):
            head, tail = [257, *role.encode(), ord("|")], [*content.strip().encode(), 258]
            return head + tail + [10], [0] * len(head) + [int(learns)] * len(tail) + [0]

        expected = [turn("user", "1+1"), turn("assistant", "2", True)]
        expected += [turn(role, content, role == "assistant") for role, content in turns]
        self.make("--text", path, "--tokenizer", folder, "--val", "0")
        self.assertEqual(self.tokens("train"), [t for tokens, _ in expected for t in tokens])
        self.assertEqual(self.mask("train"), [m for _, mask in expected for m in mask])
        self.assertEqual([i for i, f in enumerate(self.flags("train")) if f & 2], [0, len(expected[0][0] + expected[1][0])])
        pair = self.write("pair.jsonl", b'{"prompt": " 1+1", "response": "2 "}\n')
        self.make("--text", pair, "--tokenizer", folder, "--val", "0", "--no-chat-template")
        self.assertEqual(self.documents("train"), [b" 1+12 "])
        self.refused("b.jsonl:2: a message holds the special token <|im_end|>", "--tokenizer", folder, "--val", "0", "--text",
                     self.write("b.jsonl", b'\n{"prompt": "x<|im_end|>", "response": "y"}\n'))
        for template, part in ((b"{% for %}", "chat_template.jinja:1: "), (b"{{ x.y.z }}", "chat_template.jinja:1: "),
                               (b"{{ messages | length }}", "writes message 2, an assistant turn, or what is before it, otherwise"),
                               (b"{{ raise_exception('no system') }}", "no system")):
            self.write("tok/chat_template.jinja", template)
            self.refused(part, "--tokenizer", folder, "--val", "0", "--text", pair)


class Folders(unittest.TestCase):
    def test_a_folder_that_cannot_be_listed_is_an_error(self):
        """os.walk() passes over it: the data would lack its files."""
        denied = PermissionError(13, "Permission denied", "inner")
        with mock.patch("os.scandir", side_effect=denied), self.assertRaisesRegex(PermissionError, "inner"):
            text_input.find_files([os.path.dirname(os.path.abspath(__file__))])


class TemplateTest(DataTest):
    TURNS = """
{{- tools | tojson if tools is not none else 'none' }}{{ documents | tojson if documents is not none else 'none' }}
{{- mode }}
{%- for m in messages %}<|im_start|>{{ m.role }}|{{ m | tojson }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant|{% endif %}"""
    CALL = {"id": "1", "type": "function",
            "function": {"name": "add", "arguments": {"b": 1, "a": [2.5, None, "\u00e9<"]}}}
    TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

    def tokenizer(self, template, special=("<|im_start|>", "<|im_end|>"), **config):
        root = json.loads(make_data.byte_tokenizer())
        for i, token in enumerate(special, 257):
            root["added_tokens"].append({**root["added_tokens"][0], "id": i, "content": token})
        self.special = {i: token.encode() for i, token in enumerate(special, 257)}
        self.write("tok/chat_template.jinja", template.encode())
        self.write("tok/tokenizer_config.json", json.dumps(config).encode())
        return os.path.dirname(self.write("tok/tokenizer.json", json.dumps(root).encode()))

    def text(self, loss_only=False):
        tokens, mask = self.tokens("train"), self.mask("train")
        return b"".join(self.special.get(t) or bytes([t])
                        for t, is_loss in zip(tokens, mask) if is_loss or not loss_only).decode()

    def both(self, row, template, *special, kind="jsonl", **config):
        """All the text that a template made of a row, and that of its loss tokens."""
        folder = self.tokenizer(template, *special, **config)
        if kind == "parquet":
            import pyarrow
            import pyarrow.parquet
            path = self.path("a.parquet")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        else:
            path = self.write("a.jsonl", json.dumps(row).encode())
        self.make("--text", path, "--tokenizer", folder, "--val", "0")
        return self.text(), self.text(loss_only=True)


class Templates(TemplateTest):
    """What reaches a chat template is what transformers' apply_chat_template(messages, tools=…, documents=…) gives to
    it: keys without a value are left out, reasoning has the names that templates read (transformers 5.24)."""

    def test_all_keys_reach_the_template(self):
        messages = [
            {"role": "user", "content": "1+2?", "name": "Ann", "weight": None},
            {"content": None, "role": "assistant", "tool_calls": [self.CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
            {"role": "assistant", "content": "It is 3.", "reasoning": "hm", "x": {"y": -0.0}}]
        given = [
            {"role": "user", "content": "1+2?", "name": "Ann"}, {"role": "assistant", "tool_calls": [self.CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
            {"thinking": "hm", "role": "assistant", "content": "It is 3.", "reasoning": "hm", "x": {"y": -0.0},
             "reasoning_content": "hm"}]

        def dumped(value):
            return json.dumps(value, ensure_ascii=False)

        turns = [f"<|im_start|>{m['role']}|{dumped(m)}<|im_end|>" for m in given]
        learnt = "".join(dumped(m) + "<|im_end|>" for m in (given[1], given[3]))
        row = {"messages": messages, "tools": self.TOOLS, "documents": [{"title": "T", "text": "D"}],
               "chat_template_kwargs": {"mode": "deep"}, "id": 7}
        head = dumped(self.TOOLS) + dumped(row["documents"]) + "deep"
        self.assertEqual(self.both(row, self.TURNS), (head + "".join(turns), learnt))
        row = {"messages": messages, "tools": json.dumps(self.TOOLS), "documents": ""}  # JSON in strings
        self.assertEqual(self.both(row, self.TURNS), (dumped(self.TOOLS) + "none" + "".join(turns), learnt))
        self.assertEqual(self.both({"messages": messages}, self.TURNS), ("nonenone" + "".join(turns), learnt))
        # A turn of calls alone is a response.
        self.assertEqual(self.both({"messages": messages[:2]}, self.TURNS),
                         ("nonenone" + "".join(turns[:2]), dumped(given[1]) + "<|im_end|>"))

    @unittest.skipUnless(HAVE_PYARROW, "the Python package pyarrow is missing")
    def test_rows_of_parquet(self):
        """Arrow gives each struct all fields of its column; those without a value were not there."""
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        messages = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "content": "3", "name": "add"}, {"role": "assistant", "content": "3!"}]
        given = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "tool_calls": [call]},
                 {"role": "tool", "content": "3", "name": "add"}, {"role": "assistant", "content": "3!"}]
        template = "{{ tools | tojson }}{% for m in messages %}" \
                   "<|im_start|>{{ m.role }}|{{ m | tojson(sort_keys=true) }}<|im_end|>{% endfor %}"
        text, _ = self.both({"messages": messages, "tools": json.dumps(self.TOOLS)}, template, kind="parquet")
        self.assertEqual(text, json.dumps(self.TOOLS) + "".join(
            f"<|im_start|>{m['role']}|{json.dumps(m, sort_keys=True)}<|im_end|>" for m in given))

    def test_special_tokens_around_calls_are_loss_tokens(self):
        template = """
{%- for m in messages %}
{%- if m.role != 'assistant' %}<|user|>{{ m.content }}{% else %}{{ m.content }}
{%- if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}<|call|>{{ c.function.name }}<|sep|>
{{- c.function.arguments | tojson }}
{%- endfor %}<|end_calls|>{% endif %}</s>{{ '\n' }}{% endif %}{% endfor %}"""
        special = ("<|user|>", "<|calls|>", "<|call|>", "<|sep|>", "<|end_calls|>", "</s>")
        row = {"messages": [{"role": "user", "content": "Hi"},
                            {"role": "assistant", "content": "", "tool_calls": [self.CALL] * 2},
                            {"role": "tool", "content": "3"},
                            {"role": "assistant", "content": "3.", "tool_calls": [self.CALL]},
                            {"role": "tool", "content": "4"}, {"role": "assistant", "content": "Done"}]}
        call = "<|call|>add<|sep|>" + json.dumps(self.CALL["function"]["arguments"], ensure_ascii=False)
        _, learnt = self.both(row, template, special)
        self.assertEqual(learnt, f"<|calls|>{call}{call}<|end_calls|></s>3.<|calls|>{call}<|end_calls|></s>Done</s>")

    def test_parts_of_text(self):
        """A template that reads lists gets the list; another one gets the text, not a list as Python prints it."""
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]}
        turn = "{% for m in messages %}<|im_start|>CONTENT<|im_end|>{% endfor %}"
        listed = "{% if m.content is string %}{{ m.content }}" \
                 "{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}"
        for content, texts in ((listed, ("(a)(b)", "(a)")), ("{{ m.content }}", ("a\nb", "a")),
                               ("{{ m.content + '!' }}", ("a\nb!", "a!")),
                               ("{{ m.content if m.content is string }}", ("a\nb", "a"))):
            text, _ = self.both(row, turn.replace("CONTENT", content))
            self.assertEqual(text, "".join(f"<|im_start|>{t}<|im_end|>" for t in texts), content)

    def test_only_the_completion_is_learnt(self):
        row = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                          {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]}
        template = "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content }}<|im_end|>{% endfor %}" \
                   "{% if add_generation_prompt %}<|im_start|>assistant|{% endif %}"
        text, learnt = self.both(row, template)
        self.assertEqual(text, "".join(f"<|im_start|>{r}|{c}<|im_end|>" for r, c in zip(
            ("user", "assistant", "user", "assistant"), "abcd")))
        self.assertEqual(learnt, "d<|im_end|>")
        # A turn of weight 0 is an input, too, and the weight reaches no template.
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
                 {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 1}]
        printed = template.replace("m.content", "m.content ~ m.weight")
        self.assertEqual(self.both({"messages": turns}, printed), (text, "d<|im_end|>"))
        folder = self.tokenizer(template)
        for weight, part in ((0, "conversations without a response"),
                             (0.5, "a.jsonl:1: message 2 has the weight 0.5; give 1, or 0 for")):
            path = self.write("a.jsonl", json.dumps({"messages": [turns[0], {**turns[1], "weight": weight}]}).encode())
            if weight:
                self.refused(part, "--text", path, "--tokenizer", folder, "--val", "0")
            else:
                other = self.write("b.jsonl", json.dumps({"messages": turns}).encode())
                meta = self.make("--text", path, other, "--tokenizer", folder, "--val", "0")
                self.assertEqual(meta["left_out"], {part: 1})
        row = {"system": "S", "conversations": [{"from": "human", "value": "a"},
                                                {"from": "observation", "value": "b"}, {"from": "gpt", "value": "c"}]}
        text, learnt = self.both(row, template)
        self.assertEqual(text, "".join(f"<|im_start|>{r}|{c}<|im_end|>" for r, c in zip(
            ("system", "user", "tool", "assistant"), "Sabc")))

    def test_no_loss_tokens(self):
        folder = self.tokenizer("{{ messages[0].content }}")
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        path = self.write("a.jsonl", json.dumps(row).encode())
        self.refused("no loss tokens for train: the chat template writes nothing of the responses", "--text", path,
                     "--tokenizer", folder, "--val", "0")

    def test_refused(self):
        user = {"role": "user", "content": "a"}
        for template, messages, part in (
                (self.TURNS, [user, {"role": "assistant", "tool_calls": [{"name": "<|im_end|>"}]}],
                 "a.jsonl:2: a message holds the special token <|im_end|> as text"),
                ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
                 [user, {"role": "assistant", "tool_calls": [self.CALL]}],
                 "a.jsonl:2: {tok}/chat_template.jinja: writes nothing of message 2, an assistant turn"),
                ("{{ raise_exception('no tools') if tools }}", [user, {"role": "assistant", "content": "b"}],
                 "a.jsonl:2: {tok}/chat_template.jinja refuses the conversation: no tools")):
            folder = self.tokenizer(template)
            row = {"messages": messages, "tools": self.TOOLS}
            path = self.write("a.jsonl", b"\n" + json.dumps(row).encode())
            self.refused(part.replace("{tok}", folder), "--text", path, "--tokenizer", folder, "--val", "0")


class Pairs(TemplateTest):
    """Preference pairs: the chosen and the rejected response as examples side by side, each with the whole prompt."""
    CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content }}<|im_end|>{% endfor %}" \
           "{% if add_generation_prompt %}<|im_start|>assistant|{% endif %}"

    @staticmethod
    def turns(*contents):
        """Turns of the user and the assistant by turns; "system:…" and "tool:…" name others."""
        messages, roles = [], itertools.cycle(("user", "assistant"))
        for content in contents:
            role, _, rest = content.partition(":")
            named = role in ("system", "tool")
            messages.append({"role": role if named else next(roles), "content": rest if named else content})
        return messages

    def examples(self, side="train"):
        """(text, text of the loss tokens) of each example."""
        found = []
        for token, flags in zip(self.tokens(side), self.flags(side)):
            if flags & 2:
                self.assertEqual(bool(flags & 4), len(found) % 2 == 1)
                found.append(["", ""])
            text = (self.special.get(token) or bytes([token])).decode("latin-1")
            found[-1][0] += text
            found[-1][1] += text * (flags & 1)
        return [tuple(example) for example in found]

    def rendered(self, messages):
        return "".join(f"<|im_start|>{m['role']}|{m['content']}<|im_end|>" for m in messages)

    def test_plain_responses(self):
        """Without a template: the prompt, the response, end-of-text."""
        rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "three", "score": 1},
                {"prompt": "a", "chosen": "bc", "rejected": "b"}]
        path = self.write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        meta = self.make("--text", path, "--tokenizer", "byte", "--val", "0")
        self.assertEqual(self.documents("train"), [b"1+1=2", b"1+1=three", b"abc", b"ab"])
        flags = [2, 0, 0, 0, 1, 1] + [6, 0, 0, 0] + [1] * 6 + [2, 1, 1, 1] + [6, 1, 1]
        self.assertEqual(self.flags("train"), flags)
        self.assertEqual(meta["train"], {"bytes": 19, "documents": 2, "tokens": 23, "shards": 1, "loss_tokens": 13,
                                         "pairs": 2})
        self.make("--text", path, "--tokenizer", "byte", "--val", "0", "--shard-tokens", "3")  # some without flag 4
        self.assertEqual(self.flags("train"), flags)

    def test_shapes(self):
        """All ways to write one pair, in each format, have the same tokens."""
        prompt, good, bad = self.turns("system:S", "a", "b", "c"), self.turns("", "good")[1:], self.turns("", "bad")[1:]
        rows = [{"prompt": prompt, "chosen": "good", "rejected": "bad"},
                {"prompt": prompt, "chosen": good, "rejected": bad},
                {"chosen": prompt + good, "rejected": prompt + bad},
                {"prompt": None, "chosen": prompt + good, "rejected": prompt + bad},
                {"prompt": prompt, "chosen": prompt + good, "rejected": prompt + bad},
                {"prompt": " c\n", "chosen": prompt + good, "rejected": prompt + bad, "messages": prompt + good},
                {"prompt": [*prompt[:2], {**prompt[2], "weight": 1}, prompt[3]], "chosen": prompt + good,
                 "rejected": prompt + bad},
                {"system": "S", "prompt": prompt[1:], "chosen": good, "rejected": bad},
                {"chosen": [{"from": m["role"], "value": m["content"]} for m in prompt + good],
                 "rejected": [{"from": m["role"], "value": m["content"]} for m in prompt + bad]}]
        folder = self.tokenizer(self.CHAT)
        expected = [(self.rendered(prompt + good), "good<|im_end|>"), (self.rendered(prompt + bad), "bad<|im_end|>")]
        for row in rows:
            line = (json.dumps(row) + "\n").encode()
            paths = [self.write("a.jsonl", line), self.write("b.json", b"[" + line + b"]"),
                     self.write("c.jsonl.gz", gzip.compress(line))]
            if HAVE_PYARROW:
                import pyarrow
                import pyarrow.parquet
                paths.append(self.path("in", "d.parquet"))
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), paths[-1])
            for path in paths:
                self.make("--text", path, "--tokenizer", folder, "--val", "0")
                self.assertEqual(self.examples(), expected, (path, row))
        # A prompt of one user turn; responses of several turns, of which only what differs is learnt.
        self.both({"prompt": "c", "chosen": "good", "rejected": "bad"}, self.CHAT)
        self.assertEqual(self.examples(), [(self.rendered(self.turns("c", "good")), "good<|im_end|>"),
                                           (self.rendered(self.turns("c", "bad")), "bad<|im_end|>")])
        one, other = self.turns("a", "b", "c", "d"), self.turns("a", "x", "c", "y")
        self.both({"chosen": one, "rejected": other}, self.CHAT)
        self.assertEqual(self.examples(), [(self.rendered(one), "b<|im_end|>d<|im_end|>"),
                                           (self.rendered(other), "x<|im_end|>y<|im_end|>")])
        self.both({"prompt": "a", "chosen": one[1:], "rejected": one[1:3] + other[3:]}, self.CHAT)
        self.assertEqual([loss for _, loss in self.examples()], ["b<|im_end|>d<|im_end|>", "b<|im_end|>y<|im_end|>"])

    def test_tools(self):
        row = {"prompt": "1+2?", "rejected": "4", "tools": self.TOOLS,
               "chosen": [{"role": "assistant", "content": None, "tool_calls": [self.CALL]},
                          {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3!"}]}
        self.both(row, self.TURNS)
        (chosen, learnt), (rejected, _) = self.examples()
        for text in (chosen, rejected):
            self.assertTrue(text.startswith(json.dumps(self.TOOLS)), text)
        self.assertEqual(learnt.count("<|im_end|>"), 2)
        self.assertNotIn('"tool",', learnt)

    def test_split_keeps_pairs(self):
        rows = [{"prompt": f"{i} ", "chosen": "is " + "x" * (i % 9), "rejected": "was " + "y" * (i % 5)}
                for i in range(200)]
        path = self.write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        for chunk in (text_input.INPUT_CHUNK, 100):
            with mock.patch.object(text_input, "INPUT_CHUNK", chunk):
                meta = self.make("--text", path, "--tokenizer", "byte", "--val", "0.1", "--jobs", "1")
            self.assertEqual((meta["train"]["pairs"], meta["val"]["pairs"]), (180, 20))
            found = []
            for side in ("train", "val"):
                documents = self.documents(side)
                for chosen, rejected in zip(documents[::2], documents[1::2]):
                    i = int(chosen.split()[0])
                    self.assertEqual([chosen, rejected],
                                     [f"{i} is {'x' * (i % 9)}".encode(), f"{i} was {'y' * (i % 5)}".encode()])
                    found.append(i)
                self.assertEqual([f & 4 for f in self.flags(side) if f & 2], [0, 4] * (len(documents) // 2))
            self.assertEqual(sorted(found), list(range(200)))
        self.refused("a single pair cannot be split", "--tokenizer", "byte",
                     "--text", self.write("one.jsonl", json.dumps(rows[0]).encode()))

    @needs_numpy
    def test_left_out(self):
        """A pair is one document: of 5 bytes, with the prompt on both sides, and equal only if both responses are."""
        rows = [{"prompt": "a", "chosen": chosen, "rejected": rejected}
                for chosen, rejected in (("b", "cd"), ("b", "ce"), ("b", "cd"), ("b", "c"), ("cd", "b"))]
        path = self.write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        meta = self.make("--text", path, "--tokenizer", "byte", "--val", "0", "--drop-duplicates", "--min-bytes", "5")
        self.assertEqual(self.documents("train"), [b"ab", b"acd", b"ab", b"ace", b"acd", b"ab"])
        self.assertEqual(meta["left_out"], {"duplicates": 1, "shorter than 5 bytes": 1})

    @needs_tokenizers
    def test_vocabulary_of_pairs(self):
        rows = [{"prompt": "aaaa", "chosen": "wxyz" * 9, "rejected": "stuv" * 9}] * 40
        path = self.write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.make("--text", path, "--vocab", "280")
        with open(os.path.join(self.out, "tokenizer.json"), encoding="utf-8") as f:
            vocabulary = json.load(f)["model"]["vocab"]
        for word in "aaaa", "wxyz", "stuv":
            self.assertIn(word, vocabulary)

    def test_refused_pairs(self):
        good = self.turns("a", "b")
        cases = (
            ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal; remove the pair"),
            ({"chosen": good, "rejected": good}, "'chosen' and 'rejected' are equal"),
            ({"prompt": "a", "chosen": "", "rejected": "b"}, "the chosen response is empty; remove the pair"),
            ({"prompt": "a", "chosen": "b", "rejected": []}, "the rejected response is empty"),
            ({"chosen": good, "rejected": self.turns("a")}, "the rejected response is empty"),
            ({"prompt": "a", "chosen": "b", "rejected": [{**good[1], "content": "c", "weight": 0}]},
             "the rejected response is empty"),
            ({"prompt": "", "chosen": "b", "rejected": "c"},
             "the pair has no shared prompt: 'chosen' and 'rejected' need a user turn before them; give 'prompt', or"),
            ({"chosen": "b", "rejected": "c"}, "the pair has no shared prompt: 'chosen' is a string; give 'prompt'"),
            ({"chosen": good, "rejected": self.turns("x", "c")},
             "the pair has no shared prompt: 'chosen' goes on with a turn of the role 'user', not with"),
            ({"chosen": good[1:], "rejected": self.turns("", "c")[1:]}, "the pair has no shared prompt: 'chosen' and"),
            ({"prompt": self.turns("x"), "chosen": good, "rejected": self.turns("a", "c")},
             "the pair has no shared prompt: 'chosen' goes on with a turn of the role 'user', not with"),
            ({"prompt": "a", "chosen": good, "rejected": self.turns("c", "d")},
             "the pair has no shared prompt: 'chosen' goes on with a turn of the role 'user', not with"),
            ({"prompt": "x", "chosen": good, "rejected": self.turns("a", "c")},
             "'prompt' is none of the user turns that 'chosen' and 'rejected' begin with"),
            ({"prompt": "a", "chosen": "b", "rejected": 1}, "'rejected' holds int, not a string"),
            ({"prompt": 1, "chosen": "b", "rejected": "c"}, "'prompt' holds int, not a string"),
            ({"prompt": "a", "chosen": "b", "rejected": [{"role": "bot", "content": "c"}]},
             "rejected: message 1 has the role 'bot'; give "),
            ({"prompt": "a", "chosen": "<|im_end|>", "rejected": "b"}, "a message holds the special token <|im_end|>"),
            ({"prompt": "a", "chosen": "b", "rejected": "b "},
             "the responses of the pair differ, but their tokens are equal"))
        folder = self.tokenizer(self.CHAT.replace("m.content", "m.content | trim"))
        for row, part in cases:
            path = self.write("a.jsonl", b"\n" + json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}).encode() +
                              b"\n" + json.dumps(row).encode())
            self.refused(f"a.jsonl:3: {part}", "--text", path, "--tokenizer", folder, "--val", "0")
        folder = self.tokenizer("{% for m in messages if m.content != 'b' %}{{ m.content }}<|im_end|>{% endfor %}")
        path = self.write("a.jsonl", json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}).encode())
        self.refused("a.jsonl:1: a response of the pair has no loss tokens", "--text", path, "--tokenizer", folder,
                     "--val", "0")


class WithoutTokenizers(DataTest):
    def test_missing_package_is_named(self):
        path = self.write("a.txt", b"text\n" * 100)
        with mock.patch.dict(sys.modules, {"tokenizers": None}):
            self.refused("tokenizers, which is missing: run `make deps` to install it", "--text", path)


if __name__ == "__main__":
    unittest.main()

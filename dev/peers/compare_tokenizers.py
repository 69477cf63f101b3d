#!/usr/bin/env python3
"""Compares data/tokenizer.cpp with the package `tokenizers` on random strings: for the tokenizer of each family
(dev/peers/tokenizer_families.py) the ids with and without special tokens, the decoded text, the round trip, and the ids
of bytes that are not UTF-8.

    dev/peers/compare_tokenizers.py [--strings 100000] [--seed 2] [FAMILY ...]

Needs the package tokenizers and build/cpu/dev/test_tokenizer, which `make test OP=tokenizer` builds. Prints a line for each
family; exit status 1 if one differs.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TESTS = ("IdsMatchTheTokenizersPackage", "BytesThatAreNotTextMatchMakeData", "DecodeIsTheInverseForAnyBytes")


def compare(binary, family, strings, seed):
    """The differences, as the test prints them; "" if there are none."""
    from make_tokenizer_fixture import write_family

    with tempfile.TemporaryDirectory(prefix="train_gpt_") as folder:
        with contextlib.redirect_stdout(None):
            write_family(os.path.join(folder, family + ".json"), family, strings, seed)
        done = subprocess.run(
            [binary, "--gtest_brief=1", "--gtest_filter=" + ":".join(f"Tokenizer.{test}" for test in TESTS)],
            cwd=ROOT,
            text=True,
            errors="replace",
            env={**os.environ, "TOKENIZER_FIXTURES": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode == 0 and f"[  PASSED  ] {len(TESTS)} tests." in done.stdout:
        return ""
    return done.stdout.strip() or f"{binary} ended with status {done.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--strings", type=int, default=100000, help="random strings for each family (default 100000)")
    parser.add_argument("--seed", type=int, default=2, help="of the strings (default 2; the fixtures have 1)")
    parser.add_argument(
        "--binary",
        default=os.path.join(ROOT, "build", "cpu", "dev", "test_tokenizer"),
        help="default: build/cpu/dev/test_tokenizer",
    )
    args = parser.parse_args()
    if not os.access(args.binary, os.X_OK):
        parser.error(f"{args.binary} is missing; run `make test OP=tokenizer BACKEND=cpu`")
    try:
        import tokenizers
    except ImportError:
        parser.error("the Python package tokenizers is missing; run `make deps`")
    from tokenizer_families import FAMILIES

    unknown = sorted(set(args.families) - set(FAMILIES))
    if unknown:
        parser.error(f"there is no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    print(f"tokenizers {tokenizers.__version__}, {args.strings} strings for each family, seed {args.seed}")
    failed = 0
    for family in args.families or FAMILIES:
        differences = compare(args.binary, family, args.strings, args.seed)
        failed += bool(differences)
        print(f"{family}: {'equal' if not differences else differences[:4000]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

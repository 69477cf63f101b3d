#!/usr/bin/env python3
"""Shows that the tests can fail: breaks the code one line at a time, in a copy, and demands that a test notices.

    scripts/run_mutants.py                 every mutant (make mutants)
    scripts/run_mutants.py layernorm       those of one op, as `make test OP=layernorm` names it (make mutants OP=layernorm)
    scripts/run_mutants.py --list

dev/mutants/*.txt holds them, each as

    kernels/layernorm.cpp layernorm        the file to break, and the OP of `make test` that must fail
    - const float s = rstd;                a fragment of one line, which must occur exactly once in the file
    + const float s = 1;                   what takes its place

with empty lines and lines that begin with # between them. A mutant whose fragment is gone, that does not compile, or
that no test notices is a failure, and so is an OP whose tests fail without any mutant. Exit status 1 if there is one.
"""
import argparse
import glob
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

TREE = os.path.join("build", "mutants")  # the copy that gets broken


@dataclass
class Mutant:
    where: str  # file:line of the list
    file: str
    op: str
    old: str
    new: str


def read_mutants(path):
    with open(path, encoding="utf-8") as lines:
        entries = [(number, line.rstrip("\n")) for number, line in enumerate(lines, 1)
                   if line.strip() and not line.startswith("#")]
    mutants = []
    while entries:
        head, old, new = (entries + [(0, ""), (0, "")])[:3]
        entries = entries[3:]
        where, words = f"{path}:{head[0]}", head[1].split()
        if len(words) != 2 or not old[1].startswith("- ") or not new[1].startswith("+"):
            sys.exit(f"{where}: expected 'FILE OP', then '- fragment', then '+ replacement'")
        mutants.append(Mutant(where, words[0], words[1], old[1][2:].strip(), new[1][1:].strip()))
    return mutants


def mutated(mutant, tree):
    """The broken text of the mutant's file in the tree, or None and a complaint."""
    try:
        with open(os.path.join(tree, mutant.file), encoding="utf-8") as source:
            text = source.read()
    except OSError as error:
        return None, f"cannot read {mutant.file}: {error.strerror}"
    count = text.count(mutant.old)
    if count != 1:
        return None, f"the fragment occurs {count} times in {mutant.file}, not once: {mutant.old}"
    if mutant.old == mutant.new:
        return None, "the replacement changes nothing"
    return text.replace(mutant.old, mutant.new), None


def copy_tree():
    """What git knows or would add, brought up to date in TREE; unchanged files keep their time, so objects stay good."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            check=True, stdout=subprocess.PIPE).stdout.decode()
    files = {name for name in listed.split("\0") if name and os.path.isfile(name)}
    for folder, _, names in os.walk(TREE):
        for name in names:
            copy = os.path.relpath(os.path.join(folder, name), TREE)
            if copy not in files and not copy.startswith(("build" + os.sep, ".venv")):
                os.remove(os.path.join(TREE, copy))
    for name in files:
        copy = os.path.join(TREE, name)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if not os.path.exists(copy) or open(copy, "rb").read() != open(name, "rb").read():
            shutil.copy(name, copy)
    if not os.path.exists(os.path.join(TREE, ".venv")):
        os.symlink(os.path.abspath(".venv"), os.path.join(TREE, ".venv"))


def make_test(op, timeout):
    """Builds and runs the op's tests in the copy: 'passes', 'fails' or 'does not build', and the output."""
    # The outer make's variables would reach the inner one; it shall see a plain command line, and no warning for what a
    # broken line no longer uses.
    plain = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "OP", "WERROR")
    environment = {key: value for key, value in os.environ.items() if key not in plain}
    environment["DEPS"] = "no"
    outputs = []
    for target in ("test-binaries", "test"):
        try:
            done = subprocess.run(["make", "BACKEND=cpu", target, f"OP={op}"], cwd=TREE, env=environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)
        except subprocess.TimeoutExpired:
            return "fails", f"no end after {timeout} s"
        outputs.append(done.stdout.decode(errors="replace"))
        if done.returncode:
            return ("does not build" if target == "test-binaries" else "fails"), outputs[-1]
    return "passes", outputs[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="?", help="only the mutants that this OP's tests must notice")
    parser.add_argument("--list", action="store_true", help="print the mutants and check their fragments; break nothing")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one build or test (default %(default)s)")
    args = parser.parse_args()

    mutants = [m for path in sorted(glob.glob("dev/mutants/*.txt")) for m in read_mutants(path)]
    mutants = [m for m in mutants if args.op in (None, m.op)]
    if not mutants:
        sys.exit(f"dev/mutants/ has no mutant{f' for {args.op}' if args.op else ''}")
    bad = []
    if args.list:
        for m in mutants:
            complaint = mutated(m, ".")[1]
            print(f"{m.file} ({m.op}): {m.old}  ->  {m.new}" + (f"\n    {m.where}: {complaint}" if complaint else ""))
            bad += [complaint] if complaint else []
        return 1 if bad else 0

    copy_tree()
    for op in sorted({m.op for m in mutants}):
        state, output = make_test(op, args.timeout)
        if state != "passes":
            print(output)
            sys.exit(f"make test OP={op} {state} without any mutant")
    noticed = 0
    for m in mutants:
        start = time.monotonic()
        text, complaint = mutated(m, TREE)
        if text is not None:
            copy = os.path.join(TREE, m.file)
            with open(copy, "rb") as source:
                whole = source.read()
            try:
                with open(copy, "w", encoding="utf-8") as target:
                    target.write(text)
                state, output = make_test(m.op, args.timeout)
            finally:
                with open(copy, "wb") as target:
                    target.write(whole)
            if state == "does not build":
                complaint = "does not build:\n" + output
            elif state == "passes":
                complaint = f"make test OP={m.op} did not notice"
        verdict = "NOT OK " if complaint else "noticed"
        print(f"{verdict} {m.file} ({m.op}): {m.old}  ->  {m.new}  ({time.monotonic() - start:.0f} s)", flush=True)
        if complaint:
            print(f"        {m.where}: {complaint}", flush=True)
            bad.append(m)
        else:
            noticed += 1
    print(f"{len(mutants)} mutants: {noticed} noticed, {len(bad)} not")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

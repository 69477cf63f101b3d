#!/usr/bin/env python3
"""Mutation testing: applies one-line mutations to a copy of the tree, one at a time; a test must fail for each.

    scripts/run_mutants.py                 every mutant (make mutants)
    scripts/run_mutants.py layernorm       the mutants of one op (make mutants OP=layernorm)
    scripts/run_mutants.py --list
    scripts/run_mutants.py --backend cuda  those of dev/mutants/cuda.txt, on the GPU of this machine (scripts/check_gpu.sh)

A mutant in dev/mutants/*.txt has this form:

    kernels/layernorm.cpp layernorm        the file to break, and the OP of `make test` that must fail
    - const float s = rstd;                a fragment of one line, which must occur exactly once in the file
    + const float s = 1;                   its replacement

Empty lines and lines that begin with # are ignored. It is a failure if a fragment is missing, a mutant does not compile
or survives the tests, or an OP's tests fail without a mutant. Exit status 1 after a failure.

With --backend cuda a mutant costs one object and one test program. Several copies of the tree are mutated in parallel; they
start with the objects of build/cuda, which must be up to date (`make BACKEND=cuda test-binaries`).
"""
import argparse
import glob
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

TREE = os.path.join("build", "mutants")  # the copy that is mutated; with CUDA one for each job, TREE-0, TREE-1, ...
CUDA_LIST = os.path.join("dev", "mutants", "cuda.txt")
CUDA_BUILD = os.path.join("build", "cuda")


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


def copy_tree(tree):
    """Copies all files that git tracks or would add. Unchanged files are not touched, so objects stay up to date."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            check=True, stdout=subprocess.PIPE).stdout.decode()
    files = {name for name in listed.split("\0") if name and os.path.isfile(name)}
    for folder, _, names in os.walk(tree):
        for name in names:
            copy = os.path.relpath(os.path.join(folder, name), tree)
            if copy not in files and not copy.startswith(("build" + os.sep, ".venv")):
                os.remove(os.path.join(tree, copy))
    for name in files:
        copy = os.path.join(tree, name)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        if not os.path.exists(copy) or open(copy, "rb").read() != open(name, "rb").read():
            shutil.copy2(name, copy)
    if not os.path.lexists(os.path.join(tree, ".venv")):
        os.symlink(os.path.abspath(".venv"), os.path.join(tree, ".venv"))


def plain_environment():
    """Without the variables of an outer make, which would reach the inner one, and without WERROR, because a mutated line may
    leave a variable unused."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "OP", "WERROR")
    return {**{key: value for key, value in os.environ.items() if key not in outer}, "DEPS": "no"}


def run_step(command, tree, timeout):
    """(exit status, output) of a command; None instead of the status after a time-out."""
    try:
        done = subprocess.run(command, cwd=tree, env=plain_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, f"no end after {timeout} s"
    return done.returncode, done.stdout.decode(errors="replace")


def test_steps(op, backend):
    """The commands that build and run an op's tests."""
    if backend == "cuda":
        program = os.path.join(CUDA_BUILD, "dev", f"test_{op}")
        return ["make", "BACKEND=cuda", "-j1", program], [program]
    return ["make", "BACKEND=cpu", "test-binaries", f"OP={op}"], ["make", "BACKEND=cpu", "test", f"OP={op}"]


def run_test(op, backend, tree, timeout):
    """Builds and runs the op's tests in the copy: 'passes', 'fails' or 'does not build', and the output."""
    build, test = test_steps(op, backend)
    status, output = run_step(build, tree, timeout)
    if status is None:
        return "fails", output
    if status:
        return "does not build", output
    status, output = run_step(test, tree, timeout)
    return ("passes" if status == 0 else "fails"), output


def check_unmutated(ops, backend, trees, timeout):
    """Exits with an error if an op's tests fail without a mutant. With CUDA the tests of several ops run at a time."""
    def check(op):
        if backend == "cuda":  # built already
            status, output = run_step(test_steps(op, backend)[1], trees[0], timeout)
            return op, "passes" if status == 0 else "fails", output
        return (op, *run_test(op, backend, trees[0], timeout))

    with ThreadPoolExecutor(len(trees)) as jobs:
        for op, state, output in jobs.map(check, ops):
            if state != "passes":
                sys.exit(f"{output}the tests of {op}: {state} without any mutant")


def check_mutant(mutant, backend, tree, timeout):
    """Applies the mutant, runs its tests and restores the file. Returns a complaint, or None if a test failed."""
    text, complaint = mutated(mutant, tree)
    if text is None:
        return complaint
    copy = os.path.join(tree, mutant.file)
    built = os.path.join(tree, CUDA_BUILD, mutant.file + ".o")
    with open(copy, "rb") as source:
        whole = source.read()
    if backend == "cuda":
        shutil.copy2(built, built + ".whole")
    try:
        with open(copy, "w", encoding="utf-8") as target:
            target.write(text)
        state, output = run_test(mutant.op, backend, tree, timeout)
    finally:
        with open(copy, "wb") as target:
            target.write(whole)
        if backend == "cuda":  # newer than the file, so it is linked again but not compiled again
            shutil.copy(built + ".whole", built)
    if state == "does not build":
        return "does not build:\n" + output
    return f"the tests of {mutant.op} did not notice" if state == "passes" else None


def check_all(mutants, backend, trees, timeout):
    """Checks the mutants, one job for each tree, and prints a line for each. Returns the number of failures."""
    waiting, lock, failures = queue.SimpleQueue(), threading.Lock(), []
    for mutant in mutants:
        waiting.put(mutant)

    def work(tree):
        while True:
            try:
                m = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            complaint = check_mutant(m, backend, tree, timeout)
            with lock:
                verdict = "NOT OK " if complaint else "noticed"
                print(f"{verdict} {m.file} ({m.op}): {m.old}  ->  {m.new}  ({time.monotonic() - start:.0f} s)", flush=True)
                if complaint:
                    print(f"        {m.where}: {complaint}", flush=True)
                    failures.append(m)

    jobs = [threading.Thread(target=work, args=(tree,)) for tree in trees]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    print(f"{len(mutants)} mutants: {len(mutants) - len(failures)} noticed, {len(failures)} not")
    return len(failures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="?", help="only the mutants that this op's tests must notice")
    parser.add_argument("--list", action="store_true", help="print the mutants and check their fragments; run nothing")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu", help="default %(default)s")
    parser.add_argument("--jobs", type=int, default=4, help="mutants at a time with --backend cuda (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one build or test (default %(default)s)")
    args = parser.parse_args()

    lists = [CUDA_LIST] if args.backend == "cuda" else sorted(set(glob.glob("dev/mutants/*.txt")) - {CUDA_LIST})
    mutants = [m for path in lists for m in read_mutants(path) if args.op in (None, m.op)]
    if not mutants:
        sys.exit(f"dev/mutants/ has no mutant{f' for {args.op}' if args.op else ''}")
    bad = []
    if args.list:
        for m in mutants:
            complaint = mutated(m, ".")[1]
            print(f"{m.file} ({m.op}): {m.old}  ->  {m.new}" + (f"\n    {m.where}: {complaint}" if complaint else ""))
            bad += [complaint] if complaint else []
        return 1 if bad else 0

    trees = [f"{TREE}-{job}" for job in range(args.jobs)] if args.backend == "cuda" else [TREE]
    for tree in trees:
        copy_tree(tree)
        if args.backend == "cuda":
            shutil.copytree(CUDA_BUILD, os.path.join(tree, CUDA_BUILD), symlinks=True, dirs_exist_ok=True)
    check_unmutated(sorted({m.op for m in mutants}), args.backend, trees, args.timeout)
    return 1 if check_all(mutants, args.backend, trees, args.timeout) else 0


if __name__ == "__main__":
    sys.exit(main())

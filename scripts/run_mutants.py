#!/usr/bin/env python3
"""Mutation testing: applies one-line mutations to copies of the tree, one at a time in each; a test must fail for each.

    scripts/run_mutants.py                 every mutant (make mutants)
    scripts/run_mutants.py layernorm       the mutants of one op (make mutants OP=layernorm)
    scripts/run_mutants.py --list          only checks the lists, in less than a second
    scripts/run_mutants.py --backend cuda  those of dev/mutants/cuda.txt, on this machine's GPU (scripts/check_gpu.sh)

A mutant in dev/mutants/*.txt has this form:

    kernels/norm.cpp layernorm             the file to break, and the OP of `make test` that must fail
    - const float s = rstd;                a fragment of one line, which must occur exactly once in the file
    + const float s = 1;                   its replacement

Empty lines and lines that begin with # are ignored. It is a failure if a fragment is missing, a mutant does not compile
or survives the tests, no test links the file, or an OP's tests fail without a mutant. Exit status 1 after a failure.

First `make` brings build/<backend> up to date: the programs of the tests, and what the Python tests of an op start. The
copies of the tree begin with these objects. A mutant then costs the objects that its file is compiled into, and the
programs that link them: they are made with the commands of make, without make's own time, and put back afterwards. The
tests of an op end with the first that fails, whose name is printed.
"""
import argparse
import contextlib
import glob
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

TREE = os.path.join("build", "mutants")  # the copies that are mutated, one for each job: TREE-0, TREE-1, ...
CUDA_LIST = os.path.join("dev", "mutants", "cuda.txt")
# What Python tests start or load, beside their op's own program: the variable that names it to them, and the file.
PYTHON_PROGRAMS = {"TRAIN_GPT": "train_gpt", "TRAIN_GPT_KERNELS_LIB": "libtrain_gpt_kernels.so",
                   "TRAIN_GPT_DATA_LIB": "libtrain_gpt_data.so"}
PRELOADED = os.path.join("dev", "crash_shim.so")  # by tests of checkpoints into what they start


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


def list_of_mutants(backend, op=None):
    lists = [CUDA_LIST] if backend == "cuda" else sorted(set(glob.glob("dev/mutants/*.txt")) - {CUDA_LIST})
    return [m for path in lists for m in read_mutants(path) if op in (None, m.op)]


def environment():
    """Without the variables of an outer make, which the inner one would obey. Without WERROR, because a mutated line
    may leave a variable unused. Every file is compiled by itself, because one changes at a time."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "OP", "WERROR", "SANITIZE", "DEBUG", "V")
    return {**{key: value for key, value in os.environ.items() if key not in outer}, "DEPS": "no", "JUMBO": "no"}


def run_step(command, tree, limit):
    """(exit status, output) of a command; None instead of the status after a time-out. None of its processes stays."""
    process = subprocess.Popen(command, cwd=tree, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output = process.communicate(timeout=limit)[0].decode(errors="replace")
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, f"no end after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Tests:
    """The files of an op's tests, and the programs that they need."""

    def __init__(self, op, build):
        if op == "gpt":  # test_gpt.cu stands beside train_gpt.cu
            program, sources = "test_gpt", ["test_gpt.cu"]
        else:
            program, sources = f"dev/test_{op}", [f"dev/tests/test_{op}.cpp"]
            sources += [f"dev/tests/test_{op}.cu"] if build.endswith("cuda") else []
        self.programs = [os.path.join(build, program)] if any(map(os.path.exists, sources)) else []
        self.scripts = [path for path in (f"{folder}/test_{op}.py" for folder in ("data", "dev/tests", "dev/peers", "scripts"))
                        if os.path.exists(path)]
        self.files = self.programs + self.scripts
        # A script that only starts the op's program on several ranks asks the driver no more than how it was built.
        if any("run_test_on_several_ranks" not in open(path, encoding="utf-8").read() for path in self.scripts):
            self.programs = self.programs + [os.path.join(build, name) for name in PYTHON_PROGRAMS.values()]


class Build:
    """What make knows: the command for each object and program, and which files went into each."""

    def __init__(self, backend, jobs, limit):
        self.folder, self.jobs, self.limit = os.path.join("build", backend), jobs, limit
        self.make = ["make", f"BACKEND={backend}", f"-j{os.cpu_count()}"]
        self.commands = {}  # output: command
        self.includes = {}  # object: the files it was compiled from
        self.links = {}     # program: the objects in it
        self.archive = []   # the library and its objects
        self.trees = [f"{TREE}-{job}" for job in range(jobs)]

    def bring_up_to_date(self, ops):
        """Builds what the tests of these ops need, and asks make how."""
        goals = {program for op in ops for program in Tests(op, self.folder).programs}
        goals |= {os.path.join(self.folder, name) for name in (*PYTHON_PROGRAMS.values(), PRELOADED)}
        built = subprocess.run([*self.make, "--silent", *sorted(goals)], env=environment(), stdin=subprocess.DEVNULL)
        if built.returncode:
            sys.exit("The tests do not build without any mutant: see above.")
        asked = subprocess.run([*self.make, "--dry-run", "--always-make", "V=1", *sorted(goals)], env=environment(),
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout.decode()
        for line in asked.splitlines():
            if " -o " in line:
                words = shlex.split(line)
                self.commands[words[words.index("-o") + 1]] = words
            elif " ar " in line:  # rm -f ARCHIVE && ar rcs ARCHIVE OBJECTS
                self.archive = line.split(" ar ")[1].split()[1:]
        for output in self.commands:
            if output.endswith(".o"):
                with open(output[:-1] + "d", encoding="utf-8") as rules:
                    names = rules.read().replace("\\\n", " ").split("\n")[0].split()[1:]
                self.includes[output] = {os.path.normpath(name) for name in names}

    def copy_tree(self, tree):
        """Copies all files that git tracks or would add, objects and programs. The archive only names its objects."""
        shutil.rmtree(tree, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                check=True, stdout=subprocess.PIPE).stdout.decode()
        for name in [*listed.split("\0"), *self.commands]:
            if os.path.isfile(name):
                copy = os.path.join(tree, name)
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copy2(name, copy)
        for name in filter(os.path.exists, (".venv", ".deps")):
            os.symlink(os.path.abspath(name), os.path.join(tree, name))
        subprocess.run(["ar", "rcsT", *self.archive], cwd=tree, check=True)

    def objects(self, file):
        """The objects that a file goes into."""
        return {output for output, files in self.includes.items() if file in files}

    def find_links(self, program, tree):
        """Asks the linker which objects are in a program."""
        status, output = run_step([*self.commands[program], "-Wl,--trace"], tree, self.limit)
        if status != 0:
            sys.exit(f"{output}{program} does not link.")
        self.links[program] = self.includes.keys() & set(output.split("\n"))

    def run_tests(self, files, tree, limit):
        """Runs an op's tests up to the first failure: (the name of the test that failed or None, output)."""
        python = os.path.abspath(os.path.join(".venv", "bin", "python"))
        variables = [f"{variable}={os.path.join(os.path.abspath(tree), self.folder, name)}"
                     for variable, name in PYTHON_PROGRAMS.items()]
        status, output = run_step([python if os.path.exists(python) else sys.executable, "scripts/run_tests.py",
                                   "--jobs=1", "--fail-fast", *variables, *files], tree, limit)
        failed = re.search(r"^FAILED +\S+: (.+)$", output, re.M)
        return None if status == 0 else failed[1] if failed else output or f"exit status {status}", output


@contextlib.contextmanager
def replaced(files, tree):
    """Puts files of the tree aside, and back again in the end."""
    paths = [os.path.join(tree, file) for file in files]
    for path in paths:
        os.replace(path, path + ".whole")
    try:
        yield
    finally:
        for path in paths:
            os.replace(path + ".whole", path)


def check_unmutated(ops, build):
    """The seconds that each op's tests take. Exits with an error if they fail without a mutant."""
    free = queue.SimpleQueue()
    for tree in build.trees:
        free.put(tree)

    def check(op):
        tree, tests = free.get(), Tests(op, build.folder)
        for program in tests.programs:
            if program not in build.links:
                build.find_links(program, tree)
        start = time.monotonic()
        failed, output = build.run_tests(tests.files, tree, build.limit)
        free.put(tree)
        return op, failed, output, time.monotonic() - start

    print(f"Running the tests of {len(ops)} ops without mutants.", flush=True)
    seconds = {}
    with ThreadPoolExecutor(build.jobs) as jobs:
        for op, failed, output, taken in jobs.map(check, ops):
            if failed:
                jobs.shutdown(wait=False, cancel_futures=True)
                sys.exit(f"{output}The tests of {op} fail without any mutant.")
            seconds[op] = taken
    return seconds


def check_mutant(mutant, build, tree, limit):
    """Applies the mutant, runs its tests, restores the tree: (True, the test that failed) or (False, a complaint)."""
    text, complaint = mutated(mutant, tree)
    if text is None:
        return False, complaint
    tests, objects = Tests(mutant.op, build.folder), build.objects(mutant.file)
    programs = [program for program in tests.programs if objects & build.links[program]]
    objects = sorted(objects & {linked for program in programs for linked in build.links[program]})
    if not objects and not mutant.file.endswith(".py"):
        return False, f"no test of {mutant.op} links {mutant.file}"
    with replaced([mutant.file, *objects, *programs], tree):
        with open(os.path.join(tree, mutant.file), "w", encoding="utf-8") as target:
            target.write(text)
        for output in objects + programs:
            status, said = run_step(build.commands[output], tree, build.limit)
            if status != 0:
                return False, "does not build:\n" + said
        failed, _ = build.run_tests(tests.files, tree, limit)
    return (True, failed) if failed else (False, f"the tests of {mutant.op} did not notice")


def check_all(mutants, build, seconds):
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
            # A mutant may never end. Tests that run beside others take longer than they did, but not many times.
            noticed, what = check_mutant(m, build, tree, min(build.limit, 60 + 4 * seconds[m.op]))
            with lock:
                verdict = "noticed" if noticed else "NOT OK "
                print(f"{verdict} {m.file} ({m.op}): {m.old}  ->  {m.new}  ({time.monotonic() - start:.0f} s)")
                print(f"        {what if noticed else m.where + ': ' + what}", flush=True)
                if not noticed:
                    failures.append(m)

    with ThreadPoolExecutor(build.jobs) as jobs:
        for done in [jobs.submit(work, tree) for tree in build.trees]:
            done.result()
    print(f"{len(mutants)} mutants: {len(mutants) - len(failures)} noticed, {len(failures)} not")
    return len(failures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="?", help="only the mutants that this op's tests must notice")
    parser.add_argument("--list", action="store_true", help="print the mutants and check their fragments; run nothing")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu", help="default %(default)s")
    parser.add_argument("--jobs", type=int, default=max(2, os.cpu_count() // 2),
                        help="mutants at a time (default: half the cores, at least 2)")
    parser.add_argument("--timeout", type=float, default=1200,
                        help="seconds for one build, or the tests of one op (default %(default)s)")
    args = parser.parse_args()

    mutants = list_of_mutants(args.backend, args.op)
    if not mutants:
        sys.exit(f"dev/mutants/ has no mutant{f' for {args.op}' if args.op else ''}")
    if args.list:
        bad = 0
        for m in mutants:
            complaint = mutated(m, ".")[1]
            if not Tests(m.op, os.path.join("build", args.backend)).files:
                complaint = f"there is no dev/tests/test_{m.op}.cpp and no test_{m.op}.py"
            print(f"{m.file} ({m.op}): {m.old}  ->  {m.new}" + (f"\n    {m.where}: {complaint}" if complaint else ""))
            bad += complaint is not None
        return 1 if bad else 0

    ops = sorted({m.op for m in mutants})
    build = Build(args.backend, args.jobs, args.timeout)
    build.bring_up_to_date(ops)
    for tree in build.trees:
        build.copy_tree(tree)
    return 1 if check_all(mutants, build, check_unmutated(ops, build)) else 0


if __name__ == "__main__":
    sys.exit(main())

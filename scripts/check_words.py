#!/usr/bin/env python3
"""Checks that the tree speaks in standard terms: fails where a source, a page or a help text uses a word that docs/understand/glossary.md
replaces.

    scripts/check_words.py                         every tracked source, script and page
    scripts/check_words.py build/cpu/train_gpt     these and the --help output of each command of that driver

Only words that have no other sense in this project are listed, so that a finding is always a mistake. Exit status 1 if
there is one.
"""
import os
import re
import shutil
import subprocess
import sys

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")

# Pattern → what to write.
WORDS = [
    (r"texts (at a time|take part|that wait)|few texts|\d texts\b|texts of a batch|a text slides", "sequences, batch size"),
    (r"matrix products?", "matmul or GEMM"),
    (r"few rows|some rows of a product", "GEMV, small-batch GEMM"),
    (r"\bmultiprocessors?\b", "SM"),
    (r"the kernel (before|after)\b", "the previous kernel, the next kernel"),
    (r"likeliest", "most likely"),
    (r"learnt tokens?|scored tokens?", "loss tokens"),
    (r"begins? anew", "starts again"),
    (r"machine [A-E]\b", "the name of the GPU or CPU"),
    (r"the house\b|## The rooms|these rooms", "directories, modules"),
    (r"\bknobs?\b", "options, model options"),
    (r"kinds? `?[SLG]`?\b(?!')", "attention type softmax, linear or gated_linear"),
    (r"\bmix_(forward|backward)\b", "attention_in_sequences, layer_attention_backward"),
    (r"tensor cop(y|ies)\b|\b(copy|store)_box\b", "TMA copy, tma_load, tma_store"),
    (r"\bproduct_(begin|commit|wait|of_rows|of_columns|of_rounded)\b", "wgmma_fence, wgmma_commit, wgmma_wait, wgmma_ABt"),
    (r"\b(give_up|claim)_registers\b", "setmaxnreg_dec, setmaxnreg_inc"),
    (r"\bwait_for_previous\b|\blet_next_start\b", "pdl_wait, pdl_launch_dependents"),
    (r"\bsettled\b", "inputs_ready"),
    (r"\bFarewell\b", "AbortOnFailure"),
    (r"step in one launch|single launch of a step", "fused decode step"),
    (r"what is wrong is\b", "an error message names the fault"),
    (r"at moments\b", "in phases"),
]
PATTERNS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in WORDS]
SUFFIXES = (".cu", ".cuh", ".cpp", ".h", ".c", ".html", ".py", ".sh", ".md", ".txt", ".toml", "Makefile")
EXCEPT = ("dev/fixtures/", "scripts/check_words.py", "scripts/test_check_words.py")


def find(text):
    """(line number, words found, what to write) of each finding."""
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in PATTERNS:
            found = pattern.search(line)
            if found:
                findings.append((number, found.group(0), instead))
    return findings


def in_a_clone():
    return shutil.which("git") is not None and os.path.exists(os.path.join(TOP, ".git"))


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=TOP, check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    return [name for name in listed.split("\0")
            if name.endswith(SUFFIXES) and not name.startswith(EXCEPT) and os.path.isfile(os.path.join(TOP, name))]


def help_texts(driver):
    """(name, help text) of the driver and each of its commands."""
    def output(*arguments):
        done = subprocess.run([driver, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if "was built without" not in done.stderr:  # a library that a command needs
            done.check_returncode()
        return done.stdout or done.stderr
    overview = output("--help")
    commands = re.findall(r"^  (?:train_gpt )?([a-z]+)  ", overview, re.MULTILINE)
    if "train" not in commands:
        sys.exit(f"{driver} --help lists no commands that this script can read.")
    return [("--help", overview)] + [(f"{command} --help", output(command, "--help", "all")) for command in commands]


def main():
    failures = 0
    pages = []
    for name in tracked_files():
        with open(os.path.join(TOP, name), encoding="utf-8") as source:
            pages.append((name, source.read()))
    for driver in sys.argv[1:]:
        pages += help_texts(driver)
    for name, text in pages:
        for number, words, instead in find(text):
            print(f"{name}:{number}: '{words}': write {instead}")
            failures += 1
    print(f"{len(pages)} files and help texts, {failures} findings")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

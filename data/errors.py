"""Errors of the data scripts: one line that names the file and the remedy."""
import argparse
import contextlib
import errno
import os
import re
import sys


class DataError(Exception):
    """One line: what failed, the value found, the remedy."""


# `make data` takes variables for these options, and says so in the environment.
BY_MAKE = "MAKE_DATA_VARIABLES" in os.environ
VARIABLES = ("text", "val-text", "ext", "name", "tokenizer", "vocab", "val")


def option(name, value=""):
    """An option for a message, as the user writes it: --val 0, or VAL=0 for make."""
    if BY_MAKE and name in VARIABLES:
        return name.upper().replace("-", "_") + (f"={value}" if value else "")
    return f"--{name} {value}".strip() + (" of data/make_data.py" if BY_MAKE else "")


REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a writable directory",
    errno.ENOSPC: f"free some disk space, or give another {option('out')}",
    errno.EDQUOT: f"free some disk space, or give another {option('out')}",
    errno.EEXIST: "a part of the path is a file",
    errno.ENOTDIR: "a part of the path is a file",
}


@contextlib.contextmanager
def naming(path):
    """Names the file in errors of the system: those of reads and writes don't."""
    try:
        yield
    except OSError as e:
        raise DataError(one_line(e, path)) from None


def import_package(name, purpose, remedy):
    try:
        return __import__(name)
    except ImportError:
        raise DataError(f"{purpose} needs the Python package {name}, which is missing: {remedy}") from None


def printable(text):
    """The text with control characters written as \\x1b: a name that comes from a file may hold what a terminal obeys."""
    return re.sub("[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found.group()):02x}", text)


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


def one_line(error, path=None):
    """The first line of an error. Of an error of the system: the file (path, or the one that the error names), the
    system's message, the remedy."""
    message, remedy = first_line(error), ""
    if isinstance(error, OSError):
        message, path = error.strerror or message, path or error.filename
        remedy = f"; {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
    return printable((f"{os.fsdecode(path)}: " if path else "") + message + remedy)


def run_main(program, work, interrupted="interrupted"):
    """Runs work(), which returns an exit status or None. Prints an error, or that it was interrupted, as one line.
    Returns the exit status."""
    try:
        return work() or 0
    except (DataError, OSError) as e:
        print(f"{program}: {one_line(e)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: {interrupted}", file=sys.stderr)
        return 130


def not_empty(text):
    """The type of a path, for argparse. A script whose variable is not set gives an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty")
    return text

"""Errors of the data scripts: one line that names the file and the remedy."""
import contextlib
import errno


class DataError(Exception):
    """One line: what failed, the value found, the remedy."""


@contextlib.contextmanager
def naming(path):
    """Names the file in errors of the system: those of reads and writes don't."""
    try:
        yield
    except OSError as e:
        remedy = "; free some disk space, or give another --out" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise DataError(f"{path}: {e.strerror or first_line(e)}{remedy}") from None


def import_package(name, purpose, remedy):
    try:
        return __import__(name)
    except ImportError:
        raise DataError(f"{purpose} needs the Python package {name}, which is missing: {remedy}") from None


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]

#!/usr/bin/env python3
"""Checks that every #include "..." goes in a direction that the table in docs/understand/design.md allows.

    scripts/check_includes.py        exit status 1 and a line for each #include that the table does not allow

A row of the table holds for the files below its paths, except those that a longer path of another row covers. They may
include each other and what the row lists. A source file (.cpp, .cu, .c) is included by nothing.
"""
import os
import re
import sys

import check_words

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TABLE = "docs/understand/design.md"
HEADING = "### Which directory includes which"
SUFFIXES = (".h", ".cuh", ".cpp", ".cu", ".c")
INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')

# file: header that it may include all the same. The list only shrinks.
EXCEPTIONS = {}


def read_table(page):
    """[(paths of the row, paths that they may include)], from the Markdown text of the page."""
    rows = []
    for line in page.split(HEADING, 1)[1].split("\n#", 1)[0].splitlines():
        cells = line.strip().strip("|").split("|") if line.startswith("| `") else ()
        if len(cells) == 2:
            rows.append(tuple(re.findall(r"`([^`]+)`", cell) for cell in cells))
    return rows


def covers(path, name):
    """Whether the path, a file or a directory that ends in a slash, is the file of that name or holds it."""
    return name == path or (path.endswith("/") and name.startswith(path))


class Directions:
    def __init__(self, rows):
        self.rows = rows

    def row_of(self, name):
        """The row with the longest path that covers the file; None if there is none."""
        covering = [(len(path), row) for row in self.rows for path in row[0] if covers(path, name)]
        return max(covering, key=lambda pair: pair[0])[1] if covering else None

    def allows(self, name, header):
        row, of_header = self.row_of(name), self.row_of(header)
        if header.endswith((".cpp", ".cu", ".c")) or row is None or of_header is None:
            return False
        # A directory in the list stands for what its own row covers, so kernels/ is not tensor_library/.
        return row is of_header or any(covers(path, header) and (path == header or of_header is self.row_of(path + "x"))
                                       for path in row[1])


def sources():
    """The project's C++ and CUDA files, relative to its root; not those that it has fetched."""
    return [name for name in check_words.tracked_files() if name.endswith(SUFFIXES)]


def faults(top, names, exceptions):
    """A line for each #include that is not allowed, and for each exception that nothing needs."""
    with open(os.path.join(top, TABLE), encoding="utf-8") as page:
        directions = Directions(read_table(page.read()))
    unused = {(name, header) for name, headers in exceptions.items() for header in headers}
    for name in names:
        with open(os.path.join(top, name), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                found = INCLUDE.match(line)
                if not found:
                    continue
                header = found[1]
                if not os.path.exists(os.path.join(top, header)):
                    yield f"{name}:{number}: there is no file {header}; an #include is relative to the project's root"
                elif header in exceptions.get(name, ()):
                    unused.discard((name, header))
                elif not directions.allows(name, header):
                    yield f"{name}:{number}: includes {header}, which the table in {TABLE} does not allow"
    for name, header in sorted(unused):
        yield f"scripts/check_includes.py: {name} does not include {header} or may do so: remove the exception"


def main():
    found = list(faults(TOP, sources(), EXCEPTIONS))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

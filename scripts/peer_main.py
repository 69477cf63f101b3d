"""What scripts that compare runs and programs share: a main function that prints an error as one line, and results in JSON
files."""
import json
import os
import sys

from printable import printable


def peer_main(name, compare, input_errors, missing):
    """compare() returns the exit status; input_errors (a class or a tuple) is what it raises where a comparison can't
    be made, missing says what a Python package that is not there is needed for. Returns the exit status."""
    expected = input_errors if isinstance(input_errors, tuple) else (input_errors,)
    try:
        return compare()
    except (*expected, OSError) as error:
        print(f"{name}: {printable(str(error))}", file=sys.stderr)
    except ImportError as error:
        print(f"{name}: {error}; {missing}", file=sys.stderr)
    return 1


def write_json(path, value, indent=None):
    """The file has the old or the new content, also if this is interrupted."""
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(value, file, indent=indent)
    os.replace(path + ".tmp", path)

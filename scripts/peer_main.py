"""The main function of scripts that compare with other programs: an error is printed as one line."""
import sys


def peer_main(name, compare, input_errors, missing):
    """compare() returns the exit status; input_errors (a class or a tuple) is what it raises where a comparison can't
    be made, missing says what a Python package that is not there is needed for. Returns the exit status."""
    expected = input_errors if isinstance(input_errors, tuple) else (input_errors,)
    try:
        return compare()
    except (*expected, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    except ImportError as error:
        print(f"{name}: {error}; {missing}", file=sys.stderr)
    return 1

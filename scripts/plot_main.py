"""The main function of plotting scripts: an error is printed as one line."""
import in_venv  # noqa: F401
import sys

from printable import printable


def plot_main(name, output, draw, input_error):
    """draw() writes output; input_error is what it raises for input that can't be drawn. Returns the exit status: 0, 1,
    or 3 where matplotlib is not installed."""
    try:
        draw()
    except input_error as error:
        print(f"{name}: {printable(str(error))}", file=sys.stderr)
        return 1
    except ImportError:
        print(f"{name}: no plot drawn, because matplotlib is not here (make venv installs it).", file=sys.stderr)
        return 3
    except (OSError, ValueError) as error:
        print(printable(f"{name}: {output}: cannot be written ({error})"), file=sys.stderr)
        return 1
    print(printable(output))
    return 0

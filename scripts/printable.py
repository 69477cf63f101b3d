"""printable(), for the scripts: names that come from files, as messages show them."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data"))

from errors import printable  # noqa: E402, F401

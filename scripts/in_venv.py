"""Imported first by a script that needs packages of scripts/requirements.txt, so that it can be called by its name: where
the Python that runs it lacks some, the script starts again with .venv's. A package that is missing there too is named in
one line."""
import importlib.util
import os
import sys

_PYTHON = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".venv", "bin", "python")


def _name_what_is_missing(kind, error, trace):
    if not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    print(f"{os.path.basename(sys.argv[0])}: the Python package {error.name} is missing; `make venv` installs it", file=sys.stderr)


if os.path.exists(_PYTHON) and os.path.abspath(sys.executable) != _PYTHON:
    if not all(map(importlib.util.find_spec, ("numpy", "matplotlib", "rich", "tensorboardX"))):
        os.execv(_PYTHON, [_PYTHON, *sys.argv])
sys.excepthook = _name_what_is_missing

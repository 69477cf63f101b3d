"""Imported first by a script that needs packages of scripts/requirements.txt, so that it can be called by its name: where
the Python that runs it has no NumPy, the script starts again with .venv's."""
import importlib.util
import os
import sys

_PYTHON = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".venv", "bin", "python")

if not importlib.util.find_spec("numpy"):
    if os.path.exists(_PYTHON) and os.path.abspath(sys.executable) != _PYTHON:
        os.execv(_PYTHON, [_PYTHON, *sys.argv])
    sys.exit(f"{os.path.basename(sys.argv[0])}: NumPy is missing; `make venv` installs it")

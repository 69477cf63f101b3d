"""Reads and writes the files of models as NumPy arrays, for tests. Values in bf16 are the uint16 of their bits."""
import json
import os

import numpy as np

from harness import ROOT

MODELS = os.path.join(ROOT, "dev", "fixtures", "models")
DTYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "F64": "<f8", "I32": "<i4", "U8": "|u1"}


def bf16(x):
    """bf16 rounded to nearest even, as bits."""
    bits = np.ascontiguousarray(x, "<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def read_json(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return json.load(file)


def read_safetensors(path):
    """{name: array}"""
    with open(path, "rb") as file:
        blob = file.read()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(blob[8 + size:][begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors):
    names, header, offset = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": names[x.dtype.str], "shape": x.shape, "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for x in tensors.values()))


def read_model(folder):
    """The tensors of all files of a model."""
    shards = sorted(name for name in os.listdir(folder) if name.startswith("model") and name.endswith(".safetensors"))
    return {name: x for shard in shards for name, x in read_safetensors(os.path.join(folder, shard)).items()}

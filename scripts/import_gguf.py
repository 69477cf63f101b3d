#!/usr/bin/env python3
"""Converts a GGUF file into a model directory, also one with types of tensors that train_gpt does not read.

    scripts/import_gguf.py model.gguf models/name [--dtype fp32|bf16|fp16]

`train_gpt convert` reads the file. If it refuses a type (Q2_K, Q3_K, IQ..., MXFP4) all quantised tensors are widened to
fp32 first, in a temporary file beside the directory, by the Python package gguf (`make venv`).
"""
import in_venv  # noqa: F401
import argparse
import os
import sys
import tempfile

import numpy as np

import hf_directory
from hf_directory import ModelError

KEYS_OF_READER = "GGUF."  # the package's own: version, counts


def open_file(path):
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not a GGUF file that can be read ({error})") from None


def copy_keys(reader, writer):
    for key, field in reader.fields.items():
        if not key.startswith(KEYS_OF_READER) and key != "general.architecture":  # which the writer has written
            # The package cannot show an empty list.
            value = field.contents() if len(field.data) else []
            writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)


def widen(source, target):
    """Writes a GGUF file with the same content, in types that the program reads."""
    import gguf

    reader = open_file(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    copy_keys(reader, writer)
    quantised = lambda tensor: gguf.GGML_QUANT_SIZES[tensor.tensor_type][0] > 1  # noqa: E731
    for tensor in reader.tensors:
        shape, data = [int(n) for n in reversed(tensor.shape)], tensor.data
        if quantised(tensor):
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
        else:
            writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type) if quantised(tensor) else tensor.data
        writer.write_tensor_data(np.ascontiguousarray(data))
    writer.close()


def import_gguf(source, target, dtype=None):
    options = ["--dtype", dtype] if dtype else []
    parent = os.path.dirname(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    failed, said = hf_directory.run_program("convert", source, target, *options)
    if failed and "scripts/import_gguf.py" in said:
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=parent) as folder:
            widened = os.path.join(folder, "model.gguf")
            widen(source, widened)
            failed, said = hf_directory.run_program("convert", widened, target, *options)
            said = said.replace(widened, source)
    if failed:
        raise ModelError(said.splitlines()[-1].removeprefix("train_gpt: convert: "))
    sys.stderr.write(said)  # notes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the .gguf file")
    parser.add_argument("target", help="the directory to write; must not exist")
    parser.add_argument("--dtype", choices=hf_directory.DTYPES,
                        help="what weights are stored in (default: of each tensor as in the file; fp32 if quantised)")
    args = parser.parse_args()
    return hf_directory.main("import_gguf", lambda: import_gguf(args.source, args.target, args.dtype))


if __name__ == "__main__":
    raise SystemExit(main())

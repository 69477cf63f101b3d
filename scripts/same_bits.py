#!/usr/bin/env python3
"""Prints what short training runs of every kind end with, so that two versions of the program can be compared: a change
of structure changes no bit.

    TRAIN_GPT=../before/build/cpu/train_gpt scripts/same_bits.py > before.txt
    scripts/same_bits.py > after.txt; diff before.txt after.txt

Each run has 20 steps; its line has a digest of the checksums of its weights, and one of its optimizer state. On a GPU all runs are in bf16,
and GEMMs are not tuned, so that both versions use the same algorithms. Use the same number of threads for both.
"""
import in_venv  # noqa: F401
import hashlib
import json
import os
import struct
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "dev", "tests"))
import harness  # noqa: E402
import several_ranks  # noqa: E402

SMALL = ["--layers", "2", "--channels", "64", "--heads", "2", "--max-positions", "64"]
GPT2, LLAMA, MODERN = (["--model", name, *SMALL] for name in ("gpt2-tiny", "llama-tiny", "modern-tiny"))
# Name: (ranks, options). {gpt2} is the directory of that run.
RUNS = {"gpt2": (1, GPT2),
        "llama": (1, [*LLAMA, "--kv-heads", "1", "--recompute", "block"]),
        "modern with muon": (1, [*MODERN, "--optimizer", "muon", "--recompute", "norms"]),
        "gated linear": (1, [*LLAMA, "--kv-heads", "1", "--attention", "GL"]),
        "documents": (1, [*LLAMA, "--kv-heads", "2", "--document-mask", "--recompute", "activation"]),
        "norms after": (1, [*LLAMA, "--kv-heads", "2", "--norm-placement", "after", "--qk-norm", "all-heads"]),
        "lora": (1, ["--model", "{gpt2}", "--lora-rank", "4"]),
        "qlora": (1, ["--model", "{gpt2}", "--lora-rank", "4", "--qlora"]),
        "fp8": (1, [*GPT2, "--matmul-dtype", "fp8"]),
        "two ranks, stage 1": (2, [*GPT2, "--zero-stage", "1"]),
        "two ranks, stage 3": (2, [*LLAMA, "--kv-heads", "2", "--zero-stage", "3"])}


def digest(path):
    """Of the CRC-32Cs that a safetensors file holds of its tensors."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    stored = header["__metadata__"]
    checksums = [f"{name} {stored['crc32c ' + name]}\n" for name in sorted(header) if name != "__metadata__"]
    return hashlib.sha256("".join(checksums).encode()).hexdigest()[:16]


def result(top, data, name):
    """What a run ends with, or why it does not."""
    ranks, options = RUNS[name]
    if ranks > 1 and several_ranks.WHY_NOT:
        return "not run: " + several_ranks.WHY_NOT
    out = os.path.join(top, name.replace(" ", "_"))
    options = [option.replace("{gpt2}", os.path.join(top, "gpt2")) for option in options]
    done = several_ranks.run(ranks, "--batch-size", 4 // ranks, "--total-batch-tokens", 256, "--data", data, "--out", out,
                             "--seq-len", 32, "--steps", 20, "--lr", 3e-3, "--gemm-tune", "off",
                             "--dtype", "bf16" if several_ranks.CUDA else "fp32", *options)
    if done.returncode:
        return "failed: " + done.stderr.strip().splitlines()[-1]
    weights = "adapter_model.safetensors" if "--lora-rank" in options else "model.safetensors"
    end = os.path.join(out, harness.checkpoints(out)[-1])
    return f"weights {digest(os.path.join(end, weights))}  state {digest(os.path.join(end, 'state.safetensors'))}"


def main():
    with tempfile.TemporaryDirectory(prefix="train_gpt_bits_") as top:
        data = harness.make_data(top)
        for name in RUNS:
            print(f"{name:20} {result(top, data, name)}", flush=True)


if __name__ == "__main__":
    main()

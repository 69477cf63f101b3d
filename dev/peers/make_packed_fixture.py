#!/usr/bin/env python3
"""Makes dev/fixtures/packed.json: weights that llama.cpp's quantisers have packed as Q8_0 and Q4_0.

    python dev/peers/make_packed_fixture.py

Needs the package gguf, whose quantisers in numpy give the bits of llama.cpp's. The weights are those of
dev/tests/test_packed_weight.cpp: few bits, so that many quotients are halfway between two codes; groups with equal
extremes of both signs, of zeros, of numbers below fp16's smallest, and with one weight alone. (Not zeros with a sign:
the package's scale is then 0, and llama.cpp's −0.)
"""
import json
import os

import gguf
import numpy

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GROUPS, GROUP = 512, 32


def weights():
    i = numpy.arange(GROUPS * GROUP, dtype=numpy.uint32)
    h = i * numpy.uint32(2654435761)
    h = (h ^ (h >> numpy.uint32(15))) * numpy.uint32(2246822519)
    h ^= h >> numpy.uint32(13)
    group = i // GROUP
    bits = numpy.uint32(4) + group % numpy.uint32(12)  # of a weight
    value = (h >> (numpy.uint32(32) - bits)).astype(numpy.float32) - (1 << (bits - 1)).astype(numpy.float32)
    w = numpy.ldexp(value, -(group // 16).astype(numpy.int32)).astype(numpy.float32).reshape(GROUPS, GROUP)
    w[8] = 0
    w[9] = numpy.ldexp(w[9], -40)
    w[10] = 0
    w[10, 17] = -3
    return w


def main():
    w = weights()
    content = {}
    for name, type_ in (("int8", gguf.GGMLQuantizationType.Q8_0), ("int4", gguf.GGMLQuantizationType.Q4_0)):
        # A block is its scale and its codes.
        blocks = gguf.quants.quantize(w, type_)
        content[name] = {"scales": blocks[:, :2].tobytes().hex(), "codes": blocks[:, 2:].tobytes().hex()}
    with open(os.path.join(ROOT, "dev/fixtures/packed.json"), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes dev/fixtures/nf4.json: weights that bitsandbytes has quantised to NF4 with double quantisation.

    python dev/peers/make_nf4_fixture.py

Needs torch and bitsandbytes. The weights are those of dev/tests/test_nf4.cpp. They have few bits, so that the mean of the
blocks' maxima is exact in any order of summation.
"""
import json
import math
import os

import bitsandbytes.functional as quantiser
import numpy
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BLOCKS, BLOCK, GROUP = 300, 64, 256


def weights():
    i = numpy.arange(BLOCKS * BLOCK, dtype=numpy.uint32)
    h = i * numpy.uint32(2654435761)
    h = (h ^ (h >> numpy.uint32(15))) * numpy.uint32(2246822519)
    h ^= h >> numpy.uint32(13)
    exponent = -(i // BLOCK % 4).astype(numpy.int32)
    return numpy.ldexp(((h >> numpy.uint32(22)).astype(numpy.float32) - 512) / 512, exponent).astype(numpy.float32)


def nearest_absmax_codes(w, state):
    """The 8-bit codes of the blocks' maxima. On the CPU bitsandbytes' own (state.absmax) come from a table that misses
    the nearest value now and then."""
    maxima = w.reshape(-1, BLOCK).abs().amax(1) - state.offset
    groups = state.state2.absmax.repeat_interleave(GROUP)[:len(maxima)]
    values = state.state2.code
    return torch.bucketize(maxima * (1 / groups), (values[1:] + values[:-1]) / 2).to(torch.uint8)


def main():
    w = torch.from_numpy(weights())
    codes, state = quantiser.quantize_4bit(w, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    assert state.state2.blocksize == GROUP
    nearest = nearest_absmax_codes(w, state)
    print(f"{int((nearest != state.absmax).sum())} of {BLOCKS} 8-bit codes are not the nearest")
    content = {"codes": codes.flatten().numpy().tobytes().hex(), "absmax_codes": nearest.numpy().tobytes().hex(),
               "group_absmax": state.state2.absmax.tolist(), "mean": state.offset.item(),
               "absmax_values": state.state2.code.tolist(),
               "dequantised_sum": math.fsum(quantiser.dequantize_4bit(codes, state).flatten().tolist())}
    with open(os.path.join(ROOT, "dev/fixtures/nf4.json"), "w") as file:
        json.dump(content, file, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()

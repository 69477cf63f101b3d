// Models as the fused decode step knows them, for its benchmark and its test.
#pragma once

#include <cmath>
#include <optional>

#include "kernels/generation/decode_step.h"

// LLAMA_1B: LLaMA 3.2; LLAMA_8B: LLaMA 3.1.
enum ModelShape { GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN2_5_1_5B };
using MaybePacking = std::optional<Packing>;

inline DecodeModel decode_model(ModelShape shape, DType T, MaybePacking packing = {}) {
    DecodeModel m;
    m.packing = packing;
    m.HS = shape == QWEN2_5_1_5B || shape == LLAMA_8B ? 128 : 64;
    m.scale = 1 / std::sqrt(float(m.HS));
    m.slots = LINEAR_SMALL_N;
    m.capacity = 1024;
    m.dtype = T;
    if (shape == GPT2_124M) {
        m.layers = 12;
        m.C = 768;
        m.NH = m.NKV = 12;
        m.FFN = 3072;
        m.Vp = 50304;
    } else {
        if (shape == LLAMA_1B) {
            m.layers = 16;
            m.C = 2048;
            m.NH = 32;
            m.NKV = 8;
            m.FFN = 8192;
            m.Vp = 128256;
        } else if (shape == LLAMA_8B) {
            m.layers = 32;
            m.C = 4096;
            m.NH = 32;
            m.NKV = 8;
            m.FFN = 14336;
            m.Vp = 128256;
        } else {
            m.layers = 28;
            m.C = 1536;
            m.NH = 12;
            m.NKV = 2;
            m.FFN = 8960;
            m.Vp = 151936;
        }
        m.activation = Activation::SwiGLU;
        m.centred = false;
    }
    return m;
}

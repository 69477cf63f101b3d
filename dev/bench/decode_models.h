// Models as the fused decode step knows them, for its benchmark and its test.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "kernels/generation/decode_step.h"

// LLAMA_1B: LLaMA 3.2; LLAMA_8B: LLaMA 3.1.
enum ModelShape { GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN2_5_1_5B };
using MaybePacking = std::optional<Packing>;

inline DecodeModel decode_model(ModelShape shape, DType T, MaybePacking packing = {}) {
    constexpr struct {
        int64_t layers, C, NH, NKV, HS, FFN, Vp;
    } SIZES[] = {
        {12, 768, 12, 12, 64, 3072, 50304},
        {16, 2048, 32, 8, 64, 8192, 128256},
        {32, 4096, 32, 8, 128, 14336, 128256},
        {28, 1536, 12, 2, 128, 8960, 151936},
    };
    const auto& z = SIZES[shape];
    DecodeModel m;
    m.packing = packing;
    m.layers = z.layers;
    m.C = z.C;
    m.NH = z.NH;
    m.NKV = z.NKV;
    m.HS = z.HS;
    m.FFN = z.FFN;
    m.Vp = z.Vp;
    m.scale = 1 / std::sqrt(float(m.HS));
    m.slots = LINEAR_SMALL_N;
    m.capacity = 1024;
    m.dtype = T;
    if (shape != GPT2_124M) {
        m.activation = Activation::SwiGLU;
        m.centred = false;
    }
    return m;
}

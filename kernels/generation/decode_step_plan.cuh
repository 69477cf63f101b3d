// The plan of a fused decode step, made on the host: how the matrices are divided among blocks and stages, and where
// everything is in shared memory and in scratch.
//
// Examples, with bf16 on the 132 SMs of an H100, for one sequence; a stage is 12 or 32 KiB:
//
//                              GPT-2 124M: C 768, 12 heads of 64, FFN 3072   LLaMA 1B: C 2048, 32 heads on 8, FFN 8192
//   output pairs of a block ≤  QKV 9, PROJ 3, FC 12, FCPROJ 3, HEAD 191      QKV 12, PROJ 8, FC 32, FCPROJ 8, HEAD 486
//   output pairs of a stage    4, 4, 4, 1, 4                                 4, 4, 2, 1, 4
//   activations, attention     11.6 KiB of shared memory                     26.9 KiB
//   ring                       17 stages, 204 KiB                            5 stages, 160 KiB
//   attention, 1,024 keys      12 KV heads · 8 splits = 96 tasks             8 KV heads · 2 tiles · 8 splits = 128
//
// Packed, one sequence: a stage has up to 8 rows, and the columns of LLaMA's FFN fit in two.
//
//                              LLaMA 1B, int4                                LLaMA 1B, fp8
//   bytes of a row, C and FFN  1,152 and 4,608                               2,064 and 8,208
//   from row to row in a stage 1,168 and 4,672                               2,080 and 8,320
//   output pairs of a stage    4, 4, 2, 1, 4                                 4, 4, 2, 1, 4
//   ring                       20 stages of 9.1 KiB                          11 stages of 16.3 KiB
//   stages of a multiplication 8                                             4
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/generation/decode_step.cuh"

namespace fused_decode {

inline int64_t aligned(int64_t bytes) {
    return (bytes + 127) / 128 * 128;
}

// How a model's matrices are divided, and the sizes of the regions of shared memory.
struct Plan {
    bool possible = false;
    int64_t blocks = 0;
    MatrixPlan matrices[MATRICES] = {};
    int stages_at_once = 0;  // whose rows a warp multiplies side by side
    int64_t stages = 0, stage_bytes = 0, rows_bytes = 0, residual_bytes = 0, attention_bytes = 0, layers_bytes = 0;
    int64_t shared_bytes() const {
        return stages * stage_bytes + rows_bytes + residual_bytes + attention_bytes + layers_bytes;
    }
};

inline int heads_of_task(const DecodeModel& m) {
    return m.NH == m.NKV ? 1 : QUERY_TILE;
}

// Whether the model needs the extended kernel, an instance of its own with the options that GPT-2 and LLaMA lack:
// QK-norm, a norm after the embedding, a bias of the head, windows, layers without RoPE.
inline bool is_extended(const DecodeModel& m) {
    return m.qk_norm || m.embedding_norm || m.head_bias ||
           std::any_of(m.layer_options.begin(), m.layer_options.end(),
                       [](const DecodeLayer& l) { return l.window > 0 || !l.rope; });
}

inline int64_t layer_bytes(const DecodeModel& m) {
    return m.layers * (is_extended(m) ? LAYER_BYTES<true> : LAYER_BYTES<false>);
}

// NB of the kernel for N sequences.
inline int kernel_batch(int64_t N) {
    int NB = 1;
    while (NB < N) NB *= 2;
    return NB;
}

inline int64_t num_kv_splits(int64_t length) {
    return ceil_div(length, SPLIT_KEYS);
}

inline Plan plan_of(const DecodeModel& m, int64_t N) {
    Plan z;
    const int64_t item = dtype_size(m.dtype), W = 16 / item, Q = m.NH * m.HS, qkv = (m.NH + 2 * m.NKV) * m.HS;
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9 || !device_attribute(cudaDevAttrCooperativeLaunch))
        return z;
    if (m.C % W || m.HS % W || m.FFN % W || m.Vp % 2 || m.C < 2 * W || m.HS > MAX_HS || m.FFN == 0 || N < 1) return z;
    if (m.packing && (item != 2 || !can_pack(m.C) || !can_pack(Q) || !can_pack(m.FFN))) return z;
    z.blocks = std::min(num_sms(), m.C / 2);
    const bool gated = is_gated(m.activation);
    struct Size {
        int64_t outputs, K;
    };
    const Size sizes[MATRICES] = {{qkv, m.C}, {m.C, Q}, {m.FFN, m.C}, {m.C, m.FFN}, {m.Vp, m.C}};
    const auto rows_of_pair = [&](int which) { return which == FC && gated ? 4 : 2; };
    // Of a row in a stage of `rows` rows. Packed: such that the lanes of a warp, which read 8 or 4 bytes each of a
    // group of different rows or parts, read different banks.
    const auto pitch_of = [&](int64_t K, int64_t rows) {
        if (!m.packing) return K * item;
        const int64_t bytes = packed_row_bytes(*m.packing, K), offset = 8 / rows * group_bytes(*m.packing);
        return bytes + (offset - bytes % 128 + 128) % 128;
    };
    z.stage_bytes = std::max(m.packing ? 0 : MIN_STAGE_BYTES, (m.centred ? 2 : 1) * m.C * int64_t(sizeof(float)));
    for (int i = 0; i < MATRICES; i++)
        z.stage_bytes = std::max(z.stage_bytes, rows_of_pair(i) * pitch_of(sizes[i].K, rows_of_pair(i)));
    const int64_t full = MAX_STAGE_ROWS * pitch_of(m.C, MAX_STAGE_ROWS);
    if (m.packing && full < 2 * z.stage_bytes) z.stage_bytes = std::max(z.stage_bytes, full);
    z.stage_bytes = aligned(z.stage_bytes);
    for (int i = 0; i < MATRICES; i++) {
        MatrixPlan& p = z.matrices[i];
        p.K = int(sizes[i].K);
        p.pairs = int(sizes[i].outputs / 2);
        const int64_t most = ceil_div(p.pairs, std::max<int64_t>(z.blocks, 1));  // pairs of a block
        if (i != HEAD && most * rows_of_pair(i) > THREADS) return z;             // one thread for each bias
        const auto fits = [&](int64_t pairs) {
            const int64_t rows = pairs * rows_of_pair(i);
            return rows <= MAX_STAGE_ROWS && rows * pitch_of(p.K, rows) <= z.stage_bytes;
        };
        p.log_per_stage = 0;
        while (fits(int64_t(2) << p.log_per_stage) && int64_t(1) << p.log_per_stage < most) p.log_per_stage++;
        p.stage_rows = rows_of_pair(i) << p.log_per_stage;
        p.chunk = chunk_rows(kernel_batch(N), code_bits(m.packing)) / p.stage_rows;
        p.row_bytes = int(m.packing ? packed_row_bytes(*m.packing, p.K) : p.K * item);
        p.pitch = int(pitch_of(p.K, p.stage_rows));
        if (!m.packing) continue;
        p.packing = *m.packing;
        while (p.stage_rows << p.log_parts < MAX_STAGE_ROWS) p.log_parts++;
    }
    z.rows_bytes = aligned(N * std::max({m.C, Q, m.FFN}) * item);
    z.residual_bytes = aligned(N * m.C * item);
    z.attention_bytes = aligned(attention_bytes(heads_of_task(m), m.HS, item));
    z.layers_bytes = aligned(layer_bytes(m));
    const int64_t room = max_shared_bytes() - reserved_bytes(kernel_batch(N), code_bits(m.packing)) - z.shared_bytes();
    z.stages = std::min<int64_t>(room / z.stage_bytes, MAX_STAGES);
    z.possible = z.blocks > 0 && z.stages >= MIN_STAGES;
    // Half of the ring, so that the other half is loaded meanwhile; at least two.
    const int half = int(std::max<int64_t>(2, z.stages / 2));
    z.stages_at_once = std::min(half, most_at_once(kernel_batch(N), code_bits(m.packing)));
    if (m.packing) z.stages_at_once = std::bit_floor(unsigned(z.stages_at_once));
    return z;
}

// Offsets in scratch, in bytes: the epoch, the layers, then the words of exchanges.
struct ScratchLayout {
    static constexpr int64_t EPOCH = 0, LAYERS = 128;
    int64_t matmuls[LAYER_MATRICES], att, splits, end;
    explicit ScratchLayout(const DecodeModel& m) {
        const int64_t per_word = 4 / dtype_size(m.dtype), N = std::min(m.slots, LINEAR_SMALL_N);
        int64_t at = LAYERS + aligned(layer_bytes(m));
        const auto take = [&](int64_t words) {
            const int64_t begin = at;
            at += aligned(words * int64_t(sizeof(uint64_t)));
            return begin;
        };
        const int64_t Q = m.NH * m.HS, channels[LAYER_MATRICES] = {Q + 2 * m.NKV * m.HS, m.C, m.FFN, m.C};
        for (int i = 0; i < LAYER_MATRICES; i++) matmuls[i] = take(N * channels[i] / per_word);
        att = take(N * Q / per_word);
        splits = take(N * m.NH * num_kv_splits(m.capacity) * (m.HS + 2));
        end = at;
    }
};

}  // namespace fused_decode

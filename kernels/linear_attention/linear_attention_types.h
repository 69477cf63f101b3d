// The types of linear attention's arguments (linear_attention.h).
#pragma once

#include "runtime/device/tensor.h"

enum class FeatureMap : uint8_t { Identity, EluPlusOne };

struct LinearAttentionType {
    // Recurrent: token by token, for any E and M up to 512. Chunked: matmuls over chunks of tokens, for E and M up to
    // 256. Automatic: chunked where the sizes allow it.
    enum class Form : uint8_t { Automatic, Recurrent, Chunked };
    FeatureMap features = FeatureMap::EluPlusOne;
    bool normalise = true;
    Form form = Form::Automatic;
};

// The attention types of model layers. Linear attention is normalised and has features elu + 1. Gated linear attention
// has neither; it has a decay gate, and an RMSNorm of each head's output replaces the normaliser (RetNet, GLA).
inline LinearAttentionType linear_attention_type(bool gated) {
    LinearAttentionType type;
    if (gated) {
        type.features = FeatureMap::Identity;
        type.normalise = false;
    }
    return type;
}

struct LinearAttentionSequences {
    Tensor cum;              // [S + 1] int32, cum[0] = 0: sequence s is tokens cum[s] … cum[s + 1] − 1
    int64_t max_length = 0;  // length of the longest sequence, known to the host
};

// The state of each sequence: s [S, NKV, E, M] and, only where normalised, z [S, NKV, E]; fp32, contiguous. Null: not
// given; an initial state that is not given is zero.
// rows [S] int32, allowed for the final state and for the decode step: s and z then hold R states, and sequence i uses
// row rows[i]; no two sequences share a row. A row outside [0, R) (−1) skips the sequence: its state is not stored, and
// the decode step writes 0 to its out. Null: sequence i uses row i, and R = S.
struct LinearAttentionState {
    Tensor s, z, rows = {};
};

constexpr int64_t LINEAR_ATTENTION_MAX_SIZE = 512;  // of a head: E and M

struct LinearAttentionSizes {
    int64_t N, S, NH, NKV, E, M, max_length;
    bool states = true;  // initial states, final states or gradients of them are given
};

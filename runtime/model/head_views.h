// Views of activations by heads, as the attention launchers take them. Training and generation share this layout.
#pragma once

#include "runtime/device/tensor.h"
#include "runtime/model/model_config.h"

// q, k and v inside the packed rows of qkv [n, (NH + 2·NKV)·HS]: [n, NH, HS] and twice [n, NKV, HS].
struct QkvHeads {
    Tensor q, k, v;
};
inline QkvHeads split_qkv(const ModelConfig& c, const Tensor& qkv) {
    const int64_t Q = c.heads * c.head_size, K = c.kv_heads * c.head_size;
    return {split_heads(qkv.columns(0, Q), c.heads), split_heads(qkv.columns(Q, Q + K), c.kv_heads),
            split_heads(qkv.columns(Q + K, Q + 2 * K), c.kv_heads)};
}

// q and k, which are adjacent, as [n, (NH + NKV)·HS].
inline Tensor qk_rows(const ModelConfig& c, const Tensor& qkv) {
    return qkv.columns(0, (c.heads + c.kv_heads) * c.head_size);
}

// The same as [n, NH + NKV, HS]: the channels that RoPE rotates.
inline Tensor split_qk(const ModelConfig& c, const Tensor& qkv) {
    return split_heads(qk_rows(c, qkv), c.heads + c.kv_heads);
}

// The heads of each token as rows of a matrix: contiguous x [n, NH·HS] as [n·NH, HS].
inline Tensor head_matrix(const Tensor& x, int64_t heads) {
    require(x.rank == 2 && x.contiguous() && x.shape[1] % heads == 0, "head_matrix: ", shape_string(x), " of ", heads,
            " heads");
    return make_tensor(x.data, x.dtype, x.device, {x.shape[0] * heads, x.shape[1] / heads});
}

// One number per head: contiguous x [n, NH] as [n·NH]. Null stays null.
inline Tensor head_vector(const Tensor& x) {
    return x ? make_tensor(x.data, x.dtype, x.device, {x.numel()}) : Tensor{};
}

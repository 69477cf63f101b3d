// A pass over one micro-step, and a block of it: the arguments of the driver's functions.
#pragma once

#include <functional>

#include "model.h"
#include "runtime/model/linear_weight.h"

// A destination: written over, or added to.
struct Into {
    Tensor t;
    bool add = false;
    explicit operator bool() const { return bool(t); }
};
inline Into over(const Tensor& t) {
    return {t, false};
}
inline Into onto(const Tensor& t) {
    return {t, true};
}

struct Block;
// Computes a block's att from its qkv, after QK-norm and RoPE: attention of the layer's type among the tokens of each
// sequence of the pass.
void attention_in_sequences(const Block& b);

// A forward or backward pass over the tokens of `in`.
struct Pass {
    const Context& ctx;
    const Model& model;
    const Activations& acts;
    const Input& in;
    Gradients* grads = nullptr;  // of a backward pass
    // The attention of a forward pass, instead of which a caller may pass one with keys and values of its own.
    std::function<void(const Block&)> attention = attention_in_sequences;
    bool adapters = true;  // false: a forward pass of the model without its adapters

    Stream stream() const { return ctx.stream; }
    // The group that holds a layer's weights as this pass reads them (Model::use).
    int layer_group(int64_t l) const {
        return model.shards && acts.uses_fp8(l) ? model.shards->group(l) : Model::layer_group(l);
    }
    // The gradient of a parameter: the first micro-step of a step writes over it, the others add to it. Null where the
    // model has no such parameter, or it is frozen.
    Into grad(Role role, int64_t layer = -1) const {
        return {model.gradient(*grads, role, layer), grads->accumulate()};
    }
};

// A block of a pass.
struct Block {
    const Pass& p;
    const int64_t l;
    const LayerActs a;  // of the pass's tokens
    const BlockWeights w;

    Into grad(Role role) const { return p.grad(role, l); }
    bool fp8() const { return p.acts.uses_fp8(l); }
    // Whether the backward pass computes again what the forward pass did not keep.
    bool again() const { return p.grads; }
};
Block block_of(const Pass& p, int64_t l);

// Writes the embeddings of the pass's tokens and positions.
void embed(const Pass& p, Tensor out);
// The adapter of the embedding (WTE) or of an untied head; without one all its tensors are null.
LoraWeights adapter_of(const Pass& p, Role role);
// The gradients of the embedding's adapter from that of embed()'s out.
void embedding_adapter_backward(const Pass& p, Tensor dx);
// Views of weights; null where the model has none.
LinearWeights linear_weights(const Model& model, Role role, int64_t l = -1);
BlockWeights block_weights(const Model& model, int64_t l);
const LinearWeights& weights_of(const Block& b, Role role);  // of one of LINEAR_LAYERS

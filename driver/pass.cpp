#include "driver/pass.h"

BlockWeights block_weights(const Model& model, int64_t l) {
    const auto norm = [&](Role role) { return NormWeights{model.weight(role, l), model.weight(bias_of(role), l)}; };
    const auto linear = [&](Role role) {
        const bool in_nf4 = model.nf4 && linear_layer_index(role) >= 0;
        return LinearWeights{in_nf4 ? Tensor{} : model.weight(role, l), model.weight(bias_of(role), l)};
    };
    return {.norm1 = norm(NORM1_W),
            .norm2 = norm(NORM2_W),
            .qkv = linear(QKV_W),
            .proj = linear(PROJ_W),
            .fc = linear(FC_W),
            .fcproj = linear(FCPROJ_W),
            .gate = linear(DECAY_GATE_W),
            .headnorm = model.weight(HEADNORM_W, l),
            .qnorm = model.weight(QNORM_W, l),
            .knorm = model.weight(KNORM_W, l)};
}

Block block_of(const Pass& p, int64_t l) {
    const std::vector<LayerActs>& layers = p.grads ? p.acts.backward : p.acts.forward;
    return {p, l, first_tokens(layers[size_t(l)], p.in.n), block_weights(p.model, l)};
}

#include "driver/pass.h"

#include "kernels/embedding.h"
#include "kernels/matmul.h"

namespace {

LoraWeights lora_weights(const Model& model, Role role, int64_t l) {
    if (!model.adapters) return {};
    const auto parts = model.lora->parts.find({int(role), l});
    if (parts == model.lora->parts.end()) return {};
    return {model.adapters->weight(lora_a(role), l), model.adapters->weight(lora_b(role), l), &parts->second,
            static_cast<float>(model.lora->options.scale())};
}

}  // namespace

LinearWeights linear_weights(const Model& model, Role role, int64_t l) {
    const Param& p = *model.table.find(role, static_cast<int>(l));
    const Role bias = role == WTE ? HEAD_B : bias_of(role);  // WTE: a tied head
    return {.weight = model.weight(role, l),
            .bias = model.weight(bias, l),
            .nf4 = model.nf4 ? model.nf4->find(p) : nullptr,
            .fp8 = model.fp8 ? model.fp8->find(p) : nullptr,
            .packed = model.packed ? model.packed->find(p) : nullptr,
            .lora = lora_weights(model, role, l)};
}

BlockWeights block_weights(const Model& model, int64_t l) {
    const auto norm = [&](Role role) { return NormWeights{model.weight(role, l), model.weight(bias_of(role), l)}; };
    const auto linear = [&](Role role) { return linear_weights(model, role, l); };
    return {.norm1 = norm(NORM1_W),
            .norm2 = norm(NORM2_W),
            .qkv = linear(QKV_W),
            .proj = linear(PROJ_W),
            .fc = linear(FC_W),
            .fcproj = linear(FCPROJ_W),
            .gate = {model.weight(DECAY_GATE_W, l), model.weight(DECAY_GATE_B, l)},
            .headnorm = model.weight(HEADNORM_W, l),
            .qnorm = model.weight(QNORM_W, l),
            .knorm = model.weight(KNORM_W, l)};
}

const LinearWeights& weights_of(const Block& b, Role role) {
    const LinearWeights* const all[] = {&b.w.qkv, &b.w.proj, &b.w.fc, &b.w.fcproj};
    return *all[linear_layer_index(role)];
}

Block block_of(const Pass& p, int64_t l) {
    const std::vector<LayerActs>& layers = p.grads ? p.acts.backward : p.acts.forward;
    BlockWeights weights = block_weights(p.model, l);
    if (!p.adapters)
        for (LinearWeights* w : {&weights.qkv, &weights.proj, &weights.fc, &weights.fcproj}) w->lora = {};
    return {p, l, first_tokens(layers[size_t(l)], p.in.n), weights};
}

void embed(const Pass& p, Tensor out) {
    const Tensor wte = p.model.weight(WTE), wpe = p.model.weight(WPE);
    if (wte)
        embedding_forward(out, p.in.tokens, p.in.positions, wte, wpe, p.stream());
    else
        embedding_forward(out, p.in.tokens, p.in.positions, *linear_weights(p.model, WTE).packed, wpe, p.stream());
    if (const LoraWeights lora = adapter_of(p, WTE); lora.a) {
        const Tensor low_rank = p.acts.low_rank.rows(0, p.in.n);
        embedding_forward(low_rank, p.in.tokens, p.in.positions, lora.a, {}, p.stream());
        matmul(out, low_rank, lora.b, false, true, true, p.stream(), lora.scale);
    }
}

void embedding_adapter_backward(const Pass& p, Tensor dx) {
    const LoraWeights lora = adapter_of(p, WTE);
    const Model& adapters = *p.model.adapters;
    const bool accumulate = p.grads->accumulate();
    const Tensor low_rank = p.acts.low_rank.rows(0, p.in.n),
                 dlow_rank = p.acts.dlow_rank.rows(0, p.in.n).columns(0, lora.b.shape[1]);
    embedding_forward(low_rank, p.in.tokens, p.in.positions, lora.a, {}, p.stream());
    matmul(adapters.gradient(*p.grads, lora_b(WTE)), dx, low_rank, true, false, accumulate, p.stream(), lora.scale);
    matmul(dlow_rank, dx, lora.b, false, false, false, p.stream(), lora.scale);
    embedding_backward(adapters.gradient(*p.grads, lora_a(WTE)), {}, dlow_rank, p.in.tokens, p.in.positions,
                       p.acts.scratch, accumulate, false, p.stream());
}

LoraWeights adapter_of(const Pass& p, Role role) {
    return p.adapters ? linear_weights(p.model, role).lora : LoraWeights{};
}

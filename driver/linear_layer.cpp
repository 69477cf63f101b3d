#include "driver/linear_layer.h"

#include "kernels/generation/linear.h"
#include "kernels/matmul_low_rank.h"
#include "kernels/nf4.h"

namespace {

// The name of a linear layer in a profile.
const char* linear_name(Role role) {
    constexpr const char* NAMES[] = {"qkv", "proj", "fc", "fcproj"};  // as LINEAR_LAYERS
    return NAMES[linear_layer_index(role)];
}

// s·A·inp of all adapters, [n, parts·R]: the forward pass keeps it.
Tensor low_rank_of(const Block& b, Role role) {
    const LayerActs& a = b.p.acts.forward[size_t(b.l)];
    const Tensor all[] = {a.lora_qkv, a.lora_proj, a.lora_fc, a.lora_fcproj};
    return all[linear_layer_index(role)].rows(0, b.p.in.n).columns(0, weights_of(b, role).lora.a.shape[0]);
}

// What the adapters of a layer add to its output. The scratch of the forward pass is free here.
LowRank forward_low_rank(const Block& b, Role role, Tensor inp) {
    const Range range(b.p.ctx.profiler, "lora");
    const LoraWeights& lora = weights_of(b, role).lora;
    const Tensor h = low_rank_of(b, role);
    if (!b.again()) matmul(h, inp, lora.a, false, true, false, b.p.stream(), lora.scale);
    return {h, lora, b.p.acts.forward_scratch};
}

// fp8: adapters that cover all of out write it first, as in kernels/matmul_low_rank.h. But a matmul in fp8 cannot add a
// bias as well.
void fp8_forward_with_adapters(const Block& b, Role role, Tensor out, Tensor inp) {
    const LinearWeights& w = weights_of(b, role);
    const bool writes = w.lora.a && covers(w.lora, out.shape[1]) && !w.bias;
    const LowRank low_rank = w.lora.a ? forward_low_rank(b, role, inp) : LowRank{};
    const auto add_adapters = [&] {
        const Range range(b.p.ctx.profiler, "lora");
        matmul_low_rank(out, low_rank, !writes, b.p.stream());
    };
    if (writes) add_adapters();
    fp8_forward(b, role, {out, writes}, w.bias);
    if (w.lora.a && !writes) add_adapters();
}

}  // namespace

Tensor linear_weight(const Block& b, Role role) {
    const LinearWeights& w = weights_of(b, role);
    if (!w.nf4) return w.weight;
    const Range range(b.p.ctx.profiler, "dequantise");
    return nf4_dequantise(b.p.acts.base_weight, *w.nf4, b.p.stream());
}

// In chunks, which the scratch is planned for.
void packed_forward(const Pass& p, Tensor out, Tensor inp, const LinearWeights& weights, Tensor add) {
    for (int64_t begin = 0; begin < inp.shape[0]; begin += PackedWeights::ROWS) {
        const int64_t end = std::min(begin + PackedWeights::ROWS, inp.shape[0]);
        const Tensor residual = add ? add.rows(begin, end) : Tensor{};
        linear({out.rows(begin, end), Activation::None, residual}, inp.rows(begin, end), {}, weights,
               p.acts.forward_scratch, false, p.stream());
    }
}

void linear_forward(const Block& b, Role role, Tensor out, Tensor inp, Tensor columns, Tensor add) {
    const Range range(b.p.ctx.profiler, linear_name(role));
    const Stream stream = b.p.stream();
    if (weights_of(b, role).packed) return packed_forward(b.p, out, inp, weights_of(b, role), add);
    const Tensor bias = weights_of(b, role).bias;
    if (b.fp8()) {
        if (role != FCPROJ_W) quantise_input(b, role, inp, true, columns);  // the activation function does it itself
        fp8_forward_with_adapters(b, role, out, inp);
    } else if (weights_of(b, role).lora.a) {
        const LowRank low_rank = forward_low_rank(b, role, inp);
        matmul_low_rank_forward(out, inp, linear_weight(b, role), bias, low_rank, stream);
    } else if (add) {
        matmul_forward_add(out, inp, linear_weight(b, role), bias, add, stream);
    } else {
        matmul_forward(out, inp, linear_weight(b, role), bias, stream);
    }
}

void linear_forward_activation(const Block& b, Role role, Tensor out, Tensor pre, Tensor inp) {
    const Range range(b.p.ctx.profiler, linear_name(role));
    const Activation f = b.p.model.config.activation;
    const LinearWeights& w = weights_of(b, role);
    if (!w.lora.a) return matmul_forward_activation(f, out, pre, inp, linear_weight(b, role), w.bias, b.p.stream());
    const LowRank low_rank = forward_low_rank(b, role, inp);
    matmul_low_rank_forward_activation(f, out, pre, inp, linear_weight(b, role), w.bias, low_rank, b.p.stream());
}

Tensor bias_gradient(const Block& b, Role role) {
    return role == PROJ_W || role == FCPROJ_W ? Tensor{} : b.grad(bias_of(role)).t;
}

void weight_backward(const Block& b, Role role, Tensor dout, Tensor inp, Tensor dbias) {
    if (b.p.model.table.frozen) return;
    const Range range(b.p.ctx.profiler, linear_name(role));
    const Into dweight = b.grad(role);
    matmul_backward_weight(dweight.t, dbias, dout, inp, dweight.add, b.p.stream());
}

namespace {

// LoRA: with h = s·A·inp of the forward pass, dB = doutᵀ·h; with dh = s·dout·B, dA = dhᵀ·inp. Returns dh and A, whose
// product belongs to dinp; null without adapters.
LowRankGradient lora_backward(const Block& b, Role role, Tensor dout, Tensor inp) {
    const LoraWeights& lora = weights_of(b, role).lora;
    if (!lora.a) return {};
    const Range range(b.p.ctx.profiler, "lora");
    const Stream stream = b.p.stream();
    const Model& adapters = *b.p.model.adapters;
    const Gradients& grads = *b.p.grads;
    const bool accumulate = grads.accumulate();
    const Tensor low_rank = low_rank_of(b, role);
    const Tensor da = adapters.gradient(grads, lora_a(role), b.l), db = adapters.gradient(grads, lora_b(role), b.l);
    const Tensor dlow_rank = b.p.acts.dlow_rank.rows(0, inp.shape[0]).columns(0, lora.a.shape[0]);
    const int64_t R = lora.b.shape[1];
    for_each_part(lora, [&](const LoraPart& part, int64_t row, int64_t column) {
        const Tensor d = dout.columns(part.row, part.row + part.rows), h = low_rank.columns(column, column + R);
        matmul_backward_weight(db.rows(row, row + part.rows), {}, d, h, accumulate, stream);
        matmul(dlow_rank.columns(column, column + R), d, lora.b.rows(row, row + part.rows), false, false, false, stream,
               lora.scale);
    });
    matmul_backward_weight(da, {}, dlow_rank, inp, accumulate, stream);
    return {dlow_rank, lora.a};
}

}  // namespace

void fp8_linear_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp, Tensor inp_t,
                         const Fp8Producer& produce) {
    const bool frozen = b.p.model.table.frozen;
    if (dinp || !frozen) quantise_gradient(b, role, produce);
    if (const LowRankGradient d = lora_backward(b, role, dout, inp); d.a && dinp) {
        const Range range(b.p.ctx.profiler, "lora");
        matmul_backward_input(dinp.t, d.dh, d.a, dinp.add, b.p.stream());
        dinp.add = true;
    }
    const Range range(b.p.ctx.profiler, linear_name(role));
    if (!frozen) fp8_weight_gradient(b, role, inp_t);
    if (dinp) fp8_input_gradient(b, role, dinp);
}

void linear_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp, Tensor inp_t, bool sums_bias) {
    const Stream stream = b.p.stream();
    const Tensor dbias = sums_bias ? bias_gradient(b, role) : Tensor{};
    if (b.fp8()) {
        if (dbias) {
            const Range range(b.p.ctx.profiler, linear_name(role));
            matmul_backward_bias(dbias, dout, b.p.grads->accumulate(), stream);
        }
        return fp8_linear_backward(b, role, dinp, dout, inp, inp_t,
                                   [&](const Fp8Output& out) { fp8_quantise(out, dout, stream); });
    }
    weight_backward(b, role, dout, inp, dbias);
    const LowRankGradient d = lora_backward(b, role, dout, inp);
    if (!dinp) return;
    const Range range(b.p.ctx.profiler, linear_name(role));
    if (d.a)
        matmul_low_rank_backward_input(dinp.t, dout, linear_weight(b, role), d, dinp.add, stream);
    else
        matmul_backward_input(dinp.t, dout, linear_weight(b, role), dinp.add, stream);
}

void linear_backward_activation(const Block& b, Role role, const ActivationGradient& gradient, Tensor dout) {
    if (b.a.act) weight_backward(b, role, dout, b.a.act, {});
    const LowRankGradient d = lora_backward(b, role, dout, b.a.act);
    {
        const Range range(b.p.ctx.profiler, linear_name(role));
        const Activation f = b.p.model.config.activation;
        if (d.a)
            matmul_low_rank_backward_activation(f, gradient, dout, linear_weight(b, role), b.a.fc, d, b.p.stream());
        else
            matmul_backward_activation(f, gradient, dout, linear_weight(b, role), b.a.fc, b.p.stream());
    }
    if (!b.a.act) weight_backward(b, role, dout, gradient.act, {});
}

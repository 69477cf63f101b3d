#include "driver/linear_layer.h"

#include "kernels/generation/linear.h"
#include "kernels/matmul.h"
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

// Calls f(rows of B, rows of the layer's output, rows of A) for each adapter: their ranges begin, end.
template <typename F>
void for_each_part(const LoraWeights& lora, F f) {
    const int64_t R = lora.b.shape[1];
    int64_t a = 0, b = 0;
    for (const LoraPart& part : *lora.parts) {
        f(std::pair(b, b + part.rows), std::pair(part.row, part.row + part.rows), std::pair(a, a + R));
        a += R;
        b += part.rows;
    }
}

// s·B·A·inp.
void lora_forward(const Block& b, Role role, Into out, Tensor inp) {
    const Range range(b.p.ctx.profiler, "lora");
    const Stream stream = b.p.stream();
    const LoraWeights& lora = weights_of(b, role).lora;
    const Tensor low_rank = low_rank_of(b, role);
    if (!b.again()) matmul(low_rank, inp, lora.a, false, true, false, stream, lora.scale);
    for_each_part(lora, [&](auto rows_of_b, auto rows, auto rows_of_a) {
        const Tensor part = out.t.columns(rows.first, rows.second);
        const Tensor h = low_rank.columns(rows_of_a.first, rows_of_a.second);
        const Tensor weight = lora.b.rows(rows_of_b.first, rows_of_b.second);
        if (out.add)
            matmul_forward_add(part, h, weight, {}, part, stream);
        else
            matmul_forward(part, h, weight, {}, stream);
    });
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
    const LoraWeights& lora = weights_of(b, role).lora;
    // Adapters that cover all of out write it first, and the matmul with the weight adds to it: the read of out hides
    // in that matmul's epilogue, while a thin matmul would wait for it. A matmul in fp8 cannot add a bias as well.
    const bool writes = lora.a && lora.b.shape[0] == out.shape[1] && !(b.fp8() && bias);
    if (writes) {
        lora_forward(b, role, over(out), inp);
        add = out;
    }
    if (b.fp8()) {
        if (role != FCPROJ_W) quantise_input(b, role, inp, true, columns);  // the activation function does it itself
        fp8_forward(b, role, {out, writes}, bias);
    } else if (add) {
        matmul_forward_add(out, inp, linear_weight(b, role), bias, add, stream);
    } else {
        matmul_forward(out, inp, linear_weight(b, role), bias, stream);
    }
    if (lora.a && !writes) lora_forward(b, role, onto(out), inp);
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

// LoRA: with h = s·A·inp of the forward pass, dB = doutᵀ·h; with dh = s·dout·B, dA = dhᵀ·inp and dinp = dh·A. dinp may
// be null. The matmul with the frozen weight comes after it and adds to dinp, as in linear_forward().
void lora_backward(const Block& b, Role role, Into& dinp, Tensor dout, Tensor inp) {
    if (!weights_of(b, role).lora.a) return;
    const Range range(b.p.ctx.profiler, "lora");
    const Stream stream = b.p.stream();
    const Model& adapters = *b.p.model.adapters;
    const Gradients& grads = *b.p.grads;
    const bool accumulate = grads.accumulate();
    const LoraWeights& lora = weights_of(b, role).lora;
    const Tensor low_rank = low_rank_of(b, role);
    const Tensor da = adapters.gradient(grads, lora_a(role), b.l), db = adapters.gradient(grads, lora_b(role), b.l);
    const Tensor dlow_rank = b.p.acts.dlow_rank.rows(0, inp.shape[0]).columns(0, lora.a.shape[0]);
    for_each_part(lora, [&](auto rows_of_b, auto rows, auto rows_of_a) {
        const Tensor d = dout.columns(rows.first, rows.second);
        const Tensor h = low_rank.columns(rows_of_a.first, rows_of_a.second);
        matmul_backward_weight(db.rows(rows_of_b.first, rows_of_b.second), {}, d, h, accumulate, stream);
        matmul(dlow_rank.columns(rows_of_a.first, rows_of_a.second), d, lora.b.rows(rows_of_b.first, rows_of_b.second),
               false, false, false, stream, lora.scale);
    });
    matmul_backward_weight(da, {}, dlow_rank, inp, accumulate, stream);
    if (dinp) matmul_backward_input(dinp.t, dlow_rank, lora.a, dinp.add, stream);
    dinp.add = true;
}

}  // namespace

void fp8_linear_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp, Tensor inp_t,
                         const Fp8Producer& produce) {
    const bool frozen = b.p.model.table.frozen;
    if (dinp || !frozen) quantise_gradient(b, role, produce);
    lora_backward(b, role, dinp, dout, inp);
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
    lora_backward(b, role, dinp, dout, inp);
    if (!dinp) return;
    const Range range(b.p.ctx.profiler, linear_name(role));
    matmul_backward_input(dinp.t, dout, linear_weight(b, role), dinp.add, stream);
}

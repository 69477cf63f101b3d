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

const LinearWeights& weights_of(const Block& b, Role role) {
    const LinearWeights* const all[] = {&b.w.qkv, &b.w.proj, &b.w.fc, &b.w.fcproj};
    return *all[linear_layer_index(role)];
}

// Scratch as a matrix of fp8 codes.
Tensor code_matrix(const Tensor& scratch, int64_t rows, int64_t columns) {
    return make_tensor(scratch.data, scratch.dtype, scratch.device, {rows, columns});
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

void quantise_input(const Block& b, Role role, bool rows, Tensor columns, const Fp8Producer& produce) {
    const Range range(b.p.ctx.profiler, "quantise");
    const Activations& acts = b.p.acts;
    const int64_t inputs = linear_layer_sizes(acts.config, role).inputs;
    const Tensor codes = rows ? code_matrix(acts.fp8_rows, b.p.in.n, inputs) : Tensor{};
    acts.fp8->quantise(Fp8Operand::Input, role, b.l, codes, columns, b.again(), b.p.stream(), produce);
}

void quantise_input(const Block& b, Role role, Tensor inp, bool rows, Tensor columns) {
    quantise_input(b, role, rows, columns, [&](const Fp8Output& out) { fp8_quantise(out, inp, b.p.stream()); });
}

void linear_forward(const Block& b, Role role, Tensor out, Tensor inp, Tensor columns, Tensor add) {
    const Range range(b.p.ctx.profiler, linear_name(role));
    const Stream stream = b.p.stream();
    if (weights_of(b, role).packed) return packed_forward(b.p, out, inp, weights_of(b, role), add);
    const Tensor weight = linear_weight(b, role), bias = weights_of(b, role).bias;
    if (!b.fp8()) {
        // Adapters that cover all of out write it first, and the matmul with the weight adds to it: the read of out
        // hides in that matmul's epilogue, while a thin matmul would wait for it.
        const LoraWeights& lora = weights_of(b, role).lora;
        const bool writes = lora.a && lora.b.shape[0] == out.shape[1];
        if (writes) {
            lora_forward(b, role, over(out), inp);
            add = out;
        }
        if (add)
            matmul_forward_add(out, inp, weight, bias, add, stream);
        else
            matmul_forward(out, inp, weight, bias, stream);
        if (lora.a && !writes) lora_forward(b, role, onto(out), inp);
        return;
    }
    if (inp) quantise_input(b, role, inp, true, columns);
    const Activations& acts = b.p.acts;
    const Tensor rows = code_matrix(acts.fp8_rows, out.shape[0], weight.shape[1]);
    // Accumulation may be fast: the rounding of the operands is the larger error (docs/use/low_precision.md).
    matmul_fp8(out, acts.fp8->matrix(Fp8Operand::Input, role, b.l, rows),
               acts.fp8->weight(role, b.l, false, weight, acts.fp8_weight, stream), bias, false, true,
               acts.forward_scratch, stream);
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

void fp8_linear_backward(const Block& b, Role role, Tensor dinp, Tensor inp_t, const Fp8Producer& produce) {
    const Activations& acts = b.p.acts;
    const Stream stream = b.p.stream();
    const Tensor weight = weights_of(b, role).weight;
    const int64_t n = dinp.shape[0], OC = weight.shape[0];
    const Tensor rows = code_matrix(acts.fp8_rows, n, OC), columns = code_matrix(acts.fp8_columns, OC, n);
    {
        const Range range(b.p.ctx.profiler, "quantise");
        acts.fp8->quantise(Fp8Operand::Gradient, role, b.l, rows, columns, false, stream, produce);
    }
    const Range range(b.p.ctx.profiler, linear_name(role));
    const Into dweight = b.grad(role);
    // In full fp32: the sums of gradients are long.
    matmul_fp8(dweight.t, acts.fp8->matrix(Fp8Operand::Gradient, role, b.l, columns),
               acts.fp8->matrix(Fp8Operand::Input, role, b.l, inp_t), {}, dweight.add, false, acts.forward_scratch,
               stream);
    matmul_fp8(dinp, acts.fp8->matrix(Fp8Operand::Gradient, role, b.l, rows),
               acts.fp8->weight(role, b.l, true, weight, acts.fp8_weight, stream), {}, false, false,
               acts.forward_scratch, stream);
}

namespace {

// LoRA: with h = s·A·inp of the forward pass, dB = doutᵀ·h; with dh = s·dout·B, dA = dhᵀ·inp and dinp = dh·A. dinp may
// be null.
void lora_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp) {
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
}

}  // namespace

void linear_backward(const Block& b, Role role, Into dinp, Tensor dout, Tensor inp, Tensor inp_t, bool sums_bias) {
    const Stream stream = b.p.stream();
    const Tensor dbias = sums_bias ? bias_gradient(b, role) : Tensor{};
    if (b.fp8()) {
        if (dbias) {
            const Range range(b.p.ctx.profiler, linear_name(role));
            matmul_backward_bias(dbias, dout, b.p.grads->accumulate(), stream);
        }
        return fp8_linear_backward(b, role, dinp.t, inp_t,
                                   [&](const Fp8Output& out) { fp8_quantise(out, dout, stream); });
    }
    weight_backward(b, role, dout, inp, dbias);
    if (weights_of(b, role).lora.a) {  // before the frozen weight's matmul, which adds to dinp, as in linear_forward()
        lora_backward(b, role, dinp, dout, inp);
        dinp.add = true;
    }
    if (!dinp) return;
    const Range range(b.p.ctx.profiler, linear_name(role));
    matmul_backward_input(dinp.t, dout, linear_weight(b, role), dinp.add, stream);
}

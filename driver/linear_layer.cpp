#include "driver/linear_layer.h"

#include "kernels/matmul.h"

namespace {

// The name of a linear layer in a profile.
const char* linear_name(Role weight) {
    return weight == QKV_W ? "qkv" : weight == PROJ_W ? "proj" : weight == FC_W ? "fc" : "fcproj";
}

// Scratch as a matrix of fp8 codes.
Tensor code_matrix(const Tensor& scratch, int64_t rows, int64_t columns) {
    return make_tensor(scratch.data, scratch.dtype, scratch.device, {rows, columns});
}

// The adapters of a linear layer; a null: it has none.
struct LoraLayer {
    Tensor a, b;
    const std::vector<LoraPart>* parts = nullptr;
    Tensor low_rank;  // s·A·inp of all adapters, [n, parts·R]: the forward pass keeps it
    float scale = 0;  // s
};
Tensor low_rank_of(const LayerActs& a, Role role) {
    return role == QKV_W ? a.lora_qkv : role == PROJ_W ? a.lora_proj : role == FC_W ? a.lora_fc : a.lora_fcproj;
}
LoraLayer lora_layer(const Model& model, const Activations& acts, Role role, int64_t l, int64_t n) {
    if (!model.adapters) return {};
    const auto parts = model.lora->parts.find({int(role), l});
    if (parts == model.lora->parts.end()) return {};
    const Tensor a = model.adapters->weight(lora_a(role), l), b = model.adapters->weight(lora_b(role), l);
    const Tensor low_rank = low_rank_of(acts.forward[size_t(l)], role).rows(0, n).columns(0, a.shape[0]);
    return {a, b, &parts->second, low_rank, static_cast<float>(model.lora->options.scale())};
}

// Calls f(rows of B, rows of the layer's output, rows of A) for each adapter: their ranges begin, end.
template <typename F>
void for_each_part(const LoraLayer& lora, F f) {
    const int64_t R = lora.b.shape[1];
    int64_t a = 0, b = 0;
    for (const LoraPart& part : *lora.parts) {
        f(std::pair(b, b + part.rows), std::pair(part.row, part.row + part.rows), std::pair(a, a + R));
        a += R;
        b += part.rows;
    }
}

// s·B·A·inp, added to out or written to it.
void lora_forward(const Context& ctx, const LoraLayer& lora, Tensor out, Tensor inp, bool adds, Pass pass) {
    const Range range(ctx.profiler, "lora");
    if (pass == Pass::First) matmul(lora.low_rank, inp, lora.a, false, true, false, ctx.stream, lora.scale);
    for_each_part(lora, [&](auto b, auto rows, auto a) {
        const Tensor part = out.columns(rows.first, rows.second), h = lora.low_rank.columns(a.first, a.second);
        const Tensor weight = lora.b.rows(b.first, b.second);
        if (adds)
            matmul_forward_add(part, h, weight, {}, part, ctx.stream);
        else
            matmul_forward(part, h, weight, {}, ctx.stream);
    });
}

// The weight of a linear layer as its matmul reads it.
Tensor linear_weight(const Context& ctx, const Model& model, const Activations& acts, Role role, int64_t l) {
    if (!model.nf4) return model.weight(role, l);
    const Range range(ctx.profiler, "dequantise");
    return model.nf4->weight(*model.table.find(role, static_cast<int>(l)), acts.base_weight, ctx.stream);
}

}  // namespace

void quantise_input(const Context& ctx, const Activations& acts, Role role, int64_t l, int64_t n, bool rows,
                    Tensor columns, Pass pass, const Fp8Producer& produce) {
    const Range range(ctx.profiler, "quantise");
    const Tensor codes = rows ? code_matrix(acts.fp8_rows, n, linear_layer_sizes(acts.config, role).inputs) : Tensor{};
    acts.fp8->quantise(Fp8Operand::Input, role, l, codes, columns, pass == Pass::Again, ctx.stream, produce);
}

void quantise_input(const Context& ctx, const Activations& acts, Role role, int64_t l, Tensor inp, bool rows,
                    Tensor columns, Pass pass) {
    quantise_input(ctx, acts, role, l, inp.shape[0], rows, columns, pass,
                   [&](const Fp8Output& out) { fp8_quantise(out, inp, ctx.stream); });
}

void linear_forward(const Context& ctx, const Model& model, const Activations& acts, Role role, int64_t l, Tensor out,
                    Tensor inp, Tensor columns, Pass pass, Tensor add) {
    const Range range(ctx.profiler, linear_name(role));
    const Tensor weight = linear_weight(ctx, model, acts, role, l), bias = model.weight(bias_of(role), l);
    if (!acts.uses_fp8(l)) {
        // Adapters that cover all of out write it first, and the matmul with the weight adds to it: the read of out
        // hides in that matmul's epilogue, while a thin matmul would wait for it.
        const LoraLayer lora = lora_layer(model, acts, role, l, out.shape[0]);
        const bool writes = lora.a && lora.b.shape[0] == out.shape[1];
        if (writes) {
            lora_forward(ctx, lora, out, inp, false, pass);
            add = out;
        }
        if (add)
            matmul_forward_add(out, inp, weight, bias, add, ctx.stream);
        else
            matmul_forward(out, inp, weight, bias, ctx.stream);
        if (lora.a && !writes) lora_forward(ctx, lora, out, inp, true, pass);
        return;
    }
    if (inp) quantise_input(ctx, acts, role, l, inp, true, columns, pass);
    const Tensor rows = code_matrix(acts.fp8_rows, out.shape[0], weight.shape[1]);
    // Accumulation may be fast: the rounding of the operands is the larger error (docs/use/low_precision.md).
    matmul_fp8(out, acts.fp8->matrix(Fp8Operand::Input, role, l, rows),
               acts.fp8->weight(role, l, false, weight, acts.fp8_weight, ctx.stream), bias, false, true,
               acts.forward_scratch, ctx.stream);
}

Tensor bias_gradient(const Model& model, const Gradients& grads, Role role, int64_t l) {
    return role == PROJ_W || role == FCPROJ_W ? Tensor{} : model.gradient(grads, bias_of(role), l);
}

void weight_backward(const Context& ctx, const Model& model, const Gradients& grads, Role role, int64_t l, Tensor dout,
                     Tensor inp, Tensor dbias, bool accumulate) {
    if (model.table.frozen) return;
    const Range range(ctx.profiler, linear_name(role));
    matmul_backward_weight(model.gradient(grads, role, l), dbias, dout, inp, accumulate, ctx.stream);
}

void fp8_linear_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                         Role role, int64_t l, Tensor dinp, Tensor inp_t, bool accumulate, const Fp8Producer& produce) {
    const Tensor weight = model.weight(role, l);
    const int64_t n = dinp.shape[0], OC = weight.shape[0];
    const Tensor rows = code_matrix(acts.fp8_rows, n, OC), columns = code_matrix(acts.fp8_columns, OC, n);
    {
        const Range range(ctx.profiler, "quantise");
        acts.fp8->quantise(Fp8Operand::Gradient, role, l, rows, columns, false, ctx.stream, produce);
    }
    const Range range(ctx.profiler, linear_name(role));
    // In full fp32: the sums of gradients are long.
    matmul_fp8(model.gradient(grads, role, l), acts.fp8->matrix(Fp8Operand::Gradient, role, l, columns),
               acts.fp8->matrix(Fp8Operand::Input, role, l, inp_t), {}, accumulate, false, acts.forward_scratch,
               ctx.stream);
    matmul_fp8(dinp, acts.fp8->matrix(Fp8Operand::Gradient, role, l, rows),
               acts.fp8->weight(role, l, true, weight, acts.fp8_weight, ctx.stream), {}, false, false,
               acts.forward_scratch, ctx.stream);
}

namespace {

// LoRA: with h = s·A·inp of the forward pass, dB = doutᵀ·h; with dh = s·dout·B, dA = dhᵀ·inp and dinp = dh·A. adds: to
// dinp, which may be null.
void lora_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts,
                   const LoraLayer& lora, Role role, int64_t l, Tensor dinp, Tensor dout, Tensor inp, bool accumulate,
                   bool adds) {
    const Range range(ctx.profiler, "lora");
    const Tensor da = model.adapters->gradient(grads, lora_a(role), l),
                 db = model.adapters->gradient(grads, lora_b(role), l),
                 dlow_rank = acts.dlow_rank.rows(0, inp.shape[0]).columns(0, lora.a.shape[0]);
    for_each_part(lora, [&](auto b, auto rows, auto a) {
        const Tensor d = dout.columns(rows.first, rows.second), h = lora.low_rank.columns(a.first, a.second);
        matmul_backward_weight(db.rows(b.first, b.second), {}, d, h, accumulate, ctx.stream);
        matmul(dlow_rank.columns(a.first, a.second), d, lora.b.rows(b.first, b.second), false, false, false, ctx.stream,
               lora.scale);
    });
    matmul_backward_weight(da, {}, dlow_rank, inp, accumulate, ctx.stream);
    if (dinp) matmul_backward_input(dinp, dlow_rank, lora.a, adds, ctx.stream);
}

}  // namespace

void linear_backward(const Context& ctx, const Model& model, const Gradients& grads, const Activations& acts, Role role,
                     int64_t l, Tensor dinp, Tensor dout, Tensor inp, Tensor inp_t, bool accumulate, bool adds,
                     bool sums_bias) {
    const Tensor dbias = sums_bias ? bias_gradient(model, grads, role, l) : Tensor{};
    if (acts.uses_fp8(l)) {
        if (dbias) {
            const Range range(ctx.profiler, linear_name(role));
            matmul_backward_bias(dbias, dout, accumulate, ctx.stream);
        }
        return fp8_linear_backward(ctx, model, grads, acts, role, l, dinp, inp_t, accumulate,
                                   [&](const Fp8Output& out) { fp8_quantise(out, dout, ctx.stream); });
    }
    weight_backward(ctx, model, grads, role, l, dout, inp, dbias, accumulate);
    const LoraLayer lora = lora_layer(model, acts, role, l, inp.shape[0]);
    if (lora.a)  // before the frozen weight's matmul, which adds to dinp, as in linear_forward()
        lora_backward(ctx, model, grads, acts, lora, role, l, dinp, dout, inp, accumulate, adds);
    if (!dinp) return;
    const Range range(ctx.profiler, linear_name(role));
    matmul_backward_input(dinp, dout, linear_weight(ctx, model, acts, role, l), adds || lora.a, ctx.stream);
}

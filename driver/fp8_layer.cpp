#include "driver/fp8_layer.h"

#include "kernels/nf4.h"

namespace {

// Scratch as a matrix of codes.
Tensor code_matrix(const Tensor& scratch, int64_t rows, int64_t columns) {
    return make_tensor(scratch.data, scratch.dtype, scratch.device, {rows, columns});
}

Fp8Matrix weight_matrix(const Block& b, Role role, bool transposed) {
    const LinearWeights& w = weights_of(b, role);
    const Activations& acts = b.p.acts;
    if (w.fp8) return w.fp8->matrix(transposed, acts.fp8_weight, b.p.stream());
    if (!w.nf4) {
        const Model& model = b.p.model;
        const Tensor from = model.shards ? model.shards->rows(*model.table.find(role, int(b.l))) : w.weight;
        return acts.fp8->weight(role, b.l, transposed, from, acts.fp8_weight, b.p.stream());
    }
    const Range range(b.p.ctx.profiler, "dequantise");
    return {nf4_to_fp8(acts.fp8_weight, *w.nf4, transposed, b.p.stream()), Fp8Format::E4M3, w.nf4->fp8_scale};
}

}  // namespace

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

void fp8_forward(const Block& b, Role role, Into out, Tensor bias) {
    const Activations& acts = b.p.acts;
    const Tensor rows = code_matrix(acts.fp8_rows, b.p.in.n, linear_layer_sizes(acts.config, role).inputs);
    // Accumulation may be fast: the rounding of the operands is the larger error (docs/use/low_precision.md).
    matmul_fp8(out.t, acts.fp8->matrix(Fp8Operand::Input, role, b.l, rows), weight_matrix(b, role, false), bias,
               out.add, true, acts.forward_scratch, b.p.stream());
}

void quantise_gradient(const Block& b, Role role, const Fp8Producer& produce) {
    const Range range(b.p.ctx.profiler, "quantise");
    const Activations& acts = b.p.acts;
    const int64_t n = b.p.in.n, OC = linear_layer_sizes(acts.config, role).outputs;
    const Tensor columns = b.p.model.table.frozen ? Tensor{} : code_matrix(acts.fp8_columns, OC, n);
    acts.fp8->quantise(Fp8Operand::Gradient, role, b.l, code_matrix(acts.fp8_rows, n, OC), columns, false, b.p.stream(),
                       produce);
}

void fp8_weight_gradient(const Block& b, Role role, Tensor inp_t) {
    const Activations& acts = b.p.acts;
    const Into dweight = b.grad(role);
    const Tensor columns = code_matrix(acts.fp8_columns, linear_layer_sizes(acts.config, role).outputs, b.p.in.n);
    // In full fp32: the sums of gradients are long.
    matmul_fp8(dweight.t, acts.fp8->matrix(Fp8Operand::Gradient, role, b.l, columns),
               acts.fp8->matrix(Fp8Operand::Input, role, b.l, inp_t), {}, dweight.add, false, acts.forward_scratch,
               b.p.stream());
}

void fp8_input_gradient(const Block& b, Role role, Into dinp) {
    const Activations& acts = b.p.acts;
    const Tensor rows = code_matrix(acts.fp8_rows, b.p.in.n, linear_layer_sizes(acts.config, role).outputs);
    matmul_fp8(dinp.t, acts.fp8->matrix(Fp8Operand::Gradient, role, b.l, rows), weight_matrix(b, role, true), {},
               dinp.add, false, acts.forward_scratch, b.p.stream());
}

void scale_weights(const Context& ctx, const Model& model, const Activations& acts) {
    if (!acts.fp8 || acts.shape.fp8.frozen) return;
    const Range range(ctx.profiler, "scale weights");
    const ParamArena& weights = model.arenas.weights;
    acts.fp8->scale_weights(ctx, [&](Role role, int64_t l) {
        const Param& p = *model.table.find(role, int(l));
        const ParamArena::Span own = owned_span(p, model.sharding.rank, model.sharding.world);
        return own.count ? weights.elements(weights.span(p, own.begin, own.count)) : Tensor{};
    });
}

void quantise_weights(const Context& ctx, const Model& model, const Activations& acts) {
    if (!acts.fp8 || acts.shape.fp8.frozen || !(model.shards || acts.shape.fp8.keep_weights)) return;
    const Range range(ctx.profiler, "quantise");
    if (model.shards) return model.shards->quantise(ctx, model.table, model.arenas, *acts.fp8);
    model.await_weights(ctx);
    for (int64_t l = 0; l < model.config.layers; l++)
        for (const Role role : LINEAR_LAYERS)
            if (acts.uses_fp8(l)) acts.fp8->keep_weight(role, l, model.weight(role, l), ctx.stream);
}

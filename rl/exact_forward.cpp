#include "rl/exact_forward.h"

#include <algorithm>

#include "driver/sequence_loss.h"
#include "kernels/cross_entropy.h"
#include "kernels/gather_rows.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/matmul.h"

ExactForward::ExactForward(const Context& context, const Model& m, const Activations& of_run, const RunShape& shape)
    : ctx(context), model(m), run(of_run), acts(m.config, shape) {}

void ExactForward::allocate(const Tensor& shared) {
    acts.allocate(ctx, shared);
    acts.rope_table = run.rope_table;  // which outlives the steps that overwrite `shared`
}

void ExactForward::blocks(Tensor out, Tensor rows, Tensor tokens, Tensor positions, const Attend& attend) {
    const Input in{tokens.shape[0], tokens, positions, {}, {}, {}};
    Pass p{ctx, model, acts, in};
    p.attention = [&](const Block& b) { attend(b.l, b.a.qkv, b.a.att); };
    forward(p);
    if (rows.shape[0]) gather_rows(out, acts.normf.rows(0, in.n), rows, ctx.stream, logit_scale(run));
}

void ExactForward::head(Tensor out, Tensor inp) {
    const Tensor weight = model.weight(model.head());
    if (inp.dtype != out.dtype)  // then choose_sampler() refuses a bias
        return matmul(out, inp, weight, false, true, false, ctx.stream);
    matmul_forward(out, inp, weight, model.weight(HEAD_B), ctx.stream);
}

void ExactForward::losses(Tensor out, Tensor targets, Tensor inp, Tensor logits) {
    const ModelConfig& c = model.config;
    if (inp.dtype == logits.dtype && !c.logit_softcap)  // the logits of the loss are there
        return cross_entropy_forward(out, logits, targets, c.vocab_size, {}, ctx.stream);
    const Tensor scratch = make_tensor(logits.data, inp.dtype, logits.device, {logits.shape[0], logits.shape[1]});
    // In chunks no longer than training's: which kernel computes one depends on its length.
    const int64_t n = inp.shape[0], chunk = run.logits.shape[0];
    for (int64_t begin = 0; begin < n; begin += chunk) {
        const int64_t end = std::min(begin + chunk, n);
        LinearCrossEntropy loss;
        loss.losses = out.rows(begin, end);
        loss.inp = inp.rows(begin, end);
        loss.weight = model.weight(model.head());
        loss.bias = model.weight(HEAD_B);
        loss.targets = targets.rows(begin, end);
        loss.logits = scratch.rows(begin, end);
        loss.V = c.vocab_size;
        loss.softcap = c.logit_softcap;
        linear_cross_entropy_forward(loss, ctx.stream);
    }
}

// The activations of each norm of the model, as views.
#pragma once

#include "driver/pass.h"

// A norm's output, input and statistics. mean is null for RMSNorm; both mean and rstd are null without a backward pass.
struct NormActs {
    Tensor out, inp, mean, rstd;
};
// Norms before attention and the MLP: inp is the residual.
inline NormActs norm1(const LayerActs& a) {
    return {a.norm1, a.res1, a.mean1, a.rstd1};
}
inline NormActs norm2(const LayerActs& a) {
    return {a.norm2, a.res2, a.mean2, a.rstd2};
}
// Norms after them: out is the residual that follows, of which the backward pass needs nothing.
inline NormActs norm_after_attention(const LayerActs& a) {
    return {a.res2, a.proj, {}, a.rstd1};
}
inline NormActs norm_after_mlp(const LayerActs& a, Tensor next_residual) {
    return {next_residual, a.fcproj, {}, a.rstd2};
}
// Null stays null.
inline Tensor first_rows(const Tensor& t, int64_t n) {
    return t ? t.rows(0, n) : t;
}
inline NormActs final_norm(const Pass& p) {
    const Activations& acts = p.acts;
    const int64_t n = p.in.n;
    return {first_rows(acts.normf, n), first_rows(acts.resf, n), first_rows(acts.meanf, n), first_rows(acts.rstdf, n)};
}
// The norm after the embedding. Without a backward pass it works in place.
inline NormActs embedding_norm(const Pass& p, Tensor out) {
    const Activations& acts = p.acts;
    const int64_t n = p.in.n;
    return {out, acts.embedded ? acts.embedded.rows(0, n) : out, first_rows(acts.meane, n), first_rows(acts.rstde, n)};
}

#include "kernels/linear_cross_entropy.h"

#include "kernels/cross_entropy.h"
#include "kernels/matmul.h"
#ifdef HAVE_SM90A
#include "kernels/cross_entropy_hopper.h"
#endif

namespace {

void logits_of(const LinearCrossEntropy& x, Stream stream) {
    matmul_forward(x.logits, x.inp, x.weight, x.bias, stream);
    if (x.lora.a) add_low_rank(x.logits, x.low_rank, x.inp, x.lora, stream);
}

void logits_and_losses(const LinearCrossEntropy& x, Stream stream) {
    logits_of(x, stream);
    cross_entropy_forward(x.losses, x.logits, x.targets, x.V, x.softcap, stream);
}

// x.logits: dlogits.
void matmuls_backward(const LinearCrossEntropy& x, Stream stream) {
    if (x.dweight) matmul_backward_weight(x.dweight, x.dbias, x.logits, x.inp, x.accumulate, stream);
    if (!x.lora.a) return matmul_backward_input(x.dinp, x.logits, x.weight, false, stream);
    const Tensor dlogits = x.logits.columns(0, x.lora.b.shape[0]);
    matmul(x.dlow_rank, dlogits, x.lora.b, false, false, false, stream, x.lora.scale);
    matmul(x.db, dlogits, x.low_rank, true, false, x.accumulate, stream, x.lora.scale);
    matmul(x.da, x.dlow_rank, x.inp, true, false, x.accumulate, stream);
    matmul_backward_input(x.dinp, x.dlow_rank, x.lora.a, false, stream);
    matmul_backward_input(x.dinp, x.logits, x.weight, true, stream);
}

#ifdef HAVE_SM90A
// The matmul of those kernels does not store logits, which an adapter would be added to.
bool hopper_takes(const LinearCrossEntropy& x, Stream stream) {
    return !x.lora.a && hopper_cross_entropy_takes(x, stream);
}
#endif

}  // namespace

void add_low_rank(Tensor out, Tensor low_rank, Tensor inp, const LoraWeights& lora, Stream stream) {
    matmul(low_rank, inp, lora.a, false, true, false, stream);
    matmul(out.columns(0, lora.b.shape[0]), low_rank, lora.b, false, true, true, stream, lora.scale);
}

void linear_cross_entropy(const LinearCrossEntropy& x, Stream stream) {
    if (x.dlosses) {
        linear_cross_entropy_losses(x, stream);
        return linear_cross_entropy_gradient(x, stream);
    }
#ifdef HAVE_SM90A
    if (hopper_takes(x, stream)) return hopper_cross_entropy(x, stream);
#endif
    logits_of(x, stream);
    cross_entropy_forward_backward(x.losses, x.logits, x.targets, x.V, x.dloss, x.softcap, stream);
    matmuls_backward(x, stream);
}

void linear_cross_entropy_losses(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_takes(x, stream)) return hopper_cross_entropy_losses(x, stream);
#endif
    logits_and_losses(x, stream);
}

void linear_cross_entropy_gradient(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_takes(x, stream)) return hopper_cross_entropy_gradient(x, stream);
#endif
    cross_entropy_backward(x.logits, x.losses, x.dlosses, x.targets, x.V, x.softcap, stream);
    matmuls_backward(x, stream);
}

void linear_cross_entropy_forward(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_takes(x, stream)) return hopper_cross_entropy_forward(x, stream);
#endif
    logits_and_losses(x, stream);
}

#include "kernels/linear_cross_entropy.h"

#include "kernels/cross_entropy.h"
#include "kernels/matmul.h"
#ifdef HAVE_SM90A
#include "kernels/cross_entropy_hopper.h"
#endif

namespace {

void logits_and_losses(const LinearCrossEntropy& x, Stream stream) {
    matmul_forward(x.logits, x.inp, x.weight, x.bias, stream);
    cross_entropy_forward(x.losses, x.logits, x.targets, x.V, x.softcap, stream);
}

// x.logits: dlogits.
void matmuls_backward(const LinearCrossEntropy& x, Stream stream) {
    if (x.dweight) matmul_backward_weight(x.dweight, x.dbias, x.logits, x.inp, x.accumulate, stream);
    matmul_backward_input(x.dinp, x.logits, x.weight, false, stream);
}

}  // namespace

void linear_cross_entropy(const LinearCrossEntropy& x, Stream stream) {
    if (x.dlosses) {
        linear_cross_entropy_losses(x, stream);
        return linear_cross_entropy_gradient(x, stream);
    }
#ifdef HAVE_SM90A
    if (hopper_cross_entropy_takes(x, stream)) return hopper_cross_entropy(x, stream);
#endif
    matmul_forward(x.logits, x.inp, x.weight, x.bias, stream);
    cross_entropy_forward_backward(x.losses, x.logits, x.targets, x.V, x.dloss, x.softcap, stream);
    matmuls_backward(x, stream);
}

void linear_cross_entropy_losses(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_cross_entropy_takes(x, stream)) return hopper_cross_entropy_losses(x, stream);
#endif
    logits_and_losses(x, stream);
}

void linear_cross_entropy_gradient(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_cross_entropy_takes(x, stream)) return hopper_cross_entropy_gradient(x, stream);
#endif
    cross_entropy_backward(x.logits, x.losses, x.dlosses, x.targets, x.V, x.softcap, stream);
    matmuls_backward(x, stream);
}

void linear_cross_entropy_forward(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_cross_entropy_takes(x, stream)) return hopper_cross_entropy_forward(x, stream);
#endif
    logits_and_losses(x, stream);
}

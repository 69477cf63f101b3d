#include "kernels/linear_cross_entropy.h"

#include "kernels/cross_entropy.h"
#include "kernels/matmul.h"
#ifdef HAVE_SM90A
#include "kernels/cross_entropy_hopper.h"
#endif

void linear_cross_entropy(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_cross_entropy_takes(x, stream)) return hopper_cross_entropy(x, stream);
#endif
    matmul_forward(x.logits, x.inp, x.weight, x.bias, stream);
    cross_entropy_forward_backward(x.losses, x.logits, x.targets, x.V, x.dloss, x.softcap, stream);
    if (x.dweight) matmul_backward_weight(x.dweight, x.dbias, x.logits, x.inp, x.accumulate, stream);
    matmul_backward_input(x.dinp, x.logits, x.weight, false, stream);
}

void linear_cross_entropy_forward(const LinearCrossEntropy& x, Stream stream) {
#ifdef HAVE_SM90A
    if (hopper_cross_entropy_takes(x, stream)) return hopper_cross_entropy_forward(x, stream);
#endif
    matmul_forward(x.logits, x.inp, x.weight, x.bias, stream);
    cross_entropy_forward(x.losses, x.logits, x.targets, x.V, x.softcap, stream);
}

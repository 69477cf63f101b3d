#include "kernels/softcap.h"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/softcap_values.cuh"

namespace {

template <typename T>
struct Forward {
    Softcap softcap;
    __device__ float operator()(float x) const { return capped<T>(x, softcap).value; }
};

}  // namespace

void softcap_forward(Tensor logits, Softcap softcap, Stream stream) {
    const char* op = "softcap_forward";
    const DType dtype = check_activation_dtype(op, "logits", logits);
    check_matrix(op, "logits", logits, dtype);
    check_softcap(op, softcap);
    if (!softcap) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_elementwise<T>(op, logits, Forward<T>{softcap}, stream, logits);
    });
}

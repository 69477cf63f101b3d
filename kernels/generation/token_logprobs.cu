// One block for each row, one thread for each of its k tokens.
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/generation/token_logprobs.h"
#include "kernels/generation/token_logprobs_check.h"

namespace {

constexpr int THREADS = WARP;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    token_logprobs_kernel(float* logprobs, int64_t logprobs_stride, const int32_t* ids, int64_t ids_stride,
                          const float* losses, const int32_t* targets, const T* logits, int64_t logits_stride, int k) {
    const int64_t b = blockIdx.x;
    const T* const row = logits + b * logits_stride;
    const int32_t target = targets[b];
    const float of_target = target < 0 ? NAN : as_float(row[target]);
    for (int i = int(threadIdx.x); i < k; i += THREADS)
        logprobs[b * logprobs_stride + i] = as_float(row[ids[b * ids_stride + i]]) - of_target - losses[b];
}

}  // namespace

void token_logprobs(Tensor logprobs, Tensor ids, Tensor losses, Tensor targets, Tensor logits, Stream stream) {
    const char* op = "token_logprobs";
    const DType dtype = check_activation_dtype(op, "logits", logits);
    check_token_logprobs(op, dtype, logprobs, ids, losses, targets, logits);
    const int64_t B = logits.shape[0];
    if (B == 0) return;
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        token_logprobs_kernel<T><<<grid_of(B), THREADS, 0, cuda_stream(stream)>>>(
            logprobs.as<float>(), row_stride(logprobs), ids.as<int32_t>(), row_stride(ids), losses.as<float>(),
            targets.as<int32_t>(), logits.as<const T>(), row_stride(logits), int(logprobs.shape[1]));
    });
    check_launch(op, stream);
}

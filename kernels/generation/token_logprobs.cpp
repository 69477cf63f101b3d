#include "kernels/generation/token_logprobs.h"

#include <limits>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/generation/token_logprobs_check.h"

void token_logprobs(Tensor logprobs, Tensor ids, Tensor losses, Tensor targets, Tensor logits, Stream) {
    const char* op = "token_logprobs";
    check_token_logprobs(op, DType::F32, logprobs, ids, losses, targets, logits);
    const int64_t k = logprobs.shape[1], Vp = logits.shape[1];
    for (int64_t b = 0; b < logits.shape[0]; b++) {
        const float* row = logits.as<float>() + b * row_stride(logits);
        float* out = logprobs.as<float>() + b * row_stride(logprobs);
        const int32_t target = targets.as<int32_t>()[b];
        require(target < Vp, op, ": target ", target, " lies outside a row of ", Vp);
        for (int64_t i = 0; i < k; i++) {
            const int32_t id = ids.as<int32_t>()[b * row_stride(ids) + i];
            require(id >= 0 && id < Vp, op, ": id ", id, " lies outside a row of ", Vp);
            out[i] =
                target < 0 ? std::numeric_limits<float>::quiet_NaN() : row[id] - row[target] - losses.as<float>()[b];
        }
    }
}

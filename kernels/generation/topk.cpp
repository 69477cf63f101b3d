#include "kernels/generation/topk.h"

#include <algorithm>
#include <functional>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/generation/token_key.h"
#include "kernels/generation/topk_check.h"

namespace {

// best: the k largest keys so far, a heap whose smallest key is in front. After a while few elements are larger.
void top_k_of_row(float* values, int32_t* ids, const float* inp, int64_t V, int64_t k, uint64_t* best) {
    for (int64_t v = 0; v < k; v++) best[v] = token_key(inp[v], v);
    std::make_heap(best, best + k, std::greater<>());
    for (int64_t v = k; v < V; v++) {
        const uint64_t key = token_key(inp[v], v);
        if (key < best[0]) continue;
        std::pop_heap(best, best + k, std::greater<>());
        best[k - 1] = key;
        std::push_heap(best, best + k, std::greater<>());
    }
    std::sort_heap(best, best + k, std::greater<>());
    for (int64_t i = 0; i < k; i++) {
        ids[i] = token_id(best[i]);
        values[i] = inp[ids[i]];
    }
}

}  // namespace

int64_t top_k_scratch(int64_t B, int64_t, int64_t k) {
    return B * k * int64_t(sizeof(uint64_t));
}

void top_k(Tensor values, Tensor ids, Tensor inp, Tensor scratch, Stream) {
    const char* op = "top_k";
    check_top_k(op, DType::F32, values, ids, inp, scratch);
    const int64_t B = inp.shape[0], V = inp.shape[1], k = values.shape[1];
    uint64_t* best = static_cast<uint64_t*>(scratch.data);
#pragma omp parallel for schedule(static) if (B * V > PARALLEL_MIN)
    for (int64_t b = 0; b < B; b++)
        top_k_of_row(values.as<float>() + b * row_stride(values), ids.as<int32_t>() + b * row_stride(ids),
                     inp.as<float>() + b * row_stride(inp), V, k, best + b * k);
}

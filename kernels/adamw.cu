#include "kernels/adamw.h"

#include "kernels/cuda_common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t TILE = int64_t(THREADS) * 4 * 2;  // elements of a block at a time: two vectors a thread
constexpr int MAX_SEGMENTS = 256;

// Passed by value with the launch, so that no copy to the device has to be waited for. A block finds the segment of its
// tile by bisection over first_tile. More segments than fit take another launch.
struct SegmentTable {
    int32_t count;
    float weight_decay[MAX_SEGMENTS];
    int64_t begin[MAX_SEGMENTS], end[MAX_SEGMENTS];
    int64_t first_tile[MAX_SEGMENTS + 1];  // tiles of the segments before
};

// What one update needs, computed once a block in double: the powers of β and 1 − β would lose digits in fp32.
struct Factors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    float grad_scale;
    float step_size;   // lr / (1 − β1^t)
    float root_scale;  // 1 / √(1 − β2^t)
    float lr;
};

template <typename T>
struct Arenas {
    float* params;
    T* params_T;  // null: not wanted
    float *m, *v;
    const float* grads;
};

template <int W, typename T>
__device__ __forceinline__ void update(const Arenas<T>& a, int64_t i, const Factors& f, float decay) {
    const Floats<W> g = load_floats<W>(a.grads + i);
    Floats<W> p = load_floats<W>(a.params + i), m = load_floats<W>(a.m + i), v = load_floats<W>(a.v + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float gk = g[k] * f.grad_scale;
        m[k] = f.beta1 * m[k] + f.one_minus_beta1 * gk;
        v[k] = f.beta2 * v[k] + f.one_minus_beta2 * (gk * gk);
        p[k] -= f.step_size * m[k] / (sqrtf(v[k]) * f.root_scale + f.eps) + decay * p[k];
    }
    store_floats<W>(a.m + i, m);
    store_floats<W>(a.v + i, v);
    store_floats<W>(a.params + i, p);
    if (a.params_T) store_floats<W>(a.params_T + i, p);
}

template <int W, typename T>
__global__ void __launch_bounds__(THREADS) adamw_kernel(Arenas<T> a, const StepScalars* scalars, AdamWOptions options,
                                                        const __grid_constant__ SegmentTable segments) {
    if (scalars->skip) return;
    __shared__ Factors shared;
    if (threadIdx.x == 0) {
        const double beta1 = options.beta1, beta2 = options.beta2, t = double(scalars->t);
        shared.beta1 = options.beta1;
        shared.one_minus_beta1 = float(1 - beta1);
        shared.beta2 = options.beta2;
        shared.one_minus_beta2 = float(1 - beta2);
        shared.eps = options.eps;
        shared.grad_scale = scalars->grad_scale;
        shared.step_size = float(scalars->lr / (1 - pow(beta1, t)));
        shared.root_scale = float(1 / sqrt(1 - pow(beta2, t)));
        shared.lr = scalars->lr;
    }
    __syncthreads();
    const Factors f = shared;
    const int64_t tiles = segments.first_tile[segments.count];
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int low = 0, high = segments.count - 1;  // the last segment that begins at or before the tile
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (segments.first_tile[middle] <= tile)
                low = middle;
            else
                high = middle - 1;
        }
        const int64_t begin = segments.begin[low], end = segments.end[low];
        const float decay = f.lr * segments.weight_decay[low];
        // Tiles lie at multiples of TILE in the arena, so that vectors are aligned whatever the segments' ends are.
        const int64_t base = (begin / TILE + tile - segments.first_tile[low]) * TILE;
#pragma unroll
        for (int64_t part = 0; part < TILE; part += int64_t(THREADS) * W) {
            const int64_t i = base + part + int64_t(threadIdx.x) * W;
            if (i >= begin && i + W <= end) {
                update<W>(a, i, f, decay);
            } else {
                for (int64_t j = max(i, begin); j < min(i + W, end); j++) update<1>(a, j, f, decay);
            }
        }
    }
}

template <typename T>
void launch(const char* op, const Arenas<T>& arenas, const AdamWSegment* segments, int64_t num_segments,
            const AdamWOptions& options, const StepScalars* scalars, bool aligned, Stream stream) {
    SegmentTable table;
    table.count = 0;
    table.first_tile[0] = 0;
    for (int64_t s = 0; s < num_segments; s++) {
        if (segments[s].begin < segments[s].end) {
            const int at = table.count++;
            table.begin[at] = segments[s].begin, table.end[at] = segments[s].end;
            table.weight_decay[at] = segments[s].weight_decay;
            table.first_tile[at + 1] =
                table.first_tile[at] + ceil_div(segments[s].end, TILE) - segments[s].begin / TILE;
        }
        if (table.count == 0 || (table.count < MAX_SEGMENTS && s + 1 < num_segments)) continue;
        // As many blocks as run at once: each computes its factors once and then goes from tile to tile.
        const int64_t blocks = std::min(table.first_tile[table.count], 8 * num_multiprocessors());
        dispatch_width<float>(aligned, [&](auto width) {
            adamw_kernel<decltype(width)::value>
                <<<grid_of(blocks), THREADS, 0, cuda_stream(stream)>>>(arenas, scalars, options, table);
        });
        check_launch(op, stream);
        table.count = 0;
    }
}

}  // namespace

void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const AdamWSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream stream) {
    const char* op = "adamw_update";
    require(params.rank == 1, op, ": params is ", dtype_name(params.dtype), " ", shape_string(params),
            ", expected fp32 [n]");
    const int64_t n = params.shape[0];
    check_tensor(op, "params", params, DType::F32, {n});
    check_tensor(op, "m", m, DType::F32, {n});
    check_tensor(op, "v", v, DType::F32, {n});
    check_tensor(op, "grads", grads, DType::F32, {n});
    check_tensor(op, "scalars", scalars, DType::U8, {int64_t(sizeof(StepScalars))});
    if (params_T) check_tensor(op, "params_T", params_T, check_activation_dtype(op, "params_T", params_T), {n});
    for (int64_t i = 0; i < num_segments; i++)
        require((i ? segments[i - 1].end : 0) <= segments[i].begin && segments[i].begin <= segments[i].end &&
                    segments[i].end <= n,
                op, ": segment ", i, " is [", segments[i].begin, ", ", segments[i].end,
                "), expected ascending segments within [0, ", n, ")");
    dispatch_dtype(op, params_T ? params_T.dtype : DType::F32, [&](auto zero) {
        using T = decltype(zero);
        const Arenas<T> arenas{params.as<float>(), params_T ? params_T.as<T>() : nullptr, m.as<float>(), v.as<float>(),
                               grads.as<float>()};
        launch<T>(op, arenas, segments, num_segments, options,
                  reinterpret_cast<const StepScalars*>(scalars.as<uint8_t>()),
                  rows_aligned({params, params_T, m, v, grads}), stream);
    });
}

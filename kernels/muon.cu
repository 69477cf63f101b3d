// Muon's elementwise kernels and the norms of its matrices; the iteration is in kernels/newton_schulz.cpp.
//
// muon_momentum and muon_update walk segments as AdamW does (kernels/cuda/param_update_tiles.cuh). They move 14 and 12
// bytes per element with bf16 updates and master weights (AdamW: 30): GPT-2 124M has 85 million elements in
// matrices, 2.2 GB.
#include "kernels/muon.h"

#include "kernels/cuda/launch_shapes.h"
#include "kernels/cuda/param_update_tiles.cuh"
#include "kernels/muon_check.h"

namespace {

struct DeviceMuonSegment : DeviceSegment {
    int64_t to_update;  // index in the updates − index in the arena
    float shape_scale;

    DeviceMuonSegment() = default;
    explicit DeviceMuonSegment(const MuonSegment& s)
        : DeviceSegment(s), to_update(s.update_begin - s.begin), shape_scale(s.shape_scale) {}
};

template <int W, typename U, typename M, typename G>
__global__ void __launch_bounds__(UPDATE_THREADS)
    momentum_kernel(U* updates, M* m, const G* grads, const StepScalars* scalars, uint64_t seed,
                    const __grid_constant__ SegmentTable<DeviceMuonSegment> segments) {
    if (scalars->skip) return;
    const float mu = scalars->momentum, one_minus_mu = float(1 - double(mu)), grad_scale = scalars->grad_scale;
    const NoiseKeys noise{seed, uint64_t(scalars->t)};
    for_each_element<W>(
        segments,
        [](const DeviceMuonSegment& segment) { return segment.to_update % 4 == 0 && segment.to_element % 4 == 0; },
        [&](auto width, int64_t i, const DeviceMuonSegment& segment) {
            constexpr int N = decltype(width)::value;
            const Floats<N> g = load_floats<N>(grads + i);
            Floats<N> mi = load_floats<N>(m + i), u;
#pragma unroll
            for (int k = 0; k < N; k++) {
                // fmaf explicitly, so that every instance of this kernel computes the same bits.
                const float gk = one_minus_mu * (grad_scale * g[k]);
                mi[k] = fmaf(mu, mi[k], gk);
                u[k] = fmaf(mu, mi[k], gk);
            }
            store_rounded<N>(m + i, mi, noise, segment, i, Rounded::M);
            store_floats<N>(updates + i + segment.to_update, u);
        });
}

template <int W, typename T, typename U>
__global__ void __launch_bounds__(UPDATE_THREADS)
    update_kernel(ParamArenas<T> params, const U* updates, const StepScalars* scalars, uint64_t seed,
                  const __grid_constant__ SegmentTable<DeviceMuonSegment> segments) {
    if (scalars->skip) return;
    const float lr = scalars->lr;
    params.noise = {seed, uint64_t(scalars->t)};
    for_each_element<W>(
        segments,
        [](const DeviceMuonSegment& segment) { return ParamArenas<T>::vectors(segment) && segment.to_update % 4 == 0; },
        [&](auto width, int64_t i, const DeviceMuonSegment& segment) {
            constexpr int N = decltype(width)::value;
            const float rate = lr * segment.lr_scale;
            const float scale = rate * segment.shape_scale, decay = rate * segment.weight_decay;
            const Floats<N> u = load_floats<N>(updates + i + segment.to_update);
            Floats<N> p = params.template load<N>(i, segment);
#pragma unroll
            for (int k = 0; k < N; k++) p[k] -= fmaf(decay, p[k], scale * u[k]);
            params.template store<N>(i, segment, p);
        });
}

// ---------------------------------------------------------------------------------------------------------------------
// Norms. A block sums the squares of a chunk of a matrix in fp64, where they neither overflow nor underflow; then each
// block adds its matrix's sums in a fixed order and scales its chunk.
//
// GPT-2 124M, 12 matrices of 768 × 3072: 144 chunks of 16384 elements each, 1728 blocks, 64 elements a thread.

constexpr int NORM_THREADS = 256;

template <int W, typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    chunk_squares_kernel(double* sums, const T* x, int64_t size, int64_t chunks) {
    const auto [matrix, chunk] = row_item(blockIdx.x, chunks);
    const int64_t begin = chunk * gpu_scratch::MATRIX_CHUNK, end = min(size, begin + gpu_scratch::MATRIX_CHUNK);
    const T* values = x + matrix * size;
    double sum = 0;
    for (int64_t i = begin + threadIdx.x * W; i < end; i += NORM_THREADS * W) {
        const Floats<W> v = load_floats<W>(values + i);
#pragma unroll
        for (int k = 0; k < W; k++) sum += double(v[k]) * double(v[k]);
    }
    sum = block_sum_fp64<NORM_THREADS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <int W, typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    scale_kernel(T* out, const T* x, const double* sums, double scale, int64_t size, int64_t chunks) {
    const auto [matrix, chunk] = row_item(blockIdx.x, chunks);
    double sum = 0;
    for (int64_t c = threadIdx.x; c < chunks; c += NORM_THREADS) sum += sums[matrix * chunks + c];
    __shared__ float shared;
    sum = block_sum_fp64<NORM_THREADS>(sum);
    if (threadIdx.x == 0) {
        const double norm = sqrt(sum);
        shared = norm > MUON_SMALLEST_NORM ? float(scale / norm) : 0;
    }
    __syncthreads();
    const float factor = shared;
    const int64_t begin = chunk * gpu_scratch::MATRIX_CHUNK, end = min(size, begin + gpu_scratch::MATRIX_CHUNK);
    for (int64_t i = matrix * size + begin + threadIdx.x * W; i < matrix * size + end; i += NORM_THREADS * W) {
        Floats<W> v = load_floats<W>(x + i);
#pragma unroll
        for (int k = 0; k < W; k++) v[k] *= factor;
        store_floats<W>(out + i, v);
    }
}

}  // namespace

void muon_momentum(Tensor updates, Tensor m, Tensor grads, const MuonSegment* segments, int64_t num_segments,
                   uint64_t seed, Tensor scalars, Stream stream) {
    const char* op = "muon_momentum";
    check_muon_momentum(op, updates, m, grads, segments, num_segments, scalars);
    const auto* step_scalars = reinterpret_cast<const StepScalars*>(scalars.as<uint8_t>());
    dispatch_fp32_or_bf16(updates.dtype, [&](auto zero) {
        using U = decltype(zero);
        dispatch_fp32_or_bf16(m.dtype, [&](auto moment_zero) {
            using M = decltype(moment_zero);
            dispatch_fp32_or_bf16(grads.dtype, [&](auto gradient_zero) {
                using G = decltype(gradient_zero);
                dispatch_width<float>(rows_aligned({updates, m, grads}), [&](auto width) {
                    launch_segments<momentum_kernel<decltype(width)::value, U, M, G>, DeviceMuonSegment>(
                        op, segments, num_segments, stream, updates.as<U>(), m.as<M>(), grads.as<G>(), step_scalars,
                        seed);
                });
            });
        });
    });
}

void muon_update(Tensor params, Tensor params_T, Tensor updates, const MuonSegment* segments, int64_t num_segments,
                 uint64_t seed, Tensor scalars, Stream stream) {
    const char* op = "muon_update";
    check_muon_update(op, params, params_T, updates, segments, num_segments, scalars);
    const auto* step_scalars = reinterpret_cast<const StepScalars*>(scalars.as<uint8_t>());
    const bool aligned = rows_aligned({params, params_T, updates});
    dispatch_dtype(op, params_T ? params_T.dtype : DType::F32, [&](auto zero) {
        using T = decltype(zero);
        const ParamArenas<T> arenas{params.as<float>(), params_T ? params_T.as<T>() : nullptr};
        dispatch_fp32_or_bf16(updates.dtype, [&](auto update_zero) {
            using U = decltype(update_zero);
            dispatch_width<float>(aligned, [&](auto width) {
                launch_segments<update_kernel<decltype(width)::value, T, U>, DeviceMuonSegment>(
                    op, segments, num_segments, stream, arenas, updates.as<U>(), step_scalars, seed);
            });
        });
    });
}

void normalize_matrices(Tensor out, Tensor x, double scale, Tensor scratch, Stream stream) {
    const char* op = "normalize_matrices";
    check_normalize_matrices(op, out, x, scratch);
    const int64_t size = x.shape[1] * x.shape[2], chunks = gpu_scratch::matrix_chunks(size),
                  blocks = x.shape[0] * chunks;
    if (blocks == 0) return;
    require(blocks <= INT32_MAX, op, ": ", x.numel(), " elements are more than one GPU can hold");
    auto* sums = reinterpret_cast<double*>(scratch.as<uint8_t>());
    dispatch_fp32_or_bf16(x.dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(rows_aligned({out, x}) && size % FULL_WIDTH<T> == 0, [&](auto width) {
            constexpr int W = decltype(width)::value;
            chunk_squares_kernel<W>
                <<<grid_of(blocks), NORM_THREADS, 0, cuda_stream(stream)>>>(sums, x.as<T>(), size, chunks);
            check_launch(op, stream);
            scale_kernel<W><<<grid_of(blocks), NORM_THREADS, 0, cuda_stream(stream)>>>(out.as<T>(), x.as<T>(), sums,
                                                                                       scale, size, chunks);
            check_launch(op, stream);
        });
    });
}

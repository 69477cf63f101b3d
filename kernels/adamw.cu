// AdamW over an arena in one launch (kernels/cuda/param_update_tiles.cuh).
//
//   shared memory    36 B (the factors of the update)
//   registers        48
//   blocks per SM    5
#include "kernels/adamw.h"

#include "kernels/adamw_check.h"
#include "kernels/cuda/param_update_tiles.cuh"

namespace {

// The factors of an update. A block computes them once, in double: the powers of β and 1 − β would lose digits in fp32.
struct Factors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    float grad_scale;
    float step_size;   // lr / (1 − β1^t)
    float root_scale;  // 1 / √(1 − β2^t)
    float lr;
};

struct AdamWDeviceSegment : DeviceSegment {
    int64_t to_v;  // index in v − index in the arena

    AdamWDeviceSegment() = default;
    explicit AdamWDeviceSegment(const ParamSegment& s)
        : DeviceSegment(s), to_v(s.v_begin < 0 ? 0 : s.v_begin - s.begin) {}
};

// M, G: float or bf16.
template <typename M, typename G>
struct MomentArenas {
    M *m, *v;
    const G* grads;
};

template <int W, typename T, typename M, typename G>
__device__ __forceinline__ void update(const ParamArenas<T>& params, const MomentArenas<M, G>& a, int64_t i,
                                       const Factors& f, const AdamWDeviceSegment& segment) {
    const float decay = f.lr * segment.lr_scale * segment.weight_decay, step_size = f.step_size * segment.lr_scale;
    const Floats<W> g = load_floats<W>(a.grads + i);
    M* const to_v = a.v + i + segment.to_v;
    Floats<W> m = load_floats<W>(a.m + i), v = load_floats<W>(to_v), p = params.template load<W>(i, segment);
#pragma unroll
    for (int k = 0; k < W; k++) {
        // fmaf explicitly, so that every instance of this kernel computes the same bits.
        const float gk = g[k] * f.grad_scale;
        m[k] = fmaf(f.beta1, m[k], f.one_minus_beta1 * gk);
        v[k] = fmaf(f.beta2, v[k], f.one_minus_beta2 * (gk * gk));
        const float adam = step_size * m[k] / fmaf(sqrtf(v[k]), f.root_scale, f.eps);
        p[k] -= fmaf(decay, p[k], adam);
    }
    store_rounded<W>(a.m + i, m, params.noise, segment, i, Rounded::M);
    store_rounded<W>(to_v, v, params.noise, segment, i, Rounded::V);
    params.template store<W>(i, segment, p);
}

template <int W, typename T, typename M, typename G>
__global__ void __launch_bounds__(UPDATE_THREADS)
    adamw_kernel(ParamArenas<T> params, MomentArenas<M, G> moments, const StepScalars* scalars, AdamWOptions options,
                 const __grid_constant__ SegmentTable<AdamWDeviceSegment> segments) {
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
    params.noise = {options.seed, uint64_t(scalars->t)};
    for_each_element<W>(
        segments,
        [](const AdamWDeviceSegment& segment) { return ParamArenas<T>::vectors(segment) && segment.to_v % 4 == 0; },
        [&](auto width, int64_t i, const AdamWDeviceSegment& segment) {
            update<decltype(width)::value>(params, moments, i, f, segment);
        });
}

}  // namespace

void adamw_update(Tensor params, Tensor params_T, Tensor m, Tensor v, Tensor grads, const ParamSegment* segments,
                  int64_t num_segments, const AdamWOptions& options, Tensor scalars, Stream stream) {
    const char* op = "adamw_update";
    check_adamw(op, params, params_T, m, v, grads, segments, num_segments, scalars);
    const auto* step_scalars = reinterpret_cast<const StepScalars*>(scalars.as<uint8_t>());
    const bool aligned = rows_aligned({params, params_T, m, v, grads});
    dispatch_dtype(op, params_T ? params_T.dtype : DType::F32, [&](auto zero) {
        using T = decltype(zero);
        const ParamArenas<T> arenas{params.as<float>(), params_T ? params_T.as<T>() : nullptr};
        dispatch_fp32_or_bf16(m.dtype, [&](auto moment_zero) {
            using M = decltype(moment_zero);
            dispatch_fp32_or_bf16(grads.dtype, [&](auto gradient_zero) {
                using G = decltype(gradient_zero);
                const MomentArenas<M, G> moments{m.as<M>(), v.as<M>(), grads.as<G>()};
                dispatch_width<float>(aligned, [&](auto width) {
                    launch_segments<adamw_kernel<decltype(width)::value, T, M, G>, AdamWDeviceSegment>(
                        op, segments, num_segments, stream, arenas, moments, step_scalars, options);
                });
            });
        });
    });
}

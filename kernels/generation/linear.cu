// Chooses the kernel of a linear layer by the number of rows N and the matrix: GEMV for up to 2 or 8 rows, or for any
// number where batch invariance is asked for; a small-batch GEMM for up to 64 rows; otherwise a norm, the library's
// GEMM and an activation one after the other. Packed and NF4 weights have kernels of their own for small N; otherwise
// they are dequantised tile by tile.
#include "kernels/generation/linear.h"

#include "kernels/activation.h"
#include "kernels/cuda/tma.cuh"
#include "kernels/generation/linear.cuh"
#include "kernels/generation/linear_check.h"
#include "kernels/generation/lora_rows_check.h"
#include "kernels/matmul.h"
#include "kernels/packed_weight.h"

namespace {

constexpr const char* OP = "linear";

template <typename T>
LinearParams<T> make_params(const LinearSizes& z, const LinearOutput& output, const Tensor& inp, const InputNorm& norm,
                            const LinearWeights& weights) {
    const auto& [out, activation, residual] = output;
    const Tensor &weight = weights.weight, &bias = weights.bias;
    LinearParams<T> p{};
    p.inp = inp.as<T>();
    p.inp_stride = row_stride(inp);
    if (weight) {
        p.weight = weight.as<T>();
        p.weight_stride = row_stride(weight);
    }
    p.out = out.as<T>();
    p.out_stride = row_stride(out);
    if (bias) p.bias = bias.as<T>();
    if (residual) {
        p.residual = residual.as<T>();
        p.residual_stride = row_stride(residual);
    }
    p.norm_weight = norm.weight.as<float>();
    p.norm_bias = norm.bias.as<float>();
    p.C = z.C;
    p.OC = z.OC;
    p.columns = z.columns;
    p.N = int(z.N);
    p.eps = norm.eps;
    p.centred = norm.centred;
    p.activation = activation;
    p.aligned = rows_aligned({inp, weight, norm.weight, norm.bias});
    return p;
}

// False if the layer needs the library.
template <typename T>
bool launch_own_kernel(const LinearParams<T>& p, bool batch_invariant, Stream stream) {
    const bool few = p.N <= linear_gemv_rows(dtype_of<T>());
    if ((few || batch_invariant) && linear_gemv(OP, p, stream)) return true;
    if constexpr (sizeof(T) == 2) {
#ifdef HAVE_SM90A
        if (linear_small_batch_hopper(OP, p, {}, stream) || linear_dense_hopper(OP, p, {}, stream)) return true;
#endif
        return linear_small_batch(OP, p, stream);
    }
    return false;
}

// Kernels that convert packed or NF4 weights in registers. False if the weights must be dequantised first.
template <typename T>
bool launch_packed_kernel(const LinearParams<T>& p, const LinearWeights& weights, bool batch_invariant, Stream stream) {
    if constexpr (sizeof(T) == 2) {
        const int64_t few = weights.packed ? linear_gemv_rows(dtype_of<T>()) : LINEAR_SMALL_N;
        if (p.N <= few || batch_invariant)
            return weights.packed ? linear_packed_gemv(OP, p, *weights.packed, stream)
                                  : linear_nf4_gemv(OP, p, *weights.nf4, stream);
        if (!weights.packed || p.norm_weight) return false;
#ifdef HAVE_SM90A
        if (linear_packed_hopper(OP, p, {}, *weights.packed, stream)) return true;
#endif
        return linear_packed_small_batch(OP, p, *weights.packed, stream);
    }
    return false;
}

// Weights in T.
void linear_in_dtype(const LinearSizes& z, const LinearOutput& output, const Tensor& inp, const InputNorm& norm,
                     const LinearWeights& weights, const Tensor& scratch, bool batch_invariant, Stream stream) {
    const auto launched = [&](const Tensor& rows, const InputNorm& before) {
        bool done = false;
        dispatch_dtype(OP, rows.dtype, [&](auto zero) {
            const auto p = make_params<decltype(zero)>(z, output, rows, before, weights);
            done = launch_own_kernel(p, batch_invariant, stream);
        });
        return done;
    };
    if (launched(inp, norm)) return;
    const Tensor &out = output.out, &weight = weights.weight, &bias = weights.bias;
    const Activation activation = output.activation;
    Tensor residual = output.residual;
    const Tensor x = norm.weight ? linear_normed(scratch, z, inp, norm, stream) : inp;
    if (norm.weight && launched(x, {})) return;
    if (activation != Activation::None)
        return matmul_forward_activation(activation, out, linear_pre_activation(scratch, z, inp), x, weight, bias,
                                         stream, false);
    if (!residual) return matmul_forward(out, x, weight, bias, stream);
    if (row_stride(residual) != row_stride(out)) {
        const size_t item = size_t(dtype_size(inp.dtype)), width = size_t(z.columns) * item;
        cuda_check(cudaMemcpy2DAsync(out.data, size_t(row_stride(out)) * item, residual.data,
                                     size_t(row_stride(residual)) * item, width, size_t(z.N), cudaMemcpyDeviceToDevice,
                                     cuda_stream(stream)),
                   OP);
        residual = out;
    }
    matmul_forward_add(out, x, weight, bias, residual, stream);
}

// The first part of the scratch, which would hold the normalised input, gets low_rank.
template <typename T>
AdapterParams<T> make_adapter_params(const AdapterWeights& w, const AdapterTiles& tiles, const Tensor& scratch,
                                     int64_t parts) {
    AdapterParams<T> a{};
    a.a = w.a.as<T>();
    a.b = w.b.as<T>();
    a.adapter_of_row = tiles.of_row.as<int32_t>();
    a.low_rank = static_cast<T*>(scratch.data);
    a.adapters = int(w.a.shape[0]);
    a.parts = int(parts);
    a.R = int(w.b.shape[2]);
    for (size_t i = 0; i < size_t(parts); i++) a.part_ends[i] = int(w.part_ends[i]);
    return a;
}

// Rows of C weights that are dequantised at a time: 64 MiB of 16-bit weights, so that the library still has large
// matrices. A multiple of 1,024 rows, where a group of NF4's scales ends.
int64_t tile_rows(int64_t C, int64_t OC) {
    constexpr int64_t MAX_WEIGHTS = 32 << 20, STEP = NF4_BLOCK * NF4_GROUP / 16;
    return std::min(OC, std::max(MAX_WEIGHTS / std::max<int64_t>(C, 1) / STEP * STEP, STEP));
}

// Calls f(first row, tile [rows, C]) for the weights, which are dequantised to `tile`, one after the other.
template <typename F>
void for_each_tile(const LinearWeights& weights, const Tensor& tile, Stream stream, F f) {
    const int64_t C = tile.shape[1];
    if (weights.packed) {
        const PackedWeight& w = *weights.packed;
        const int64_t OC = w.rows.shape[0];
        for (int64_t o = 0; o < OC; o += tile.shape[0]) {
            const int64_t end = std::min(o + tile.shape[0], OC);
            const Tensor to = tile.rows(0, end - o);
            packed_dequantise(to, {w.packing, C, w.rows.rows(o, end)}, stream);
            f(o, to);
        }
        return;
    }
    for (const Nf4Matrix::Part& part : weights.nf4->parts) {
        const Nf4Weights& w = part.weights;
        for (int64_t o = 0; o < part.rows; o += tile.shape[0]) {
            const int64_t end = std::min(o + tile.shape[0], part.rows), n = (end - o) * C, first = o * C / NF4_BLOCK;
            const Tensor to = tile.rows(0, end - o);
            const int64_t group = first / NF4_GROUP;
            nf4_dequantise(make_tensor(to.data, to.dtype, to.device, {n}),
                           {w.codes.rows(o * C / 2, end * C / 2), w.absmax_codes.rows(first, first + nf4_blocks(n)),
                            w.group_absmax.rows(group, group + nf4_groups(n)), w.mean},
                           stream);
            f(part.row + o, to);
        }
    }
}

// Packed or NF4 weights: by a kernel that converts them in registers, or dequantised tile by tile and multiplied like
// weights in T.
void linear_packed(const LinearSizes& z, const LinearOutput& output, const Tensor& inp, const InputNorm& norm,
                   const LinearWeights& weights, const Tensor& scratch, bool batch_invariant, Stream stream) {
    const auto launched = [&](const Tensor& x, const InputNorm& before) {
        bool done = false;
        dispatch_dtype(OP, x.dtype, [&](auto zero) {
            const auto p = make_params<decltype(zero)>(z, output, x, before, weights);
            done = launch_packed_kernel(p, weights, batch_invariant, stream);
        });
        return done;
    };
    if (launched(inp, norm)) return;
    const Tensor x = norm.weight ? linear_normed(scratch, z, inp, norm, stream) : inp;
    if (norm.weight && launched(x, {})) return;
    const bool activates = output.activation != Activation::None;
    const Tensor y = activates ? linear_pre_activation(scratch, z, inp) : output.out;
    const Tensor tile = make_tensor(linear_packed_scratch(scratch, z, inp.dtype).data, inp.dtype, inp.device,
                                    {tile_rows(z.C, z.OC), z.C});
    for_each_tile(weights, tile, stream, [&](int64_t first, const Tensor& weight) {
        const int64_t rows = weight.shape[0], end = first + rows;
        const auto columns = [&](const Tensor& t) { return t ? t.columns(first, end) : Tensor{}; };
        linear_in_dtype({z.N, z.C, rows, rows}, {columns(y), Activation::None, columns(output.residual)}, x, {},
                        {weight, columns(weights.bias)}, {}, batch_invariant, stream);
    });
    if (activates) activation_forward(output.activation, output.out, y, stream);
}

#ifdef HAVE_SM90A
// The kernels that stream weights apply norms without means and biases to their sums.
bool streams_behind(const InputNorm& norm) {
    return !norm.centred && !norm.bias;
}
#endif

}  // namespace

// Hopper's tensor cores multiply more rows in the time that reading the weights takes: a matmul of LLaMA 1B takes 26 µs
// in the mean as a GEMV of 2 rows, 38 of 4, 51 of 8, and 17 with 64 rows otherwise (H200). Packed weights likewise.
int64_t linear_gemv_rows(DType dtype) {
    return dtype_size(dtype) == 2 && is_hopper() ? 2 : LINEAR_SMALL_N;
}

int64_t linear_scratch(int64_t N, int64_t C, int64_t OC, DType dtype, bool packed) {
    const int64_t tile = packed ? tile_rows(C, OC) * C * dtype_size(dtype) : 0;
    return linear_normed_bytes(N, C, dtype) + linear_pre_activation_bytes(N, OC, dtype) + tile;
}

int64_t linear_nf4_scratch(int64_t N, int64_t C, int64_t OC, DType dtype) {
    return linear_scratch(N, C, OC, dtype, true);
}

void linear(const LinearOutput& output, Tensor inp, const InputNorm& norm, const LinearWeights& weights, Tensor scratch,
            bool batch_invariant, Stream stream) {
    const DType dtype = check_activation_dtype(OP, "inp", inp);
    const LinearSizes z = check_linear(OP, dtype, output, inp, norm, weights, scratch);
    if (z.N == 0 || z.OC == 0) return;
    const bool in_dtype = !weights.packed && !weights.nf4;
    (in_dtype ? linear_in_dtype : linear_packed)(z, output, inp, norm, weights, scratch, batch_invariant, stream);
}

bool linear_with_adapters(const LinearOutput& output, Tensor inp, const LinearWeights& weights,
                          const AdapterWeights& adapters, const AdapterTiles& tiles, Tensor scratch, Stream stream) {
    const char* op = "linear_with_adapters";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    const LinearSizes z = check_linear(op, dtype, output, inp, {}, weights, scratch);
    const int64_t parts = check_adapter_weights(op, dtype, adapters), width = adapters.a.shape[0] * adapters.a.shape[1];
    check_tensor(op, "A", adapters.a, dtype, {adapters.a.shape[0], adapters.a.shape[1], z.C});
    check_tensor(op, "B", adapters.b, dtype, {z.OC, adapters.a.shape[0], adapters.b.shape[2]});
    check_tensor(op, "tiles.of_row", tiles.of_row, DType::I32, {z.N}, Given::Optional);
    if (z.N <= LINEAR_SMALL_N || z.N > SMALL_BATCH_MAX_N || weights.packed || weights.nf4 || !tiles.of_row ||
        2 * width > z.C || !start_aligned(adapters.a) || !start_aligned(adapters.b) || !start_aligned(scratch))
        return false;
    bool done = false;
#ifdef HAVE_SM90A
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2)
            done = linear_adapters_hopper(op, make_params<T>(z, output, inp, {}, weights),
                                          make_adapter_params<T>(adapters, tiles, scratch, parts), stream);
    });
#endif
    return done;
}

bool linear_takes_unscaled([[maybe_unused]] int64_t N, [[maybe_unused]] const LinearWeights& weights,
                           [[maybe_unused]] const InputNorm& norm, [[maybe_unused]] DType dtype) {
#ifdef HAVE_SM90A
    if (!is_hopper() || dtype != DType::BF16 || N <= linear_gemv_rows(dtype) || N > UNSCALED_MAX_ROWS || weights.nf4)
        return false;
    if (weights.packed) return streams_behind(norm);
    const int64_t C = weights.weight.shape[1], OC = weights.weight.shape[0];
    if (!rows_aligned({weights.weight})) return false;
    return small_batch_hopper_takes_at_once(C, OC) ||
           (streams_behind(norm) && dense_hopper_takes(C, OC) && !small_batch_hopper_takes_norm(C, OC));
#else
    return false;
#endif
}

bool linear_unscaled(const LinearOutput& output, const UnscaledRows& inp, const LinearWeights& weights,
                     const UnscaledRows& next, [[maybe_unused]] Stream stream) {
    const char* op = "linear_unscaled";
    const LinearSizes z = check_linear(op, DType::BF16, output, inp.rows, inp.norm, weights);
    const auto check_parts = [&](const char* name, const Tensor& parts, int64_t C) {
        check_tensor(op, name, parts, DType::F32, {unscaled_parts(C), UNSCALED_MAX_ROWS, 2});
    };
    require(!inp.norm.weight || inp.parts, op, ": inp has a norm, but no parts");
    if (inp.parts) check_parts("inp.parts", inp.parts, z.C);
    if (next.rows) {
        require(output.activation == Activation::None, op,
                ": rows of a norm are made of outputs without an activation");
        check_tensor(op, "next.rows", next.rows, DType::BF16, {z.N, z.columns});
        check_parts("next.parts", next.parts, z.columns);
        check_tensor(op, "next.norm.weight", next.norm.weight, DType::F32, {z.columns});
    }
#ifdef HAVE_SM90A
    if (z.N == 0 || z.N > UNSCALED_MAX_ROWS || weights.nf4) return false;
    const auto p = make_params<bf16>(z, output, inp.rows, inp.norm, weights);
    UnscaledParams<bf16> unscaled{};
    unscaled.parts = reinterpret_cast<const RowPart*>(inp.parts.as<float>());
    if (next.rows) {
        unscaled.next_rows = next.rows.as<bf16>();
        unscaled.next_parts = reinterpret_cast<RowPart*>(next.parts.as<float>());
        unscaled.next_weight = next.norm.weight.as<float>();
        unscaled.next_centred = next.norm.centred;
    }
    if (weights.weight && small_batch_hopper_takes_at_once(z.C, z.OC) &&
        linear_small_batch_hopper(op, p, unscaled, stream))
        return true;
    if ((inp.parts && !streams_behind(inp.norm)) || (next.rows && !streams_behind(next.norm))) return false;
    return weights.packed ? linear_packed_hopper(op, p, unscaled, *weights.packed, stream)
                          : linear_dense_hopper(op, p, unscaled, stream);
#else
    return false;
#endif
}

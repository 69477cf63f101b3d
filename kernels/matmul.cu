// Matmuls through cuBLASLt or, on Hopper, kernels/gemm_hopper.h, summed in fp32 (never TF32), and the bias gradient by
// our own kernels. The handle, the workspace and the plans belong to the stream (runtime/device/blas.h).
#include "kernels/matmul.h"

#include <algorithm>
#include <memory>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/linear_gemm.h"
#include "runtime/device/target.h"
#include "runtime/timing.h"

namespace {

// Fills each row of out with bias, or with zeros if bias is null.
template <typename T>
__global__ void fill_rows_kernel(T* out, int64_t stride, const T* bias, int64_t rows, int64_t columns) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * columns; i += step)
        out[i / columns * stride + i % columns] = bias ? bias[i % columns] : T{};
}

void fill_rows(const char* op, const Tensor& out, const Tensor& bias, Stream stream) {
    dispatch_dtype(op, out.dtype, [&](auto zero) {
        using T = decltype(zero);
        fill_rows_kernel<<<grid_of(ceil_div(out.numel(), 256)), 256, 0, cuda_stream(stream)>>>(
            out.as<T>(), row_stride(out), bias.as<T>(), out.shape[0], out.shape[1]);
        check_launch(op, stream);
    });
}

// out = alpha·op(a)·op(b) (+ out if accumulate) (+ bias). The caller has checked shapes. bias is null or of a's dtype.
void multiply(const char* op, const Tensor& out, const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b,
              bool accumulate, const Tensor& bias, Stream stream, float alpha = 1) {
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[transpose_a ? 0 : 1];
    if (M == 0 || N == 0) return;
    if (K == 0) {  // an empty sum; the library rejects empty operands
        if (!accumulate) {
            Tensor no_bias;
            no_bias.dtype = out.dtype;
            fill_rows(op, out, bias ? bias : no_bias, stream);
        }
        return;
    }
    Gemm gemm = make_gemm(out, a, b, transpose_a, transpose_b, accumulate,
                          bias ? GemmEpilogue::Bias : GemmEpilogue::None, bias, Tensor{});
    gemm.operands.alpha = alpha;
    run_gemm(op, gemm, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The bias gradient: sums over the rows of a matrix, in an order that depends only on sizes and GPU. Each block of
// sum_chunks_kernel sums a chunk of rows over a tile of columns; add_chunks_kernel sums the chunks.
//
//   tile                warp w of 16 takes rows w, w + 16 …; a lane owns W columns of 16 bytes, a block 32·W
//   loads in flight     8 vectors a thread
//   shared memory       16 KiB (16-bit, W = 8), 8 KiB (fp32, W = 4)
//   registers           60 (16-bit), 62 (fp32) a thread
//   blocks per SM       2 (__launch_bounds__), 32 warps
//
// GPT-2 124M, bf16, B=64, T=1024, dbias of the MLP's first layer: inp [65536, 3072], W = 8, 256 columns a block, 12
// column tiles. An H100 has 132 SMs, so 2·132/12 = 22 chunks of 2979 rows: 264 blocks, all resident at once.

constexpr int SUM_WARPS = 16, SUM_LOADS = 8;

// partial [chunks, columns]. Each warp issues SUM_LOADS row loads before it uses the first, so that the two blocks of
// an SM keep enough bytes in flight to saturate the memory bandwidth.
template <typename T, int W>
__global__ void __launch_bounds__(SUM_WARPS* WARP, 2)
    sum_chunks_kernel(float* partial, const T* inp, int64_t stride, int64_t rows, int64_t columns, int64_t chunk) {
    __shared__ float sums[SUM_WARPS][WARP * W];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t column = (int64_t(blockIdx.x) * WARP + lane) * W, first = int64_t(blockIdx.y) * chunk;
    const int64_t end = min(rows, first + chunk);
    Floats<W> sum = {};
    if (column < columns) {
        for (int64_t row = first + warp; row < end; row += SUM_LOADS * SUM_WARPS) {
            Pack<T, W> x[SUM_LOADS] = {};
#pragma unroll
            for (int i = 0; i < SUM_LOADS; i++)
                if (row + i * SUM_WARPS < end) x[i] = load_pack<W>(inp + (row + i * SUM_WARPS) * stride + column);
#pragma unroll
            for (int i = 0; i < SUM_LOADS; i++) {
                const Floats<W> y = as_floats(x[i]);
#pragma unroll
                for (int k = 0; k < W; k++) sum[k] += y[k];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < W; i++) sums[warp][i * WARP + lane] = sum[i];
    __syncthreads();
    for (int i = threadIdx.x; i < WARP * W; i += SUM_WARPS * WARP) {
        const int64_t to = (int64_t(blockIdx.x) * WARP + i % WARP) * W + i / WARP;
        if (to >= columns) continue;
        float total = 0;
#pragma unroll
        for (int w = 0; w < SUM_WARPS; w++) total += sums[w][i];
        partial[int64_t(blockIdx.y) * columns + to] = total;
    }
}

// A block sums 32 columns, one per lane; warp w takes the chunks w, w + 16 …
// GPT-2 124M, dbias of the MLP's first layer: 3072 / 32 = 96 blocks of 16 warps for 22 chunks.
__global__ void __launch_bounds__(SUM_WARPS* WARP)
    add_chunks_kernel(float* out, const float* partial, int64_t chunks, int64_t columns, bool accumulate) {
    __shared__ float sums[SUM_WARPS][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t column = int64_t(blockIdx.x) * WARP + lane;
    float sum = 0;
    if (column < columns) {
#pragma unroll 4
        for (int64_t c = warp; c < chunks; c += SUM_WARPS) sum += partial[c * columns + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < SUM_WARPS; w++) total += sums[w][lane];
    out[column] = accumulate ? out[column] + total : total;
}

void add_chunks(const char* op, const Tensor& out, const float* partial, int64_t chunks, bool accumulate,
                Stream stream) {
    const int64_t columns = out.shape[0];
    add_chunks_kernel<<<unsigned(ceil_div(columns, WARP)), SUM_WARPS * WARP, 0, cuda_stream(stream)>>>(
        out.as<float>(), partial, chunks, columns, accumulate);
    check_launch(op, stream);
}

// The partial sums are in the library's workspace: the stream orders its uses.
void sum_rows(const char* op, const Tensor& out, const Tensor& inp, bool accumulate, Stream stream) {
    const int64_t rows = inp.shape[0], columns = inp.shape[1];
    if (columns == 0) return;
    const int64_t max_chunks = int64_t(Blas::WORKSPACE_BYTES) / (columns * int64_t(sizeof(float)));
    require(max_chunks >= 1, op, ": dbias has ", columns, " elements, more than the workspace holds");
    dispatch_dtype(op, inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(rows_aligned({inp}) && columns % FULL_WIDTH<T> == 0, [&](auto width) {
            const int64_t blocks = ceil_div(columns, WARP * width);
            // Two blocks on each SM, all resident at once, but at least SUM_LOADS rows for each warp.
            const int64_t wanted =
                std::max<int64_t>(1, std::min(num_sms() * 2 / blocks, ceil_div(rows, SUM_WARPS * SUM_LOADS)));
            const int64_t chunk = std::max<int64_t>(1, ceil_div(rows, std::min({wanted, max_chunks, int64_t(65535)})));
            const int64_t chunks = ceil_div(rows, chunk);  // 0 without rows
            float* partial = static_cast<float*>(blas_of(op, stream).workspace);
            if (chunks > 0) {
                sum_chunks_kernel<T, width>
                    <<<dim3(unsigned(blocks), unsigned(chunks)), SUM_WARPS * WARP, 0, cuda_stream(stream)>>>(
                        partial, inp.as<T>(), row_stride(inp), rows, columns, chunk);
                check_launch(op, stream);
            }
            add_chunks(op, out, partial, chunks, accumulate, stream);
        });
    });
}

// Runs it, or `separate`, which computes the same with two kernels. d: of a backward pass.
template <typename Separate>
void run_with_activation(const char* op, Gemm gemm, Separate separate, const ActivationGradient& d, Stream stream) {
    if (is_batch_invariant(op, gemm.key, stream)) return run_batch_invariant(op, gemm, stream);
    GemmPlan& plan = blas_plan(op, gemm.key, gemm.operands, stream);
    Kernels kernels;
    if (plan.possible) kernels.add(GemmKernel::Library);
    kernels.add(GemmKernel::Separate);
    add_hopper_kernels(kernels, gemm);
    // Prompts, whose GEMMs are not timed. LLaMA 1B's gate and up, 8,192 rows: 0.87 ms as two kernels, 0.79 as one
    // (H200).
    const bool keeps_pre = gemm.operands.aux;
    if (!keeps_pre && !plan.compared && kernels.has(GemmKernel::Hopper1)) plan.kernel = GemmKernel::Hopper1;

    // hopper_gemm() sums the columns of dpre over the rows of each tile.
    const int64_t tiles = ceil_div(gemm.key.M, HOPPER_GEMM_ROWS);
    const bool sums = d.dbias && gemm.key.epilogue != GemmEpilogue::SwigluBackward &&
                      tiles * gemm.key.N * int64_t(sizeof(float)) <= int64_t(Blas::WORKSPACE_BYTES);
    float* const partial = sums ? static_cast<float*>(blas_of(op, stream).workspace) : nullptr;
    gemm.operands.column_sums = partial;
    run_fastest(op, plan, kernels, stream, [&](GemmKernel kernel) {
        if (kernel == GemmKernel::Separate) return separate();
        if (kernel == GemmKernel::Library)
            blas_multiply(op, gemm.key, plan, gemm.operands, stream);
        else
            run_hopper(op, gemm, kernel, stream);
        if (!d.dbias) return;
        if (sums && kernel != GemmKernel::Library)
            add_chunks(op, d.dbias, partial, tiles, d.accumulate, stream);
        else
            sum_rows(op, d.dbias, d.dpre, d.accumulate, stream);
    });
}

// out has the inputs' dtype or is fp32.
void check_out_dtype(const char* op, const char* name, const Tensor& out, DType dtype) {
    require(!out || out.dtype == dtype || out.dtype == DType::F32, op, ": ", name, " is ", dtype_name(out.dtype), " ",
            shape_string(out), ", expected ", dtype_name(dtype), " or fp32");
}

}  // namespace

void matmul(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate, Stream stream,
            float alpha) {
    const char* op = "matmul";
    const DType dtype = check_activation_dtype(op, "a", a);
    check_matrix(op, "a", a, dtype);
    check_out_dtype(op, "out", out, dtype);
    check_matrix(op, "out", out, out.dtype);
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[transpose_a ? 0 : 1];
    if (transpose_a)
        check_matrix(op, "a", a, K, M, Given::Required, dtype);
    else
        check_matrix(op, "a", a, M, K, Given::Required, dtype);
    if (transpose_b)
        check_matrix(op, "b", b, N, K, Given::Required, dtype);
    else
        check_matrix(op, "b", b, K, N, Given::Required, dtype);
    multiply(op, out, a, b, transpose_a, transpose_b, accumulate, Tensor{}, stream, alpha);
}

void matmul_batched(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, float alpha, float beta,
                    Tensor add, Stream stream) {
    const char* op = "matmul_batched";
    const DType dtype = check_activation_dtype(op, "a", a);
    const BatchedSizes s = check_matmul_batched(op, out, a, b, transpose_a, transpose_b, beta, add, dtype);
    if (s.batch * s.M * s.N == 0) return;
    GemmKey key;
    key.batch = s.batch;
    key.M = s.M;
    key.N = s.N;
    key.K = s.K;
    key.ld_out = s.N;
    key.ld_a = a.shape[2];
    key.ld_b = b.shape[2];
    key.dtype = dtype;
    key.out_dtype = dtype;
    key.transpose_a = transpose_a;
    key.transpose_b = transpose_b;
    key.accumulate = beta != 0;
    const auto alignment = [&](const Tensor& t) {
        return gemm_alignment(t.data, s.batch > 1 ? t.stride[0] * dtype_size(dtype) : 0);
    };
    key.align_out = beta != 0 ? std::min(alignment(out), alignment(add)) : alignment(out);
    key.align_a = alignment(a);
    key.align_b = alignment(b);
    GemmOperands operands{out.data, a.data, b.data, beta != 0 ? add.data : nullptr};
    operands.alpha = alpha;
    operands.beta = beta;
    run_fastest_gemm(op, {key, operands}, stream);
}

void matmul_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Stream stream) {
    const char* op = "matmul_forward";
    const DType dtype = check_forward(op, inp, weight, bias);
    check_matrix(op, "out", out, inp.shape[0], weight.shape[0], Given::Required, dtype);
    multiply(op, out, inp, weight, false, true, false, bias, stream);
}

void matmul_forward_add(Tensor out, Tensor inp, Tensor weight, Tensor bias, Tensor add, Stream stream) {
    const char* op = "matmul_forward_add";
    const DType dtype = check_forward(op, inp, weight, bias);
    check_matrix(op, "out", out, inp.shape[0], weight.shape[0], Given::Required, dtype);
    check_added(op, out, add, inp);
    if (out.numel() == 0) return;
    Gemm gemm =
        make_gemm(out, inp, weight, false, true, true, bias ? GemmEpilogue::Bias : GemmEpilogue::None, bias, {});
    gemm.operands.add = add.data;
    gemm.key.align_out = std::min(gemm.key.align_out, gemm_alignment(add.data));
    run_gemm(op, gemm, stream);
}

void matmul_forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                               Stream stream, bool keeps_pre) {
    const char* op = "matmul_forward_activation";
    const DType dtype = check_forward(op, inp, weight, bias);
    check_activation_output(op, f, out, pre, dtype, keeps_pre);
    check_matrix(op, "pre", pre, inp.shape[0], weight.shape[0], Given::Required, dtype);
    const auto separate = [&] {
        multiply(op, pre, inp, weight, false, true, false, bias, stream);
        if (out) activation_forward(f, out, pre, stream);
    };
    const GemmEpilogue epilogue = bias ? epilogues_of(f).forward_bias : epilogues_of(f).forward;
    if (epilogue == GemmEpilogue::None || !can_fuse({out ? out : pre, pre, inp, weight})) return separate();
    const int64_t I = pre.shape[1] / activation_inputs(f, 1);
    const Tensor aux = keeps_pre ? pre : Tensor{};
    run_with_activation(op, gemm_with_activation(epilogue, out, I, inp, weight, true, bias, aux), separate, {}, stream);
}

void matmul_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, Stream stream) {
    const char* op = "matmul_backward_input";
    check_backward_input(op, dinp, dout, weight);
    multiply(op, dinp, dout, weight, false, false, accumulate, Tensor{}, stream);
}

void matmul_backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight, Tensor pre,
                                Stream stream) {
    const char* op = "matmul_backward_activation";
    const DType dtype = check_backward_input(op, d.dact, dout, weight);
    check_activation_gradient(op, f, d, pre, dtype);
    const auto separate = [&] {
        multiply(op, d.dact, dout, weight, false, false, false, Tensor{}, stream);
        activation_backward(f, d.dpre, d.act, d.dact, pre, stream);
        if (d.dbias) sum_rows(op, d.dbias, d.dpre, d.accumulate, stream);
    };
    const std::optional<Gemm> gemm = gradient_gemm(f, d, dout, weight, pre);
    if (!gemm) return separate();
    run_with_activation(op, *gemm, separate, d, stream);
}

void matmul_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream) {
    const char* op = "matmul_backward_weight";
    const DType dtype = check_activation_dtype(op, "dout", dout);
    check_matrix(op, "dout", dout, dtype);
    check_matrix(op, "inp", inp, dtype);
    const int64_t N = dout.shape[0], OC = dout.shape[1], C = inp.shape[1];
    require(dweight.dtype == DType::F32 || (dweight.dtype == DType::BF16 && dtype == DType::BF16), op, ": dweight is ",
            dtype_name(dweight.dtype), " and dout ", dtype_name(dtype), "; a dweight in bf16 needs inputs in bf16");
    check_matrix(op, "dweight", dweight, OC, C, Given::Required, dweight.dtype);
    check_tensor(op, "dbias", dbias, DType::F32, {OC}, Given::Optional);
    check_matrix(op, "inp", inp, N, C, Given::Required, dtype);
    multiply(op, dweight, dout, inp, true, false, accumulate, Tensor{}, stream);
    if (dbias) sum_rows(op, dbias, dout, accumulate, stream);
}

void matmul_backward_bias(Tensor dbias, Tensor dout, bool accumulate, Stream stream) {
    const char* op = "matmul_backward_bias";
    const DType dtype = check_activation_dtype(op, "dout", dout);
    check_matrix(op, "dout", dout, dtype);
    check_tensor(op, "dbias", dbias, DType::F32, {dout.shape[1]});
    sum_rows(op, dbias, dout, accumulate, stream);
}

void matmul_batch_invariant(bool on, Stream stream) {
    require(!on || this_target().hopper, "matmul_batch_invariant: only kernels for sm_90a, on a Hopper GPU");
    blas_of("matmul_batch_invariant", stream).batch_invariant = on;
}

void matmul_tuning(bool on, Stream stream) {
    blas_of("matmul_tuning", stream).tuning = on;
}

std::string matmul_choices(Stream stream, bool used_only) {
    return blas_choices(blas_of("matmul_choices", stream), used_only);
}

bool matmul_use_choices(const std::string& text, Stream stream, bool used) {
    return blas_use_choices(blas_of("matmul_use_choices", stream), text, used);
}

const char* matmul_library() {
    static const std::string name = blas_version();
    return name.c_str();
}

namespace {

// Pseudo-random numbers in [−1, 1): with zeros the GPU would draw less power and run faster than with real data.
template <typename T>
__global__ void fill_random_kernel(T* out, int64_t n, uint32_t seed) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        uint32_t x = uint32_t(i) * 2654435761u + seed;
        x = (x ^ x >> 16) * 0x85ebca6bu;
        x = (x ^ x >> 13) * 0xc2b2ae35u;
        out[i] = from_float<T>(float(int32_t(x ^ x >> 16)) * 0x1p-31f);
    }
}

}  // namespace

double measured_peak_flops(Stream stream, DType dtype) {
    const char* op = "measured_peak_flops";
    const int64_t n = dtype == DType::F32 ? 4096 : 8192;
    const auto allocate = [&] {
        return std::unique_ptr<void, void (*)(void*)>(device_alloc(size_t(n * n * dtype_size(dtype))), device_free);
    };
    const auto a = allocate(), b = allocate(), out = allocate();
    const auto matrix = [&](void* data) { return make_tensor(data, dtype, Device::CUDA, {n, n}); };
    dispatch_dtype(op, dtype, [&](auto zero) {
        using T = decltype(zero);
        for (void* data : {a.get(), b.get()}) {
            fill_random_kernel<<<1024, 256, 0, cuda_stream(stream)>>>(static_cast<T*>(data), n * n,
                                                                      data == a.get() ? 1u : 2u);
            check_launch(op, stream);
        }
    });

    const auto run = [&] { matmul(matrix(out.get()), matrix(a.get()), matrix(b.get()), false, true, false, stream); };
    double best = 0;
    for (int i = 0; i < 4; i++)  // the first warms up
        best = std::max(best, 2.0 * double(n) * double(n) * double(n) / (timed_ms(run, 5, stream) * 1e-3));
    return best;
}

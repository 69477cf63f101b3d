// Matrix products through cuBLASLt, sums always in fp32 (never TF32), and the bias gradient by kernels of our own.
//
// cuBLASLt thinks in columns: our row-major out [M, N] is its outᵀ [N, M], so it is asked for outᵀ = op(b)ᵀ·op(a)ᵀ with
// b as its first operand. A row-major matrix is a column-major one transposed, so the transpose flags stay what they
// are. The bias goes with columns of out, its rows: the library's bias epilogue.
//
// The handle, the workspace and the algorithms chosen so far come with the stream (runtime/blas.h).
#include "kernels/matmul.h"

#include <algorithm>
#include <memory>

#include "kernels/cuda_common.cuh"
#include "runtime/blas.h"

namespace {

void blas_check(cublasStatus_t status, const char* op, const char* call) {
    require(status == CUBLAS_STATUS_SUCCESS, op, ": ", call, ": ", cublasLtGetStatusString(status));
}

cudaDataType_t cuda_type(DType dtype) {
    return dtype == DType::BF16 ? CUDA_R_16BF : dtype == DType::F16 ? CUDA_R_16F : CUDA_R_32F;
}

// cuBLASLt's descriptors are small objects that it wants created and destroyed.
template <typename Handle, cublasStatus_t (*destroy)(Handle)>
struct Descriptor {
    Handle handle = nullptr;
    Descriptor() = default;
    Descriptor(const Descriptor&) = delete;
    ~Descriptor() {
        if (handle) destroy(handle);
    }
};
using MatmulDesc = Descriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Descriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Descriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

void create_layout(Layout& layout, const char* op, const Tensor& t) {
    blas_check(cublasLtMatrixLayoutCreate(&layout.handle, cuda_type(t.dtype), uint64_t(t.shape[1]),
                                          uint64_t(t.shape[0]), row_stride(t)),
               op, "cublasLtMatrixLayoutCreate");
}

// The largest power of two up to 256 that divides the address; algorithms may rely on it.
uint32_t alignment(const void* p) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    return uint32_t(std::min<uintptr_t>(256, address & (~address + 1)));
}

// Rows of out become bias, or zeros without one.
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

// out = op(a)·op(b) (+ out if accumulate) (+ bias). Shapes are checked; bias is null or of out's dtype.
void multiply(const char* op, const Tensor& out, const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b,
              bool accumulate, const Tensor& bias, Stream stream) {
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[transpose_a ? 0 : 1];
    require(stream.blas, op, ": the stream has no matrix library; make it with create_stream()");
    if (M == 0 || N == 0) return;
    if (K == 0) {  // an empty sum; the library takes no empty operands
        if (!accumulate) {
            Tensor no_bias;
            no_bias.dtype = out.dtype;
            fill_rows(op, out, bias ? bias : no_bias, stream);
        }
        return;
    }
    Blas& blas = *stream.blas;

    MatmulDesc desc;
    blas_check(cublasLtMatmulDescCreate(&desc.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F), op, "cublasLtMatmulDescCreate");
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
        blas_check(cublasLtMatmulDescSetAttribute(desc.handle, attribute, &value, sizeof(value)), op,
                   "cublasLtMatmulDescSetAttribute");
    };
    const cublasOperation_t first = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, first);
    set(CUBLASLT_MATMUL_DESC_TRANSB, second);
    if (bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        const void* pointer = bias.data;
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointer);
    }
    Layout layout_a, layout_b, layout_out;
    create_layout(layout_a, op, a);
    create_layout(layout_b, op, b);
    create_layout(layout_out, op, out);

    // An algorithm is good for all products of the same sizes, strides, dtypes and alignments.
    const std::array<int64_t, 16> key = {M,
                                         N,
                                         K,
                                         row_stride(out),
                                         row_stride(a),
                                         row_stride(b),
                                         int64_t(out.dtype),
                                         int64_t(a.dtype),
                                         transpose_a,
                                         transpose_b,
                                         accumulate,
                                         bool(bias),
                                         alignment(out.data),
                                         alignment(a.data),
                                         alignment(b.data),
                                         bias ? alignment(bias.data) : 0};
    auto found = blas.algorithms.find(key);
    if (found == blas.algorithms.end()) {
        Preference preference;
        blas_check(cublasLtMatmulPreferenceCreate(&preference.handle), op, "cublasLtMatmulPreferenceCreate");
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
            blas_check(cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, &value, sizeof(value)), op,
                       "cublasLtMatmulPreferenceSetAttribute");
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(blas.workspace_bytes));
        // Products split along K may sum their parts in fp32 only.
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(b.data));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(a.data));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(out.data));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(out.data));
        cublasLtMatmulHeuristicResult_t result{};
        int results = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
            blas.handle, desc.handle, layout_b.handle, layout_a.handle, layout_out.handle, layout_out.handle,
            preference.handle, 1, &result, &results);
        require(status == CUBLAS_STATUS_SUCCESS && results > 0, op, ": cuBLASLt has no algorithm for M = ", M,
                ", N = ", N, ", K = ", K, ", ", dtype_name(a.dtype), " to ", dtype_name(out.dtype), " (",
                cublasLtGetStatusString(status), ")");
        found = blas.algorithms.emplace(key, result.algo).first;
    }

    const float alpha = 1, beta = accumulate ? 1 : 0;  // with beta = 0 what out holds is not read, NaN included
    const cublasStatus_t status =
        cublasLtMatmul(blas.handle, desc.handle, &alpha, b.data, layout_b.handle, a.data, layout_a.handle, &beta,
                       out.data, layout_out.handle, out.data, layout_out.handle, &found->second, blas.workspace,
                       blas.workspace_bytes, cuda_stream(stream));
    require(status == CUBLAS_STATUS_SUCCESS, op, ": cublasLtMatmul failed (", cublasLtGetStatusString(status),
            ") for M = ", M, ", N = ", N, ", K = ", K);
    check_launch(op, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The bias gradient: sums over the rows of a matrix, in an order that depends on sizes and GPU alone. Blocks sum a
// chunk of rows each, and a second kernel the chunks.

constexpr int SUM_WARPS = 8;

// partial [chunks, columns]; a thread owns W columns, a block's warps take its rows in turns.
template <typename T, int W>
__global__ void __launch_bounds__(SUM_WARPS* WARP)
    sum_chunks_kernel(float* partial, const T* inp, int64_t stride, int64_t rows, int64_t columns, int64_t chunk) {
    __shared__ float sums[SUM_WARPS][WARP * W];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t column = (int64_t(blockIdx.x) * WARP + lane) * W, first = int64_t(blockIdx.y) * chunk;
    const int64_t end = min(rows, first + chunk);
    Floats<W> sum = {};
    if (column < columns) {
#pragma unroll 4
        for (int64_t row = first + warp; row < end; row += SUM_WARPS) {
            const Floats<W> x = load_floats<W>(inp + row * stride + column);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += x[i];
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

__global__ void add_chunks_kernel(float* out, const float* partial, int64_t chunks, int64_t columns, bool accumulate) {
    const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0;
    for (int64_t c = 0; c < chunks; c++) sum += partial[c * columns + column];
    out[column] = accumulate ? out[column] + sum : sum;
}

// The partial sums lie in the library's workspace: the stream orders its uses.
void sum_rows(const char* op, const Tensor& out, const Tensor& inp, bool accumulate, Stream stream) {
    const int64_t rows = inp.shape[0], columns = inp.shape[1];
    if (columns == 0) return;
    const int64_t room = int64_t(stream.blas->workspace_bytes) / (columns * int64_t(sizeof(float)));
    require(room >= 1, op, ": dbias has ", columns, " elements, more than the workspace holds");
    dispatch_dtype(op, inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        dispatch_width<T>(rows_aligned({inp}) && columns % FULL_WIDTH<T> == 0, [&](auto width) {
            const int64_t blocks = ceil_div(columns, WARP * width);
            // Eight blocks for each multiprocessor, but no fewer than 8 rows for each warp.
            const int64_t wanted = std::max<int64_t>(
                1, std::min(ceil_div(num_multiprocessors() * 8, blocks), ceil_div(rows, SUM_WARPS * 8)));
            const int64_t chunk = std::max<int64_t>(1, ceil_div(rows, std::min({wanted, room, int64_t(65535)})));
            const int64_t chunks = ceil_div(rows, chunk);  // 0 without rows
            float* partial = static_cast<float*>(stream.blas->workspace);
            if (chunks > 0) {
                sum_chunks_kernel<T, width>
                    <<<dim3(unsigned(blocks), unsigned(chunks)), SUM_WARPS * WARP, 0, cuda_stream(stream)>>>(
                        partial, inp.as<T>(), row_stride(inp), rows, columns, chunk);
                check_launch(op, stream);
            }
            add_chunks_kernel<<<unsigned(ceil_div(columns, 128)), 128, 0, cuda_stream(stream)>>>(
                out.as<float>(), partial, chunks, columns, accumulate);
            check_launch(op, stream);
        });
    });
}

// Products of activations give activations or fp32.
void check_out_dtype(const char* op, const char* name, const Tensor& out, DType dtype) {
    require(!out || out.dtype == dtype || out.dtype == DType::F32, op, ": ", name, " is ", dtype_name(out.dtype), " ",
            shape_string(out), ", expected ", dtype_name(dtype), " or fp32");
}

}  // namespace

void matmul(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate, Stream stream) {
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
    multiply(op, out, a, b, transpose_a, transpose_b, accumulate, Tensor{}, stream);
}

void matmul_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Stream stream) {
    const char* op = "matmul_forward";
    const DType dtype = check_activation_dtype(op, "inp", inp);
    check_matrix(op, "inp", inp, dtype);
    check_matrix(op, "weight", weight, dtype);
    const int64_t N = inp.shape[0], C = inp.shape[1], OC = weight.shape[0];
    check_matrix(op, "out", out, N, OC, Given::Required, dtype);
    check_matrix(op, "weight", weight, OC, C, Given::Required, dtype);
    check_tensor(op, "bias", bias, dtype, {OC}, Given::Optional);
    multiply(op, out, inp, weight, false, true, false, bias, stream);
}

void matmul_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, Stream stream) {
    const char* op = "matmul_backward_input";
    const DType dtype = check_activation_dtype(op, "dout", dout);
    check_matrix(op, "dout", dout, dtype);
    check_matrix(op, "weight", weight, dtype);
    const int64_t N = dout.shape[0], OC = dout.shape[1], C = weight.shape[1];
    check_matrix(op, "dinp", dinp, N, C, Given::Required, dtype);
    check_matrix(op, "weight", weight, OC, C, Given::Required, dtype);
    multiply(op, dinp, dout, weight, false, false, accumulate, Tensor{}, stream);
}

void matmul_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream) {
    const char* op = "matmul_backward_weight";
    const DType dtype = check_activation_dtype(op, "dout", dout);
    check_matrix(op, "dout", dout, dtype);
    check_matrix(op, "inp", inp, dtype);
    const int64_t N = dout.shape[0], OC = dout.shape[1], C = inp.shape[1];
    check_matrix(op, "dweight", dweight, OC, C);
    check_tensor(op, "dbias", dbias, DType::F32, {OC}, Given::Optional);
    check_matrix(op, "inp", inp, N, C, Given::Required, dtype);
    multiply(op, dweight, dout, inp, true, false, accumulate, Tensor{}, stream);
    if (dbias) sum_rows(op, dbias, dout, accumulate, stream);
}

const char* matmul_library() {
    static const std::string name = [] {
        const size_t version = cublasLtGetVersion();
        return str("cuBLASLt ", version / 10000, ".", version / 100 % 100, ".", version % 100);
    }();
    return name.c_str();
}

namespace {

// Numbers in [−1, 1) without pattern: zeros would draw less power and run faster than real data.
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

    struct Event {
        cudaEvent_t handle = nullptr;
        Event() { cuda_check(cudaEventCreate(&handle), "measured_peak_flops"); }
        ~Event() { cudaEventDestroy(handle); }
    } begin, end;
    constexpr int REPEATS = 5;
    double best = 0;
    for (int i = 0; i < 4; i++) {  // the first warms up
        cuda_check(cudaEventRecord(begin.handle, cuda_stream(stream)), op);
        for (int r = 0; r < REPEATS; r++)
            matmul(matrix(out.get()), matrix(a.get()), matrix(b.get()), false, true, false, stream);
        cuda_check(cudaEventRecord(end.handle, cuda_stream(stream)), op);
        cuda_check(cudaEventSynchronize(end.handle), op);
        float milliseconds = 0;
        cuda_check(cudaEventElapsedTime(&milliseconds, begin.handle, end.handle), op);
        best = std::max(best, REPEATS * 2.0 * double(n) * double(n) * double(n) / (milliseconds * 1e-3));
    }
    return best;
}

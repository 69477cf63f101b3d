#include "kernels/matmul.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <vector>

#ifdef USE_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#endif

#include "kernels/check.h"
#include "kernels/cpu/cpu_loops.h"
#include "kernels/cpu/gemm_blocked.h"
#include "kernels/matmul_check.h"
#include "runtime/device/convert_dtype.h"

namespace {

bool batch_invariant = false;  // matmul_batch_invariant()

#ifdef USE_ONEDNN
// a·bᵀ, the forward pass of a linear layer, for long rows: there oneDNN's matmul primitive packs b better than its
// sgemm. For shorter rows sgemm is as good or better. The library caches the primitives.
constexpr int64_t LONG_ROWS = 2048;

void multiply_ABt(const char* op, int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b,
                  int64_t ldb, bool accumulate, float* c, int64_t ldc) {
    using dnnl::memory;
    try {
        const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
        dnnl::stream stream(engine);
        const auto f32 = memory::data_type::f32;
        const memory::desc a_desc({M, K}, f32, memory::dims{lda, 1}), b_desc({K, N}, f32, memory::dims{1, ldb}),
            c_desc({M, N}, f32, memory::dims{ldc, 1});
        dnnl::primitive_attr attributes;
        if (accumulate) {
            dnnl::post_ops sum;
            sum.append_sum(1.0f);
            attributes.set_post_ops(sum);
        }
#if DNNL_VERSION_MAJOR >= 3
        const dnnl::matmul::primitive_desc primitive(engine, a_desc, b_desc, c_desc, attributes);
#else
        const dnnl::matmul::primitive_desc primitive(dnnl::matmul::desc(a_desc, b_desc, c_desc), attributes, engine);
#endif
        dnnl::matmul(primitive).execute(stream, {{DNNL_ARG_SRC, memory(a_desc, engine, const_cast<float*>(a))},
                                                 {DNNL_ARG_WEIGHTS, memory(b_desc, engine, const_cast<float*>(b))},
                                                 {DNNL_ARG_DST, memory(c_desc, engine, c)}});
        stream.wait();
    } catch (const dnnl::error& e) {
        throw Error(str(op, ": oneDNN's matmul failed (", e.what(), ") for M = ", M, ", N = ", N, ", K = ", K));
    }
}
#endif

// out = alpha·op(a)·op(b) (+ out if accumulate).
void multiply(const char* op, const Tensor& out, const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b,
              bool accumulate, float alpha = 1) {
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[transpose_a ? 0 : 1];
    const float *pa = a.as<float>(), *pb = b.as<float>();
    float* c = out.as<float>();
    if (M == 0 || N == 0) return;
    if (K == 0) {  // an empty sum; libraries differ on whether they write it
        for (int64_t i = 0; i < M && !accumulate; i++) std::fill_n(c + i * row_stride(out), N, 0.0f);
        return;
    }
    const bool forward = !transpose_a && transpose_b;
#ifdef USE_ONEDNN
    if (!(batch_invariant && forward)) {
        if (forward && K >= LONG_ROWS && alpha == 1) {
            multiply_ABt(op, M, N, K, pa, row_stride(a), pb, row_stride(b), accumulate, c, row_stride(out));
            return;
        }
        // Row-major, unlike BLAS. With beta = 0 what c holds is not read, NaN included.
        const dnnl_status_t status =
            dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', M, N, K, alpha, pa, row_stride(a), pb,
                       row_stride(b), accumulate ? 1.0f : 0.0f, c, row_stride(out));
        return require(status == dnnl_success, op, ": oneDNN's sgemm failed with status ", int(status), " for M = ", M,
                       ", N = ", N, ", K = ", K);
    }
#endif
    (void)op, (void)forward;
    gemm_blocked(transpose_a, transpose_b, M, N, K, pa, row_stride(a), pb, row_stride(b), accumulate, c,
                 row_stride(out), alpha);
}

// The same for an out in fp32 or bf16. bf16: the product is computed in fp32 in memory of its own, and what is stored
// is rounded once.
void multiply_to(const char* op, const Tensor& out, const Tensor& a, const Tensor& b, bool transpose_a,
                 bool transpose_b, bool accumulate, float alpha = 1) {
    if (out.dtype == DType::F32) return multiply(op, out, a, b, transpose_a, transpose_b, accumulate, alpha);
    const int64_t M = out.shape[0], N = out.shape[1], stride = row_stride(out);
    std::vector<float> product(size_t(M * N));
    multiply(op, host_tensor(product.data(), {M, N}), a, b, transpose_a, transpose_b, false, alpha);
    bf16* const sums = out.as<bf16>();
#pragma omp parallel for schedule(static) if (M * N > PARALLEL_MIN)
    for (int64_t m = 0; m < M; m++) {
        bf16* const row = sums + m * stride;
        const float* const terms = product.data() + m * N;
        for (int64_t n = 0; n < N; n++) row[n] = to_bf16(accumulate ? to_float(row[n]) + terms[n] : terms[n]);
    }
}

// Throws unless a matrix is in fp32 or bf16.
void check_out_dtype(const char* op, const char* name, const Tensor& out) {
    require(!out || out.dtype == DType::F32 || out.dtype == DType::BF16, op, ": ", name, " is ", dtype_name(out.dtype),
            " ", shape_string(out), ", expected fp32 or bf16");
}

// Matrix i of a contiguous batch.
Tensor matrix_of(const Tensor& batch, int64_t i) {
    return host_tensor(batch.as<float>() + i * batch.stride[0], {batch.shape[1], batch.shape[2]});
}

// Σ over `rows` rows of up to SUM_COLUMNS columns, in ascending order within blocks of SUM_ROWS rows and then over the
// blocks: rounding errors grow with √(rows/SUM_ROWS) and not with √rows, and the order never depends on the threads.
constexpr int64_t SUM_COLUMNS = 1024, SUM_ROWS = 64;

MULTIARCH void sum_columns(float* out, const float* inp, int64_t rows, int64_t columns, int64_t stride,
                           bool accumulate) {
    alignas(64) float total[SUM_COLUMNS], block[SUM_COLUMNS];
    const int64_t whole = columns / 16 * 16;
    for (int64_t c = 0; c < columns; c++) total[c] = accumulate ? out[c] : 0.0f;
    for (int64_t r0 = 0; r0 < rows; r0 += SUM_ROWS) {
        std::fill_n(block, columns, 0.0f);
        for (int64_t r = r0; r < std::min(rows, r0 + SUM_ROWS); r++) {
            const float* row = inp + r * stride;
            for (int64_t c = 0; c < whole; c += 16) vec_store(block + c, vec_load(block + c) + vec_load(row + c));
            for (int64_t c = whole; c < columns; c++) block[c] += row[c];
        }
        for (int64_t c = 0; c < columns; c++) total[c] += block[c];
    }
    std::copy_n(total, columns, out);
}

// Threads own columns, so there are no partial sums to combine.
void sum_rows(const Tensor& out, const Tensor& inp, bool accumulate) {
    const int64_t rows = inp.shape[0], columns = inp.shape[1], stride = row_stride(inp);
    const int64_t share = (columns + omp_get_max_threads() - 1) / omp_get_max_threads();
    const int64_t width = std::clamp<int64_t>((share + 63) / 64 * 64, 64, SUM_COLUMNS);
    const float* in = inp.as<float>();
    float* o = out.as<float>();
#pragma omp parallel for schedule(static) if (rows * columns > PARALLEL_MIN)
    for (int64_t c = 0; c < columns; c += width)
        sum_columns(o + c, in + c, rows, std::min(width, columns - c), stride, accumulate);
}

void forward(const char* op, const Tensor& out, const Tensor& inp, const Tensor& weight, const Tensor& bias,
             const Tensor& add = {}) {
    check_matrix(op, "inp", inp);
    check_matrix(op, "weight", weight);
    const int64_t N = inp.shape[0], C = inp.shape[1], OC = weight.shape[0];
    check_matrix(op, "out", out, N, OC);
    check_matrix(op, "inp", inp, N, C);
    check_matrix(op, "weight", weight, OC, C);
    check_tensor(op, "bias", bias, DType::F32, {OC}, Given::Optional);
    if (add) check_added(op, out, add, inp);
    // Storing what is added first costs one write of out; adding it afterwards would cost a read and a write.
    if (bias || (add && add.data != out.data)) {
        const int64_t stride = row_stride(out);
        const float* b = bias.as<float>();
#pragma omp parallel for schedule(static) if (N * OC > PARALLEL_MIN)
        for (int64_t n = 0; n < N; n++) {
            float* o = out.as<float>() + n * stride;
            const float* a = add ? add.as<float>() + n * stride : nullptr;
            if (!a || !b) {
                std::copy_n(a ? a : b, OC, o);
                continue;
            }
            for (int64_t i = 0; i < OC; i++) o[i] = a[i] + b[i];
        }
    }
    multiply(op, out, inp, weight, false, true, add || bias);
}

void backward_input(const char* op, const Tensor& dinp, const Tensor& dout, const Tensor& weight, bool accumulate) {
    check_matrix(op, "dout", dout);
    check_matrix(op, "weight", weight);
    const int64_t N = dout.shape[0], OC = dout.shape[1], C = weight.shape[1];
    check_matrix(op, "dinp", dinp, N, C);
    check_matrix(op, "dout", dout, N, OC);
    check_matrix(op, "weight", weight, OC, C);
    multiply(op, dinp, dout, weight, false, false, accumulate);
}

}  // namespace

void matmul(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool accumulate, Stream, float alpha) {
    const char* op = "matmul";
    check_out_dtype(op, "out", out);
    check_matrix(op, "out", out, out.dtype);
    check_matrix(op, "a", a);
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[transpose_a ? 0 : 1];
    check_matrix(op, "out", out, M, N, Given::Required, out.dtype);
    if (transpose_a)
        check_matrix(op, "a", a, K, M);
    else
        check_matrix(op, "a", a, M, K);
    if (transpose_b)
        check_matrix(op, "b", b, N, K);
    else
        check_matrix(op, "b", b, K, N);
    multiply_to(op, out, a, b, transpose_a, transpose_b, accumulate, alpha);
}

void matmul_batched(Tensor out, Tensor a, Tensor b, bool transpose_a, bool transpose_b, float alpha, float beta,
                    Tensor add, Stream) {
    const char* op = "matmul_batched";
    const BatchedSizes s = check_matmul_batched(op, out, a, b, transpose_a, transpose_b, beta, add, DType::F32);
    if (beta != 0) {
        float* o = out.as<float>();
        const float* c = add.as<float>();
        parallel_chunks(1, out.numel(), true, [&](int64_t, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) o[i] = beta * c[i];
        });
    }
    // Threads share a matrix, or take whole ones where that divides the work well: small GEMMs leave little to share.
    const int threads = omp_get_max_threads();
    const bool whole = s.batch % threads == 0 || s.batch >= 4 * threads;
    std::exception_ptr error;
#pragma omp parallel for schedule(static) if (whole)
    for (int64_t i = 0; i < s.batch; i++) {
        try {
            multiply(op, matrix_of(out, i), matrix_of(a, i), matrix_of(b, i), transpose_a, transpose_b, beta != 0,
                     alpha);
        } catch (...) {
#pragma omp critical
            error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
}

void matmul_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, Stream) {
    forward("matmul_forward", out, inp, weight, bias);
}

void matmul_forward_add(Tensor out, Tensor inp, Tensor weight, Tensor bias, Tensor add, Stream) {
    forward("matmul_forward_add", out, inp, weight, bias, add);
}

void matmul_forward_activation(Activation f, Tensor out, Tensor pre, Tensor inp, Tensor weight, Tensor bias,
                               Stream stream, bool keeps_pre) {
    const char* op = "matmul_forward_activation";
    check_activation_output(op, f, out, pre, DType::F32, keeps_pre);
    forward(op, pre, inp, weight, bias);
    if (out) activation_forward(f, out, pre, stream);
}

void matmul_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, Stream) {
    backward_input("matmul_backward_input", dinp, dout, weight, accumulate);
}

void matmul_backward_activation(Activation f, const ActivationGradient& d, Tensor dout, Tensor weight, Tensor pre,
                                Stream stream) {
    const char* op = "matmul_backward_activation";
    check_activation_gradient(op, f, d, pre, DType::F32);
    backward_input(op, d.dact, dout, weight, false);
    activation_backward(f, d.dpre, d.act, d.dact, pre, stream);
    if (d.dbias) sum_rows(d.dbias, d.dpre, d.accumulate);
}

void matmul_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream) {
    const char* op = "matmul_backward_weight";
    check_matrix(op, "dout", dout);
    check_matrix(op, "inp", inp);
    const int64_t N = dout.shape[0], OC = dout.shape[1], C = inp.shape[1];
    check_out_dtype(op, "dweight", dweight);
    check_matrix(op, "dweight", dweight, OC, C, Given::Required, dweight.dtype);
    check_tensor(op, "dbias", dbias, DType::F32, {OC}, Given::Optional);
    check_matrix(op, "dout", dout, N, OC);
    check_matrix(op, "inp", inp, N, C);
    multiply_to(op, dweight, dout, inp, true, false, accumulate);
    if (dbias) sum_rows(dbias, dout, accumulate);
}

void matmul_backward_bias(Tensor dbias, Tensor dout, bool accumulate, Stream) {
    const char* op = "matmul_backward_bias";
    check_matrix(op, "dout", dout);
    check_tensor(op, "dbias", dbias, DType::F32, {dout.shape[1]});
    sum_rows(dbias, dout, accumulate);
}

void matmul_batch_invariant(bool on, Stream) {
    batch_invariant = on;
}

void matmul_tuning(bool, Stream) {}

std::string matmul_choices(Stream, bool) {
    return "";
}

bool matmul_use_choices(const std::string& text, Stream, bool) {
    return text.empty();  // any other table is a GPU's
}

#ifdef USE_ONEDNN
#define STRINGIFY(x) #x
#define VERSION_STRING(major, minor, patch) STRINGIFY(major) "." STRINGIFY(minor) "." STRINGIFY(patch)
const char* matmul_library() {
    return "oneDNN " VERSION_STRING(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH);
}
#else
const char* matmul_library() {
    return "built-in blocked GEMM";
}
#endif

double measured_peak_flops(Stream stream, DType dtype) {
    require(dtype == DType::F32, "measured_peak_flops: the CPU multiplies in fp32, not in ", dtype_name(dtype));
    // As much work for each thread whatever their number: 448 rows on two threads, 7 ms.
    const auto n = int64_t(std::lround(5.6 * std::cbrt(omp_get_max_threads()))) * 64;
    std::vector<float> a(size_t(n * n), 0.5f), b(size_t(n * n), 0.25f), out(size_t(n * n));
    double best = 0;
    for (int i = 0; i < 8; i++) {  // the first warms up
        const auto begin = std::chrono::steady_clock::now();
        matmul(host_tensor(out.data(), {n, n}), host_tensor(a.data(), {n, n}), host_tensor(b.data(), {n, n}), false,
               true, false, stream);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        best = std::max(best, 2.0 * n * n * n / seconds);
    }
    return best;
}

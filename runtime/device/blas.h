// CUDA only: GEMMs through cuBLASLt, with a handle, a workspace and plans for each stream. create_blas_stream()
// (runtime/device/blas_stream.h) makes them with the stream, so nothing is global, launchers allocate nothing, and two
// streams never share a workspace. One thread at a time may use a stream and its Blas.
//
// A GemmKey describes a GEMM: sizes, strides, dtypes, alignments and epilogue. Each key has one GemmPlan: the library's
// descriptors and the algorithm. The algorithm is the first that the library's heuristic proposes, the fastest of those
// that were timed (tuning), or one from a table of earlier timings (blas_choices, blas_use_choices). Only algorithms
// that give the same bits every time and sum in fp32 are allowed. The plan also says which kernel computes the GEMM
// (GemmKernel), the library's or another one; kernels/cuda/fastest_gemm.h compares and runs them.
#pragma once

#include <cublasLt.h>

#include <map>
#include <optional>
#include <string>

#include "runtime/device/device.h"
#include "runtime/device/fp8_codes.h"
#include "runtime/device/tensor.h"

// The operation that is applied to op(a)·op(b) before it is stored. GELU is the tanh form. Where out is f(aux), aux may
// be null: it is not stored then.
enum class GemmEpilogue : uint8_t {
    None,
    Bias,          // + bias[column]
    Gelu,          // aux = op(a)·op(b), out = gelu(aux)
    GeluBias,      // aux = op(a)·op(b) + bias[column], out = gelu(aux)
    GeluBackward,  // out = op(a)·op(b) ⊙ gelu'(aux)
    // Those that only kernels/gemm_hopper.h has. A bias is added if there is one. Relu2, Swiglu and Exp may have no
    // out.
    Relu2,           // aux = op(a)·op(b), out = relu2(aux)
    Relu2Backward,   // out = op(a)·op(b) ⊙ relu2'(aux)
    Swiglu,          // aux [M, 2·N] = op(a)·op(b) with op(b) [K, 2·N], out = swiglu(aux)
    SwigluBackward,  // out [M, 2·N] = the gradient of aux [M, 2·N], from op(a)·op(b), that of swiglu(aux)
    Exp,             // out = 2^min(log2(e)·op(a)·op(b) + row_offsets[row], 100), 0 from column valid_columns on
};
// The epilogues in the library, which come first.
constexpr bool library_has(GemmEpilogue epilogue) {
    return epilogue <= GemmEpilogue::GeluBackward;
}

// out [M, N] = op(a)·op(b), row-major, of each matrix of the batch. ld_*: row strides in elements. In a batch matrices
// are contiguous, one after the other. Not in the key: alpha, and whether out, act and column_sums are null. So a pass
// that recomputes runs the same kernel and gives the same bits; the timing is that of the first call.
struct GemmKey {
    int64_t batch = 1, M = 0, N = 0, K = 0;
    int64_t ld_out = 0, ld_a = 0, ld_b = 0, ld_aux = 0;  // ld_aux: 0 without aux
    DType dtype = DType::F32, out_dtype = DType::F32;    // of a, b, bias and aux; of out. U8: fp8 codes, bias as out
    Fp8Format format_a = Fp8Format::E4M3, format_b = Fp8Format::E4M3;  // of fp8 codes
    bool fast_accumulation = false;                                    // fp8: sums are kept in fewer bits
    bool transpose_a = false, transpose_b = false, accumulate = false;
    GemmEpilogue epilogue = GemmEpilogue::None;
    // Bytes, up to 16; 0 where null. align_out: also of what is added.
    int64_t align_out = 0, align_a = 0, align_b = 0, align_bias = 0, align_aux = 0;
    // A second pair of operands, which only kernels/gemm_hopper.h has: a2 [M, K2], and b2 with b's transpose and K2
    // instead of K. 0: none.
    int64_t K2 = 0, ld_a2 = 0, ld_b2 = 0, align_a2 = 0, align_b2 = 0;
};
bool operator<(const GemmKey& x, const GemmKey& y);

// out = alpha·(op(a)·op(b) + a2·op(b2)) + beta·add, then the epilogue.
struct GemmOperands {
    void* out = nullptr;
    const void *a = nullptr, *b = nullptr, *add = nullptr, *bias = nullptr;  // add: as out, null unless accumulate
    void* aux = nullptr;
    const void *a2 = nullptr, *b2 = nullptr;
    float alpha = 1, beta = 1;
    const float *inverse_scale_a = nullptr, *inverse_scale_b = nullptr;  // fp8: factors of a and b, on the device
    // Further outputs of hopper_gemm(), or null. column_sums [ceil(M / HOPPER_GEMM_ROWS), N], with the gradients of
    // GELU and ReLU²: out, before rounding, summed over the rows of each tile. act [M, N], contiguous, with the
    // gradient of SwiGLU: swiglu(aux).
    float* column_sums = nullptr;
    void* act = nullptr;
    // Of Exp: row_offsets [M]; row_sums [ceil(N / HOPPER_GEMM_COLUMNS), M]: out, before rounding, summed over the
    // columns of each tile.
    const float* row_offsets = nullptr;
    float* row_sums = nullptr;
    int64_t valid_columns = 0;
};

// The kernels that compute a GEMM with its epilogue.
enum class GemmKernel : uint8_t {
    Library,
    Separate,  // several kernels: a GEMM, and what follows it or is added to its sums
    Hopper1,   // hopper_gemm() with clusters of one block
    Hopper2,   // and of two
};

struct GemmPlan {
    cublasLtMatmulDescOpaque_t desc = {};
    cublasLtMatrixLayoutOpaque_t a = {}, b = {}, out = {};
    cublasLtMatmulAlgo_t algorithm = {};
    bool possible = false;                    // false: the library has no algorithm
    bool compared = false;                    // with the other kernels
    GemmKernel kernel = GemmKernel::Library;  // the fastest, if compared
    bool adopted = false;                     // from another GEMM, whose kernel may not take this one
    bool used = false;                        // by a GEMM of this process, not only listed in a table
    double milliseconds = -1;                 // measured; negative: not timed, the heuristic's choice
};

struct Blas : StreamLibrary {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;                           // 256-byte aligned
    static constexpr size_t WORKSPACE_BYTES = 32 << 20;  // what cuBLAS itself allocates on Hopper
    bool tuning = false;                                 // time the algorithms of each key that is not timed yet
    bool batch_invariant = false;                        // matmul_batch_invariant()
    std::optional<GemmKernel> only_kernel;  // of all GEMMs that have it, without comparison (ladders, tests)
    std::map<GemmKey, GemmPlan> plans;

    Blas();
    ~Blas() override;
    Blas(const Blas&) = delete;
    Blas& operator=(const Blas&) = delete;
};

// The Blas of a stream. Throws Error, naming op, if the stream has none.
Blas& blas_of(const char* op, Stream stream);

// The alignment in bytes of p, and of p + batch_stride, for a GemmKey: a power of two up to 16; 0 if p is null.
int64_t gemm_alignment(const void* p, int64_t batch_stride = 0);

// The plan for a key. The first call makes it; while tuning is on it is also timed, which overwrites out and aux. No
// size may be 0.
GemmPlan& blas_plan(const char* op, const GemmKey& key, const GemmOperands& operands, Stream stream);

// Runs the GEMM of a plan whose `possible` is true.
void blas_multiply(const char* op, const GemmKey& key, GemmPlan& plan, const GemmOperands& operands, Stream stream);

// Writes and reads the table of timed algorithms, as matmul_choices() and matmul_use_choices() (kernels/matmul.h).
std::string blas_choices(const Blas& blas, bool used_only);
bool blas_use_choices(Blas& blas, const std::string& text, bool used);

std::string blas_version();  // "cuBLASLt 13.1.0"

// CUDA only: the matrix library behind a stream. create_stream() (runtime/device/device.h) makes one with the stream,
// so that kernels/matmul.cu finds handle and workspace where it finds the queue: nothing is global, nothing is created
// or allocated inside a launcher but at the first product of its kind, and two streams never share a workspace. A
// stream, and so its Blas, belongs to one thread at a time.
//
// A product's kind is its GemmKey: sizes, strides, dtypes, alignments and what happens to its result. For each kind
// there is one plan: the library's descriptors and the algorithm, which is the heuristic's first, the fastest of those
// timed (tuning), or one adopted from a table of earlier timings (blas_choices, blas_use_choices). Algorithms are
// restricted to those that give the same bits every time and add up in fp32.
#pragma once

#include <cublasLt.h>

#include <map>
#include <string>

#include "runtime/device/device.h"
#include "runtime/device/tensor.h"

// What happens to a product on its way to out. GELU is the tanh form.
enum class GemmEpilogue : uint8_t {
    None,
    Bias,          // + bias[column]
    Gelu,          // aux = product, out = gelu(aux)
    GeluBias,      // aux = product + bias[column], out = gelu(aux)
    GeluBackward,  // out = product ⊙ gelu'(aux)
};

// out [M, N] = op(a)·op(b), row-major; ld: elements from one row to the next.
struct GemmKey {
    int64_t M = 0, N = 0, K = 0;
    int64_t ld_out = 0, ld_a = 0, ld_b = 0, ld_aux = 0;  // ld_aux: 0 without aux
    DType dtype = DType::F32, out_dtype = DType::F32;    // of a, b, bias and aux; of out
    bool transpose_a = false, transpose_b = false, accumulate = false;
    GemmEpilogue epilogue = GemmEpilogue::None;
    int64_t align_out = 0, align_a = 0, align_b = 0, align_bias = 0, align_aux = 0;  // bytes, up to 16; 0 where null
};
bool operator<(const GemmKey& x, const GemmKey& y);

struct GemmPointers {
    void* out = nullptr;
    const void *a = nullptr, *b = nullptr, *bias = nullptr;
    void* aux = nullptr;
};

struct GemmPlan {
    cublasLtMatmulDescOpaque_t desc = {};
    cublasLtMatrixLayoutOpaque_t a = {}, b = {}, out = {};
    cublasLtMatmulAlgo_t algorithm = {};
    bool possible = false;     // false: the library has no algorithm for this, or apart from its epilogue it is faster
    bool compared = false;     // with product and activation as two kernels
    bool used = false;         // by a product of this process, not only listed in a table
    double milliseconds = -1;  // as timed; negative: not timed, the heuristic's choice
};

// A later candidate must be faster by more than 1%: less is noise, and among equals the first one stays.
constexpr double GEMM_TUNING_MARGIN = 0.99;

struct Blas {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;  // 256-byte aligned
    size_t workspace_bytes = 0;
    bool tuning = false;  // time the algorithms of each product that isn't timed yet
    std::map<GemmKey, GemmPlan> plans;
};

Blas* create_blas();
void destroy_blas(Blas* blas);

// The alignment of p as keys have it.
int64_t gemm_alignment(const void* p);

// The plan of a product, made at the first call and timed while tuning is on, which overwrites out and aux. No size may
// be 0.
GemmPlan& blas_plan(const char* op, const GemmKey& key, const GemmPointers& pointers, Stream stream);

// out = op(a)·op(b) (+ out), with its epilogue, by a plan that is possible.
void blas_multiply(const char* op, const GemmKey& key, GemmPlan& plan, const GemmPointers& pointers, Stream stream);

// The table of timed algorithms as text, and back: kernels/matmul.h says what they promise.
std::string blas_choices(const Blas& blas, bool used_only);
bool blas_use_choices(Blas& blas, const std::string& text, bool used);

std::string blas_version();  // "cuBLASLt 13.1.0"

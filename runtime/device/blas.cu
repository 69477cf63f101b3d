#include "runtime/device/blas.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <limits>
#include <sstream>
#include <tuple>
#include <vector>

#include "runtime/device/cuda_check.h"
#include "runtime/timing.h"

namespace {

void blas_check(cublasStatus_t status, const char* op, const char* call) {
    require(status == CUBLAS_STATUS_SUCCESS, op, ": ", call, ": ", cublasLtGetStatusString(status));
}

auto fields(const GemmKey& k) {
    return std::tie(k.batch, k.M, k.N, k.K, k.ld_out, k.ld_a, k.ld_b, k.ld_aux, k.dtype, k.out_dtype, k.format_a,
                    k.format_b, k.fast_accumulation, k.transpose_a, k.transpose_b, k.accumulate, k.epilogue,
                    k.align_out, k.align_a, k.align_b, k.align_bias, k.align_aux, k.K2, k.ld_a2, k.ld_b2, k.align_a2,
                    k.align_b2);
}

}  // namespace

bool operator<(const GemmKey& x, const GemmKey& y) {
    return fields(x) < fields(y);
}

Blas::Blas() {
    blas_check(cublasLtCreate(&handle), "create_blas_stream", "cublasLtCreate");
    try {
        workspace = device_alloc(WORKSPACE_BYTES);
    } catch (...) {
        cublasLtDestroy(handle);
        throw;
    }
}

Blas::~Blas() {
    device_free(workspace);
    cublasLtDestroy(handle);
}

Blas& blas_of(const char* op, Stream stream) {
    auto* blas = dynamic_cast<Blas*>(stream.library);
    require(blas, op, ": the stream has no cuBLASLt handle; create it with create_blas_stream()");
    return *blas;
}

// Capped at 16: no algorithm requires more than the 16 bytes of a vector access or a TMA copy, so one plan serves every
// matrix with that alignment.
int64_t gemm_alignment(const void* p, int64_t batch_stride) {
    if (!p) return 0;
    const auto address = reinterpret_cast<uintptr_t>(p) | uintptr_t(batch_stride);
    return int64_t(std::min<uintptr_t>(16, address & (~address + 1)));
}

namespace {

cudaDataType_t cuda_type(DType dtype) {
    return dtype == DType::BF16 ? CUDA_R_16BF : dtype == DType::F16 ? CUDA_R_16F : CUDA_R_32F;
}
cudaDataType_t cuda_type(DType dtype, Fp8Format format) {
    return dtype != DType::U8 ? cuda_type(dtype) : format == Fp8Format::E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

template <typename T>
void set(GemmPlan& plan, const char* op, cublasLtMatmulDescAttributes_t attribute, const T& value) {
    blas_check(cublasLtMatmulDescSetAttribute(&plan.desc, attribute, &value, sizeof(value)), op,
               "cublasLtMatmulDescSetAttribute");
}

void set_pointers(GemmPlan& plan, const char* op, const GemmOperands& p) {
    if (p.bias) set(plan, op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.aux) set(plan, op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux);
    // The library's first operand is b.
    if (p.inverse_scale_b) set(plan, op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.inverse_scale_b);
    if (p.inverse_scale_a) set(plan, op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.inverse_scale_a);
}

cublasLtEpilogue_t library_epilogue(const GemmKey& key) {
    switch (key.epilogue) {
        case GemmEpilogue::None:
            return CUBLASLT_EPILOGUE_DEFAULT;
        case GemmEpilogue::Bias:
            return CUBLASLT_EPILOGUE_BIAS;
        case GemmEpilogue::Gelu:
            return key.ld_aux ? CUBLASLT_EPILOGUE_GELU_AUX : CUBLASLT_EPILOGUE_GELU;
        case GemmEpilogue::GeluBias:
            return key.ld_aux ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS;
        case GemmEpilogue::GeluBackward:
            return CUBLASLT_EPILOGUE_DGELU;
        case GemmEpilogue::Relu2:
        case GemmEpilogue::Relu2Backward:
        case GemmEpilogue::Swiglu:
        case GemmEpilogue::SwigluBackward:
        case GemmEpilogue::Exp:
            break;
    }
    throw Error("library_epilogue: the library has no such epilogue");
}

// The descriptors of a GEMM, without an algorithm.
//
// cuBLASLt is column-major: our row-major out [M, N] is its outᵀ [N, M]. It therefore computes outᵀ = op(b)ᵀ·op(a)ᵀ
// with b as its first operand. A row-major matrix is a transposed column-major one, so the transpose flags stay the
// same. The bias has an element for each column of out, which is a row for the library, as its bias epilogue expects.
GemmPlan describe(const Blas& blas, const char* op, const GemmKey& key) {
    GemmPlan plan;
    blas_check(cublasLtMatmulDescInit(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), op, "cublasLtMatmulDescInit");
    set(plan, op, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan, op, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan, op, CUBLASLT_MATMUL_DESC_EPILOGUE, library_epilogue(key));
    if (key.ld_aux) set(plan, op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.ld_aux);
    // The library checks their alignment: pass addresses with the same alignment, which it never reads.
    const auto stand_in = [&](int64_t align) { return align ? static_cast<char*>(blas.workspace) + align : nullptr; };
    GemmOperands stand_ins;
    stand_ins.bias = stand_in(key.align_bias);
    stand_ins.aux = stand_in(key.align_aux);
    if (key.dtype == DType::U8) {
        stand_ins.inverse_scale_a = stand_ins.inverse_scale_b = static_cast<const float*>(blas.workspace);
        set(plan, op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(key.fast_accumulation));
    }
    set_pointers(plan, op, stand_ins);

    const auto layout = [&](cublasLtMatrixLayoutOpaque_t& to, cudaDataType_t type, int64_t rows, int64_t columns,
                            int64_t ld) {
        blas_check(cublasLtMatrixLayoutInit(&to, type, uint64_t(columns), uint64_t(rows), ld), op,
                   "cublasLtMatrixLayoutInit");
        if (key.batch == 1) return;
        const auto set_batch = [&](cublasLtMatrixLayoutAttribute_t attribute, auto value) {
            blas_check(cublasLtMatrixLayoutSetAttribute(&to, attribute, &value, sizeof(value)), op,
                       "cublasLtMatrixLayoutSetAttribute");
        };
        set_batch(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t(key.batch));
        set_batch(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t(rows * ld));
    };
    const cudaDataType_t type_a = cuda_type(key.dtype, key.format_a), type_b = cuda_type(key.dtype, key.format_b);
    layout(plan.a, type_a, key.transpose_a ? key.K : key.M, key.transpose_a ? key.M : key.K, key.ld_a);
    layout(plan.b, type_b, key.transpose_b ? key.N : key.K, key.transpose_b ? key.K : key.N, key.ld_b);
    layout(plan.out, cuda_type(key.out_dtype), key.M, key.N, key.ld_out);
    return plan;
}

constexpr int MAX_CANDIDATES = 32;

// The algorithms that the library's heuristic expects to be fastest, best first.
int candidates(const Blas& blas, const char* op, const GemmKey& key, GemmPlan& plan, int wanted,
               cublasLtMatmulHeuristicResult_t* results) {
    cublasLtMatmulPreferenceOpaque_t preference;
    blas_check(cublasLtMatmulPreferenceInit(&preference), op, "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        blas_check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)), op,
                   "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(Blas::WORKSPACE_BYTES));
    // Split-K GEMMs must sum their parts in fp32. With an epilogue split-K is off: the library would round the sum to
    // 16 bits before it adds the bias. In a batch it is off, so that no sum is divided by a matrix's position in it.
    const bool split = key.batch == 1 && (key.out_dtype == DType::F32 || key.epilogue == GemmEpilogue::None);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t(split ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(key.align_b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(key.align_a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(key.align_out));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(key.align_out));
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(blas.handle, &plan.desc, &plan.b, &plan.a, &plan.out,
                                                                 &plan.out, &preference, wanted, results, &count);
    return status == CUBLAS_STATUS_SUCCESS ? count : 0;
}

cublasStatus_t launch(const Blas& blas, GemmPlan& plan, const GemmOperands& p, bool accumulate, Stream stream) {
    const float beta = accumulate ? p.beta : 0;  // with beta = 0 add is not read, so NaN in it is ignored
    return cublasLtMatmul(blas.handle, &plan.desc, &p.alpha, p.b, &plan.b, p.a, &plan.a, &beta,
                          accumulate ? p.add : p.out, &plan.out, p.out, &plan.out, &plan.algorithm, blas.workspace,
                          Blas::WORKSPACE_BYTES, cuda_stream(stream));
}

void require_success(const char* op, const GemmKey& key, cublasStatus_t status) {
    require(status == CUBLAS_STATUS_SUCCESS, op, ": cublasLtMatmul failed (", cublasLtGetStatusString(status),
            ") for M = ", key.M, ", N = ", key.N, ", K = ", key.K, ", batch ", key.batch);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tuning

// *hash += Σ hash(index, bits) over the elements of a matrix. Integer sums do not depend on their order.
template <typename Bits>
__global__ void hash_kernel(unsigned long long* hash, const Bits* matrix, int64_t rows, int64_t columns, int64_t ld) {
    unsigned long long sum = 0;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
        for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
            unsigned long long x =
                matrix[row * ld + column] + (unsigned long long)(row * columns + column) * 0x9e3779b97f4a7c15ull;
            x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9ull;
            sum += x ^ x >> 29;
        }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) atomicAdd(hash, sum);
}

// Hash of the result of the last GEMM. The workspace is free between GEMMs.
unsigned long long hash_result(const Blas& blas, const char* op, const GemmKey& key, const void* out, Stream stream) {
    auto* hash = static_cast<unsigned long long*>(blas.workspace);
    device_fill(hash, 0, sizeof(*hash), stream);
    const int64_t rows = key.batch * key.M;
    const unsigned blocks = unsigned(std::min<int64_t>(rows, 4096));
    if (dtype_size(key.out_dtype) == 2)
        hash_kernel<<<blocks, 256, 0, cuda_stream(stream)>>>(hash, static_cast<const uint16_t*>(out), rows, key.N,
                                                             key.ld_out);
    else
        hash_kernel<<<blocks, 256, 0, cuda_stream(stream)>>>(hash, static_cast<const uint32_t*>(out), rows, key.N,
                                                             key.ld_out);
    check_launch(op, stream);
    unsigned long long value = 0;
    copy_to_host(&value, hash, sizeof(value), stream);
    return value;
}

// Puts the fastest algorithm into the plan and overwrites out. Between runs the inputs stay in the L2 cache as far as
// they fit, as they do in training. The first, short samples choose a few algorithms, long ones among these.
void tune(const Blas& blas, const char* op, const GemmKey& key, GemmPlan& plan, const GemmOperands& p, Stream stream) {
    constexpr double TOO_SLOW = 1.25;  // times the fastest single run: not timed further
    constexpr size_t FINALISTS = 4;
    cublasLtMatmulHeuristicResult_t results[MAX_CANDIDATES];
    const int count = candidates(blas, op, key, plan, MAX_CANDIDATES, results);
    std::vector<GemmPlan> deterministic;
    int refused = 0, differ = 0;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    double fastest = std::numeric_limits<double>::max();
    for (int i = 0; i < count; i++) {
        if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
        plan.algorithm = results[i].algo;
        // Two runs that overwrite out must give the same bits. The first one warms up.
        status = launch(blas, plan, p, false, stream);
        if (status != CUBLAS_STATUS_SUCCESS) {
            refused++;
            continue;
        }
        const unsigned long long first = hash_result(blas, op, key, p.out, stream);
        plan.milliseconds =
            timed_ms([&] { require_success(op, key, launch(blas, plan, p, false, stream)); }, 1, stream);
        if (hash_result(blas, op, key, p.out, stream) != first) {
            differ++;
            continue;
        }
        deterministic.push_back(plan);
        fastest = std::min(fastest, plan.milliseconds);
    }
    require(!deterministic.empty(), op, ": none of cuBLASLt's ", count, " algorithms serves for M = ", key.M,
            ", N = ", key.N, ", K = ", key.K, ", batch ", key.batch, ": ", differ, " give other bits a second time, ",
            refused, " cannot run (", cublasLtGetStatusString(status),
            "); check that GPU memory is left, and the GPU's health");
    const auto too_slow = [&](const GemmPlan& tried) { return tried.milliseconds > TOO_SLOW * fastest; };
    deterministic.erase(std::remove_if(deterministic.begin(), deterministic.end(), too_slow), deterministic.end());

    const auto times = [&](double sample_ms) {
        std::vector<std::function<void()>> work;
        for (GemmPlan& candidate : deterministic)
            work.push_back([&] { require_success(op, key, launch(blas, candidate, p, key.accumulate, stream)); });
        return time_in_turns(work, stream, sample_ms);
    };
    std::vector<double> medians = times(SHORT_SAMPLE_MS);
    if (draws_full_power(*std::min_element(medians.begin(), medians.end()))) {
        for (size_t i = 0; i < deterministic.size(); i++) deterministic[i].milliseconds = medians[i];
        std::stable_sort(deterministic.begin(), deterministic.end(),
                         [](const GemmPlan& x, const GemmPlan& y) { return x.milliseconds < y.milliseconds; });
        deterministic.resize(std::min<size_t>(deterministic.size(), FINALISTS));
        medians = times(LONG_SAMPLE_MS);
    }
    const size_t best = fastest_of(medians);
    plan.algorithm = deterministic[best].algorithm;
    plan.milliseconds = medians[best];
}

// Whether the library may compute the GEMM.
bool is_of_library(const GemmKey& key) {
    return library_has(key.epilogue) && key.K2 == 0;
}

// A plan with the algorithm that the heuristic ranks first.
GemmPlan make_plan(const Blas& blas, const char* op, const GemmKey& key) {
    if (!is_of_library(key)) return {};
    GemmPlan plan = describe(blas, op, key);
    cublasLtMatmulHeuristicResult_t first{};
    plan.possible = candidates(blas, op, key, plan, 1, &first) > 0;
    plan.algorithm = first.algo;
    return plan;
}

// The library's answer whether it can run the plan's algorithm with its descriptors in the workspace.
bool can_run(const Blas& blas, GemmPlan& plan) {
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(blas.handle, &plan.desc, &plan.b, &plan.a, &plan.out, &plan.out, &plan.algorithm,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= Blas::WORKSPACE_BYTES;
}

// Takes the choice of the GEMM that differs only in adding to out, where it has been timed: the algorithms of both
// multiply alike, so that timing the second one would find the same and make a start longer.
bool adopt_choice(const Blas& blas, GemmKey key, GemmPlan& plan) {
    key.accumulate = !key.accumulate;
    const auto found = blas.plans.find(key);
    if (found == blas.plans.end() || found->second.milliseconds < 0) return false;
    const GemmPlan& timed = found->second;
    GemmPlan taken = plan;
    taken.algorithm = timed.algorithm;
    taken.milliseconds = timed.milliseconds;
    taken.compared = timed.compared;
    taken.kernel = timed.kernel;
    taken.adopted = true;
    if (!can_run(blas, taken)) return false;
    plan = taken;
    return true;
}

}  // namespace

GemmPlan& blas_plan(const char* op, const GemmKey& key, const GemmOperands& p, Stream stream) {
    Blas& blas = blas_of(op, stream);
    auto found = blas.plans.find(key);
    if (found == blas.plans.end()) found = blas.plans.emplace(key, make_plan(blas, op, key)).first;
    GemmPlan& plan = found->second;
    plan.used = true;
    if (!plan.possible) return plan;
    set_pointers(plan, op, p);
    if (blas.tuning && plan.milliseconds < 0 && !adopt_choice(blas, key, plan)) tune(blas, op, key, plan, p, stream);
    return plan;
}

void blas_multiply(const char* op, const GemmKey& key, GemmPlan& plan, const GemmOperands& p, Stream stream) {
    set_pointers(plan, op, p);
    require_success(op, key, launch(blas_of(op, stream), plan, p, key.accumulate, stream));
    check_launch(op, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The table as text: GPU and library version, column names, a line for each GEMM, and a checksum. The checksum keeps
// damaged algorithm descriptions from the library, whose behaviour with them is undefined.

namespace {

constexpr const char* LEGEND =
    "# M N K, ld of out a b aux, dtype (fp8: of a and of b, fast accumulation), out's, transposes, accumulate, "
    "epilogue, alignment of out a b bias aux, algorithm, ms, batch if not 1, or + and of a second pair K, ld of a b, "
    "alignment of a b";
constexpr std::array<const char*, 10> EPILOGUES = {
    "none",  "bias",           "gelu",   "gelu_bias",       "gelu_backward",
    "relu2", "relu2_backward", "swiglu", "swiglu_backward", "exp"};
constexpr std::array<DType, 3> DTYPES = {DType::F32, DType::BF16, DType::F16};
constexpr std::array<const char*, 4> KERNELS = {"library", "apart", "hopper_1", "hopper_2"};  // instead of an algorithm
constexpr const char* HEX = "0123456789abcdef";

std::string hex(const void* data, size_t bytes) {
    std::string text;
    for (size_t i = 0; i < bytes; i++) {
        const unsigned byte = static_cast<const unsigned char*>(data)[i];
        text += {HEX[byte / 16], HEX[byte % 16]};
    }
    return text;
}

bool parse_hex(const std::string& text, void* data, size_t bytes) {
    if (text.size() != 2 * bytes || text.find_first_not_of(HEX) != std::string::npos) return false;
    for (size_t i = 0; i < bytes; i++)
        static_cast<unsigned char*>(data)[i] =
            static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    return true;
}

// FNV-1a.
std::string checksum(const std::string& text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3u;
    return str("checksum ", std::hex, hash);
}

// The GPU, the library version and the kernels of our own, for which alone the timings hold: the first line of the
// table. The number counts the versions of hopper_gemm() that differ in speed.
std::string timed_with() {
#ifdef HAVE_SM90A
    const char* own = ", hopper_gemm 4";
#else
    const char* own = "";
#endif
    return device_name() + " " + blas_version() + own;
}

// "bf16", "e4m3,e5m2" or "e4m3,e4m3,fast".
std::string operands_name(const GemmKey& k) {
    if (k.dtype != DType::U8) return dtype_name(k.dtype);
    return str(FP8_FORMAT_NAMES[size_t(k.format_a)], ',', FP8_FORMAT_NAMES[size_t(k.format_b)],
               k.fast_accumulation ? ",fast" : "");
}

bool parse_operands(const std::string& name, GemmKey& k) {
    for (const DType dtype : DTYPES)
        if (k.dtype = dtype, operands_name(k) == name) return true;
    k.dtype = DType::U8;
    for (const Fp8Format a : {Fp8Format::E4M3, Fp8Format::E5M2})
        for (const Fp8Format b : {Fp8Format::E4M3, Fp8Format::E5M2})
            for (const bool fast : {false, true})
                if (k.format_a = a, k.format_b = b, k.fast_accumulation = fast, operands_name(k) == name) return true;
    return false;
}

std::string line_of(const GemmKey& k, const GemmPlan& plan) {
    return str(k.M, ' ', k.N, ' ', k.K, ' ', k.ld_out, ' ', k.ld_a, ' ', k.ld_b, ' ', k.ld_aux, ' ', operands_name(k),
               ' ', dtype_name(k.out_dtype), ' ', "NT"[k.transpose_a], "NT"[k.transpose_b], ' ', k.accumulate, ' ',
               EPILOGUES[size_t(k.epilogue)], ' ', k.align_out, ' ', k.align_a, ' ', k.align_b, ' ', k.align_bias, ' ',
               k.align_aux, ' ',
               plan.kernel == GemmKernel::Library ? hex(&plan.algorithm, sizeof(plan.algorithm))
                                                  : std::string(KERNELS[size_t(plan.kernel)]),
               ' ', plan.milliseconds, k.batch > 1 ? str(' ', k.batch) : "",
               k.K2 > 0 ? str(" + ", k.K2, ' ', k.ld_a2, ' ', k.ld_b2, ' ', k.align_a2, ' ', k.align_b2) : "");
}

bool parse_line(const std::string& line, GemmKey& k, GemmPlan& plan) {
    std::istringstream in(line);
    std::string dtype, out_dtype, transposes, epilogue, bytes, batch, beyond;
    in >> k.M >> k.N >> k.K >> k.ld_out >> k.ld_a >> k.ld_b >> k.ld_aux >> dtype >> out_dtype >> transposes >>
        k.accumulate >> epilogue >> k.align_out >> k.align_a >> k.align_b >> k.align_bias >> k.align_aux >> bytes >>
        plan.milliseconds;
    const bool complete = !in.fail();
    in >> batch;
    if (batch == "+") {
        in >> k.K2 >> k.ld_a2 >> k.ld_b2 >> k.align_a2 >> k.align_b2;
        if (in.fail() || k.K2 < 1) return false;
    } else {
        const auto [end, error] = std::from_chars(batch.data(), batch.data() + batch.size(), k.batch);
        if (!batch.empty() && (error != std::errc{} || *end || k.batch < 2 || k.batch > INT32_MAX)) return false;
    }
    in >> beyond;
    const auto parse_dtype = [](const std::string& name, DType& to) {
        for (const DType d : DTYPES)
            if (name == dtype_name(d)) return to = d, true;
        return false;
    };
    const auto found = std::find(EPILOGUES.begin(), EPILOGUES.end(), epilogue);
    if (!complete || !beyond.empty() || found == EPILOGUES.end() || transposes.size() != 2 ||
        transposes.find_first_not_of("NT") != std::string::npos || !(plan.milliseconds >= 0))
        return false;
    k.epilogue = GemmEpilogue(found - EPILOGUES.begin());
    k.transpose_a = transposes[0] == 'T';
    k.transpose_b = transposes[1] == 'T';
    const auto found_kernel = std::find(KERNELS.begin() + 1, KERNELS.end(), bytes);
    plan.kernel = found_kernel == KERNELS.end() ? GemmKernel::Library : GemmKernel(found_kernel - KERNELS.begin());
    return parse_operands(dtype, k) && parse_dtype(out_dtype, k.out_dtype) &&
           (plan.kernel != GemmKernel::Library ||
            (is_of_library(k) && parse_hex(bytes, &plan.algorithm, sizeof(plan.algorithm))));
}

}  // namespace

std::string blas_version() {
    const size_t version = cublasLtGetVersion();
    return str("cuBLASLt ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string blas_choices(const Blas& blas, bool used_only) {
    std::string text = str(timed_with(), '\n', LEGEND, '\n');
    for (const auto& [key, plan] : blas.plans)
        if (plan.milliseconds >= 0 && (plan.used || !used_only)) text += line_of(key, plan) + '\n';
    return text + checksum(text) + '\n';
}

bool blas_use_choices(Blas& blas, const std::string& text, bool used) {
    const char* op = "matmul_use_choices";
    if (text.empty()) return true;
    std::istringstream lines(text);
    std::string line;
    std::getline(lines, line);
    if (line != timed_with()) return false;

    const char* damaged = ": the table of GEMM algorithms is damaged; without it they are timed again";
    const size_t last = text.rfind("checksum ");
    require(last != std::string::npos && text.substr(last) == checksum(text.substr(0, last)) + '\n', op, damaged);
    std::map<GemmKey, GemmPlan> adopted;  // so that damage in a later line leaves the plans unchanged
    while (std::getline(lines, line)) {
        if (line[0] == '#' || line.rfind("checksum ", 0) == 0) continue;
        GemmKey key;
        GemmPlan listed;
        require(parse_line(line, key, listed), op, damaged);
        const bool library = listed.kernel == GemmKernel::Library;
        GemmPlan plan = library ? describe(blas, op, key) : make_plan(blas, op, key);
        plan.kernel = listed.kernel;
        plan.milliseconds = listed.milliseconds;
        plan.compared = true;
        if (library) {
            plan.possible = true;
            plan.algorithm = listed.algorithm;
            require(can_run(blas, plan), op, damaged);
        }
        adopted[key] = plan;
    }
    for (const auto& [key, plan] : adopted) {
        GemmPlan& current = blas.plans[key];
        const bool was_used = current.used;
        current = plan;
        current.used = was_used || used;
    }
    return true;
}

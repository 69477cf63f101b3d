#include "kernels/gemm_hopper.h"

#include "kernels/gemm_hopper_epilogues.cuh"

namespace hopper_gemm_kernel {
namespace {

// The clusters of a kernel that run at the same time.
template <typename K>
int resident_clusters(const char* op, const cudaLaunchConfig_t& config) {
    static const int clusters = [&] {
        cuda_check(cudaFuncSetAttribute(gemm_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        int(config.dynamicSmemBytes)),
                   op);
        int count = int(num_sms());
        if (K::CLUSTER > 1) cuda_check(cudaOccupancyMaxActiveClusters(&count, gemm_kernel<K>, &config), op);
        return count;
    }();
    return clusters;
}

struct Matrix {
    const void* data;
    int64_t ld, rows, columns;
};

CUtensorMap map_of(const char* op, const Matrix& x, int box_rows, int box_columns = PANEL_COLUMNS) {
    return make_tensor_map(op, Heads<const bf16>{static_cast<const bf16*>(x.data), x.ld, x.ld}, x.rows, 1, x.columns,
                           box_rows, box_columns);
}

// Halves of columns (of out and aux) or of rows (of b) in SwiGLU's matrices.
Matrix right_half(const Matrix& x) {
    return {static_cast<const bf16*>(x.data) + x.columns, x.ld, x.rows, x.columns};
}
Matrix lower_half(const Matrix& x) {
    return {static_cast<const bf16*>(x.data) + x.rows * x.ld, x.ld, x.rows, x.columns};
}

// How many rows of tiles are computed column by column (Tiles). If b stays in half of L2, few: a is then read from
// memory once. GPT-2 1558M, input gradient of fc: b has 20 MB, and 251 MB are read instead of 291. Otherwise each group
// reads b from memory again.
int rows_in_group(int64_t b_bytes) {
    static const int64_t l2 = device_attribute(cudaDevAttrL2CacheSize);
    return b_bytes <= l2 / 2 ? 8 : 16;
}

// The maps of a [M, inner] and of b, [N, inner] or [inner, N].
template <typename K>
Inputs inputs_of(const char* op, const Matrix& a, const void* b_data, int64_t ld_b, int64_t N) {
    Inputs inputs{};
    inputs.a = map_of(op, a, BM);
    const Matrix b = K::B_MN_MAJOR ? Matrix{b_data, ld_b, a.columns, N} : Matrix{b_data, ld_b, N, a.columns};
    const int box = K::B_MN_MAJOR ? BK / K::CLUSTER : K::Epilogue::GATED ? BN / 2 : BN / K::CLUSTER;
    inputs.b[0] = map_of(op, b, box);
    if (K::Epilogue::GATED) inputs.b[1] = map_of(op, lower_half(b), box);
    return inputs;
}

template <typename K>
void launch(const char* op, const GemmKey& key, const GemmOperands& operands, Stream stream) {
    constexpr bool GATED = K::Epilogue::GATED;
    constexpr int PANEL = K::Epilogue::Panel::COLUMNS;
    static_assert(sizeof(typename K::Shared) <= 232448);  // the most that a block may use
    Arguments p{};
    p.inputs[0] = inputs_of<K>(op, {operands.a, key.ld_a, key.M, key.K}, operands.b, key.ld_b, key.N);
    if (key.K2 > 0)
        p.inputs[1] = inputs_of<K>(op, {operands.a2, key.ld_a2, key.M, key.K2}, operands.b2, key.ld_b2, key.N);
    const Matrix out{operands.out, key.ld_out, key.M, key.N};
    const Matrix aux = key.accumulate ? Matrix{operands.add, key.ld_out, key.M, key.N}
                                      : Matrix{operands.aux, key.ld_aux, key.M, key.N};
    p.stores_out = operands.out;
    p.stores_aux = aux.data;
    p.floats = static_cast<float*>(operands.out);  // only StoreFloats reads it
    p.ld_floats = key.ld_out;
    if (operands.out && key.out_dtype == DType::BF16) p.out[0] = map_of(op, out, 16, PANEL);
    if (operands.act) p.act = map_of(op, {operands.act, key.N, key.M, key.N}, 16, PANEL);
    if (aux.data) p.aux[0] = map_of(op, aux, 16, PANEL);
    if (aux.data && (key.epilogue == GemmEpilogue::Swiglu || key.epilogue == GemmEpilogue::SwigluBackward))
        p.aux[1] = map_of(op, right_half(aux), 16, PANEL);
    if (key.epilogue == GemmEpilogue::SwigluBackward) p.out[1] = map_of(op, right_half(out), 16, PANEL);
    p.bias = static_cast<const bf16*>(operands.bias);
    p.alpha = operands.alpha;
    p.column_sums = operands.column_sums;
    p.M = int(key.M);
    p.N = int(key.N);
    p.row_offsets = operands.row_offsets;
    p.row_sums = operands.row_sums;
    p.valid_columns = int(operands.valid_columns);
    p.rows = int(ceil_div(key.M, BM * K::CLUSTER));
    p.columns = int(ceil_div(key.N, GATED ? BN / 2 : BN));
    p.group = rows_in_group((GATED ? 2 : 1) * key.N * key.K * int64_t(sizeof(bf16))) / K::CLUSTER;
    p.first_steps = int(ceil_div(key.K, BK));
    p.steps = p.first_steps + int(ceil_div(key.K2, BK));

    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = K::CLUSTER;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(K::CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = sizeof(typename K::Shared);
    config.stream = cuda_stream(stream);
    config.attrs = &cluster;
    config.numAttrs = K::CLUSTER > 1;
    const int clusters = std::min(p.rows * p.columns, resident_clusters<K>(op, config));
    config.gridDim = dim3(unsigned(clusters * K::CLUSTER));
    cuda_check(cudaLaunchKernelEx(&config, gemm_kernel<K>, p), op);
}

template <int CLUSTER>
void dispatch(const char* op, const GemmKey& key, const GemmOperands& operands, Stream stream) {
    using namespace mlp_activation;
    const auto run = [&](auto kernel) { launch<decltype(kernel)>(op, key, operands, stream); };
    switch (key.epilogue) {
        case GemmEpilogue::None:
        case GemmEpilogue::Bias:
            if (key.out_dtype == DType::F32) return run(Kernel<CLUSTER, false, StoreFloats>{});
            if (key.accumulate)
                return key.transpose_b ? run(Kernel<CLUSTER, false, StoreSum>{})
                                       : run(Kernel<CLUSTER, true, StoreSum>{});
            return key.transpose_b ? run(Kernel<CLUSTER, false, StoreActivation<void>>{})
                                   : run(Kernel<CLUSTER, true, StoreActivation<void>>{});
        case GemmEpilogue::Gelu:
        case GemmEpilogue::GeluBias:
            return run(Kernel<CLUSTER, false, StoreActivation<GeluForward<bf16>>>{});
        case GemmEpilogue::Relu2:
            return run(Kernel<CLUSTER, false, StoreActivation<Relu2Forward>>{});
        case GemmEpilogue::Swiglu:
            return run(Kernel<CLUSTER, false, StoreSwiglu>{});
        case GemmEpilogue::Exp:
            return run(Kernel<CLUSTER, false, StoreExp>{});
        case GemmEpilogue::GeluBackward:
            return run(Kernel<CLUSTER, true, StoreGradient<GeluBackward<bf16>>>{});
        case GemmEpilogue::Relu2Backward:
            return run(Kernel<CLUSTER, true, StoreGradient<Relu2Backward>>{});
        case GemmEpilogue::SwigluBackward:
            return operands.act ? run(Kernel<CLUSTER, true, StoreSwigluGradient<true>>{})
                                : run(Kernel<CLUSTER, true, StoreSwigluGradient<false>>{});
    }
}

bool is_backward(GemmEpilogue e) {
    return e == GemmEpilogue::GeluBackward || e == GemmEpilogue::Relu2Backward || e == GemmEpilogue::SwigluBackward;
}

}  // namespace
}  // namespace hopper_gemm_kernel

bool hopper_gemm_takes(const GemmKey& key) {
    const auto aligned = [](int64_t align, int64_t ld) { return align == 16 && ld % 8 == 0; };
    const bool plain = key.epilogue == GemmEpilogue::None || key.epilogue == GemmEpilogue::Bias;
    const bool transposes =
        !key.transpose_a && (plain || key.transpose_b != hopper_gemm_kernel::is_backward(key.epilogue));
    const bool small = std::max({key.M, key.N, key.K, key.K2}) <= INT32_MAX / 2;  // TMA takes 32-bit coordinates
    const bool stores = key.out_dtype == DType::BF16 || (key.out_dtype == DType::F32 && key.transpose_b &&
                                                         key.epilogue == GemmEpilogue::None && !key.accumulate);
    const bool pair =
        key.K2 == 0 || (key.K2 > 0 && aligned(key.align_a2, key.ld_a2) && aligned(key.align_b2, key.ld_b2));
    return is_hopper() && small && key.dtype == DType::BF16 && stores && transposes && key.batch == 1 &&
           (plain || !key.accumulate) && key.K > 0 && pair && key.N % 8 == 0 && aligned(key.align_a, key.ld_a) &&
           aligned(key.align_b, key.ld_b) && aligned(key.align_out, key.ld_out) &&
           (!key.ld_aux || aligned(key.align_aux, key.ld_aux)) &&
           (!key.align_bias || (key.align_bias >= 4 && key.epilogue != GemmEpilogue::Exp));
}

void hopper_gemm(const char* op, const GemmKey& key, const GemmOperands& operands, int cluster, Stream stream) {
    require(hopper_gemm_takes(key) && (operands.alpha == 1 || key.epilogue <= GemmEpilogue::Bias) && operands.beta == 1,
            op, ": hopper_gemm() does not take this GEMM");
    require(cluster == 1 || cluster == 2, op, ": clusters of ", cluster, " blocks, expected 1 or 2");
    (cluster == 1 ? hopper_gemm_kernel::dispatch<1> : hopper_gemm_kernel::dispatch<2>)(op, key, operands, stream);
    check_launch(op, stream);
}

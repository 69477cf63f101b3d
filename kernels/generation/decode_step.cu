// The fused decode step: its arguments, their checks, and the launch of one of the kernels (decode_step_kernel.cuh).
#include "kernels/generation/decode_step.h"

#include "kernels/generation/decode_attention_check.h"
#include "kernels/generation/decode_step_kernel.cuh"
#include "kernels/packed_weight_check.h"

namespace {

using namespace fused_decode;

template <typename T>
Arguments<T> arguments_of(const Tensor& logits, const Tensor& ids, const DecodeBatch& batch, const DecodeModel& m,
                          const InferenceWeights& weights, const Tensor& scratch, const Plan& z) {
    Arguments<T> a{};
    a.logits = logits.as<T>();
    a.logits_stride = row_stride(logits);
    a.ids = ids.as<int32_t>();
    a.slots = batch.slots.as<int32_t>();
    a.positions = batch.positions.as<int32_t>();
    if (batch.table)
        a.angles = {batch.angles.as<int32_t>(), batch.table.as<float>(), batch.table.shape[0],
                    int(batch.table.shape[1])};
    const Tensor &wte = m.packing ? weights.packed_wte->rows : weights.wte,
                 &head = m.packing ? weights.head.packed->rows : weights.head.weight;
    a.wte = wte.data;
    a.wpe = weights.wpe ? weights.wpe.as<T>() : nullptr;
    a.head = head.data;
    a.vocab = wte.shape[0];
    a.wpe_rows = weights.wpe ? weights.wpe.shape[0] : 0;
    a.normf_weight = weights.normf.weight.as<float>();
    a.normf_bias = weights.normf.bias.as<float>();
    char* const base = static_cast<char*>(scratch.data);
    const ScratchLayout offsets(m);
    const auto words = [&](int64_t at) { return reinterpret_cast<uint64_t*>(base + at); };
    a.epoch = reinterpret_cast<uint32_t*>(base + ScratchLayout::EPOCH);
    a.layers = reinterpret_cast<const Layer*>(base + ScratchLayout::LAYERS);
    for (int i = 0; i < LAYER_MATRICES; i++) a.matmul_words[i] = words(offsets.matmuls[i]);
    a.att_words = words(offsets.att);
    a.split_words = words(offsets.splits);
    std::copy_n(z.matrices, MATRICES, a.plans);
    a.num_slots = m.slots;
    a.capacity = m.capacity;
    a.num_layers = int(m.layers);
    a.N = int(logits.shape[0]);
    a.C = int(m.C);
    a.NH = int(m.NH);
    a.NKV = int(m.NKV);
    a.HS = int(m.HS);
    a.page_columns = int(ceil_div(m.capacity, KV_PAGE));
    a.query_tiles = int(ceil_div(m.NH / m.NKV, heads_of_task(m)));
    a.kv_splits = int(num_kv_splits(std::min(batch.max_length, m.capacity)));
    while (int64_t(FULL_WIDTH<T>) << a.log_lanes < m.HS) a.log_lanes++;
    a.eps = m.eps;
    a.per_channel = 1 / float(m.C);
    a.scale = m.scale;
    a.centred = m.centred;
    a.activation = m.activation;
    a.stages = int(z.stages);
    a.stage_bytes = int(z.stage_bytes);
    a.stages_at_once = z.stages_at_once;
    int64_t at = 0;
    const auto take = [&](int64_t bytes) {
        const int64_t begin = at;
        at += bytes;
        return int(begin);
    };
    a.ring_offset = take(z.stages * z.stage_bytes);
    a.rows_offset = take(z.rows_bytes);
    a.residual_offset = take(z.residual_bytes);
    a.attention_offset = take(z.attention_bytes);
    a.layers_offset = take(z.layers_bytes);
    a.qk_norm = m.qk_norm;
    a.head_bias = m.head_bias ? weights.head.bias.as<T>() : nullptr;
    if (m.embedding_norm) {
        a.embedding_norm_weight = weights.embedding_norm.weight.as<float>();
        a.embedding_norm_bias = weights.embedding_norm.bias.as<float>();
    }
    return a;
}

void check_weight(const char* op, const char* name, const Tensor& t, DType dtype, int64_t rows, int64_t columns) {
    check_tensor(op, name, t, dtype, {rows, columns});
    check_contiguous(op, name, t);
    require(rows_aligned({t}), op, ": ", name, " is not aligned to 16 bytes");
}

// A weight [rows, columns] in T or, if the model is packed, so.
void check_weight(const char* op, const char* name, const Tensor& weight, const PackedWeight* packed,
                  const DecodeModel& m, int64_t rows, int64_t columns) {
    if (!m.packing) return check_weight(op, name, weight, m.dtype, rows, columns);
    require(packed && packed->packing == *m.packing, op, ": ", name, " is not packed in ",
            PACKING_NAMES[size_t(*m.packing)]);
    check_packed(op, *packed, rows, columns);
    require(rows_aligned({packed->rows}), op, ": ", name, " is not aligned to 16 bytes");
}

}  // namespace

int64_t decode_step_max_batch(const DecodeModel& model) {
    int64_t N = std::min(model.slots, LINEAR_SMALL_N);
    while (N > 0 && !plan_of(model, N).possible) N--;
    return N;
}

int64_t decode_step_scratch(const DecodeModel& model) {
    return decode_step_max_batch(model) > 0 ? ScratchLayout(model).end : 0;
}

void decode_step_prepare(Tensor scratch, const DecodeModel& m, const InferenceWeights& weights,
                         const std::vector<LayerCache>& cache, Stream stream) {
    const char* op = "decode_step_prepare";
    const int64_t Q = m.NH * m.HS;
    const bool gated = is_gated(m.activation);
    require(int64_t(weights.blocks.size()) == m.layers && int64_t(cache.size()) == m.layers, op, ": ",
            weights.blocks.size(), " blocks and a cache for ", cache.size(), " layers, expected ", m.layers);
    require(decode_step_max_batch(m) > 0, op,
            ": the fused decode step does not support this model (decode_step_max_batch() is 0)");
    check_scratch(op, scratch, decode_step_scratch(m));
    const auto norm = [&](const NormWeights& n) {
        check_tensor(op, "norm.weight", n.weight, DType::F32, {m.C});
        check_tensor(op, "norm.bias", n.bias, DType::F32, {m.C}, Given::Optional);
        require(rows_aligned({n.weight, n.bias}), op, ": a norm's weights are not aligned to 16 bytes");
    };
    const auto linear = [&](const LinearWeights& w, const char* name, int64_t rows, int64_t columns) {
        check_weight(op, name, w.weight, w.packed, m, rows, columns);
        check_tensor(op, name, w.bias, m.dtype, {rows}, Given::Optional);
    };
    const int64_t vocab = m.packing && weights.packed_wte ? weights.packed_wte->rows.shape[0] : weights.wte.shape[0];
    check_weight(op, "wte", weights.wte, weights.packed_wte, m, vocab, m.C);
    if (weights.wpe) check_weight(op, "wpe", weights.wpe, m.dtype, weights.wpe.shape[0], m.C);
    check_weight(op, "head", weights.head.weight, weights.head.packed, m, m.Vp, m.C);
    norm(weights.normf);
    if (m.embedding_norm) norm(weights.embedding_norm);
    if (m.head_bias) check_tensor(op, "head.bias", weights.head.bias, m.dtype, {m.Vp});
    require(m.layer_options.empty() || int64_t(m.layer_options.size()) == m.layers, op, ": options of ",
            m.layer_options.size(), " layers, expected ", m.layers);
    std::vector<Layer> layers;
    std::vector<LayerOptions> options;
    for (size_t l = 0; l < weights.blocks.size(); l++) {
        const BlockWeights& b = weights.blocks[l];
        norm(b.norm1);
        norm(b.norm2);
        linear(b.qkv, "qkv", Q + 2 * m.NKV * m.HS, m.C);
        linear(b.proj, "proj", m.C, Q);
        linear(b.fc, "fc", activation_inputs(m.activation, m.FFN), m.C);
        linear(b.fcproj, "fcproj", m.C, m.FFN);
        const DecodeLayer special = m.layer_options.empty() ? DecodeLayer{} : m.layer_options[l];
        require(special.window >= 0, op, ": the window of layer ", l, " is ", special.window,
                "; it must be 0 (none) or positive");
        const LayerCache& c = cache[l];
        require(c.k.rank == 4 && c.k.shape[0] > 0, op, ": the cache of layer ", l, " is ", shape_string(c.k),
                ", expected [pages, KV_PAGE, NKV, HS]");
        for (const Tensor& t : {c.k, c.v}) {
            check_tensor(op, "cache", t, m.dtype, {c.k.shape[0], KV_PAGE, m.NKV, m.HS});
            check_contiguous(op, "cache", t);
            require(rows_aligned({t}), op, ": a cache is not aligned to 16 bytes");
        }
        check_tensor(op, "pages", c.pages, DType::I32, {m.slots, ceil_div(m.capacity, KV_PAGE)});
        check_pages(op, c.pages, c.k.shape[0] * KV_PAGE);
        Layer layer{};
        const LinearWeights* const matrices[LAYER_MATRICES] = {&b.qkv, &b.proj, &b.fc, &b.fcproj};
        for (int i = 0; i < LAYER_MATRICES; i++) {
            layer.weight[i] = m.packing ? matrices[i]->packed->rows.data : matrices[i]->weight.data;
            layer.bias[i] = matrices[i]->bias.data;
        }
        const NormWeights* const norms[2] = {&b.norm1, &b.norm2};
        for (int i = 0; i < 2; i++) {
            layer.norm_weight[i] = norms[i]->weight.as<float>();
            layer.norm_bias[i] = norms[i]->bias.as<float>();
        }
        layer.k = c.k.data;
        layer.v = c.v.data;
        layer.pages = c.pages.as<int32_t>();
        layer.num_pages = c.k.shape[0];
        layers.push_back(layer);
        for (const Tensor& weight : {b.qnorm, b.knorm})
            if (m.qk_norm) check_tensor(op, "QK-norm", weight, DType::F32, {m.HS}, Given::Optional);
        options.push_back({b.qnorm.as<float>(), b.knorm.as<float>(), special.window, special.rope});
    }
    device_fill(scratch.data, 0, size_t(scratch.bytes()), stream);
    copy_to_device(static_cast<char*>(scratch.data) + ScratchLayout::LAYERS, layers.data(),
                   layers.size() * sizeof(Layer), stream);
    if (is_extended(m))
        copy_to_device(static_cast<char*>(scratch.data) + ScratchLayout::LAYERS + layers.size() * sizeof(Layer),
                       options.data(), options.size() * sizeof(LayerOptions), stream);
    synchronize(stream);
}

void decode_step(Tensor logits, Tensor ids, const DecodeBatch& batch, const DecodeModel& m,
                 const InferenceWeights& weights, Tensor scratch, Stream stream) {
    const char* op = "decode_step";
    const int64_t N = logits.shape[0];
    check_matrix(op, "logits", logits, N, m.Vp, Given::Required, m.dtype);
    check_tensor(op, "ids", ids, DType::I32, {N});
    check_tensor(op, "slots", batch.slots, DType::I32, {N});
    check_tensor(op, "positions", batch.positions, DType::I32, {N});
    check_angles(op, batch.angles, batch.table, N, m.HS);
    check_scratch(op, scratch, decode_step_scratch(m));
    require(m.scale > 0, op, ": scale is ", m.scale, "; it must be positive");
    require(rows_aligned({logits}), op, ": rows of logits are not aligned to 16 bytes");
    if (N == 0 || batch.max_length == 0) return;
    const Plan z = plan_of(m, N);
    require(N <= std::min(m.slots, LINEAR_SMALL_N) && z.possible, op, ": batch size ", N, ", expected at most ",
            decode_step_max_batch(m));
    dispatch_dtype(op, m.dtype, [&](auto zero) {
        using T = decltype(zero);
        const Arguments<T> a = arguments_of<T>(logits, ids, batch, m, weights, scratch, z);
        if constexpr (sizeof(T) == 2)
            if (m.packing)
                return (*m.packing == Packing::Int4 ? launch<T, 4> : launch<T, 8>)(op, a, z, is_extended(m), stream);
        launch<T, 0>(op, a, z, is_extended(m), stream);
    });
}

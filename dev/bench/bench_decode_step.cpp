// The fused decode step, from tokens to logits: time of a step, tokens/s, and the bytes of weights and KV cache that it
// reads against the machine's copy bandwidth. GPT-2 124M and the shapes of LLaMA 3.2 1B and Qwen2.5 1.5B, 1 sequence
// and larger batches, contexts of 128 and 1,024 tokens; with packed weights also LLaMA 3.1 8B. Runs whose batch size
// the fused step does not support say so.
#include "kernels/generation/decode_step.h"

#include <numeric>

#include "dev/bench/bench_util.h"
#include "dev/bench/decode_models.h"
#include "kernels/packed_weight.h"
#include "runtime/rng.h"

namespace {

// Random weights and a full KV cache. Packed weights repeat 64 random rows.
class Model {
  public:
    Model(const DecodeModel& m, ModelShape shape) {
        const bool all_biases = shape == GPT2_124M, qkv_biases = all_biases || shape == QWEN2_5_1_5B;
        const auto bias = [&](DType T, int64_t rows, bool has_bias) { return has_bias ? make(T, {rows}) : Tensor{}; };
        const auto norm = [&] { return NormWeights{make(DType::F32, {m.C}), bias(DType::F32, m.C, all_biases)}; };
        const auto linear = [&](int64_t rows, int64_t columns, bool has_bias) {
            LinearWeights w;
            if (m.packing)
                w.packed = make_packed(*m.packing, rows, columns);
            else
                w.weight = make(m.dtype, {rows, columns});
            w.bias = bias(m.dtype, rows, has_bias);
            return w;
        };
        const int64_t Q = m.NH * m.HS, fc = m.activation == Activation::SwiGLU ? 2 * m.FFN : m.FFN;
        for (int64_t l = 0; l < m.layers; l++) {
            BlockWeights b;
            b.norm1 = norm();
            b.norm2 = norm();
            b.qkv = linear(Q + 2 * m.NKV * m.HS, m.C, qkv_biases);
            b.proj = linear(m.C, Q, all_biases);
            b.fc = linear(fc, m.C, all_biases);
            b.fcproj = linear(m.C, m.FFN, all_biases);
            weights.blocks.push_back(b);
        }
        weights.normf = norm();
        weights.head = linear(m.Vp, m.C, false);
        weights.wte = weights.head.weight;  // tied
        weights.packed_wte = weights.head.packed;
        weight_bytes = bytes;
        if (shape == GPT2_124M) weights.wpe = make(m.dtype, {m.capacity, m.C});
        const int64_t columns = (m.capacity + KV_PAGE - 1) / KV_PAGE;
        std::vector<int32_t> page_of(size_t(m.slots * columns));  // of the sequences in turns, as they grow together
        for (int64_t i = 0; i < m.slots * columns; i++)
            page_of[size_t(i)] = static_cast<int32_t>(i % columns * m.slots + i / columns);
        arrays.push_back(BenchArray::ints(page_of));
        const Tensor list = arrays.back();
        for (int64_t l = 0; l < m.layers; l++) {
            LayerCache c;
            c.k = make(m.dtype, {m.slots * columns, KV_PAGE, m.NKV, m.HS});
            c.v = make(m.dtype, {m.slots * columns, KV_PAGE, m.NKV, m.HS});
            c.pages = make_tensor(list.data, DType::I32, list.device, {m.slots, columns});
            cache.push_back(c);
        }
    }

    InferenceWeights weights;
    std::vector<LayerCache> cache;
    double weight_bytes = 0;  // that a step reads

  private:
    Tensor make(DType T, std::initializer_list<int64_t> shape) {
        arrays.emplace_back(T, shape, 0.02f);
        bytes += arrays.back().bytes();
        return arrays.back();
    }

    const PackedWeight* make_packed(Packing packing, int64_t rows, int64_t columns) {
        constexpr int64_t REPEATED = 64;
        const int64_t row_bytes = packed_row_bytes(packing, columns);
        std::vector<float> values(size_t(REPEATED * columns));
        for (size_t i = 0; i < values.size(); i++) values[i] = 0.02f * float(normal01(1, uint64_t(columns), i));
        std::vector<uint8_t> block(size_t(REPEATED * row_bytes));
        packed_quantise({packing, columns, host_tensor(block.data(), {REPEATED, row_bytes})},
                        host_tensor(values.data(), {REPEATED, columns}));
        arrays.push_back(BenchArray::bytes(rows * row_bytes));
        bytes += arrays.back().bytes();
        char* const to = static_cast<char*>(arrays.back().tensor().data);
        for (int64_t row = 0; row < rows; row += REPEATED)
            copy_to_device(to + row * row_bytes, block.data(), size_t(std::min(REPEATED, rows - row) * row_bytes),
                           Stream{});
        synchronize(Stream{});
        const Tensor of_rows = make_tensor(to, DType::U8, arrays.back().tensor().device, {rows, row_bytes});
        packed.push_back(std::make_unique<PackedWeight>(PackedWeight{packing, columns, of_rows}));
        return packed.back().get();
    }

    std::vector<BenchArray> arrays;
    std::vector<std::unique_ptr<PackedWeight>> packed;
    double bytes = 0;
};

// The model of the last benchmark, kept because weights take longer to make than to time.
const Model& kept_model(ModelShape shape, const DecodeModel& m) {
    static std::unique_ptr<Model> model;
    static ModelShape of_shape;
    static DType of_dtype;
    static MaybePacking of_packing;
    if (!model || of_shape != shape || of_dtype != m.dtype || of_packing != m.packing) {
        model.reset();  // before the next one takes its memory
        model = std::make_unique<Model>(m, shape);
        of_shape = shape;
        of_dtype = m.dtype;
        of_packing = m.packing;
    }
    return *model;
}

void time_step(benchmark::State& state, DType T, ModelShape shape, MaybePacking packing = {}) {
    const int64_t N = state.range(0), length = state.range(1);
    const DecodeModel m = decode_model(shape, T, packing);
    const int64_t max_batch = decode_step_max_batch(m);
    if (backend_device() == Device::CPU) return skip_bench(state, "the fused decode step is a GPU kernel");
    if (N > max_batch) return skip_bench(state, str("the largest batch of this model is ", max_batch));
    const Model& model = kept_model(shape, m);
    std::vector<int32_t> slot_of(static_cast<size_t>(N));
    std::iota(slot_of.begin(), slot_of.end(), 0);
    const BenchArray logits(T, {N, m.Vp}),
        ids = BenchArray::ints({N}, int32_t(m.Vp)), slots = BenchArray::ints(slot_of),
        positions = BenchArray::ints(std::vector<int32_t>(size_t(N), int32_t(length - 1))),
        table({m.capacity, m.HS / 2, 2}), scratch = BenchArray::bytes(decode_step_scratch(m));
    decode_step_prepare(scratch, m, model.weights, model.cache, Stream{});
    DecodeBatch batch;
    batch.slots = slots;
    batch.positions = positions;
    batch.max_length = length;
    if (shape != GPT2_124M) {
        batch.angles = positions;
        batch.table = table;
    }
    run_bench(state, [&] { decode_step(logits, ids, batch, m, model.weights, scratch, Stream{}); });
    report_bytes(state, model.weight_bytes + double(2 * m.layers * N * length * m.NKV * m.HS * dtype_size(T)));
    report_tokens(state, double(N));
}

void gpt2_124M(benchmark::State& state, DType T) {
    time_step(state, T, GPT2_124M);
}
void llama_1B(benchmark::State& state, DType T) {
    time_step(state, T, LLAMA_1B);
}
void qwen2_5_1_5B(benchmark::State& state, DType T) {
    time_step(state, T, QWEN2_5_1_5B);
}

template <ModelShape SHAPE, Packing PACKING>
void packed_step(benchmark::State& state, DType T) {
    time_step(state, T, SHAPE, PACKING);
}
const auto llama_1B_fp8 = packed_step<LLAMA_1B, Packing::Fp8>, llama_1B_int8 = packed_step<LLAMA_1B, Packing::Int8>,
           llama_1B_int4 = packed_step<LLAMA_1B, Packing::Int4>, llama_8B_fp8 = packed_step<LLAMA_8B, Packing::Fp8>,
           llama_8B_int8 = packed_step<LLAMA_8B, Packing::Int8>, llama_8B_int4 = packed_step<LLAMA_8B, Packing::Int4>;

const std::vector<std::string> NAMES = {"N", "length"};
const Sizes GPU = {{1, 128}, {1, 1024}, {2, 128}, {2, 1024}, {4, 128}, {4, 1024}, {8, 128}, {8, 1024}};
BENCH(gpt2_124M, NAMES, (Sizes{{1, 128}}), GPU);
BENCH(llama_1B, NAMES, Sizes{}, GPU);
BENCH(qwen2_5_1_5B, NAMES, Sizes{}, GPU);
const Sizes PACKED_1B = {{1, 128}, {1, 1024}, {8, 128}}, PACKED_8B = {{1, 128}};
BENCH(llama_1B_fp8, NAMES, Sizes{}, PACKED_1B);
BENCH(llama_1B_int8, NAMES, Sizes{}, PACKED_1B);
BENCH(llama_1B_int4, NAMES, Sizes{}, PACKED_1B);
BENCH(llama_8B_fp8, NAMES, Sizes{}, PACKED_8B);
BENCH(llama_8B_int8, NAMES, Sizes{}, PACKED_8B);
BENCH(llama_8B_int4, NAMES, Sizes{}, PACKED_8B);

}  // namespace

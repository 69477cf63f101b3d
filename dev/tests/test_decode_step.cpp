// A decode step over all layers, by separate ops and, where the GPU supports it, fused. Both are compared with the
// formula in float64, over several steps that share a KV cache.
#include "kernels/generation/decode_step.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>

#include "dev/bench/decode_models.h"
#include "dev/oracle/reference.h"
#include "dev/tests/packed_fixture.h"
#include "dev/tests/test_util.h"
#include "kernels/embedding.h"
#include "kernels/generation/decode_attention.h"
#include "kernels/generation/linear.h"
#include "kernels/norm.h"
#include "kernels/qk_norm.h"

namespace {

struct ModelOptions {
    int64_t layers, C, NH, NKV, HS, FFN, V, capacity;
    Activation activation;
    bool centred, biases, wpe;
    int64_t R;  // channels that RoPE rotates
    bool qkv_bias = false, head_bias = false, embedding_norm = false, qk_norm = false, qk_weights = false;
    std::vector<DecodeLayer> layer = {};  // empty: RoPE in all layers, no windows
    std::optional<Packing> packing = {};

    DecodeLayer options(size_t l) const { return layer.empty() ? DecodeLayer{} : layer[l]; }
    int64_t columns() const { return (capacity + KV_PAGE - 1) / KV_PAGE; }  // of a page table
};

// The blocks of GPT-2 and LLaMA, with sizes that give each matrix another number of rows and splits for each block.
const ModelOptions GPT2 = {2, 128, 2, 2, 64, 512, 256, 24, Activation::GELU, true, true, true, 0};
const ModelOptions LLAMA = {3, 96, 6, 2, 16, 176, 384, 24, Activation::SwiGLU, false, false, false, 16};
const ModelOptions WIDE = {1, 640, 10, 1, 80, 1024, 128, 24, Activation::ReLU2, true, false, false, 40};

ModelOptions with(ModelOptions options, void (*change)(ModelOptions&)) {
    change(options);
    return options;
}

// Options that the families and presets add to those: each option of the extended kernel alone, and all of them.
const std::vector<ModelOptions> EXTENDED = {
    with(LLAMA, [](ModelOptions& z) { z.qkv_bias = true; }),  // Qwen2; the plain kernel serves it
    with(LLAMA, [](ModelOptions& z) { z.qk_norm = z.qk_weights = true; }),
    with(LLAMA,
         [](ModelOptions& z) {
             z.layer = {{}, {false, 0}, {}};
         }),
    with(LLAMA,
         [](ModelOptions& z) {
             z.layer = {{true, 5}, {}, {true, 7}};
         }),
    with(GPT2, [](ModelOptions& z) { z.embedding_norm = true; }),
    with(GPT2, [](ModelOptions& z) { z.head_bias = true; }),
    // modern-124M: RMSNorm, ReLU², heads of which half rotates
    with(WIDE,
         [](ModelOptions& z) {
             z.centred = false;
             z.NKV = 10;
             z.HS = 64;
             z.R = 32;
             z.qk_norm = z.embedding_norm = z.head_bias = true;
         }),
    with(WIDE,
         [](ModelOptions& z) {
             z.layers = 2;
             z.NKV = 5;
             z.HS = 128;
             z.R = 128;
             z.biases = true;
             z.qk_norm = z.qk_weights = z.embedding_norm = z.head_bias = true;
             z.layer = {{false, 3}, {true, 1}};
         }),
};

// A model of random weights with a KV cache, and the same in float64.
struct Fixture {
    const ModelOptions z;
    const DType T;
    const int64_t slots;
    uint64_t seed = 100;
    std::vector<std::unique_ptr<TestArray>> arrays;
    std::vector<std::unique_ptr<DevicePacked>> packed;
    std::map<const PackedWeight*, std::vector<double>> decoded;
    InferenceWeights weights;
    std::vector<LayerCache> cache;  // by layer, with page tables that differ
    TestArray table;

    // past: standard deviation of what the cache holds already.
    Fixture(const ModelOptions& options, DType dtype, int64_t num_slots, double past = 0)
        : z(options),
          T(dtype),
          slots(num_slots),
          table(TestArray::of(reference::rope_table(options.capacity, std::max<int64_t>(options.R, 2), 10000, {}),
                              {options.capacity, std::max<int64_t>(options.R, 2) / 2, 2})) {
        const int64_t Q = z.NH * z.HS, qkv = (z.NH + 2 * z.NKV) * z.HS;
        const bool swiglu = z.activation == Activation::SwiGLU;
        const auto linear = [&](int64_t rows, int64_t columns) {
            LinearWeights w;
            if (z.packing)
                w.packed = random_packed(rows, columns, 1 / std::sqrt(double(columns)));
            else
                w.weight = random(T, {rows, columns}, 1 / std::sqrt(double(columns)));
            if (z.biases || (z.qkv_bias && rows == qkv)) w.bias = random(T, {rows}, 0.1);
            return w;
        };
        const auto norm = [&] {
            NormWeights w;
            w.weight = random(DType::F32, {z.C}, 0.2, 1);
            if (z.biases) w.bias = random(DType::F32, {z.C}, 0.1);
            return w;
        };
        if (z.packing)
            weights.packed_wte = random_packed(z.V, z.C, 1);
        else
            weights.wte = random(T, {z.V, z.C}, 1);
        if (z.wpe) weights.wpe = random(T, {z.capacity, z.C}, 0.5);
        for (int64_t l = 0; l < z.layers; l++) {
            BlockWeights b;
            b.norm1 = norm();
            b.norm2 = norm();
            b.qkv = linear(qkv, z.C);
            b.proj = linear(z.C, Q);
            b.fc = linear(swiglu ? 2 * z.FFN : z.FFN, z.C);
            b.fcproj = linear(z.C, z.FFN);
            if (z.qk_weights) {
                b.qnorm = random(DType::F32, {z.HS}, 0.2, 1);
                b.knorm = random(DType::F32, {z.HS}, 0.2, 1);
            }
            weights.blocks.push_back(b);
            LayerCache c;
            c.k = random(T, {slots * z.columns(), KV_PAGE, z.NKV, z.HS}, past);
            c.v = random(T, {slots * z.columns(), KV_PAGE, z.NKV, z.HS}, past);
            std::vector<int32_t> pages(size_t(slots * z.columns()));
            std::iota(pages.begin(), pages.end(), 0);
            std::rotate(pages.begin(), pages.begin() + l % int64_t(pages.size()), pages.end());
            arrays.push_back(std::make_unique<TestArray>(TestArray::ints(pages, {slots, z.columns()})));
            c.pages = *arrays.back();
            cache.push_back(c);
        }
        weights.normf = norm();
        if (z.embedding_norm) weights.embedding_norm = norm();
        if (z.head_bias) weights.head.bias = random(T, {z.V}, 0.5);
        if (z.packing)
            weights.head.packed = random_packed(z.V, z.C, 1 / std::sqrt(double(z.C)));
        else
            weights.head.weight = random(T, {z.V, z.C}, 1 / std::sqrt(double(z.C)));
    }
    const PackedWeight* random_packed(int64_t rows, int64_t columns, double scale) {
        const TestArray values = TestArray::random({rows, columns}, seed++, scale);
        const HostPacked on_host(*z.packing, values.values(), rows, columns);
        packed.push_back(std::make_unique<DevicePacked>(on_host));
        const PackedWeight* const weight = &*packed.back();
        decoded[weight] = on_host.decoded();
        return weight;
    }
    const double* host(const Tensor& t, const PackedWeight* of_packed) const {
        return of_packed ? decoded.at(of_packed).data() : host(t).data();
    }
    Tensor random(DType dtype, std::initializer_list<int64_t> shape, double scale, double shift = 0) {
        arrays.push_back(std::make_unique<TestArray>(TestArray::random(dtype, shape, seed++, scale, shift)));
        return *arrays.back();
    }
    const std::vector<double>& host(const Tensor& t) const {
        for (const auto& a : arrays)
            if (a->tensor().data == t.data) return a->values();
        throw Error("no such array");
    }
    DecodeModel model() const {
        DecodeModel m;
        m.layers = z.layers;
        m.C = z.C;
        m.NH = z.NH;
        m.NKV = z.NKV;
        m.HS = z.HS;
        m.FFN = z.FFN;
        m.Vp = z.V;
        m.slots = slots;
        m.capacity = z.capacity;
        m.dtype = T;
        m.activation = z.activation;
        m.scale = float(1 / std::sqrt(double(z.HS)));
        m.centred = z.centred;
        m.qk_norm = z.qk_norm;
        m.embedding_norm = z.embedding_norm;
        m.head_bias = z.head_bias;
        m.layer_options = z.layer;
        m.packing = z.packing;
        return m;
    }
};

using Step = std::vector<int32_t>;  // one token for each sequence

// Logits [V] of the last token of a sequence, by the formula.
std::vector<double> formula(const Fixture& f, const std::vector<int32_t>& sequence) {
    const ModelOptions& z = f.z;
    const int64_t n = int64_t(sequence.size()), Q = z.NH * z.HS, kv = z.NKV * z.HS, row = Q + 2 * kv;
    std::vector<int32_t> position(sequence.size());
    std::iota(position.begin(), position.end(), 0);
    const auto data = [&](const Tensor& t) { return t ? f.host(t).data() : nullptr; };
    const auto norm = [&](const std::vector<double>& x, const NormWeights& w) {
        return z.centred
                   ? reference::layernorm_forward(x.data(), nullptr, data(w.weight), data(w.bias), f.model().eps, n,
                                                  z.C)
                         .out.value
                   : reference::rmsnorm_forward(x.data(), nullptr, data(w.weight), f.model().eps, n, z.C).out.value;
    };
    const auto matmul = [&](const std::vector<double>& x, const LinearWeights& w, int64_t K, int64_t rows) {
        return reference::matmul_forward(x.data(), f.host(w.weight, w.packed), data(w.bias), n, K, rows).value;
    };
    const auto add = [](std::vector<double>& x, const std::vector<double>& y) {
        for (size_t i = 0; i < x.size(); i++) x[i] += y[i];
    };
    std::vector<double> x =
        reference::embedding_forward(sequence.data(), position.data(), f.host(f.weights.wte, f.weights.packed_wte),
                                     data(f.weights.wpe), n, z.C)
            .value;
    if (z.embedding_norm) x = norm(x, f.weights.embedding_norm);
    for (size_t l = 0; l < f.weights.blocks.size(); l++) {
        const BlockWeights& b = f.weights.blocks[l];
        const std::vector<double> qkv = matmul(norm(x, b.norm1), b.qkv, z.C, row);
        std::vector<double> q, key, value, att(size_t(n * Q)), mag(size_t(z.HS));
        for (int64_t i = 0; i < n; i++) {
            const auto at = qkv.begin() + i * row;
            q.insert(q.end(), at, at + Q);
            key.insert(key.end(), at + Q, at + Q + kv);
            value.insert(value.end(), at + Q + kv, at + row);
        }
        if (z.qk_norm) {
            const auto head_norm = [&](const std::vector<double>& heads, const Tensor& w, int64_t H) {
                const std::vector<double> ones(size_t(z.HS), 1);
                return reference::rmsnorm_forward(heads.data(), nullptr, w ? data(w) : ones.data(), f.model().eps,
                                                  n * H, z.HS)
                    .out.value;
            };
            q = head_norm(q, b.qnorm, z.NH);
            key = head_norm(key, b.knorm, z.NKV);
        }
        if (z.R && z.options(l).rope) {
            q = reference::rope(q.data(), position.data(), f.table.data(), n, z.NH, z.HS, z.R, false).value;
            key = reference::rope(key.data(), position.data(), f.table.data(), n, z.NKV, z.HS, z.R, false).value;
        }
        for (int64_t i = 0; i < n; i++)
            for (int64_t h = 0; h < z.NH; h++) {
                const int64_t window = z.options(l).window, seen = window ? std::min(i + 1, window) : i + 1,
                              at = (i + 1 - seen) * kv + h / (z.NH / z.NKV) * z.HS;
                reference::attention_query(&att[size_t(i * Q + h * z.HS)], mag.data(), &q[size_t(i * Q + h * z.HS)],
                                           &key[size_t(at)], &value[size_t(at)], seen, kv, z.HS,
                                           double(f.model().scale));
            }
        add(x, matmul(att, b.proj, Q, z.C));
        std::vector<double> act = matmul(norm(x, b.norm2), b.fc, z.C, activation_inputs(z.activation, z.FFN));
        act = reference::activation_forward(z.activation, act.data(), n, z.FFN).value;
        add(x, matmul(act, b.fcproj, z.FFN, z.C));
    }
    const std::vector<double> last = norm(x, f.weights.normf);
    const LinearWeights& head = f.weights.head;
    return reference::matmul_forward(&last[size_t((n - 1) * z.C)], f.host(head.weight, head.packed), data(head.bias), 1,
                                     z.C, z.V)
        .value;
}

// Runs steps for N sequences. Token -1 marks a finished sequence.
class Runner {
  public:
    // The first token of each sequence has position `at`.
    Runner(const Fixture& fixture, const std::vector<int32_t>& slots_of_sequences, bool use_fused, int32_t at = 0,
           bool invariant = false)
        : f(fixture),
          fused(use_fused),
          batch_invariant(invariant),
          N(int64_t(slots_of_sequences.size())),
          slots(TestArray::ints(slots_of_sequences, {N})),
          length(slots_of_sequences.size(), at),
          step_scratch(TestArray::scratch(std::max<int64_t>(decode_step_scratch(f.model()), 1))),
          decode_scratch(TestArray::scratch(decode_attention_scratch(N, f.z.NH, f.z.HS, f.z.capacity))) {
        device_fill(decode_scratch.tensor().data, 0, size_t(decode_scratch.tensor().bytes()), Stream{});
        if (fused) decode_step_prepare(step_scratch, f.model(), f.weights, f.cache, Stream{});
    }
    // Returns the logits of each sequence.
    std::vector<std::vector<double>> step(const Step& tokens) {
        std::vector<int32_t> id, at, rows_of_wpe;
        for (size_t n = 0; n < tokens.size(); n++) {
            id.push_back(std::max(tokens[n], 0));
            at.push_back(tokens[n] < 0 ? -1 : length[n]++);
            rows_of_wpe.push_back(std::max(at.back(), 0));
        }
        const TestArray ids = TestArray::ints(id, {N}), positions = TestArray::ints(at, {N}),
                        embedded = TestArray::ints(rows_of_wpe, {N});
        DecodeBatch batch;
        batch.slots = slots;
        batch.positions = positions;
        batch.max_length = f.z.capacity;
        if (f.z.R) {
            batch.angles = positions;
            batch.table = f.table;
        }
        const TestArray logits = TestArray::poisoned(f.T, {N, f.z.V});
        if (fused)
            decode_step(logits, ids, batch, f.model(), f.weights, step_scratch, Stream{});
        else
            by_ops(logits, ids, embedded, batch);
        const std::vector<double> all = logits.fetch();
        std::vector<std::vector<double>> rows;  // of logits
        for (int64_t n = 0; n < N; n++) rows.emplace_back(all.begin() + n * f.z.V, all.begin() + (n + 1) * f.z.V);
        return rows;
    }

  private:
    void by_ops(const Tensor& logits, const Tensor& ids, const Tensor& embedded, const DecodeBatch& batch) {
        const ModelOptions& z = f.z;
        const int64_t Q = z.NH * z.HS, qkv_channels = Q + 2 * z.NKV * z.HS;
        const TestArray x = TestArray::poisoned(f.T, {N, z.C}), qkv = TestArray::poisoned(f.T, {N, qkv_channels}),
                        att = TestArray::poisoned(f.T, {N, Q}), act = TestArray::poisoned(f.T, {N, z.FFN});
        const TestArray scratch = TestArray::scratch(
            linear_scratch(N, std::max({z.C, Q, z.FFN}), std::max({2 * z.FFN, qkv_channels, z.V}), f.T, true));
        const auto layer = [&](const Tensor& out, const Tensor& inp, const NormWeights& n, const LinearWeights& w,
                               Activation activation, const Tensor& residual) {
            linear({out, activation, residual}, inp, {n.weight, n.bias, f.model().eps, z.centred}, w, scratch,
                   batch_invariant, Stream{});
        };
        if (f.weights.packed_wte)
            embedding_forward(x, ids, embedded, *f.weights.packed_wte, f.weights.wpe, Stream{});
        else
            embedding_forward(x, ids, embedded, f.weights.wte, f.weights.wpe, Stream{});
        const NormWeights& e = f.weights.embedding_norm;
        if (e.weight && z.centred)
            layernorm_forward({.out = x, .inp = x, .weight = e.weight, .bias = e.bias, .eps = f.model().eps}, Stream{});
        else if (e.weight)
            rmsnorm_forward({.out = x, .inp = x, .weight = e.weight, .eps = f.model().eps}, Stream{});
        for (size_t l = 0; l < f.weights.blocks.size(); l++) {
            const BlockWeights& b = f.weights.blocks[l];
            layer(qkv, x, b.norm1, b.qkv, Activation::None, {});
            DecodeBatch of_layer = batch;
            const Tensor table = z.options(l).rope ? batch.table : Tensor{};
            of_layer.table = z.qk_norm ? Tensor{} : table;
            if (z.qk_norm) {
                const Tensor qk = split_heads(qkv.tensor().columns(0, (z.NH + z.NKV) * z.HS), z.NH + z.NKV);
                qk_norm_forward(qk, {}, qk, {b.qnorm, b.knorm}, table ? embedded : Tensor{}, table, z.NH, f.model().eps,
                                Stream{});
            }
            of_layer.pages = f.cache[l].pages;
            decode_attention(att, qkv, f.cache[l].k, f.cache[l].v, of_layer, z.options(l).window, f.model().scale,
                             decode_scratch, Stream{});
            layer(x, att, {}, b.proj, Activation::None, x);
            layer(act, x, b.norm2, b.fc, z.activation, {});
            layer(x, act, {}, b.fcproj, Activation::None, x);
        }
        layer(logits, x, f.weights.normf, f.weights.head, Activation::None, {});
    }

    const Fixture& f;
    const bool fused, batch_invariant;  // the latter of the separate ops
    const int64_t N;
    const TestArray slots;
    std::vector<int32_t> length;
    const TestArray step_scratch, decode_scratch;
};

class DecodeStep : public DTypeTest {
  public:
    // Which of separate ops (false) and the fused step (true) can run a batch of N here.
    static std::vector<bool> ways(const Fixture& f, int64_t N) {
        std::vector<bool> ways = {false};
        if (decode_step_max_batch(f.model()) >= N) ways.push_back(true);
        return ways;
    }
};

// Bounds the largest error relative to the largest logit. docs/understand/numerics.md has the bounds for whole models.
void expect_logits(const std::vector<double>& got, const std::vector<double>& ref, DType T, const std::string& where) {
    double worst = 0, largest = 0;
    for (size_t i = 0; i < ref.size(); i++) {
        worst = std::max(worst, std::isfinite(got[i]) ? std::fabs(got[i] - ref[i]) : INFINITY);
        largest = std::max(largest, std::fabs(ref[i]));
    }
    EXPECT_LE(worst, (T == DType::F32 ? 1e-5 : T == DType::BF16 ? 2e-2 : 2.5e-3) * largest) << where;
}

int32_t token_of(const Fixture& f, int64_t sequence, int64_t step) {
    return int32_t(philox(9, uint64_t(sequence), uint64_t(step)).v[0] % uint32_t(f.z.V));
}

void expect_oracle(const std::vector<ModelOptions>& models, DType T) {
    for (size_t model = 0; model < models.size(); model++) {
        const Fixture f(models[model], T, 8);
        std::map<std::vector<int32_t>, std::vector<double>> known;  // by sequence, which batches share
        for (const int64_t N : {1, 2, 3, 8}) {
            for (const bool fused : DecodeStep::ways(f, N)) {
                std::vector<int32_t> slots;
                for (int64_t n = 0; n < N; n++) slots.push_back(int32_t((3 * n + 1) % 8));
                Runner runner(f, slots, fused);
                std::vector<std::vector<int32_t>> sequences(slots.size());
                const int64_t steps = N == 1 ? 20 : 5;
                for (int64_t s = 0; s < steps; s++) {
                    Step step;
                    // Sequences start at different steps. Before its start and after its end a sequence counts as
                    // finished.
                    for (int64_t n = 0; n < N; n++) {
                        const bool active = s >= n % 3 && !(n == 1 && s == steps - 1);
                        step.push_back(active ? token_of(f, n, s) : -1);
                        if (active) sequences[size_t(n)].push_back(step.back());
                    }
                    const std::vector<std::vector<double>> logits = runner.step(step);
                    for (int64_t n = 0; n < N; n++) {
                        if (step[size_t(n)] < 0 || (s + 1 < steps && s % 4 != 0)) continue;
                        const std::vector<int32_t>& sequence = sequences[size_t(n)];
                        if (!known.count(sequence)) known[sequence] = formula(f, sequence);
                        expect_logits(
                            logits[size_t(n)], known[sequence], T,
                            str("model ", model, " N ", N, " sequence ", n, " step ", s, fused ? " fused" : ""));
                    }
                }
            }
        }
    }
}

// Those that the fused step supports with packed weights, in each packing. Parts of rows, warps without a group, and
// rows of as many groups as there are in a model of 1B parameters.
std::vector<ModelOptions> packed_models(DType T) {
    std::vector<ModelOptions> models;
    for (const Packing packing : ALL_PACKINGS) {
        if (backend_device() == Device::CPU && packing != Packing::Fp8) continue;  // x is quantised: test_linear.cpp
        if (backend_device() == Device::CUDA && T == DType::F32) continue;         // the fused step needs 16 bits
        std::vector<ModelOptions> those = {GPT2, LLAMA, WIDE, EXTENDED[3], EXTENDED.back(), LLAMA};
        those[5].layers = 1;
        those[5].FFN = 8192;
        for (ModelOptions& z : those) {
            z.packing = packing;
            z.FFN = (z.FFN + PACKED_GROUP - 1) / PACKED_GROUP * PACKED_GROUP;
            models.push_back(z);
        }
    }
    return models;
}

TEST_P(DecodeStep, MatchesOracle) {
    std::vector<ModelOptions> models = EXTENDED;
    models.insert(models.end(), {GPT2, LLAMA, WIDE});
    expect_oracle(models, activation());
}

TEST_P(DecodeStep, PackedWeightsMatchOracle) {
    expect_oracle(packed_models(activation()), activation());
}

// Contexts of several KV splits, and of more splits than are combined at a time; several query tiles. The fused step is
// compared with the separate ops; test_decode_attention.cpp compares those with the oracle for long contexts.
TEST_P(DecodeStep, LongContextsMatchOracle) {
    ModelOptions long_gpt2 = GPT2, long_llama = LLAMA;
    long_gpt2.layers = 1;
    long_gpt2.capacity = 600;
    long_llama.layers = 1;
    long_llama.capacity = 4100;
    long_llama.NKV = 1;
    ModelOptions long_window = long_llama;
    long_window.layers = 3;
    long_window.layer = {{true, 130}, {true, 300}, {}};  // windows in 2 to 4 pages
    for (const ModelOptions& options : {long_gpt2, long_llama, long_window}) {
        const Fixture f(options, activation(), 2, 1);
        for (const int32_t at : {254, 255, 256, 257, 384, 385, 427, 428, 599, 3584, 4099}) {
            if (at >= options.capacity) continue;
            std::vector<std::vector<double>> by_ops;
            for (const bool fused : ways(f, 2)) {
                const std::vector<std::vector<double>> logits =
                    Runner(f, {1, 0}, fused, at).step({token_of(f, 0, 0), token_of(f, 1, 0)});
                for (size_t n = 0; fused && n < 2; n++)
                    expect_logits(logits[n], by_ops[n], activation(), str("length ", at + 1, " sequence ", n));
                if (!fused) by_ops = logits;
                for (const auto& row : logits)
                    EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](double x) { return std::isfinite(x); }));
            }
        }
    }
}

TEST_P(DecodeStep, BitsDoNotDependOnTheBatch) {
    std::vector<ModelOptions> models = EXTENDED;
    models.insert(models.end(), {GPT2, LLAMA});
    for (const ModelOptions& packed : packed_models(activation())) models.push_back(packed);
    for (const ModelOptions& options : models) {
        const Fixture f(options, activation(), 8);
        for (const bool fused : ways(f, 2)) {
            std::vector<std::vector<double>> alone;
            for (const int64_t N : {1, 2, 3, 8}) {
                if (fused && N > decode_step_max_batch(f.model())) continue;
                std::vector<int32_t> slots;
                for (int64_t n = 0; n < N; n++) slots.push_back(int32_t(7 - n));
                // Few sequences need no promise: linear.h.
                Runner runner(f, slots, fused, 0, N > linear_gemv_rows(f.T));
                for (int64_t s = 0; s < 3; s++) {
                    Step step;
                    for (int64_t n = 0; n < N; n++) step.push_back(token_of(f, n, s));
                    const std::vector<double> first = runner.step(step)[0];
                    if (N == 1)
                        alone.push_back(first);
                    else
                        expect_same_bits("logits of the first sequence", first, alone[size_t(s)]);
                }
            }
        }
    }
}

// The stages of LLaMA 8B, pairs of rows of 14,336 columns, leave little room in shared memory.
TEST(DecodeStepPlan, Llama8BFits) {
    DecodeModel m = decode_model(LLAMA_8B, DType::BF16);
    DecodeModel small = m;
    small.FFN = 4096;
    if (decode_step_max_batch(small) == 0) GTEST_SKIP() << "there is no fused decode step here";
    EXPECT_GE(decode_step_max_batch(m), 1);
    for (const Packing packing : {Packing::Fp8, Packing::Int8, Packing::Int4}) {
        m.packing = packing;
        EXPECT_GE(decode_step_max_batch(m), 1) << int(packing);
    }
}

TEST_P(DecodeStep, InvalidArgumentsAreErrors) {
    const Fixture f(GPT2, activation(), 2);
    DecodeModel m = f.model();
    if (decode_step_max_batch(m) == 0) {
        EXPECT_EQ(decode_step_scratch(m), 0);
        EXPECT_THROW(decode_step_prepare({}, m, f.weights, f.cache, Stream{}), Error);
        EXPECT_THROW(decode_step({}, {}, {}, m, f.weights, {}, Stream{}), Error);
        return;
    }
    EXPECT_EQ(decode_step_max_batch(m), 2);
    m.HS = 65;
    EXPECT_EQ(decode_step_max_batch(m), 0);
    m = f.model();
    m.FFN = 1 << 18;
    EXPECT_EQ(decode_step_max_batch(m), 0);
    m = f.model();
    const TestArray scratch = TestArray::scratch(decode_step_scratch(m));
    EXPECT_THROW(decode_step_prepare(scratch, m, f.weights, {}, Stream{}), Error);
    DecodeModel packed = m;
    packed.packing = Packing::Int8;
    const TestArray for_packed = TestArray::scratch(std::max<int64_t>(decode_step_scratch(packed), 1));
    EXPECT_EQ(decode_step_max_batch(packed), f.T == DType::F32 ? 0 : 2);
    EXPECT_THROW(decode_step_prepare(for_packed, packed, f.weights, f.cache, Stream{}), Error);
    InferenceWeights wrong = f.weights;
    wrong.blocks[1].proj = wrong.blocks[1].fc;
    EXPECT_THROW(decode_step_prepare(scratch, m, wrong, f.cache, Stream{}), Error);
    std::vector<LayerCache> no_table = f.cache;
    no_table[1].pages = {};
    EXPECT_THROW(decode_step_prepare(scratch, m, f.weights, no_table, Stream{}), Error);
    DecodeModel windowed = m;
    windowed.layer_options = {{true, -1}, {}};
    const TestArray more = TestArray::scratch(decode_step_scratch(windowed));
    EXPECT_THROW(decode_step_prepare(more, windowed, f.weights, f.cache, Stream{}), Error);
    decode_step_prepare(scratch, m, f.weights, f.cache, Stream{});
    const TestArray logits = TestArray::poisoned(f.T, {3, f.z.V}), ids = TestArray::ints({0, 0, 0}, {3});
    DecodeBatch batch;
    batch.slots = ids;
    batch.positions = ids;
    batch.max_length = 1;
    EXPECT_THROW(decode_step(logits, ids, batch, m, f.weights, scratch, Stream{}), Error);
}

INSTANTIATE_DTYPES(DecodeStep);

}  // namespace

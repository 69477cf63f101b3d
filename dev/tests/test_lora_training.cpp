// LoRA adapters in training: their tables, and forward and backward against the model with the adapters merged.
#include <gtest/gtest.h>

#include "dev/tests/adapters.h"
#include "kernels/matmul_fp8.h"
#include "models/family.h"
#include "models/lora.h"
#include "runtime/model/initialise.h"

namespace {

class LoraVariant : public ModelVariantTest {};

// Where dW is the driver's, it has an error of its own, of the same bound.
TEST_P(LoraVariant, MatchesTheMergedModel) {
    Driver lora = lora_driver(config(), training_shape(B, T), lora_options({"all-linear"}, true));
    lora.randomise(3);
    merge(lora, driver);
    const std::vector<double> expected = driver.logits(batch);
    EXPECT_LE(max_abs(difference(lora.logits(batch), expected)), 1e-5 * max_abs(expected));
    lora.gradients({batch});
    const bool exact = reference::has_gradients(config()) && !config().norm_after;
    const double bound = (exact ? 1 : 2) * 1e-5;
    for (const AdapterGradients& g : adapter_gradients(lora, merged_gradients(driver, batch, B, T))) {
        EXPECT_LE(relative_rms(g.a, g.expected_a), bound) << g.name;
        EXPECT_LE(relative_rms(g.b, g.expected_b), bound) << g.name;
    }
}

// Micro-steps add up, with the bounds of whole models (dev/tests/test_model.cpp); gated linear attention is left out,
// because it amplifies rounding errors. A step changes the adapters and nothing else.
TEST_P(LoraVariant, StepsChangeTheAdaptersAlone) {
    Driver lora = lora_driver(config(), training_shape(B, T), lora_options());
    lora.randomise(3);
    lora.gradients({batch});
    const std::vector<float> whole = lora.grads();
    lora.gradients(split(batch, B, T));
    const std::vector<float> parts = lora.grads();
    const std::vector<double> expected(whole.begin(), whole.end()), got(parts.begin(), parts.end());
    if (config().layers_of(AttentionType::GatedLinear) == 0) {
        const double bound = config().qk_norm == QkNorm::Off ? 1e-6 : 1e-5;
        EXPECT_LE(relative_rms(got, expected), bound);
    }

    const std::vector<float> base = fetch_floats(lora.ctx, lora.model.arenas.weights.data), before = lora.params();
    const double first = lora.step(batch, 1e-2), last = [&] {
        double loss = 0;
        for (int step = 0; step < 10; step++) loss = lora.step(batch, 1e-2);
        return loss;
    }();
    EXPECT_LT(last, first);
    EXPECT_FALSE(same_bits(lora.params(), before));
    EXPECT_TRUE(same_bits(fetch_floats(lora.ctx, lora.model.arenas.weights.data), base));
}

TEST_P(LoraVariant, RecomputationAndOffloadChangeNoBit) {
    std::vector<float> expected;
    for (const Recompute level : {Recompute::None, Recompute::Activation, Recompute::Norms, Recompute::Block})
        for (const auto& [offload, epilogue] : {std::pair(false, ActivationEpilogue::Off),
                                                {true, ActivationEpilogue::Off},
                                                {false, ActivationEpilogue::Backward},
                                                {true, ActivationEpilogue::Both}}) {
            RunShape shape = training_shape(B, T);
            shape.recompute = level;
            shape.offload_inputs = offload;
            shape.activation_epilogue = epilogue;
            Driver lora = lora_driver(config(), shape, lora_options());
            lora.randomise(3);
            lora.gradients({batch});
            if (expected.empty()) expected = lora.grads();
            EXPECT_TRUE(same_bits(lora.grads(), expected))
                << "level " << int(level) << " offload " << offload << " activation in matmuls " << int(epilogue);
        }
}

INSTANTIATE_TEST_SUITE_P(Lora, LoraVariant, testing::ValuesIn(MODEL_VARIANTS),
                         [](const auto& test) { return test.param.name; });

ModelConfig variant(const char* name) {
    ModelConfig c = base_config();
    for (const ModelVariant& v : MODEL_VARIANTS)
        if (std::string(v.name) == name) v.apply(c);
    validate(c, name);
    return c;
}

std::vector<std::string> tensor_names(const ParamTable& table) {
    std::vector<std::string> names;
    for (const Param& p : table.params)
        for (const SourceTensor& source : p.sources) names.push_back(source.name);
    return names;
}

// The bounds of whole models in bf16, for the logits and for all gradients together.
TEST(Lora, Bf16MatchesTheMergedModel) {
    if (dtypes().size() == 1) GTEST_SKIP() << "the CPU computes in fp32";
    constexpr int64_t B = 2, T = 11;
    for (const char* name : {"gpt2", "llama_heads_of_16"}) {
        SCOPED_TRACE(name);
        const ModelConfig config = variant(name);
        const Batch batch = random_batch(config, B, T, 5);
        Driver lora = lora_driver(config, training_shape(B, T, DType::BF16), lora_options()),
               merged(config, training_shape(B, T));
        lora.randomise(3);
        merge(lora, merged);
        const std::vector<double> expected = merged.logits(batch);
        const Bounds limit = bounds(DType::BF16);
        EXPECT_LE(max_abs(difference(lora.logits(batch), expected)), limit.logits * max_abs(expected));
        lora.gradients({batch});
        std::vector<double> got, reference;
        for (const AdapterGradients& g : adapter_gradients(lora, merged_gradients(merged, batch, B, T))) {
            for (const auto* part : {&g.a, &g.b}) got.insert(got.end(), part->begin(), part->end());
            for (const auto* part : {&g.expected_a, &g.expected_b})
                reference.insert(reference.end(), part->begin(), part->end());
        }
        EXPECT_LE(relative_rms(got, reference), limit.gradients);
    }
}

// Adapters of some parts of a fused parameter: the others keep the base's output, and the gradients of the targets are
// those that they have beside adapters of zeros.
TEST(Lora, PartsOfFusedParameters) {
    constexpr int64_t B = 2, T = 11;
    const ModelConfig config = variant("llama");
    const Batch batch = random_batch(config, B, T, 5);
    const std::vector<std::vector<std::string>> subsets = {{"k_proj"}, {"q_proj", "v_proj"}, {"up_proj", "o_proj"}};
    for (const std::vector<std::string>& targets : subsets) {
        SCOPED_TRACE(targets[0]);
        Driver lora = lora_driver(config, training_shape(B, T), lora_options(targets)),
               merged(config, training_shape(B, T));
        EXPECT_EQ(tensor_names(lora.model.adapters->table).size(), 2 * 2 * targets.size());
        lora.randomise(3);
        merge(lora, merged);
        const std::vector<double> expected = merged.logits(batch);
        EXPECT_LE(max_abs(difference(lora.logits(batch), expected)), 1e-5 * max_abs(expected));
        lora.gradients({batch});
        const std::vector<float> got = lora.grads();
        EXPECT_GT(rms({got.begin(), got.end()}), 0);
        Driver all = lora_driver(config, training_shape(B, T), lora_options());
        copy_weights(all.model, lora.model);
        device_fill(all.model.adapters->arenas.weights.data.data, 0,
                    size_t(all.model.adapters->arenas.weights.data.bytes()), {});
        const auto copy = [&](const Driver& to, const Driver& from, auto put) {
            for (const Param& p : from.model.adapters->table.params)
                for (const SourceTensor& source : p.sources)
                    for (const Param& q : to.model.adapters->table.params)
                        for (const SourceTensor& same : q.sources)
                            if (same.name == source.name) put(q, same, p, source);
        };
        copy(all, lora, [&](const Param& q, const SourceTensor& to, const Param& p, const SourceTensor& from) {
            const std::vector<float> values = fetch_param(*lora.model.adapters, p);
            all.model.adapters->arenas.store(q, values.data() + from.row * p.cols, to.row * q.cols, to.rows * q.cols);
        });
        all.gradients({batch});
        copy(all, lora, [&](const Param& q, const SourceTensor& to, const Param& p, const SourceTensor& from) {
            const std::vector<float> a = fetch_floats(all.ctx, all.optimizer.grads.tensor(q)),
                                     b = fetch_floats(lora.ctx, lora.optimizer.grads.tensor(p));
            const std::vector<double> x(a.begin() + to.row * q.cols, a.begin() + (to.row + to.rows) * q.cols),
                y(b.begin() + from.row * p.cols, b.begin() + (from.row + from.rows) * p.cols);
            EXPECT_LE(relative_rms(y, x), 1e-5) << to.name;
        });
    }
}

// The backward pass ends where the first block's input is: adapters there have their gradients, and those of the last
// block alone keep theirs beside frozen blocks.
TEST(Lora, AdaptersOfOneLayer) {
    constexpr int64_t B = 2, T = 11;
    for (const auto& [name, matrix] : {std::pair("llama", "self_attn.q_proj"), {"olmo2", "qkv"}}) {
        const ModelConfig config = variant(name);
        const Batch batch = random_batch(config, B, T, 5);
        for (const char* layer : {"layers.0.", "layers.1."}) {
            SCOPED_TRACE(str(name, " ", layer));
            const std::string target = str(layer, matrix);
            Driver lora = lora_driver(config, training_shape(B, T), lora_options({target})),
                   merged(config, training_shape(B, T));
            lora.randomise(3);
            merge(lora, merged);
            const std::vector<double> expected = merged.logits(batch);
            EXPECT_LE(max_abs(difference(lora.logits(batch), expected)), 1e-5 * max_abs(expected));
            lora.gradients({batch});
            const std::vector<AdapterGradients> all = adapter_gradients(lora, merged_gradients(merged, batch, B, T));
            ASSERT_EQ(all.size(), 1u);
            EXPECT_LE(relative_rms(all[0].a, all[0].expected_a), 2e-5);
            EXPECT_LE(relative_rms(all[0].b, all[0].expected_b), 2e-5);
        }
    }
}

// Adapters of embedding and head, alone and beside those of a block: s·A·Bᵀ is added to the embedding, s·B·A to the
// head. Also with a norm after the embedding, a softcap, a biased head, and several micro-steps.
TEST(Lora, EmbeddingAndHead) {
    constexpr int64_t B = 2, T = 11;
    for (const char* name : {"llama", "modern_heads_of_16"})
        for (const std::vector<std::string>& targets :
             {std::vector<std::string>{"embed_tokens", "lm_head", "v_proj"}, {"embed_tokens"}, {"lm_head"}}) {
            SCOPED_TRACE(str(name, " ", targets[0]));
            const ModelConfig config = variant(name);
            std::vector<std::string> named = targets;
            if (std::string(name) != "llama")  // files of its own family name tensors as the table does
                for (std::string& target : named)
                    target = target == "embed_tokens" ? "wte" : target == "lm_head" ? "head" : "qkv";
            const Batch batch = random_batch(config, B, T, 5);
            RunShape shape = training_shape(B, T);
            shape.recompute = targets.size() == 1 ? Recompute::Block : Recompute::None;
            Driver lora = lora_driver(config, shape, lora_options(named)), merged(config, training_shape(B, T));
            lora.randomise(3);
            merge(lora, merged);
            const std::vector<double> expected = merged.logits(batch);
            EXPECT_LE(max_abs(difference(lora.logits(batch), expected)), 1e-5 * max_abs(expected));
            const double loss = merged.gradients({batch});
            EXPECT_NEAR(lora.gradients(split(batch, B, T)), loss, 1e-5 * loss);
            const std::vector<AdapterGradients> all = adapter_gradients(lora, merged_gradients(merged, batch, B, T));
            ASSERT_EQ(all.size(), targets.size() == 1 ? 1u : 4u);  // two layers
            for (const AdapterGradients& g : all) {
                EXPECT_LE(relative_rms(g.a, g.expected_a), 2e-5) << g.name;
                EXPECT_LE(relative_rms(g.b, g.expected_b), 2e-5) << g.name;
            }
            lora.loss_tokens_only = true;
            const std::vector<float> before = lora.grads();
            lora.gradients({batch});
            const std::vector<float> after = lora.grads();
            EXPECT_LE(relative_rms({before.begin(), before.end()}, {after.begin(), after.end()}), 1e-5);
        }
}

// To Muon A and B of each adapter are matrices of their own, with no second moment.
TEST(Lora, MuonUpdatesEachAdapter) {
    constexpr double LR = 0.01;
    const ModelConfig config = variant("llama");
    const Batch batch = random_batch(config, 2, 11, 5);
    OptimizerOptions muon = Driver::default_options();
    muon.rates = {GroupHyperparameters{1, 0}};
    Driver d(config, training_shape(2, 11), true, muon, OptimizerType::Muon, {}, {}, lora_options());
    d.randomise(3);
    const Model& adapters = *d.model.adapters;
    EXPECT_EQ(Optimizer::second_moments(adapters), 0);
    std::vector<std::vector<float>> before;
    for (const Param& p : adapters.table.params) before.push_back(fetch_param(adapters, p));
    const double loss = d.step(batch, LR);
    for (const Param& p : adapters.table.params) {
        const std::vector<float> after = fetch_param(adapters, p);
        for (const SourceTensor& matrix : p.sources) {
            // The update of r x c is lr·scale·U·Vᵀ of full rank: its squares sum to lr²·scale²·min(r, c).
            const int64_t begin = matrix.row * p.cols, n = matrix.rows * p.cols;
            double sum = 0;
            for (int64_t i = begin; i < begin + n; i++)
                sum += std::pow(double(after[size_t(i)]) - before[p.index][size_t(i)], 2);
            const double scale = shape_scale(MuonScale::Spectral, matrix.rows, p.cols);
            EXPECT_NEAR(std::sqrt(sum / double(std::min(matrix.rows, p.cols))) / (LR * scale), 1, 1e-3) << matrix.name;
        }
    }
    double last = loss;
    for (int step = 0; step < 10; step++) last = d.step(batch, LR);
    EXPECT_LT(last, loss);
}

TEST(Lora, TableHasTheNamesOfPeft) {
    const ParamTable base = parameter_table(variant("llama"), 1);
    const LoraTable lora(base, lora_options({"v_proj", "down_proj"}), 1);
    const std::string layer = "base_model.model.model.layers.0.";
    const std::vector<std::string> names = tensor_names(lora.params);
    ASSERT_EQ(names.size(), 8u);
    EXPECT_EQ(names[0], layer + "self_attn.v_proj.lora_A.weight");
    EXPECT_EQ(names[1], layer + "self_attn.v_proj.lora_B.weight");
    EXPECT_EQ(names[2], layer + "mlp.down_proj.lora_A.weight");
    EXPECT_EQ(lora.params.file, "adapter_model.safetensors");
    EXPECT_EQ(lora.widths, (std::array<int64_t, NUM_LINEAR_LAYERS>{3, 0, 0, 3}));
    const LoraTable first(base, lora_options({"layers.0.self_attn.q_proj"}), 1);
    EXPECT_EQ(tensor_names(first.params), (std::vector<std::string>{layer + "self_attn.q_proj.lora_A.weight",
                                                                    layer + "self_attn.q_proj.lora_B.weight"}));

    const ParamTable gpt2 = parameter_table(variant("gpt2"), 1);
    EXPECT_EQ(LoraTable(gpt2, lora_options(), 1).options.targets,
              (std::vector<std::string>{"c_attn", "c_proj", "c_fc"}));
    EXPECT_EQ(tensor_names(LoraTable(gpt2, lora_options({"c_proj"}), 1).params).size(), 8u);  // of attention and MLP
    expect_error(
        [&] {
            LoraTable(base, lora_options({"q_proj", "proj"}), 1);
        },
        "--lora-targets proj: the model's blocks have no such linear layer; they have "
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj, and embedding and head embed_tokens,lm_head, or give "
        "all-linear");
    EXPECT_EQ(
        tensor_names(LoraTable(base, lora_options({"embed_tokens", "lm_head"}), 1).params),
        (std::vector<std::string>{"base_model.model.model.embed_tokens.lora_embedding_A",
                                  "base_model.model.model.embed_tokens.lora_embedding_B",
                                  "base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"}));
    EXPECT_THROW(LoraTable(gpt2, lora_options({"lm_head"}), 1), Error);
}

TEST(Lora, InitialValues) {
    const ModelConfig config = variant("llama");
    Driver lora = lora_driver(config, training_shape(2, 11), lora_options());
    const Model& adapters = *lora.model.adapters;
    initialise_weights(adapters.table, adapters.arenas, 7, {});
    for (const Param& p : adapters.table.params) {
        const std::vector<float> values = fetch_param(adapters, p);
        const std::vector<double> x(values.begin(), values.end());
        if (p.role % 2) {
            EXPECT_EQ(max_abs(x), 0) << p.name;
            continue;
        }
        // Uniform: the standard deviation of bound/√3 is estimated to 1/√n · √0.8/2 of it; four times that.
        const double bound = 1 / std::sqrt(double(p.cols)), n = double(p.numel());
        EXPECT_LE(max_abs(x), bound) << p.name;
        EXPECT_NEAR(rms(x) * std::sqrt(3) / bound, 1, 4 * std::sqrt(0.8 / n) / 2) << p.name;
        double sum = 0;
        for (const double v : x) sum += v;
        EXPECT_LE(std::fabs(sum / n), 4 * bound / std::sqrt(3 * n)) << p.name;
    }
}

// The scratch of the gradient norm is planned for the larger of the two tables.
TEST(Lora, AdaptersLargerThanTheBase) {
    LoraOptions o = lora_options();
    o.rank = 1 << 16;
    const Model model(base_config(), {}, {}, OptimizerType::AdamW, {}, o);
    ASSERT_GT(model.adapters->table.total, model.table.total);
    const Activations acts(base_config(), Driver::with_workspace(training_shape(1, 8), model));
    const auto& entries = acts.plan.entries();
    const auto scratch =
        std::find_if(entries.begin(), entries.end(), [](const auto& e) { return e.name == "scratch"; });
    ASSERT_NE(scratch, entries.end());
    EXPECT_GE(scratch->shape[0], sum_squares_scratch(model.adapters->table.total));
}

// The plan of an 8B model: the base is there once, in bf16; gradients, moments and master weights are the adapters'.
TEST(Lora, MemoryOfTheFrozenBase) {
    ModelConfig config;
    ASSERT_TRUE(preset("llama-8B", config));
    LoraOptions o = lora_options();
    o.rank = 16;
    const Model model(config, {}, {DType::BF16, true}, OptimizerType::AdamW, {}, o);
    const int64_t base = model.table.total, own = model.adapters->table.total;
    EXPECT_EQ(model.adapters->table.num_weights(), 41943040);  // what peft counts
    RunShape shape = training_shape(1, 2048, DType::BF16);
    shape.recompute = Recompute::Block;
    set_adapters(shape, model);
    const MemoryPlan plan = memory_plan(model, Activations(config, shape));
    const auto line = [&](const std::string& name) {
        for (const auto& [what, bytes] : plan.lines)
            if (what == name) return bytes;
        return int64_t(0);
    };
    EXPECT_EQ(line("weights"), 2 * base);
    EXPECT_EQ(line("master weights"), 0);
    EXPECT_EQ(line("adapters"), 6 * own);
    EXPECT_EQ(line("gradients"), 4 * own);
    EXPECT_EQ(line("optimizer (m, v)"), 8 * own);
}

}  // namespace

// QLoRA is LoRA on the base that NF4 makes of the weights: the same bits, in every level of recomputation.
TEST(Qlora, EqualsLoraOnTheDequantisedBase) {
    constexpr int64_t B = 2, T = 8;
    for (const bool llama : {true, false}) {
        const ModelConfig config = qlora_config(llama);
        const Batch batch = random_batch(config, B, T, 5);
        LoraOptions lora = lora_options(), qlora = lora_options();
        qlora.nf4 = true;
        for (const DType dtype : dtypes())
            for (const Recompute level : {Recompute::None, Recompute::Norms, Recompute::Block}) {
                SCOPED_TRACE(str(llama ? "llama " : "gpt2 ", dtype_name(dtype), " recompute ", int(level)));
                RunShape shape = training_shape(B, T, dtype);
                shape.recompute = level;
                Driver whole = lora_driver(config, shape, lora), quantised = lora_driver(config, shape, qlora);
                EXPECT_LT(quantised.model.bytes() + quantised.model.nf4->memory.bytes(), whole.model.bytes());
                whole.randomise(3);
                const std::vector<double> before = whole.logits(batch);
                quantise_base(quantised, whole);
                const std::vector<double> expected = whole.logits(batch);
                EXPECT_GT(max_abs(difference(before, expected)), 1e-3 * max_abs(before));
                expect_same_bits("logits", quantised.logits(batch), expected);
                for (int step = 0; step < 2; step++)
                    EXPECT_EQ(quantised.step(batch, 1e-2), whole.step(batch, 1e-2)) << step;
                for (const Param& p : whole.model.adapters->table.params)
                    EXPECT_EQ(fetch_param(*quantised.model.adapters, p), fetch_param(*whole.model.adapters, p))
                        << p.name;
            }
    }
}

// Weights that come out of host memory into two buffers ahead of use, five layers through them: the bits of weights in
// place. A base in the model's dtype, in NF4, in fp8, and in fp8 out of NF4.
TEST(StreamedBase, HasTheSameBits) {
    constexpr int64_t B = 2, T = 16;
    for (const bool llama : {true, false})
        for (const auto& [nf4, fp8] : {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
            if (fp8 && !matmul_fp8_unavailable().empty()) continue;
            const DType dtype = dtypes().back();
            SCOPED_TRACE(str(llama ? "llama " : "gpt2 ", dtype_name(dtype), nf4 ? " nf4" : "", fp8 ? " fp8" : ""));
            ModelConfig config = qlora_config(llama);
            config.layers = 5;
            config.set_attention("SSSSS");
            LoraOptions lora = lora_options();
            lora.nf4 = nf4;
            const Batch batch = random_batch(config, B, T, 5);
            const auto trained = [&, fp8 = fp8](bool streams, Recompute level) {
                RunShape shape = training_shape(B, T, dtype);
                shape.recompute = level;
                shape.fp8.on = fp8;
                Offload offload;
                offload.weights = streams;
                Driver d = lora_driver(config, shape, lora, offload);
                EXPECT_EQ(bool(d.model.gatherer), streams);
                d.randomise(3);
                std::vector<float> all;
                for (int step = 0; step < 2; step++) all.push_back(float(d.step(batch, 1e-2)));
                d.gradients(split(batch, B, T));
                for (const std::vector<float>& part : {d.grads(), d.params()})
                    all.insert(all.end(), part.begin(), part.end());
                return all;
            };
            const std::vector<float> expected = trained(false, Recompute::None);
            EXPECT_TRUE(std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); }));
            for (const Recompute level : {Recompute::None, Recompute::Norms, Recompute::Block})
                EXPECT_TRUE(same_bits(trained(true, level), expected)) << "recompute " << int(level);
        }
}

TEST(Qlora, NeedsRowsOfWholeBlocks) {
    LoraOptions qlora = lora_options();
    qlora.nf4 = true;
    ModelConfig config = qlora_config(true);
    config.ffn = 120;
    expect_error(
        [&] { const Driver d = lora_driver(config, training_shape(1, 8), qlora); },
        "layers.0.fcproj.weight: has 120 inputs; NF4 needs a multiple of 64; leave out --qlora or --weights nf4");
}

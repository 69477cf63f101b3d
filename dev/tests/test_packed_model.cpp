// Models with packed weights: passes and generation against the same model with the dequantised weights in fp32, and
// what is allocated against the plan.
#include "driver/packed_weights.h"

#include "dev/tests/generation_fixture.h"
#include "dev/tests/packed_fixture.h"
#include "dev/tests/temp_dir.h"
#include "models/family.h"
#include "runtime/files/files.h"
#include "runtime/files/json_keys.h"
#include "runtime/model/initialise.h"

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GenerationByType);  // of generation_fixture.h

namespace {

constexpr int64_t T = 24;

// attention as for long_config(); all rows are multiples of 32, unless ffn is another.
ModelConfig packed_config(const std::string& attention, bool tied, int64_t ffn = 96) {
    ModelConfig c = long_config(attention);
    c.channels = 64;
    c.head_size = 64 / c.heads;
    c.ffn = ffn;
    c.tied = tied;
    return c;
}

// A model with packed random weights, and one with their values in fp32.
struct TwoModels {
    Context ctx;
    Model packed, dense;
    TwoModels(const ModelConfig& config, Packing packing)
        : packed(config, {}, inference_precision(DType::F32, packing)), dense(config, {}) {
        packed.allocate(ctx);
        dense.allocate(ctx);
        for (const Model* m : {&packed, &dense}) initialise_weights(m->table, m->arenas, 5, ctx.stream);
        packed.packed->randomise(packed.table, 5);
        for (const Param& p : packed.table.params) {
            const PackedWeight* const from = packed.packed->find(p);
            if (from) packed_dequantise(dense.weight(p.role, p.layer), *from, ctx.stream);
        }
    }
};

std::vector<double> logits_of(const Context& ctx, const Model& model, const std::vector<int32_t>& tokens) {
    RunShape shape = inference_shape(1, int64_t(tokens.size()));
    shape.packing = model.precision.packing;
    Activations acts(model.config, shape);
    acts.allocate(ctx);
    const Input in = upload(ctx, acts, single_sequence(tokens.data(), int64_t(tokens.size())));
    const Pass pass{ctx, model, acts, in};
    forward(pass);
    const std::vector<float> rows = fetch_floats(ctx, head_logits(pass, 0, in.n));
    return {rows.begin(), rows.end()};
}

EngineOptions packed_options(int64_t slots, Packing packing) {
    EngineOptions o = engine_options(slots, 40, 1);
    o.packing = packing;
    return o;
}

}  // namespace

// In fp32 the dequantised weights are exact, on a GPU always. On the CPU Int8 and Int4 quantise activations: an error
// of step/√12 a value, where the step is the largest of 32 values / 127. For normal values that is 2.1/127/√12 = 0.5%
// of a value's RMS, and as much of a sum's. The residual adds up those of 4 linear layers a block, two blocks and the
// head: √9 · 0.5% = 1.5%, and twice that is the bound. A wrong scale or order of codes gives more than 50%.
TEST(PackedModel, PassesMatchTheDequantisedModel) {
    for (const char* attention : {"SS", "LG", "SW"})
        for (const bool tied : {false, true})
            for (const Packing packing : ALL_PACKINGS) {
                const TwoModels m(packed_config(attention, tied), packing);
                const std::vector<int32_t> tokens = random_tokens(m.packed.config, T, 3);
                const std::vector<double> got = logits_of(m.ctx, m.packed, tokens),
                                          ref = logits_of(m.ctx, m.dense, tokens);
                const bool exact = packing == Packing::Fp8 || backend_device() != Device::CPU;
                const double error = rms(difference(got, ref)) / rms(ref);
                EXPECT_LE(error, exact ? 2e-6 : 0.03) << attention << " " << name_of(packing) << " tied " << tied;
                if (!exact) {
                    EXPECT_GE(error, 1e-4);
                }
            }
}

TEST(PackedModel, LossesMatchTheDequantisedModel) {
    const TwoModels m(packed_config("SS", false), Packing::Fp8);
    const Batch batch = random_batch(m.packed.config, 2, T, 4);
    double losses[2];
    for (int i = 0; i < 2; i++) {
        const Model& model = i ? m.dense : m.packed;
        RunShape shape = inference_shape(2, T);
        shape.packing = model.precision.packing;
        Activations acts(model.config, shape);
        acts.allocate(m.ctx);
        const Input in = upload(m.ctx, acts, batch);
        forward({m.ctx, model, acts, in});
        evaluate_loss({m.ctx, model, acts, in}, false);
        losses[i] = fetch<double>(acts.loss_sum)[0];
    }
    EXPECT_NEAR(losses[0], losses[1], 1e-5 * losses[1]);
}

// The engine computes what forward() computes, and a sequence has the same bits in any batch.
TEST(PackedModel, GenerationMatchesPassesAndDoesNotDependOnTheBatch) {
    for (const char* attention : {"SS", "LG", "SW"})
        for (const Packing packing : ALL_PACKINGS) {
            const TwoModels m(packed_config(attention, packing == Packing::Int4), packing);
            EngineOptions o = packed_options(3, packing);
            o.batch_invariant = true;
            Generation together(m.packed, o), alone(m.packed, o);
            std::vector<Prompt> prompts;
            for (const int64_t n : {7, 2, 19})
                prompts.push_back({int64_t(prompts.size()), random_tokens(m.packed.config, n, uint64_t(n)), 10 + n, 0});
            std::vector<std::vector<float>> rows = together.prefill(prompts),
                                            row = alone.prefill({{0, prompts[2].tokens, prompts[2].sequence, 0}});
            std::vector<int32_t> sequence = prompts[2].tokens;
            for (int step = 0; step < 6; step++) {
                const std::string where = str(attention, " ", name_of(packing), ", step ", step);
                EXPECT_TRUE(same_bits(rows[2], row[0])) << where;
                const std::vector<double> all = logits_of(m.ctx, m.packed, sequence);
                const std::vector<double> last(all.end() - m.packed.config.padded_vocab(), all.end()),
                    ref(last.begin(), last.begin() + m.packed.config.vocab_size);
                EXPECT_LE(max_abs(difference({row[0].begin(), row[0].end()}, ref)), 0.02 * max_abs(ref)) << where;
                sequence.push_back(alone.sampled[0]);
                rows = together.decode();
                row = alone.decode();
            }
        }
}

TEST(PackedModel, ThePlanIsWhatIsAllocated) {
    for (const Packing packing : ALL_PACKINGS)
        for (const int64_t ffn : {96, 40}) {
            const ModelConfig c = packed_config("SS", true, ffn);
            TwoModels m(c, packing);
            int64_t packed_bytes = 0, others = 0;
            for (const Param& p : m.packed.table.params) {
                const PackedWeight* const w = m.packed.packed->find(p);
                EXPECT_EQ(w == nullptr, bool(m.packed.weight(p.role, p.layer))) << p.name;
                EXPECT_EQ(w != nullptr, p.cols % 32 == 0 && p.cols > 0 && p.role != DECAY_GATE_W) << p.name;
                (w ? packed_bytes : others) += w ? w->rows.bytes() : m.packed.weight(p.role, p.layer).bytes();
            }
            EXPECT_NEAR(double(m.packed.packed->bytes()), double(packed_bytes), 256.0 * double(c.layers * 4 + 2));
            EXPECT_NEAR(double(m.packed.bytes()), double(others), 512.0 * double(m.packed.table.params.size()));
            const std::string plan = memory_plan(m.packed).text(0);
            EXPECT_NE(plan.find(str(name_of(packing), " weights")), std::string::npos) << plan;
            const std::string note = m.packed.packed->note(m.packed.table);
            EXPECT_EQ(note, ffn == 96 ? std::string()
                                      : str("--weights ", name_of(packing),
                                            ": 32 does not divide the rows of layers.*.fcproj.weight (40), "
                                            "which stay as they are\n"));
        }
}

// Matrices that stay in fp32 beside packed ones.
TEST(PackedModel, RowsThat32DoesNotDivideStay) {
    const TwoModels m(packed_config("SS", false, 40), Packing::Fp8);
    const std::vector<int32_t> tokens = random_tokens(m.packed.config, T, 3);
    const std::vector<double> got = logits_of(m.ctx, m.packed, tokens), ref = logits_of(m.ctx, m.dense, tokens);
    EXPECT_LE(rms(difference(got, ref)), (backend_device() == Device::CPU ? 2e-6 : 0.03) * rms(ref));
    Generation g(m.packed, packed_options(1, Packing::Fp8));
    const std::vector<float> row = g.prefill({{0, tokens, 0, 0}})[0];
    const int64_t V = m.packed.config.vocab_size, Vp = m.packed.config.padded_vocab();
    const std::vector<double> last(ref.end() - Vp, ref.end() - Vp + V);
    EXPECT_LE(max_abs(difference({row.begin(), row.end()}, last)), 0.02 * max_abs(last));
}

// An embedding with more weights than are read at a time (2²⁴): quantised from a file, read packed, and random.
TEST(PackedModel, MatricesOfSeveralBlocks) {
    ModelConfig c = packed_config("S", true);
    c.vocab_size = 270000;
    const Context ctx;
    Model dense(c, {});
    dense.allocate(ctx);
    initialise_weights(dense.table, dense.arenas, 5, ctx.stream);
    const auto embedding_of = [&](const Model& model) {
        const Tensor rows = model.packed->find(*model.table.find(WTE))->rows;
        std::vector<uint8_t> bytes(size_t(rows.bytes()));
        copy_to_host(bytes.data(), rows.data, bytes.size(), ctx.stream);
        return bytes;
    };
    std::vector<float> buffer;
    const Param& wte = *dense.table.find(WTE);
    const float* const values = dense.arenas.fetch(wte, buffer);
    const HostPacked expected(Packing::Int8, {values, values + wte.padded_numel()}, wte.padded_rows, wte.cols);

    Model random(c, {}, inference_precision(DType::F32, Packing::Int8));
    random.allocate(ctx);
    random.packed->randomise(random.table, 5);
    EXPECT_EQ(embedding_of(random), expected.bytes);
    const PackedRows rows{Packing::Int8, [](const PackedWeight& to, const Param& p, int64_t row, const float* from) {
                              quantise_rows(to, p, row, from, "here");
                          }};
    for (const PackedRows* how : {static_cast<const PackedRows*>(nullptr), &rows}) {
        const TempDir dir;
        save_model_files(dir.path(), c, nlohmann::json::object(), {});
        if (how) {
            nlohmann::json config = read_json(dir.file("config.json"));
            add_packing(config, Packing::Int8);
            write_json(dir.file("config.json"), config);
        }
        save_weights(
            dir.file("model.safetensors"), dense.table,
            [&](const Param& p, std::vector<float>& of) { return dense.arenas.fetch(p, of); },
            [](const Param&, const SourceTensor&) { return DType::F32; }, how);
        Model loaded(c, {}, inference_precision(DType::F32, Packing::Int8));
        loaded.allocate(ctx);
        loaded.packed->load(find_model(dir.path()), loaded.table);
        EXPECT_EQ(embedding_of(loaded), expected.bytes) << (how ? "packed" : "fp32");
    }
}

// Muon with its matrices distributed over ranks, in rounds of any size, against one rank that has all of them. Started
// alone this is a world of one rank; dev/tests/test_muon_ranks.py starts it on several ranks.
#include "dev/tests/model_fixture.h"
#include "dev/tests/world.h"
#include "runtime/model/initialise.h"

namespace {

const testing::Environment* const environment = testing::AddGlobalTestEnvironment(new LaunchedWorld);

// A model after two updates of its hidden matrices with gradients that are the same on all ranks.
struct Updated {
    Model model;
    Optimizer optimizer;
    std::vector<float> values;  // the held elements of the hidden matrices, in the order of the table

    Updated(const Context& ctx, const ModelConfig& config, const Sharding& sharding, int64_t round_bytes)
        : model(config, sharding, {}, OptimizerType::Muon) {
        OptimizerOptions options = Driver::default_options();
        options.muon.round_bytes = round_bytes;
        model.allocate(ctx);
        optimizer.allocate(ctx, model, options);
        initialise_weights(model.table, model.arenas, 7, ctx.stream);
        const Arena workspace(update_workspace_bytes(model, round_bytes), "workspace"), memory(4096, "scalars");
        const Tensor scalars = memory.at(0, DType::U8, {int64_t(sizeof(StepScalars))});
        optimizer.muon.warm_up(ctx, workspace.at(0, DType::U8, {workspace.bytes()}));  // changes no state
        for (int64_t t = 1; t <= 2; t++) {
            StepScalars s{};
            s.lr = 0.05f;
            s.momentum = 0.9f;
            s.grad_scale = 1;
            s.t = t;
            copy_to_device(scalars.data, &s, sizeof s, ctx.stream);
            for (const Param& p : model.table.params) set_gradient(ctx, p, t);
            optimizer.muon.update(ctx, optimizer.slices, workspace.at(0, DType::U8, {workspace.bytes()}), scalars);
        }
        ctx.wait_for_stream("the updates");
        for (const Param& p : model.table.params) {
            if (p.optimizer != OptimizerType::Muon) continue;
            const ParamArena::Span span = optimizer.m.span(p, 0, p.numel());
            for (const ParamArena* arena : {&model.arenas.weights, &optimizer.m}) {
                const ParamArena::Span part = arena->span(p, span.begin, span.count);
                EXPECT_EQ(part.count, span.count);
                const std::vector<float> held = fetch<float>(arena->elements(part));
                values.insert(values.end(), held.begin(), held.end());
            }
        }
    }

    void set_gradient(const Context& ctx, const Param& p, int64_t t) const {
        const ParamArena::Span span = optimizer.grads.arena.span(p, 0, p.numel());
        std::vector<float> host;
        for (int64_t i = 0; i < span.count; i++)
            host.push_back(float(normal01(uint64_t(t), name_hash(p.name), uint64_t(span.begin + i))));
        if (span.count)
            copy_to_device(optimizer.grads.arena.elements(span).data, host.data(), host.size() * sizeof(float),
                           ctx.stream);
    }
};

// The same elements of one rank's result.
std::vector<float> same_elements(const Updated& alone, const Updated& updated) {
    std::vector<float> values;
    for (const Param& p : updated.model.table.params) {
        if (p.optimizer != OptimizerType::Muon) continue;
        const ParamArena::Span span = updated.optimizer.m.span(p, 0, p.numel());
        const Param& q = alone.model.table.by_name(p.name);
        for (const ParamArena* arena : {&alone.model.arenas.weights, &alone.optimizer.m}) {
            const std::vector<float> held = fetch<float>(arena->elements(arena->span(q, span.begin, span.count)));
            values.insert(values.end(), held.begin(), held.end());
        }
    }
    return values;
}

// On a CPU the same bits: a matrix's update does not depend on its batch. A GPU may take other GEMM algorithms for
// other batches; Newton-Schulz makes their rounding errors up to a thousand times larger.
TEST(MuonOnRanks, EveryStageAndRoundSizeMatchesOneRank) {
    const Context& ctx = LaunchedWorld::context();
    const Context single;
    for (const char* name : {"gpt2", "llama"}) {
        ModelConfig config = base_config();
        config.layers = 3;
        config.set_attention("SSS");
        for (const ModelVariant& variant : MODEL_VARIANTS)
            if (variant.name == std::string(name)) variant.apply(config);
        const Updated alone(single, config, {}, MUON_ROUND_BYTES);
        for (const int64_t stage : {0, 1, 2, 3}) {
            // One matrix of each owner at a time; a few; all at once.
            for (const int64_t round_bytes : {int64_t(1), ctx.world * 8000, MUON_ROUND_BYTES}) {
                SCOPED_TRACE(str(name, ", stage ", stage, ", rounds of ", round_bytes, " bytes"));
                const Updated updated(ctx, config, {stage, ctx.rank, ctx.world}, round_bytes);
                const size_t rounds = updated.optimizer.muon.all_rounds().size();
                if (round_bytes == 1) {
                    EXPECT_GE(rounds, size_t(18 / ctx.world));
                } else if (round_bytes == MUON_ROUND_BYTES) {
                    EXPECT_EQ(rounds, 1u);
                }
                const std::vector<float> expected = same_elements(alone, updated);
                if (backend_device() == Device::CPU) {
                    EXPECT_TRUE(same_bits(updated.values, expected));
                    continue;
                }
                ASSERT_EQ(updated.values.size(), expected.size());
                for (size_t i = 0; i < expected.size(); i++)
                    ASSERT_NEAR(updated.values[i], expected[i], 0.05 * 1e-3) << i;
            }
        }
    }
}

}  // namespace

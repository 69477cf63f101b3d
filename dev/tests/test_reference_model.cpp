// The float64 reference model, the oracle of the driver's tests, against PyTorch in float64.
#include <gtest/gtest.h>

#include <cmath>

#include "dev/oracle/reference_model.h"
#include "dev/tests/fixtures.h"
#include "model.h"
#include "models/family.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/files.h"

namespace {

// Both sides compute in float64, so only the order of their sums differs.
constexpr double TOLERANCE = 1e-11;

reference::Weights load(const Fixture& f) {
    const ParamTable table = parameter_table(f.config, 1);
    std::vector<float> arena(static_cast<size_t>(table.total));
    load_weights(f.directory, table, host_tensor(arena.data(), {table.total}));
    return reference::widen(table, arena.data());
}

reference::ModelOutput run(const Fixture& f, const ModelConfig& config, const reference::Weights& weights) {
    return reference::model_forward(config, weights, f.tokens(), f.targets(), f.B, f.T);
}

// max|Δ| / max|ref|; NaN anywhere gives NaN, which no comparison accepts.
double max_error(const std::vector<double>& got, const std::vector<double>& ref) {
    double error = 0, size = 0;
    for (size_t i = 0; i < ref.size(); i++) {
        const double d = std::fabs(got.at(i) - ref[i]);
        if (!(d <= error)) error = d;
        size = std::max(size, std::fabs(ref[i]));
    }
    return error / size;
}

class ReferenceModel : public testing::TestWithParam<std::string> {};

TEST_P(ReferenceModel, MatchesPyTorch) {
    const Fixture f(GetParam());
    const reference::ModelOutput out = run(f, f.config, load(f));
    const std::vector<double> logits = f.values<double>("logits");
    ASSERT_EQ(out.logits.size(), logits.size());
    EXPECT_LE(max_error(out.logits, logits), TOLERANCE);
    EXPECT_LE(std::fabs(out.loss - f.loss()), TOLERANCE * f.loss());
}

// A config with the keys of transformers 4 gives the same model.
TEST_P(ReferenceModel, Transformers4Config) {
    const Fixture f(GetParam());
    const std::string path = join_path(f.directory, "config_transformers4.json");
    if (f.config.positions == Positions::Learned) {
        ASSERT_FALSE(path_exists(path));  // GPT-2's keys are the same in both
        return;
    }
    const ModelConfig config = config_from_json(read_json(path), path);
    const reference::Weights weights = load(f);
    EXPECT_EQ(run(f, config, weights).logits, run(f, f.config, weights).logits);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, ReferenceModel, testing::ValuesIn(fixture_names()), [](const auto& test) {
    std::string name = test.param;
    std::replace(name.begin(), name.end(), '-', '_');
    return name;
});

TEST(Fixtures, AllExist) {
    EXPECT_EQ(fixture_names(),
              (std::vector<std::string>{"gpt2-fp16", "gpt2-inner-eps", "gpt2-plain", "gpt2-untied", "llama-bf16",
                                        "llama-bias-tied", "llama-gqa", "llama-mqa-head-dim", "llama-rope-dynamic",
                                        "llama-rope-linear", "llama-rope-llama3", "llama-sharded", "mistral", "olmo2",
                                        "phi3", "qwen2", "qwen3", "smollm3"}));
}

// Each option below changes the logits by far more than any tolerance, so an ignored option makes a test fail.
TEST(Fixtures, LogitsDependOnEveryModelOption) {
    struct Change {
        const char* fixture;
        void (*apply)(ModelConfig&);
    };
    const Change changes[] = {
        {"gpt2-inner-eps", [](ModelConfig& c) { c.norm_eps = 1e-5; }},
        {"llama-mqa-head-dim", [](ModelConfig& c) { c.norm_eps = 1e-6; }},
        {"llama-gqa", [](ModelConfig& c) { c.rope_theta = 9000; }},
        {"llama-rope-linear", [](ModelConfig& c) { c.rope_scaling = {}; }},
        {"llama-rope-linear", [](ModelConfig& c) { c.rope_scaling.factor = 2; }},
        {"llama-rope-dynamic", [](ModelConfig& c) { c.rope_scaling = {}; }},
        {"llama-rope-dynamic", [](ModelConfig& c) { c.rope_scaling.factor = 1.9; }},
        {"llama-rope-dynamic", [](ModelConfig& c) { c.rope_scaling.original_max_position = 15; }},
        {"llama-rope-llama3", [](ModelConfig& c) { c.rope_scaling = {}; }},
        {"llama-rope-llama3", [](ModelConfig& c) { c.rope_scaling.factor = 7; }},
        {"llama-rope-llama3", [](ModelConfig& c) { c.rope_scaling.low_freq_factor = 1.5; }},
        {"llama-rope-llama3", [](ModelConfig& c) { c.rope_scaling.high_freq_factor = 3; }},
        {"llama-rope-llama3", [](ModelConfig& c) { c.rope_scaling.original_max_position = 63; }},
    };
    for (const Change& change : changes) {
        const Fixture f(change.fixture);
        ModelConfig config = f.config;
        change.apply(config);
        EXPECT_GE(max_error(run(f, config, load(f)).logits, f.values<double>("logits")), 1e-4)
            << change.fixture << ", change " << &change - changes;
    }
}

}  // namespace

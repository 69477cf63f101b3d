// test_gpt: proves the driver from end to end, in one file and without a test framework.
//
//     make test OP=gpt                  counts its checks among the other tests
//     build/cpu/test_gpt [FIXTURE ...]  prints them; by default of a GPT-2 and a LLaMA
//
// A fixture of dev/fixtures/models is a tiny model as transformers saves it, with what PyTorch computes from it in
// float64 (dev/peers/make_reference.py). For each, in fp32 and on a GPU in bf16 too, the driver's model must have
//
//     1. PyTorch's logits and loss,
//     2. its gradient of every parameter,
//     3. its losses in ten steps of AdamW,
//     4. the same gradients from micro-steps as from the whole batch,
//     5. the same bits after five more steps, whether or not the run was saved and loaded before them,
//     6. in fp32, the greedy tokens of the engine, which has a KV cache and kernels of its own.
//
// The last line is "overall okay: 1", and the exit status 0, if all hold.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "dev/tests/batches.h"
#include "dev/tests/fixtures.h"
#include "dev/tests/saved_state.h"
#include "dev/tests/vectors.h"
#include "driver/inference.h"
#include "driver/pass.h"
#include "model.h"

namespace {

// --------------------------------------------------------------------------------------------------------------------
// The report: a line for each check.

bool overall_okay = true;

void check(const std::string& what, double value, double bound) {
    const bool okay = value <= bound;  // not NaN
    overall_okay = overall_okay && okay;
    std::printf("  %s  %-32s %.1e, at most %.1e\n", okay ? "okay" : "FAIL", what.c_str(), value, bound);
}

using Values = std::vector<double>;

// --------------------------------------------------------------------------------------------------------------------
// A model in training that starts from a fixture's weights.

Batch batch_of(const Fixture& f) {
    return make_batch(f.tokens(), f.targets(), f.B, f.T);
}

struct Run {
    Context ctx;
    Model model;
    Activations acts;
    Optimizer optimizer;
    double loss_tokens = 0;

    Run(const Fixture& f, DType dtype)
        : model(f.config, {}, {dtype, dtype != DType::F32}), acts(f.config, shape(f, dtype, model)) {
        model.allocate(ctx);
        acts.allocate(ctx);
        OptimizerOptions options;
        for (GroupHyperparameters& rate : options.rates) rate.weight_decay = 0.1f;
        optimizer.allocate(ctx, model, options);
        write_scalars(ctx, acts, StepScalars{});
        load_weights(f.directory, model.table, model.arenas);
        for (const int32_t target : f.targets()) loss_tokens += target != Batch::NO_TARGET;
    }
    static RunShape shape(const Fixture& f, DType dtype, const Model& model) {
        RunShape s = training_shape(f.B, f.T, dtype);
        s.update_bytes = update_workspace_bytes(model);
        return s;
    }

    // [n, V], by a pass over the batch.
    Values logits(const Batch& batch) {
        const Input in = upload(ctx, acts, batch);
        forward({ctx, model, acts, in});
        Values all;
        for (int64_t n = 0; n < in.n; n++) {
            const std::vector<float> row = fetch_floats(ctx, head_logits({ctx, model, acts, in}, n, n + 1));
            all.insert(all.end(), row.begin(), row.begin() + model.config.vocab_size);
        }
        return all;
    }
    // The gradients of the mean loss, from micro-steps that are all of the fixture's batch. Returns that loss.
    double gradients(const std::vector<Batch>& micro_steps) {
        for (size_t i = 0; i < micro_steps.size(); i++) {
            const Input in = upload(ctx, acts, micro_steps[i]);
            forward({ctx, model, acts, in});
            backward({ctx, model, acts, in, &optimizer.grads}, float(1 / loss_tokens), i == 0);
        }
        double sum = 0;
        copy_to_host(&sum, acts.loss_sum.data, sizeof sum, ctx.stream);
        return sum / loss_tokens;
    }
    // One step of AdamW. Returns the loss before it.
    double step(const Batch& batch) {
        gradients({batch});
        StepScalars s = read_scalars(ctx, acts);
        s.lr = 1e-2f;
        s.grad_clip = 1;
        write_scalars(ctx, acts, s);
        update(ctx, model, optimizer, acts, 1 / loss_tokens);
        return read_scalars(ctx, acts).loss;
    }
    TrainingArenas state() const { return {model.arenas, optimizer.m, optimizer.v}; }
    std::vector<float> gradient_arena() const { return fetch_floats(ctx, optimizer.grads.arena.data); }
    std::vector<float> weights() const {
        std::vector<float> arena(size_t(model.table.total), 0.0f), buffer;
        for (const Param& p : model.table.params)
            std::copy_n(model.arenas.fetch(p, buffer), p.padded_numel(), arena.begin() + p.offset);
        return arena;
    }
};

// Relative to the largest logit, and to the RMS of each gradient (docs/understand/numerics.md).
struct Bounds {
    double logits, gradients;
};
Bounds bounds_of(DType dtype) {
    return dtype == DType::F32 ? Bounds{1e-5, 1e-5} : Bounds{2e-2, 3e-2};
}

// --------------------------------------------------------------------------------------------------------------------
// The six proofs.

void prove_logits_and_loss(const Fixture& f, Run& run) {
    const DType dtype = run.model.precision.dtype;
    const Values logits = f.values<double>("logits");
    const double limit = bounds_of(dtype).logits * max_abs(logits);
    check("logits", max_abs(difference(run.logits(batch_of(f)), logits)), limit);
    // In 16 bits the loss, a difference of two logits on average, has the error of both.
    const double loss = run.gradients({batch_of(f)});
    check("loss", std::fabs(loss - f.loss()), dtype == DType::F32 ? 1e-5 * f.loss() : 2 * limit);
}

// PyTorch's gradient of a parameter, put together from the tensors of the file that the parameter is made of.
Values expected_gradient(const Fixture& f, const Param& p) {
    Values all(size_t(p.numel()), NAN);
    for (const SourceTensor& source : p.sources) {
        const std::vector<float> file = f.values<float>("grad/" + source.name);
        const int64_t cols = p.row_size();
        require(int64_t(file.size()) == source.rows * cols, source.name, " has another shape");
        for (int64_t r = 0; r < source.rows; r++)
            for (int64_t c = 0; c < cols; c++)
                all[size_t((source.row + r) * cols + c)] =
                    file[size_t(source.transposed ? c * source.rows + r : r * cols + c)];
    }
    return all;
}

// q, k and v are one parameter, and so are gate and up: an error is relative to all of it. (The gradient of k's bias
// alone is the residue of a cancellation, and test_model.cpp compares each part.)
void prove_gradients(const Fixture& f, Run& run) {
    run.gradients({batch_of(f)});
    const std::vector<float> arena = run.gradient_arena();
    for (const Param& p : run.model.table.params) {
        const Values got(arena.begin() + p.offset, arena.begin() + p.offset + p.numel());
        const Values expected = expected_gradient(f, p);
        check(p.name, rms(difference(got, expected)) / rms(expected), bounds_of(run.model.precision.dtype).gradients);
    }
}

// Adam gives a gradient of 1e-8 the step of one of size 1, so rounding errors of tiny gradients grow: float64 itself
// moves by up to 2e-5 of the first loss (llama-bf16, step 8) when its weights are changed by 3e-8. Hence 1e-4.
void prove_steps(const Fixture& f, DType dtype) {
    Run run(f, dtype);
    const Values expected = f.values<double>("adamw_losses");
    Values losses;
    while (losses.size() < expected.size()) losses.push_back(run.step(batch_of(f)));
    check("losses of AdamW's steps", max_abs(difference(losses, expected)),
          (dtype == DType::F32 ? 1e-4 : 2e-2) * expected[0]);
    // Padding rows never train.
    const std::vector<float> weights = run.weights();
    double padding = 0;
    for (const Param& p : run.model.table.params)
        for (int64_t i = p.numel(); i < p.padded_numel(); i++)
            padding = std::max(padding, double(std::fabs(weights[size_t(p.offset + i)])));
    check("largest padding of a weight", padding, 0);
}

// The sums differ by their order, and each may be as far from the exact one as (2) allows.
void prove_micro_steps(const Fixture& f, Run& run) {
    const auto gradients = [&](const std::vector<Batch>& micro_steps) {
        run.gradients(micro_steps);
        const std::vector<float> arena = run.gradient_arena();
        return Values(arena.begin(), arena.end());
    };
    const Values whole = gradients({batch_of(f)}), sum = gradients(split(batch_of(f), f.B, f.T));
    check("micro-steps", rms(difference(sum, whole)) / rms(whole), 2 * bounds_of(run.model.precision.dtype).gradients);
}

// Weights and both moments of AdamW.
std::vector<float> state_of(const Run& run) {
    std::vector<float> all = run.weights();
    for (const ParamArena& moments : {run.optimizer.m, run.optimizer.v}) {
        const std::vector<float> values = fetch_floats(run.ctx, moments.data);
        all.insert(all.end(), values.begin(), values.end());
    }
    return all;
}

void prove_resume(const Fixture& f, DType dtype) {
    std::string directory = (std::filesystem::temp_directory_path() / "test_gpt_XXXXXX").string();
    require(mkdtemp(directory.data()), directory, ": cannot be created");
    const Batch batch = batch_of(f);
    const auto five_steps = [&](Run& run) {
        for (int i = 0; i < 5; i++) run.step(batch);
    };
    Run run(f, dtype), resumed(f, dtype);
    five_steps(run);
    save_state(directory, run.model.table, run.state());
    write_scalars(resumed.ctx, resumed.acts, read_scalars(run.ctx, run.acts));  // a run keeps them in trainer.json
    load_state(directory, resumed.model.table, resumed.state());
    std::filesystem::remove_all(directory);
    five_steps(run);
    five_steps(resumed);
    const std::vector<float> a = state_of(run), b = state_of(resumed);
    size_t different = 0;
    for (size_t i = 0; i < a.size(); i++) different += std::memcmp(&a[i], &b[i], sizeof a[i]) != 0;
    check("numbers that resuming changes", double(different), 0);
}

// The engine continues the first half of the first sequence up to the fixture's length. After each token the driver's
// pass over the whole sequence must have its largest logit there.
void prove_greedy_tokens(const Fixture& f, Run& run) {
    std::vector<int32_t> sequence = f.tokens();
    sequence.resize(size_t(f.T / 2));
    EngineOptions options;
    options.context = f.T;
    options.sampling.temperature = 0;
    Engine engine(f.config, options, run.ctx.stream);
    engine.allocate(inference_weights(run.model));
    engine.prefill({{0, sequence, 0, 0}});
    int64_t different = 0;
    while (int64_t(sequence.size()) < f.T) {
        Activations acts(f.config, inference_shape(1, int64_t(sequence.size())));
        acts.allocate(run.ctx);
        const Input in = upload(run.ctx, acts, single_sequence(sequence.data(), int64_t(sequence.size())));
        forward({run.ctx, run.model, acts, in});
        const std::vector<float> row =
            fetch_floats(run.ctx, head_logits({run.ctx, run.model, acts, in}, in.n - 1, in.n));
        const auto largest = std::max_element(row.begin(), row.begin() + f.config.vocab_size) - row.begin();
        sequence.push_back(engine.next().tokens[0]);
        different += sequence.back() != largest;
        if (int64_t(sequence.size()) < f.T) engine.decode();
    }
    check("greedy tokens that differ", double(different), 0);
}

void prove(const std::string& name, DType dtype) {
    std::printf("%s, %s\n", name.c_str(), dtype_name(dtype));
    const Fixture f(name);
    Run run(f, dtype);
    prove_logits_and_loss(f, run);
    prove_gradients(f, run);
    prove_steps(f, dtype);
    prove_micro_steps(f, run);
    prove_resume(f, dtype);
    if (dtype == DType::F32) prove_greedy_tokens(f, run);
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    if (names.empty()) names = {"gpt2-plain", "llama-gqa"};
    try {
        for (const std::string& name : names) {
            prove(name, DType::F32);
            if (backend_device() != Device::CPU) prove(name, DType::BF16);
        }
    } catch (const std::exception& error) {
        std::printf("  FAIL  %s\n", error.what());
        overall_okay = false;
    }
    std::printf("overall okay: %d\n", overall_okay);
    return overall_okay ? 0 : 1;
}

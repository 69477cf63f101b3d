// The work of a training run before its first step (memory, weights, CUDA graphs) and between steps (log, evaluation,
// samples, checkpoints). The steps themselves and the loop are in train_gpt.cu.
#include "driver/trainer.h"

#include <chrono>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "driver/evaluation.h"
#include "driver/fit.h"
#include "driver/fp8_layer.h"
#include "driver/frozen_weights.h"
#include "driver/inference.h"
#include "driver/matmul_cache.h"
#include "driver/pass.h"
#include "driver/sequence_loss.h"
#include "infer/generate.h"
#include "infer/prompts.h"
#include "kernels/matmul.h"
#include "models/lora_adapter.h"
#include "models/model_source.h"
#include "runtime/device/gpu_table.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/files.h"
#include "runtime/host_memory.h"
#include "runtime/model/initialise.h"
#include "runtime/signals.h"

using nlohmann::ordered_json;

namespace {

MemoryPlan plan_with(const RunOptions& tried, const ModelConfig& config, const Context& ctx) {
    const Model model = model_of(tried, config, ctx.rank, ctx.world);
    return memory_plan(model, Activations(config, run_shape(tried, model)), gradient_options(tried));
}

// The bytes that a run of a model needs with other options.
std::function<int64_t(const RunOptions&)> planned_bytes_of(const ModelConfig& config, const Context& ctx) {
    return [&](const RunOptions& tried) { return plan_with(tried, config, ctx).total; };
}

// Changes the options to the first with which the run fits, if there are any.
FitReport search(RunOptions& options, const ModelConfig& config, const Context& ctx, int64_t available,
                 const std::vector<RankHost>& hosts) {
    const auto lacks_host = [&](const RunOptions& tried) {
        return lacks_host_memory(hosts, plan_with(tried, config, ctx));
    };
    return find_fit(options, config.layers, ctx.world, this_target(), available, planned_bytes_of(config, ctx),
                    lacks_host);
}

// The bytes that a run may take of every rank's device.
int64_t available_on_all(const RunOptions& options, const Context& ctx) {
    MemoryPlan limits;
    limits.limit = options.gpu_memory;
    // Ranks must choose the same.
    const std::vector<int64_t> free =
        ctx.comm->all_gather_host(limits.available(device_memory_available(), device_bytes_in_use()));
    return *std::min_element(free.begin(), free.end());
}

// With the options that depend on the memory that is free.
TrainSetup with_chosen_options(TrainSetup setup, const Context& ctx) {
    const TrainOptions& o = setup.o;
    if (o.fp8.on) choose_fp8_weights(setup.o, available_on_all(o, ctx), planned_bytes_of(setup.source.config, ctx));
    return setup;
}

// Advice for a run that does not fit: options with which it does.
std::string what_fits(const TrainOptions& o, const ModelConfig& config, const Context& ctx, int64_t available,
                      const std::vector<RankHost>& hosts) {
    RunOptions fitting = o;
    const FitReport fit = search(fitting, config, ctx, available, hosts);
    if (!fit.found()) return fit.remedy();
    const std::string same_step =
        fitting.batch_size < o.batch_size ? str(" --total-batch-tokens ", o.total_batch_tokens) : "";
    return str(fit.tried.back().options, same_step, " fits: it needs ", human_bytes(fit.tried.back().bytes),
               "; add these options, or --fit");
}

// A warning, or nothing. On an H100 GPT-2 with 768 channels gains 1.09 times (docs/log/performance.md). Narrower models
// are not measured: quantising an input [N, C] and a gradient [N, OC] reads and writes 4·N·(C + OC) bytes at 2.5 TB/s;
// their three matmuls save 40% of 6·N·C·OC FLOP at 650 TFLOP/s, so fp8 loses below C·OC/(C + OC) = 430.
std::string fp8_warning(const ModelConfig& c) {
    if (backend_device() == Device::CPU) return "fp8 is emulated on the CPU: it is slower than fp32\n";
    if (c.channels >= 768) return "";
    return str("--matmul-dtype fp8 is hardly faster, or slower, with ", c.channels,
               " channels: quantisation takes what the matmuls save\n");
}

}  // namespace

std::string fit_run(TrainSetup& setup, const Context& ctx) {
    const int64_t available = available_on_all(setup.o, ctx);
    RunOptions options = setup.o;
    const FitReport fit = search(options, setup.source.config, ctx, available, hosts_of_ranks(ctx));
    require(fit.found(), "--fit: nothing fits into ", human_bytes(available), "; ", fit.remedy());
    setup.set_memory_options(options, ctx.world);
    const FitReport::Try& found = fit.tried.back();
    return str("--fit: ", found.options.empty() ? "the options as given" : found.options, ", ",
               human_bytes(found.bytes), " of ", human_bytes(available), " (", found.reason, ")\n");
}

// Throws Error if the run does not fit into memory, with options that do.
MemoryPlan Trainer::checked_memory_plan(const GradientOptions& gradients) const {
    MemoryPlan plan = memory_plan(model, acts, gradients);
    plan.limit = options.gpu_memory;
    const std::vector<RankHost> hosts = hosts_of_ranks(ctx);
    plan.check([&](int64_t available) { return what_fits(options, model.config, ctx, available, hosts); });
    const std::string missing = lacks_host_memory(hosts, plan);
    require(missing.empty(), "--offload ", options.offload, ": ", missing, "; offload less, ",
            !model.offload.weights ? "use --optimizer-dtype bf16, "
            : model.nf4            ? ""
                                   : "add --qlora, ",
            "or free memory of the host");
    return plan;
}

void Trainer::print(const std::string& text) const {
    if (ctx.rank == 0) std::cerr << text;
}

// The first lines of output: model, devices, memory, adapters.
void Trainer::print_setup(const MemoryPlan& plan) const {
    print(str(setup.source.name, ": ", describe(model.config, model.table.num_weights()), ", ", dtype_name(dtype),
              options.model.auto_dtype ? " (--dtype auto)" : "", acts.fp8 ? ", matmuls of the blocks in fp8\n" : "\n",
              device_description(), ", ", matmul_library(), "\n"));
    print(setup.notes);
    if (ctx.world > 1) print(str(ctx.world, " ranks, ZeRO stage ", options.sharding.zero_stage, "\n"));
    print(str("memory plan\n", plan.text(ctx.in_use_before)));
    if (acts.fp8) print(fp8_warning(model.config));
    if (model.adapters)
        print(str("LoRA adapters of ", model.lora->options.description(), ": ",
                  with_commas(model.adapters->table.num_weights()), " weights are trained\n"));
    const std::string cut = cut_choices_note(choices, tokenizer ? tokenizer->start_of_text().size() : 0, acts.shape.T);
    if (!cut.empty()) print(str("--eval-multiple-choice: ", cut, "\n"));
}

// MFU's denominator: the data sheet's peak, or a measured matmul where the device is unknown. The measurement allocates
// memory of its own, so it comes before the arenas.
void Trainer::find_peak_flops() {
    peak_flops = dense_peak_flops(device_name(), dtype);
    const bool known = peak_flops != 0;
    if (options.measure_peak || !known) measured_flops = measured_peak_flops(ctx.stream, dtype);
    if (!known) peak_flops = measured_flops;
    print(str("MFU is a fraction of ", with_commas(std::llround(peak_flops / 1e9)), " GFLOP/s",
              ctx.world > 1 ? " of each rank, " : ", ",
              known ? str("the dense ", dtype_name(dtype), " peak of ", device_name())
                    : str("a matmul in ", dtype_name(dtype), " measured now"),
              "\n"));
}

Trainer::Trainer(const Context& context, TrainSetup run_setup, std::unique_ptr<DirectoryLock> held)
    : ctx(context),
      setup(with_chosen_options(std::move(run_setup), context)),
      lock(std::move(held)),
      options(setup.o),
      dtype(options.model.type()),
      model(model_of(options, setup.source.config, ctx.rank, ctx.world)),
      acts(setup.source.config, run_shape(options, model)),
      checkpoints(ctx, model.trained().table,
                  {options.out, options.keep, float_type(options.save_dtype), options.on_save_error == "stop"}),
      asked_to_stop(static_cast<size_t>(ctx.world)),
      watchdog(options.step_timeout,
               str("train_gpt: ", options.command, ": ", ctx.world > 1 ? str("rank ", ctx.rank, ": ") : ""),
               str(" (--step-timeout); '", options.command, " --resume --out ", options.out,
                   "' continues from the last checkpoint")) {
    tokenizer = setup.tokenizer();
    if (!setup.questions.empty()) choices = make_choices(setup.questions, *tokenizer, setup.source.config.vocab_size);
    for (const TrainingData& data : setup.data)
        val_bytes.push_back(data.val_files ? text_bytes(data.directory, *data.val_files, false) : 0);
    const GradientOptions gradients = gradient_options(options, options.seed);
    MemoryPlan plan = checked_memory_plan(gradients);
    planned_bytes = plan.total;
    if (model.adapters) {
        if (!setup.resume.checkpoint.empty())
            LoraAdapter::check_base(setup.resume.checkpoint, setup.lora_base(), model.config, model.table);
        base_record = LoraAdapter::base_record(setup.lora_base(), model.config, model.table);
    }
    if (keeps_reference(acts.shape, model)) {
        reference_record = LoraAdapter::fingerprint(setup.lora_base(), model.table);
        if (!setup.source.adapter.empty())
            reference_record += str(" with adapter ", LoraAdapter::checksum(setup.source.adapter));
        require(setup.resume.checkpoint.empty() || setup.resume.reference == reference_record, setup.source.directory,
                " is not the model that the run started from, which --kl compares with (fingerprint ", reference_record,
                ", it was ", setup.resume.reference, "); restore it");
    }
    make_directories(options.out);  // before anything is printed: if this fails, only the error is
    claim_run_directory(ctx, options.out, lock);
    // Training goes on while a copy of its state is written to a checkpoint, if the host has memory for the copy.
    const bool saves_meanwhile = options.save_every && options.save_every < options.steps;
    const int64_t snapshot_bytes = saves_meanwhile ? snapshot_of(model).bytes() : 0;
    std::string no_snapshot = saves_meanwhile ? checkpoints.lacks_memory(plan.host_total() + snapshot_bytes) : "";
    if (no_snapshot.empty()) plan.add("checkpoint snapshot", snapshot_bytes, MemoryPlace::Host);
    print_setup(plan);
    find_peak_flops();
    model.allocate(ctx);
    acts.allocate(ctx);
    if (options.rollout.on())
        for (QueuedStep& q : queue) q.sums = HostMemory(host_alloc(size_t(acts.sums.bytes())), host_free);
    optimizer.allocate(ctx, model, optimizer_options(options), gradients);
    // In another thread, beside what follows. 8B on two ranks: 45 GiB of pinned memory each, which take 2.9 s.
    const bool copies = saves_meanwhile && no_snapshot.empty();
    if (copies) checkpoints.start_allocation(snapshot_of(model));
    start();
    if (options.rollout.exact) matmul_batch_invariant(true, ctx.stream);
    warm_up();
    if (stores_reference())
        reference = pair_reference(
            ctx, model, acts, setup, step > 0, [this] { watchdog.state("computing the reference", step); },
            [this](const std::string& line) { print(line + "\n"); });
    if (copies) no_snapshot = checkpoints.finish_allocation();
    if (!no_snapshot.empty())
        print("training waits while a checkpoint is written, there is no memory for a copy: " + no_snapshot + "\n");
    if (ctx.rank == 0) write_file(join_path(options.out, "run.toml"), options.toml);
}

// Waits for the device, which may still run a step and write its scalars.
Trainer::~Trainer() {
    if (abort_on_failure.failed()) return;
    try {
        synchronize(ctx.stream);
    } catch (const Error&) {  // a destructor cannot report it
    }
}

void Trainer::load_base() {
    if (options.random_weights) {
        initialise_weights(model.table, model.arenas, options.seed, ctx.stream);
        if (model.nf4) initialise_frozen(*model.nf4, model.table, options.seed);
        if (model.fp8) initialise_frozen(*model.fp8, model.table, options.seed);
    } else {
        print(load_weights(setup.source, model.table, model.arenas));
        if (model.nf4) load_frozen(*model.nf4, open_weight_source(setup.source, model.table), model.table);
        if (model.fp8) load_frozen(*model.fp8, open_weight_source(setup.source, model.table), model.table);
    }
}

// The scales are of the largest weights, so they tell of another base that begins as the old one did, which is all that
// LoraAdapter::check_base() looks at.
void Trainer::check_base_scales() {
    if (!acts.fp8 || !model.frozen()) return;
    if (model.gatherer) model.gatherer->begin(ctx.stream);
    for (int64_t l = 0; l < model.config.layers; l++) {
        const GatheredGroup weights = model.use(ctx, model.layer_group(l));
        for (const Role role : LINEAR_LAYERS) {
            const LinearWeights w = linear_weights(model, role, l);
            const Tensor scale = w.fp8 ? w.fp8->scale : w.nf4 ? w.nf4->fp8_scale : Tensor{};
            float numbers[FP8_SCALE_FLOATS] = {};
            if (scale) copy_to_host(numbers, scale.data, sizeof numbers, ctx.stream);
            base_scales.push_back(numbers[FP8_SCALE]);
        }
    }
    const std::vector<float>& old = setup.resume.fp8_base_scales;
    for (size_t i = 0; i < std::min(old.size(), base_scales.size()); i++)
        require(!old[i] || !base_scales[i] || old[i] == base_scales[i], setup.lora_base().name, ": the fp8 scale of ",
                model.table.find(LINEAR_LAYERS[i % NUM_LINEAR_LAYERS], int(i / NUM_LINEAR_LAYERS))->name, " is ",
                base_scales[i], ", but was ", old[i], " when ", setup.resume.checkpoint,
                " was written: the base has changed; restore it");
}

void Trainer::start() {
    StepScalars scalars{};
    Model& trained = model.trained();
    if (model.adapters) {
        load_base();
        check_base_scales();
    }
    if (!setup.resume.checkpoint.empty()) {
        load_state(setup.resume.checkpoint, trained.table, {trained.arenas, optimizer.m, optimizer.v}, ranks_of(ctx));
        step = saved_step = setup.resume.step;
        scalars.t = setup.resume.adam_steps;
        scalars.norm_count = setup.resume.norm_count;
        idle_steps = setup.resume.idle_steps;
        std::copy(setup.resume.grad_norms.begin(), setup.resume.grad_norms.end(), scalars.norms);
    } else if (!setup.source.directory.empty() && !model.adapters) {
        print(load_weights(setup.source, model.table, model.arenas));
    } else {
        initialise_weights(trained.table, trained.arenas, options.seed, ctx.stream);
    }
    if (acts.fp8 && !setup.resume.fp8_history.empty())
        acts.fp8->restore(setup.resume.fp8_history, setup.resume.fp8_steps, ctx.stream);
    scale_weights(ctx, model, acts);
    quantise_weights(ctx, model, acts);
    write_scalars(ctx, acts, scalars);
}

// Random tokens. With equal tokens all rows of a matrix would be equal. A GPU at its power limit multiplies such
// matrices up to a quarter faster, and ranks the algorithms in another order.
Batch Trainer::warm_up_batch() const {
    Batch batch;
    const size_t N = static_cast<size_t>(options.batch_size * options.seq_len);
    batch.tokens = batch.positions = std::vector<int32_t>(N);
    for (size_t i = 0; i < N; i++) {
        batch.tokens[i] = static_cast<int32_t>(philox(0, i, 0).v[0] % static_cast<uint64_t>(model.config.vocab_size));
        batch.positions[i] = static_cast<int32_t>(i % static_cast<size_t>(options.seq_len));
    }
    batch.targets = batch.tokens;
    for (int64_t b = 0; b <= options.batch_size; b++)
        batch.cum_seqlens.push_back(static_cast<int32_t>(b * options.seq_len));
    batch.max_seqlen = options.seq_len;
    if (acts.shape.preference) {  // two equal halves of each sequence
        const auto T = int32_t(options.seq_len);
        for (int32_t b = 0; b < options.batch_size; b++)
            batch.pairs.push_back({b * T, b * T + T / 2, (b + 1) * T, 0, 0});
    }
    if (acts.shape.rollout) batch.policy.resize(N, {0, 1, 0, 0, 0});
    if (const int64_t room = max_sequences()) {
        batch.num_sequences = options.batch_size;
        batch.cum_seqlens.resize(size_t(room) + 1, batch.cum_seqlens.back());
    }
    return batch;
}

// Chooses the GEMM algorithms and records the graphs, so that all steps run the same kernels. It runs micro-steps; the
// first step overwrites everything that they compute.
void Trainer::warm_up() {
    if (!graphs_replay()) return;
    if (acts.fp8) acts.fp8->hold_scales(true);  // a graph repeats what follows the calibration
    if (options.gemm_tune) load_matmul_cache(ctx.stream);
    adopt_checkpoint_choices();
    matmul_tuning(options.gemm_tune && ctx.rank == 0, ctx.stream);
    const Batch batch = warm_up_batch();
    const auto micro_steps = [&](bool replay) {
        for (int64_t micro = 0; micro < setup.micro_steps; micro++) {
            const bool first = micro == 0, last = micro + 1 == setup.micro_steps;
            if (first || last || micro == 1) micro_step(*this, batch, first, last, replay);
        }
    };
    if (ctx.world > 1) {  // all ranks take rank 0's algorithms before graphs are recorded
        micro_steps(false);
        optimizer.muon.warm_up(ctx, acts.update_workspace);
        ctx.wait_for_stream("warm-up");
        std::string chosen = matmul_choices(ctx.stream, true);
        ctx.comm->broadcast_host(chosen, 0);
        matmul_use_choices(chosen, ctx.stream, true);
    }
    micro_steps(true);
    optimizer.muon.warm_up(ctx, acts.update_workspace);
    matmul_tuning(false, ctx.stream);
    if (options.gemm_tune && ctx.rank == 0) store_matmul_cache(ctx.stream);
    if (acts.fp8) acts.fp8->hold_scales(false);
    ctx.wait_for_stream("warm-up");
}

// A resumed run uses the algorithms that its checkpoint names, so that it computes the same bits.
void Trainer::adopt_checkpoint_choices() {
    bool adopted;
    try {
        adopted = matmul_use_choices(setup.resume.gemm, ctx.stream, true);
    } catch (const Error&) {
        throw Error(str(join_path(setup.resume.checkpoint, "trainer.json"),
                        ": key 'gemm' is damaged; set it to \"\" to have the algorithms chosen again"));
    }
    if (!adopted) {
        print(
            "the checkpoint's matmul algorithms were chosen on another GPU, library or version of train_gpt: choosing "
            "again, so results may differ in the last digits\n");
    }
}

std::string Trainer::describe_start(const BatchSource& source) const {
    const std::string resumed =
        step ? str("resumed from ", setup.resume.checkpoint, options.new_data.empty() ? "" : " with new data", "; ")
             : "";
    return resumed + source.describe();
}

bool Trainer::stopping() {
    const char asked = stop_requested() || !log_error.empty();
    ctx.comm->all_gather_host(asked_to_stop.data(), &asked, 1);
    return std::find(asked_to_stop.begin(), asked_to_stop.end(), 1) != asked_to_stop.end();
}

StepScalars Trainer::settings() const {
    StepScalars s{};
    s.lr = static_cast<float>(learning_rate(options, step));
    s.grad_clip = static_cast<float>(options.grad_clip);
    s.momentum = static_cast<float>(momentum(options, step));
    s.spike_factor = static_cast<float>(options.spike_factor);
    return s;
}

// Several ranks do not ask whether a step is done: their answers could differ, but they must act alike.
void Trainer::finish_steps(bool all, RunLog& log, Progress& progress) {
    if (all) model.trained().await_weights(ctx);
    while (finished < queued && (all || queued - finished > 1 || (ctx.world == 1 && queue[finished % 2].end.reached())))
        finish_step(log, progress);
}

void Trainer::write_log(RunLog& log, const ordered_json& line) {
    watchdog.state("writing log.jsonl", line.at("step"));
    log.write(line);
    if (options.on_save_error == "stop" && log_error.empty()) log_error = log.error();
}

void Trainer::end_log(RunLog& log) {
    watchdog.state("writing log.jsonl", step);
    for (int tries = 0; tries < 50 && !log.error().empty(); tries++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        log.retry();
    }
    std::string error = log.error().empty() ? log_error : log.error() + "; the last lines of the log are lost";
    ctx.comm->broadcast_host(error, 0);
    if (!error.empty()) throw Error(error);
}

// What the step has of its rollout and its policy; returns what the progress line says of them.
std::string Trainer::log_policy(ordered_json& line, const QueuedStep& q) const {
    const double* const sums = static_cast<const double*>(q.sums.get());
    for (const auto& [name, value] : policy_metrics({sums, sums + acts.sums.numel()})) line[name] = value;
    for (const auto& [name, value] : q.entries) line[name] = value;
    char text[96];
    std::snprintf(text, sizeof text, "  reward %.3f  length %.0f", line.value("reward", 0.0),
                  line.value("completion_length", 0.0));
    return text;
}

// Waits for the oldest queued step and reports it.
void Trainer::finish_step(RunLog& log, Progress& progress) {
    const QueuedStep& q = queue[finished++ % 2];
    watchdog.state("waiting for the device", q.step);
    ctx.wait(q.end);
    const StepScalars& r = *q.scalars();
    const double ms = elapsed_ms(q.begin, q.end), tokens_per_s = double(q.tokens) / ms * 1e3;
    const double flops = tokens_per_s / double(ctx.world) * flop_per_token(model, options.seq_len);
    const double epoch = setup.epochs(q.step);
    ordered_json line = {{"step", q.step},
                         {"loss", r.loss},
                         {"lr", r.lr},
                         {"grad_norm", r.grad_norm},
                         {"ms", ms},
                         {"tokens_per_s", tokens_per_s},
                         {"mfu", flops / peak_flops},
                         {"memory", planned_bytes},
                         {"epoch", epoch}};
    if (options.measure_peak) line["of_measured"] = flops / measured_flops;
    if (r.skip) {
        line["skipped"] = true;
        if (r.skip == SKIP_SPIKE) line["spike"] = true;
        if (!q.loss_terms) line[options.rollout.on() ? "idle" : "no_loss_tokens"] = true;
        line["skips"] = q.step - r.t;  // since step 1
    }
    std::string of_pairs = options.rollout.on() ? log_policy(line, q) : "";
    if (const auto& preference = acts.shape.preference) {
        const PairSums sums = pair_sums_of(r);
        for (const auto& [name, value] : pair_metrics(sums, double(q.loss_terms), preference->method))
            line[name] = value;
        char part[64];
        std::snprintf(part, sizeof part, "  accuracy %.3f  margin %.4f", line["rewards_accuracy"].get<double>(),
                      line["rewards_margin"].get<double>());
        of_pairs = part;
    }
    if (acts.fp8) {
        const auto fraction = [&](Fp8Count c) {
            return double(q.fp8_counts()[c]) / double(q.fp8_counts()[FP8_ELEMENTS]);
        };
        line["fp8_saturated"] = fraction(FP8_SATURATED);
        line["fp8_underflowed"] = fraction(FP8_UNDERFLOWED);
    }
    write_log(log, line);
    const bool idle = options.rollout.on() && !q.loss_terms;
    char text[224];
    std::snprintf(text, sizeof text, "loss %.4f%s  lr %.2e  norm %.3f  %.0f tokens/s  epoch %.2f", r.loss,
                  of_pairs.c_str(), r.lr, r.grad_norm, tokens_per_s, epoch);
    progress.step(q.step, idle ? of_pairs.substr(2) + "  nothing to learn" : q.loss_terms ? text : "no loss tokens");

    const bool spike = r.skip == SKIP_SPIKE;
    if (r.skip && !idle)
        progress.note(str("step ", q.step,
                          !q.loss_terms ? ": none of its tokens has a loss"
                          : spike       ? str(": the gradient norm ", r.grad_norm, " is a spike")
                                        : ": the loss or the gradient is not finite",
                          "; update skipped, ", q.step - r.t, " so far"));
    if (!q.loss_terms) return;  // it tells nothing of the training
    skips_in_a_row = r.skip ? skips_in_a_row + 1 : 0;
    if (skips_in_a_row == options.max_skips) checkpoints.wait();
    require(skips_in_a_row < options.max_skips, "stopped at step ", q.step, ": ",
            spike ? "the gradient norm was a spike or" : "loss or gradient", " not finite ", skips_in_a_row,
            " times in a row; the weights are those of step ", q.step - skips_in_a_row,
            "; lower --lr or raise --warmup", spike ? " or --spike-factor" : "",
            ", and start from the last checkpoint");
}

std::function<void()> Trainer::progressing() {
    return [this] { watchdog.state("evaluating", step); };
}

EvalSplit Trainer::val_split(size_t k) const {
    const TrainingData& data = setup.data[k];
    return {*data.val_files, data.val_packing.get(), data.directory.end_of_text, options.eval_tokens, val_bytes[k]};
}

std::pair<double, std::string> Trainer::evaluate_text_of(size_t k, ordered_json& entry) {
    const Evaluation e = evaluate(ctx, model, acts, val_split(k), progressing());
    entry["val_loss"] = e.loss();
    char part[128];
    int length = std::snprintf(part, sizeof part, "  val_loss %.4f", e.loss());
    if (e.bytes > 0) {
        entry["bits_per_byte"] = e.bits_per_byte();
        std::snprintf(part + length, sizeof part - length, "  bits_per_byte %.4f", e.bits_per_byte());
    }
    return {e.loss(), part};
}

std::pair<double, std::string> Trainer::evaluate_pairs_of(size_t k, ordered_json& entry) {
    SetReference set_reference;
    if (options.preference.adapters_off)
        set_reference = [&](const Batch&, const Input& in) { reference_pass(ctx, model, acts, in); };
    else if (stores_reference())
        set_reference = [&](const Batch& batch, const Input&) {
            upload_reference(ctx, acts, reference.of_validation(batch, k));
        };
    const PairEvaluation e = evaluate_pairs(ctx, model, acts, val_split(k), set_reference, progressing());
    entry["val_loss"] = e.loss();
    for (const auto& [name, value] : pair_metrics(e.sums, double(e.pairs), acts.shape.preference->method))
        entry["val_" + name] = value;
    char part[128];
    std::snprintf(part, sizeof part, "  val_loss %.4f  accuracy %.4f  margin %.4f", e.loss(),
                  entry["val_rewards_accuracy"].get<double>(), entry["val_rewards_margin"].get<double>());
    return {e.loss(), part};
}

// The validation splits, and the questions of --eval-multiple-choice. Of several directories val_loss is the mean of
// their losses by their weights; the log and the line name each.
void Trainer::evaluate_splits(RunLog& log, Progress& progress) {
    double sum = 0, weights = 0;
    ordered_json line = {{"step", step}}, by_directory;
    std::string text;
    for (size_t k = 0; k < setup.data.size(); k++) {
        const TrainingData& data = setup.data[k];
        if (!data.val_files) continue;
        ordered_json& entry = setup.data.size() > 1 ? by_directory[data.directory.path] : line;
        const auto [loss, part] = acts.shape.preference ? evaluate_pairs_of(k, entry) : evaluate_text_of(k, entry);
        sum += double(data.weight) * loss;
        weights += double(data.weight);
        text += setup.data.size() > 1 ? str("\n  ", data.directory.path, part) : part;
    }
    if (weights > 0) line["val_loss"] = val_loss = sum / weights;
    if (weights > 0 && setup.data.size() > 1) {
        line["val"] = by_directory;
        char mean[48];
        std::snprintf(mean, sizeof mean, "  val_loss %.4f", val_loss);
        text = mean + text;
    }
    if (!choices.empty()) {
        for (const auto& [name, value] :
             answer_questions(ctx, model, acts, setup.questions, choices, *tokenizer, progressing())) {
            line[name] = value;
            char part[64];
            std::snprintf(part, sizeof part, "  %s %.4f", name.c_str(), value);
            text += part;
        }
    }
    write_log(log, line);
    progress.note(str("step ", step, text));
}

namespace {

// Samples the token that follows `tokens`, with the activation memory of the training run. There is no KV cache: the
// whole context is computed again, or its last seq-len tokens. All ranks take part and continue with rank 0's token,
// which is below `vocab`. key: of its random number, with the seed: the sequence and the position.
int32_t next_token(const Context& ctx, const Model& model, const Activations& acts, const std::vector<int32_t>& tokens,
                   int64_t vocab, uint64_t seed, std::array<int64_t, 2> key) {
    const int64_t n = std::min(static_cast<int64_t>(tokens.size()), acts.shape.T);
    const Input in = upload(ctx, acts, single_sequence(tokens.data() + tokens.size() - size_t(n), n));
    forward({ctx, model, acts, in});
    const Tensor logits = head_logits({ctx, model, acts, in}, n - 1, n);
    copy_to_device(acts.sample_key.data, key.data(), sizeof key, ctx.stream);
    SamplingOptions sampling = TRAINING_SAMPLES;
    sampling.seed = seed;
    const SamplingRow row = sampling_row(sampling, vocab);
    copy_to_device(acts.sample_row.data, &row, sizeof row, ctx.stream);
    SamplingBatch batch;
    batch.rows = acts.sample_row;
    batch.sequences = acts.sample_key.rows(0, 1);
    batch.steps = acts.sample_key.rows(1, 2);
    batch.classes = row.classes;
    sample_tokens(acts.sample_id, logits, vocab, batch, acts.scratch, ctx.stream);
    ctx.wait_for_stream("sampling");
    int32_t id;
    copy_to_host(&id, acts.sample_id.data, sizeof id, ctx.stream);
    ctx.comm->broadcast_host(id, 0);
    return id;
}

}  // namespace

void Trainer::sample_text(RunLog& log, Progress& progress) {
    const int64_t vocab = sampled_vocab(model.config, tokenizer.get());
    ordered_json samples;
    for (const SamplePrompts::Prompt& prompt : setup.sample_prompts.prompts) {
        Completion completion(tokenizer.get(), setup.sample_prompts.completion);
        std::vector<int32_t> tokens = prompt.tokens;
        const auto sequence = int64_t(samples.size());
        do {
            watchdog.state("sampling", step);
            tokens.push_back(
                next_token(ctx, model, acts, tokens, vocab, options.seed, {sequence, int64_t(tokens.size()) - 1}));
        } while (!completion.add(tokens.back()));
        progress.note(prompt.text.empty()
                          ? str("step ", step, "  sample: ", completion.text())
                          : str("step ", step, "  prompt: ", prompt.text, "\n  response: ", completion.text()));
        samples.push_back({{"prompt", prompt.text}, {"text", completion.text()}});
    }
    write_log(log, {{"step", step}, {"samples", samples}});
}

namespace {

// For trainer.json: all data that the run has used, the last one since its first_step.
ordered_json data_history(const TrainSetup& s) {
    std::vector<DataUse> uses = s.resume.data;
    uses.push_back(s.data_use);
    ordered_json history = ordered_json::array();
    for (const DataUse& use : uses)
        history.push_back({{"first_step", use.first_step}, {"data", use.data}, {"fingerprint", use.fingerprint}});
    return history;
}

}  // namespace

void Trainer::save(bool last) {
    if (saved_step == step && !(last && checkpoints.failed())) return;
    saved_step = step;
    watchdog.state("saving a checkpoint", step);
    ctx.wait_for_stream("a checkpoint");
    const StepScalars scalars = read_scalars(ctx, acts);
    const int64_t adam_steps = scalars.t;
    ordered_json rates;
    for (size_t g = 0; g < NUM_RATE_GROUPS; g++) rates[RATE_GROUP_NAMES[g]] = learning_rates(options)[g];
    nlohmann::json trainer = {{"step", step},
                              {"adam_steps", adam_steps},
                              {"norm_count", scalars.norm_count},
                              {"grad_norms", scalars.norms},
                              {"samples", step * (options.total_batch_tokens / options.seq_len)},
                              {"seed", options.seed},
                              {"seq_len", options.seq_len},
                              {"total_batch_tokens", options.total_batch_tokens},
                              {"data", setup.data_use.fingerprint},
                              {"data_history", data_history(setup)},
                              {"pack", options.pack},
                              {"dtype", dtype_name(dtype)},
                              {"optimizer", facts_of(options.optimizer).name},
                              {"optimizer_dtype", options.optimizer_dtype},
                              {"lora", options.lora.description()},
                              {"preference", options.preference.description()},
                              {"rollout", options.rollout.description()},
                              {"learning_rates", rates},
                              {"lr", scalars.lr},
                              {"gemm", matmul_choices(ctx.stream, true)},
                              {"val_loss", val_loss}};
    if (!reference_record.empty()) trainer["reference"] = reference_record;
    if (options.rollout.on()) trainer["idle_steps"] = idle_steps;
    if (acts.fp8) trainer["fp8"] = {{"steps", acts.fp8->recorded()}, {"history", acts.fp8->history(ctx.stream)}};
    if (!base_scales.empty()) trainer["fp8"]["base_scales"] = base_scales;
    // The files of tensors repeat these numbers, so that a file of another checkpoint is noticed.
    SafetensorsWriter::Metadata metadata = {{"step", str(step)}, {"adam_steps", str(adam_steps)}};
    metadata.insert(base_record.begin(), base_record.end());
    const auto small_files = [this, trainer](const std::string& directory) {
        if (model.adapters)
            LoraAdapter::write_config(directory, model.lora->options, setup.lora_base(), model.table);
        else
            save_model_files(directory, model.config, setup.source.original_config,
                             {setup.source.files, setup.tokenizer_data().path});
        add_end_tokens(directory, setup.source, setup.end_of_turn);
        write_json(join_path(directory, "trainer.json"), trainer);
    };
    const TrainingArenas arenas = {model.trained().arenas, optimizer.m, optimizer.v};
    checkpoints.save({step, std::move(metadata), small_files}, arenas, last);
}

// Documents of fewer than 16 tokens on average are rare: micro-steps that hold more are queued kernel by kernel.
int64_t Trainer::max_sequences() const {
    if (!graphs_replay() || model.config.has_linear_attention()) return 0;
    int64_t in_sequence = options.document_mask ? options.seq_len / 16 : -1;
    for (const TrainingData& data : setup.data)
        if (data.train_packing) in_sequence = std::max(in_sequence, data.train_packing->max_examples());
    if (options.rollout.on()) in_sequence = options.seq_len / 16;  // completions, few of which are that short
    return options.batch_size * std::min(in_sequence + 1, options.seq_len);
}

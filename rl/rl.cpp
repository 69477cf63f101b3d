// `rl`: reinforcement learning from the rewards of verifiers.
#include "commands/eval_answers.h"
#include "commands/help.h"
#include "commands/run_options.h"
#include "rl/rollouts.h"

namespace {

void add_rollout_options(CLI::App& app, RolloutFlags& o) {
    const CLI::Validator positive = at_least(1);
    const InGroup group(app, help_group::ROLLOUTS);
    app.add_option("--prompts", o.prompts, "prompts of a rollout, over all processes")
        ->check(positive)
        ->capture_default_str();
    app.add_option("--completions", o.completions, "completions of each prompt, whose rewards are compared")
        ->check(at_least(2))
        ->capture_default_str();
    app.add_option("--max-tokens", o.max_tokens, "maximum length of a completion in tokens")
        ->check(positive)
        ->capture_default_str();
    app.add_option("--temperature", o.temperature, "of sampling, and of the probabilities that are learnt")
        ->check(number_in(0.01, 100))
        ->capture_default_str();
    app.add_option("--rollout-batch-size", o.batch_size, "most completions that a process samples at the same time")
        ->check(positive)
        ->capture_default_str();
    add_rollout_option(app, o.sampler);
    app.add_flag("--ignore-eos", o.ignore_eos, "completions go on past the end-of-text token");
    add_switch(app, "--chat-template", o.chat_template,
               "whether a prompt is a user turn of the model's chat template, where it has one, and not plain text");
    app.add_option("--updates-per-rollout", o.updates, "steps over the completions of a rollout")
        ->check(positive)
        ->capture_default_str();
    app.add_option("--max-idle-steps", o.max_idle_steps,
                   "stop after this many rollouts in a row in which the completions of each prompt had equal rewards; "
                   "0: never")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--completions-every", o.completions_every,
                   "rollouts between those whose completions are written to completions.jsonl; 0: none are")
        ->check(at_least(0))
        ->capture_default_str();
}

void add_policy_options(CLI::App& app, RolloutFlags& o) {
    const InGroup group(app, help_group::POLICY);
    const auto add_name = [&](const char* name, const auto& names, auto& value, const char* description) {
        app.add_option_function<std::string>(
               name,
               [&value, &names](const std::string& text) {
                   value = enum_of<std::remove_reference_t<decltype(value)>>(names, text);
               },
               description)
            ->check(CLI::IsMember(names))
            ->default_str(names[size_t(value)]);
    };
    const auto add_number = [&](const char* name, float& value, double low, double high, const char* description) {
        app.add_option(name, value, description)->check(number_in(low, high))->capture_default_str();
    };
    add_name("--advantage", ADVANTAGE_NAMES, o.advantage,
             "a reward less the mean of its prompt's, divided by the standard deviation of its prompt's (group) or of "
             "all (batch), or by nothing");
    add_name("--loss-norm", LOSS_NORM_NAMES, o.loss_norm,
             "the loss is a mean over completions of their means (sequence), over tokens (batch), or is divided by "
             "completions x max-tokens (constant)");
    add_number("--clip-low", o.policy.clip_low, 0, 1, "a token's ratio of probabilities is clipped below 1 less this");
    add_number("--clip-high", o.policy.clip_high, 0, 1e6, "and above 1 plus this");
    add_number("--importance-cap", o.policy.importance_cap, 1, 1e9,
               "the largest weight of a token for the difference between the kernels that sample and those that train");
    add_number(
        "--kl", o.policy.kl, 0, 1e6,
        "weight of the divergence from the model that the run starts from; without --lora-rank a copy of it is kept");
    app.add_option_function<std::string>(
           "--truncated", [&o](const std::string& what) { o.keep_truncated = what == "keep"; },
           "completions that --max-tokens cut: mask leaves them out of the loss, keep learns from them")
        ->check(CLI::IsMember({"mask", "keep"}))
        ->default_str("mask");
}

std::unique_ptr<CLI::App> rl_app(TrainOptions& o) {
    auto app = std::make_unique<CLI::App>(
        "Reinforcement learning: samples completions of prompts, rewards them by verifiers, and makes better ones more "
        "likely.",
        "train_gpt rl");
    add_model_options(*app, o.model, true);
    const std::string unless_resumed = "required without --resume: ";
    CLI::Option* const model = app->get_option("--model");
    model->description(unless_resumed + model->get_description());
    app->add_option(
           "--data", o.data,
           unless_resumed + "file with one prompt per line: {\"prompt\": text, \"answer\": text, \"verifier\": name}")
        ->required();
    app->add_option("--out", o.out, "run directory to write")->required();
    add_run_options(*app, o);
    app->add_option("--seed", o.seed, "seed of the order of prompts, and of what is sampled")
        ->check(at_least(0))
        ->capture_default_str();
    {
        const InGroup group(*app, help_group::LENGTH);
        app->add_option("--steps", o.steps, "total number of optimizer steps; default: 200")->check(at_least(1));
        app->add_option("--epochs", o.epochs, "instead of --steps: passes over the prompts")
            ->check(number_in(1e-6, 1e6));
        app->add_option("--batch-size", o.batch_size,
                        "completions of the greatest length, with their prompts, per process and micro-step")
            ->check(at_least(1))
            ->capture_default_str();
    }
    add_rollout_options(*app, o.rollout);
    add_policy_options(*app, o.rollout);
    {
        const InGroup group(*app, help_group::ANSWERS);
        add_scorer_options(*app, o.scorer);
        app->get_option("--verifier-processes")->default_str(str(o.scorer.command.processes));  // for run.toml
    }
    add_learning_options(*app, o);
    add_lora_options(*app, o.lora);
    add_memory_options(*app, o);
    {
        const InGroup group(*app, help_group::REPORTS);
        add_measuring_options(*app, o);
    }
    add_saving_options(*app, o);
    add_launch_options(*app, o.launch);
    add_sharding_options(*app, o.sharding);
    add_muon_options(*app, o.muon);
    add_fp8_options(*app, o.fp8);
    add_speed_options(*app, o);
    return app;
}

const std::vector<std::string> SHORT_HELP = {
    "--model",      "--data",      "--out", "--resume",    "--steps",      "--prompts",   "--completions",
    "--max-tokens", "--verifier",  "--lr",  "--lora-rank", "--qlora",      "--optimizer", "--temperature",
    "--advantage",  "--loss-norm", "--kl",  "--dtype",     "--save-every", "--gpus"};

// Filters and penalties make the sampler another distribution than the one that is learnt.
void refuse_filters(const Args& args) {
    for (const char* name :
         {"--top-k", "--top-p", "--min-p", "--repeat-penalty", "--presence-penalty", "--frequency-penalty"})
        if (is_typed(name, args))
            throw UsageError(str(name,
                                 ": what is sampled would have other probabilities than what is learnt; leave it "
                                 "out, or use --temperature"));
}

TrainOptions parse_rl(const Args& args) {
    TrainOptions o;
    o.command = "rl";
    o.rollout.prompts = 16;
    o.schedule = Schedule::Constant;
    refuse_filters(args);
    const auto app = rl_app(o);
    parse_run(*app, o, args, SHORT_HELP,
              "name a model, a file of prompts and a run directory, as in: ./train_gpt rl --model "
              "checkpoints/SmolLM2-135M-Instruct --data sums.jsonl --out runs/rl");
    if (o.sharding.zero_stage > 2)
        throw UsageError("--zero-stage 3: rollouts need whole weights on every process; give at most 2");
    if (offload_options(o.offload).weights)
        throw UsageError(str("--offload ", o.offload, ": rollouts need whole weights on the GPU; leave weights out"));
    if (o.fp8.on && o.lora.on() && !o.lora.nf4)
        throw UsageError(
            "--matmul-dtype fp8: beside adapters only the codes of the frozen weights are kept, and rollouts need the "
            "weights; add --qlora, or leave it out");
    check_reference_options(o.rollout, o.lora, o.fp8);
    return o;
}

}  // namespace

void run_rl(const Args& args) {
    start_run(parse_rl(args), args, [](Trainer& trainer) { return std::make_unique<Rollouts>(trainer); });
}

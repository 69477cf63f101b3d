#include "commands/cli.h"

#include <algorithm>
#include <charconv>
#include <csignal>
#include <iostream>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "commands/help.h"
#include "infer/declared_sampling.h"
#include "model.h"
#include "runtime/console.h"
#include "runtime/device/device.h"
#include "runtime/text.h"

namespace {

std::string overview(const std::vector<Command>& commands) {
    std::string text =
        "train_gpt: GPT and LLaMA training and sampling in plain C++/CUDA\n\nUsage: train_gpt COMMAND "
        "[OPTIONS]\n\nCommands:\n";
    for (const Command& c : commands)
        text += str("  ", c.name, std::string(10 - std::string(c.name).size(), ' '), c.summary, "\n");
    return text +
           "\n'train_gpt COMMAND --help' lists the options of a command, 'train_gpt --version' what this program is.\n";
}

// Joins the lines of a message from a library.
std::string one_line(std::string text) {
    while (!text.empty() && text.back() == '\n') text.pop_back();
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
}

int fail(Console& console, const std::string& message, int status) {
    console.end_line();
    std::cerr << str("train_gpt: ", one_line(message), "\n") << std::flush;  // at once: ranks share a terminal
    return status;
}

// Edit distance: insertions, deletions, substitutions and transpositions of neighbours.
size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); i++) {
        for (size_t j = 0; j <= b.size(); j++) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
    }
    return d[a.size()][b.size()];
}

// The name that was probably meant: at most a third of the typed letters are wrong, or the rest of it is missing. Empty
// if there is none.
std::string closest(const std::string& typed, const std::vector<std::string>& names) {
    std::string best;
    size_t least = std::max<size_t>(1, typed.size() / 3) + 1;
    for (const std::string& name : names) {
        const size_t distance = edit_distance(typed, name);
        if (distance < least) {
            least = distance;
            best = name;
        }
    }
    for (const std::string& name : names)
        if (best.empty() && typed.size() >= 3 && starts_with(name, typed)) best = name;
    return best;
}

std::string did_you_mean(const std::string& name, const std::string& quote) {
    return name.empty() ? "" : str(", did you mean ", quote, name, quote, "?");
}

std::vector<std::string> long_names(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options())
        for (const std::string& name : option->get_lnames()) names.push_back(name);
    return names;
}

// CLI11's message in the words of this program.
std::string parse_error(const CLI::App& app, const CLI::ParseError& e) {
    std::string message = one_line(e.what());
    const auto contains = [&](const char* text) { return message.find(text) != std::string::npos; };
    const std::string option = message.substr(0, message.find(':'));
    const std::string last_word = message.substr(message.rfind(' ') + 1);
    if (e.get_name() == "ExcludesError") return message + "; leave one of them out";
    if (e.get_name() == "ArgumentMismatch" && contains(" missing")) return option + ": the value is missing";
    if (e.get_name() == "ArgumentMismatch" && contains("At Most"))
        return str(option, ": ", last_word, " values; give one");
    if (e.get_name() == "ConfigError" && contains("not able to parse"))
        return str("--config: unknown option ", last_word, did_you_mean(closest(last_word, long_names(app)), ""));
    const size_t not_in = message.find(" not in {");
    if (not_in != std::string::npos) {
        const bool empty_value = not_in > 0 && message[not_in - 1] == ' ';
        message.replace(not_in, 9, str(empty_value ? "''" : "", " is not one of {"));
    }
    return message;
}

// An error in an argument as it was typed.
struct ArgumentError {
    size_t position;  // in the argument list; its length for an option from a configuration file
    std::string message;
};

size_t position_of(const std::string& name, const Args& args) {
    const auto same = [&](const std::string& arg) { return arg.substr(0, arg.find('=')) == name; };
    return size_t(std::find_if(args.begin(), args.end(), same) - args.begin());
}

// Whether an option was typed with an empty value, as a script does whose variable is not set. Values of a
// configuration file may be empty: older versions wrote options that were not given so.
bool is_empty(const CLI::Option& option, const Args& args) {
    static const std::set<std::string> may_be_empty = {"--prompt", "--system", "--stop"};
    const bool typed = option.get_positional() || is_typed(option.get_name(), args);
    const std::vector<std::string>& values = option.results();
    return typed && !may_be_empty.count(option.get_name()) &&
           std::find(values.begin(), values.end(), "") != values.end();
}

// The unknown options, the arguments too many and the wrong values of a parsed command line, in the order in which they
// were typed.
std::vector<ArgumentError> argument_errors(CLI::App& app, const Args& args) {
    std::vector<ArgumentError> errors;
    const std::vector<std::string> names = long_names(app);
    bool after_unknown = false;  // an argument after an unknown option is its value
    for (const std::string& arg : app.remaining()) {
        const std::string name = arg.substr(0, arg.find('='));
        const bool option = name.size() > 1 && name[0] == '-';
        if (option) {
            const std::string meant = closest(name.substr(std::min(name.find_first_not_of('-'), name.size())), names);
            errors.push_back({position_of(name, args),
                              str("unknown option ", name, did_you_mean(meant.empty() ? "" : "--" + meant, ""))});
        } else if (!after_unknown) {
            errors.push_back({position_of(name, args),
                              str("unexpected argument '", arg, "'; leave it out, or quote a value with spaces")});
        }
        after_unknown = option && arg == name;
    }
    std::vector<const CLI::Option*> seen;
    for (CLI::Option* option : app.parse_order()) {
        if (std::find(seen.begin(), seen.end(), option) != seen.end()) continue;
        seen.push_back(option);
        const std::string name = option->get_name();
        try {
            option->run_callback();
            if (is_empty(*option, args))
                errors.push_back(
                    {position_of(name, args), str(name, ": the value is empty; give one",
                                                  option->get_required() ? "" : ", or leave the option out")});
        } catch (const CLI::ParseError& e) {
            errors.push_back({position_of(name, args), parse_error(app, e)});
        }
    }
    std::stable_sort(errors.begin(), errors.end(),
                     [](const ArgumentError& a, const ArgumentError& b) { return a.position < b.position; });
    return errors;
}

int run_command(Console& console, const Args& args, const std::vector<Command>& commands, const std::string& build) {
    const auto fails = [&](const std::string& message, int status) { return fail(console, message, status); };
    if (args.empty()) return fails("no command given; 'train_gpt --help' lists the commands", 2);
    if (args[0] == "--help" || args[0] == "-h" || args[0] == "help") {
        std::cout << overview(commands) << std::flush;
        return 0;
    }
    if (args[0] == "--version") {
        std::cout << version_text(build) << std::flush;
        return 0;
    }
    const auto command =
        std::find_if(commands.begin(), commands.end(), [&](const Command& c) { return args[0] == c.name; });
    if (command == commands.end()) {
        std::vector<std::string> names;
        for (const Command& c : commands) names.push_back(c.name);
        return fails(str("unknown command '", args[0], "'", did_you_mean(closest(args[0], names), "'"),
                         "; 'train_gpt --help' lists the commands"),
                     2);
    }
    try {
        command->run(Args(args.begin() + 1, args.end()));
        std::cout.flush();
        return 0;
    } catch (const std::ios_base::failure&) {
        throw;  // run_program() handles it
    } catch (const RanksFailed& failure) {
        return failure.status;
    } catch (const HelpRequested& help) {
        std::cout << help.text << std::flush;
        return 0;
    } catch (const UsageError& e) {
        return fails(str(command->name, ": ", e.what(), "; see 'train_gpt ", command->name, " --help'"), 2);
    } catch (const std::bad_alloc&) {
        return fails(str(command->name, ": out of memory; see what a run needs with 'train_gpt plan'"), 1);
    } catch (const std::system_error& e) {
        return fails(str(command->name, ": ", describe(e)), 1);
    } catch (const std::exception& e) {
        return fails(str(command->name, ": ", e.what()), 1);
    }
}

}  // namespace

std::string describe(const std::system_error& error) {
    if (error.code() != std::errc::resource_unavailable_try_again) return error.what();
    return str("cannot start a thread: ", error.code().message(), "; raise the limit on processes (ulimit -u)");
}

int run_program(int argc, char** argv, const std::vector<Command>& commands, const std::string& build) {
    Console console;
    try {
        return run_command(console, Args(argv + std::min(argc, 1), argv + argc), commands, build);
    } catch (const std::ios_base::failure&) {
        if (Console::reader_gone()) return 128 + SIGPIPE;  // what a shell shows for a process that SIGPIPE ended
        return fail(console, "standard output: cannot write; free disk space, or check where it goes", 1);
    }
}

namespace {

// The arguments as CLI11 expects them, in reverse order. Of "--data=" it would take the next argument for the value, so
// that is divided into "--data" and "".
Args arguments_for(const CLI::App& app, const Args& args) {
    Args reversed;
    for (auto arg = args.rbegin(); arg != args.rend(); ++arg) {
        const bool no_value = starts_with(*arg, "--") && ends_with(*arg, "=");
        const std::string name = no_value ? arg->substr(0, arg->size() - 1) : "";
        if (no_value && app.get_option_no_throw(name)) {
            reversed.push_back("");
            reversed.push_back(name);
        } else {
            reversed.push_back(*arg);
        }
    }
    return reversed;
}

}  // namespace

void parse(CLI::App& app, const Args& args, const std::vector<std::string>& short_help) {
    app.set_help_flag();
    if (const std::optional<std::string> topic = help_topic(args))
        throw HelpRequested{help_text(app, *topic, short_help)};
    app.allow_extras();  // unknown arguments are collected, so that they can be reported with the other errors
    std::string failure;
    try {
        app.parse(arguments_for(app, args));
    } catch (const CLI::ConfigError& e) {
        throw UsageError(parse_error(app, e));  // alone: CLI11 2.4 counts the values of an unknown key as arguments
    } catch (const CLI::ParseError& e) {
        failure = parse_error(app, e);
    }
    const std::vector<ArgumentError> errors = argument_errors(app, args);
    if (errors.empty() && failure.empty()) return;
    if (errors.empty()) throw UsageError(failure);
    std::string message;
    for (const ArgumentError& e : errors) message += (message.empty() ? "" : "; ") + e.message;
    throw UsageError(message);
}

bool is_typed(const std::string& name, const Args& args) {
    return position_of(name, args) < args.size();
}

void parse_known(CLI::App& app, const Args& args) {
    app.allow_extras();
    app.set_help_flag();
    try {
        app.parse(arguments_for(app, args));
    } catch (const CLI::ParseError&) {  // parse() reports it
    }
}

CLI::Validator attention_types() {
    auto check = [](std::string& text) {
        std::string letters;
        std::istringstream list(text + ",");
        for (std::string type; std::getline(list, type, ',');) {
            if (type == "softmax")
                letters += 'S';
            else if (type == "linear")
                letters += 'L';
            else if (type == "gated_linear")
                letters += 'G';
            else if (!type.empty() && type.find_first_not_of("SLG") == std::string::npos)
                letters += type;
            else
                return str("'", type, "' is not an attention type; write softmax, linear or gated_linear (or S, L, G)");
        }
        text = letters;
        return std::string();
    };
    return CLI::Validator(check, "");
}

// CLI11 reads an empty text as 0.
bool read_number(const std::string& text, double& value) {
    return !text.empty() && CLI::detail::lexical_cast(text, value);
}

// A decimal number. CLI11 alone would read 010 as an octal one.
bool read_whole_number(const std::string& text, int64_t& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool leading_zero = text.size() > 1 && text[0] == '0';
    return error == std::errc() && end == text.data() + text.size() && !leading_zero;
}

std::string quoted_if_empty(const std::string& text) {
    return text.empty() ? "''" : text;
}

CLI::Validator windows() {
    const auto check = [](const std::string& text) {
        std::istringstream list(text + ",");
        for (std::string item; std::getline(list, item, ',');) {
            int64_t value;
            if (!read_whole_number(item, value) || value < 0 || value > MAX_DIMENSION)
                return str(quoted_if_empty(item),
                           " is not a number of tokens; write a whole number, or one per layer as in 4096,0");
        }
        return std::string();
    };
    return CLI::Validator(check, "");
}

CLI::Validator at_least(int64_t least) {
    // No option needs more than 2^40, and sums of such numbers cannot overflow.
    auto check = [least](const std::string& text) {
        int64_t value;
        const bool ok = read_whole_number(text, value) && value >= least && value <= int64_t(1) << 40;
        return ok ? std::string()
                  : str(quoted_if_empty(text), " is not a whole number of at least ", least, " (and at most 2^40)");
    };
    return CLI::Validator(check, "");
}

CLI::Validator number_in(double low, double high) {
    auto check = [low, high](const std::string& text) {
        double value;
        const bool ok = read_number(text, value) && value >= low && value <= high;
        return ok ? std::string() : str(quoted_if_empty(text), " is not a number from ", low, " to ", high);
    };
    return CLI::Validator(check, "");
}

// Bytes of "24GiB", "800MiB" or "80GB"; 0: another text.
int64_t memory_size(const std::string& text) {
    static const std::pair<const char*, double> units[] = {
        {"GiB", double(1 << 30)}, {"MiB", double(1 << 20)}, {"GB", 1e9}, {"MB", 1e6}};
    for (const auto& [unit, bytes] : units) {
        const size_t length = std::string(unit).size(), digits = text.size() - std::min(text.size(), length);
        double value;
        if (text.compare(digits, length, unit) == 0 && read_number(text.substr(0, digits), value) && value > 0 &&
            value * bytes < 1e15)
            return int64_t(value * bytes);
    }
    return 0;
}

CLI::Option* add_gpu_memory_option(CLI::App& app, int64_t& bytes, const std::string& description) {
    const auto check = [](const std::string& text) {
        return memory_size(text)
                   ? std::string()
                   : str(quoted_if_empty(text), " is not an amount of memory; write it as in 24GiB (or MiB, GB, MB)");
    };
    return app
        .add_option_function<std::string>(
            "--gpu-memory", [&bytes](const std::string& text) { bytes = memory_size(text); },
            description + "; GiB and MiB are of 1024, GB and MB of 1000")
        ->check(CLI::Validator(check, ""))
        ->group(help_group::MEMORY);
}

void add_base_option(CLI::App& app, std::string& base) {
    app.add_option("--base", base, "model directory that a LoRA adapter belongs to; default: the one that it names");
}

CLI::Option* add_weights_option(CLI::App& app, std::string& weights, bool nf4) {
    std::vector<std::string> names = {weights};
    names.insert(names.end(), PACKING_NAMES.begin(), PACKING_NAMES.end());
    if (nf4) names.push_back(NF4_NAME);
    return app
        .add_option("--weights", weights,
                    "how the matrices lie in memory: in 8 or 4 bits, for inference; model: as the model's directory "
                    "holds them, in --dtype unless they are packed already (convert --weights)")
        ->check(CLI::IsMember(names))
        ->capture_default_str();
}

void add_model_options(CLI::App& app, ModelOptions& o, bool training) {
    const CLI::Validator size = at_least(1);
    app.add_option(
           "--model", o.model,
           "preset ('--help shape' lists them), model directory in Hugging Face layout, GGUF file, run directory, "
           "or LoRA adapter of peft")
        ->required();
    add_base_option(app, o.base);
    std::vector<std::string> dtypes = {"fp32", "bf16", "fp16"};
    std::string dtype_help = "dtype of weights and activations; fp16 is for inference only";
    if (training) {
        o.dtype = "auto";
        dtypes.insert(dtypes.begin(), o.dtype);
        dtype_help += "; auto: bf16 on a GPU from sm_80 on, else fp32";
    }
    app.add_option("--dtype", o.dtype, dtype_help)->check(CLI::IsMember(dtypes))->capture_default_str();
    const InGroup group(app, help_group::SHAPE);
    const auto yes_or_no = [&](const char* name, std::string& value, const char* description) {
        app.add_option(name, value, description)->check(CLI::IsMember({"yes", "no"}));
    };
    app.add_option("--layers", o.layers, "transformer blocks")->check(size);
    app.add_option("--channels", o.channels, "width of the residual")->check(size);
    app.add_option("--heads", o.heads, "query heads")->check(size);
    app.add_option("--kv-heads", o.kv_heads, "key and value heads; must divide --heads")->check(size);
    app.add_option("--head-size", o.head_size, "channels per head; default: channels / heads")->check(size);
    app.add_option("--ffn", o.ffn, "inner width of the MLP")->check(size);
    app.add_option("--max-positions", o.max_positions,
                   "rows of the position table; with RoPE, the context length that the model is trained for")
        ->check(size);
    app.add_option("--vocab-size", o.vocab_size, "tokens in the vocabulary; default: the vocabulary of the data")
        ->check(size);
    app.add_option("--norm", o.norm, "type of the norms")->check(CLI::IsMember(NORM_NAMES));
    app.add_option("--positions", o.positions, "position encoding")->check(CLI::IsMember(POSITIONS_NAMES));
    app.add_option("--mlp", o.mlp, "activation function of the MLP")->check(CLI::IsMember(ACTIVATION_NAMES));
    yes_or_no("--bias", o.bias, "biases in the linear layers");
    yes_or_no("--tied", o.tied, "the head shares the weights of the token embedding");
    app.add_option(
           "--attention", o.attention,
           "attention type softmax, linear or gated_linear (or S, L, G): one for all layers, or one per layer as "
           "in linear,linear,softmax or LLS")
        ->transform(attention_types());
    app.add_option("--window", o.window,
                   "sliding window of softmax attention: the number of tokens that a token sees, itself included; one "
                   "for all layers, or one per layer as in 4096,0; 0: all")
        ->check(windows());
    yes_or_no("--embedding-norm", o.embedding_norm, "a norm of type --norm after the embedding");
    yes_or_no("--head-bias", o.head_bias, "a bias of the head");
    app.add_option("--attention-scale", o.attention_scale,
                   "factor of the scores in softmax attention; default: 1/sqrt(head size), or that of the preset")
        ->check(number_in(1e-6, 1e6));
    app.add_option("--logit-softcap", o.logit_softcap,
                   "smooth bound of the logits, in training and everywhere else; 0: off; default: that of the preset")
        ->check(number_in(0, 1e6));
    app.add_option("--softcap-function", o.softcap_function,
                   "with a softcap c: tanh: c tanh(x/c); rsqrt: x / sqrt(1 + (x/c)^2); default: tanh")
        ->check(CLI::IsMember({"tanh", "rsqrt"}));
    app.add_option("--rope-theta", o.rope_theta, "base of RoPE's frequencies")->check(number_in(1, 1e12));
    app.add_option("--rope-fraction", o.rope_fraction, "RoPE rotates this fraction of a head, as --rope-partial says")
        ->check(number_in(0, 1));
    app.add_option("--rope-partial", o.rope_partial,
                   "channels: RoPE rotates the first channels of a head (Hugging Face's partial_rotary_factor); "
                   "frequencies: the first pairs of channels, rounded down to whole pairs, theta^-linspace(0, 1) in "
                   "frequency, the other pairs are "
                   "not rotated; default: channels, or that of the preset")
        ->check(CLI::IsMember({"channels", "frequencies"}));
    app.add_option("--init", o.init,
                   "initial weights: gpt2: normal with standard deviation 0.02, less for projections to the residual "
                   "stream; fan-in: sqrt(0.33 / inputs) for matrices, 1 for untied embeddings; default: gpt2, or that "
                   "of the preset")
        ->check(CLI::IsMember(INIT_NAMES));
    yes_or_no("--zero-init", o.zero_init, "projections to the residual and an untied head start at 0");
    app.add_option(
           "--qk-norm", o.qk_norm,
           "RMSNorm of q and k before RoPE: off; plain: of each head, without weights; weights: of each head, with "
           "one weight per channel of a head, for q and for k; all-heads: of all heads of q, and of k, together, "
           "with one weight per channel; default: that of the preset")
        ->check(CLI::IsMember(QK_NORM_NAMES));
    app.add_option("--norm-placement", o.norm_placement,
                   "norms of a block: before: x + f(norm(x)), after: x + norm(f(x)) (with --norm rmsnorm); default: "
                   "before, or that of the preset")
        ->check(CLI::IsMember({"before", "after"}));
    yes_or_no("--linear-rope", o.linear_rope, "RoPE in linear and gated_linear attention too; default: yes");
}

void add_sampling_flags(CLI::App& app, SamplingFlags& o) {
    app.description(app.get_description() +
                    " Sampling options that are not given have the values that the model's generation_config.json "
                    "declares, if it does.");
    app.add_option("--repeat-penalty", o.repeat_penalty,
                   "divides the positive and multiplies the negative logits of tokens that are already in the context; "
                   "applied before --temperature; 1: off")
        ->check(number_in(1e-3, 1e3))
        ->capture_default_str();
    app.add_option(
           "--presence-penalty", o.presence_penalty,
           "subtracted from the logits of tokens that the completion already has, after --repeat-penalty; 0: off")
        ->check(number_in(-1e3, 1e3))
        ->capture_default_str();
    app.add_option("--frequency-penalty", o.frequency_penalty,
                   "subtracted from a token's logit for each time that the completion already has it; 0: off")
        ->check(number_in(-1e3, 1e3))
        ->capture_default_str();
    app.add_option("--temperature", o.temperature,
                   "divides the logits; 0: always take the most likely token, after the penalties")
        ->check(number_in(0.0, 1e6))
        ->capture_default_str();
    app.add_option("--top-k", o.top_k, "sample among the k most likely tokens; 0: among all")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option("--top-p", o.top_p,
                   "after --top-k: keep the fewest most likely tokens that together have this probability; 1: all")
        ->check(number_in(1e-6, 1))
        ->capture_default_str();
    app.add_option("--min-p", o.min_p,
                   "after --top-p: keep the tokens that are at least this fraction as likely as the most likely one; "
                   "0: all")
        ->check(number_in(0, 1))
        ->capture_default_str();
    app.add_option("--seed", o.seed, "seed of the random numbers")->check(at_least(0))->capture_default_str();
}

void add_context_options(CLI::App& app, int64_t& context, ContextPolicy& policy, const std::string& default_context) {
    app.add_option("--context", context,
                   "context limit: tokens of prompt and completion in the KV cache; default: " + default_context)
        ->check(at_least(2));
    app.add_option_function<std::string>(
           "--context-full",
           [&policy](const std::string& what) { policy.slide = policy.cut_prompts = what == "slide"; },
           "at the context limit: slide: keep the later half of the tokens and go on; stop: end the completion. A "
           "prompt longer than the context is an error, unless slide is given")
        ->check(CLI::IsMember({"slide", "stop"}))
        ->default_str("slide");
}

void add_launch_options(CLI::App& app, LaunchOptions& o) {
    const InGroup group(app, help_group::GPUS);
    app.add_option("--gpus", o.gpus, "start one process on each of this many GPUs of this machine, or on 'all'")
        ->capture_default_str()
        ->configurable(false);
    app.add_option("--rendezvous", o.rendezvous,
                   "HOST:PORT where rank 0 listens; needed if the launcher does not set it or the port is in use")
        ->configurable(false);
    app.add_option("--comm-timeout", o.timeout_s, "seconds that a process waits for the others before it fails")
        ->check(number_in(0.1, 1e6))
        ->capture_default_str()
        ->configurable(false);
}

void add_sharding_options(CLI::App& app, ShardingOptions& o) {
    const InGroup group(app, help_group::GPUS);
    app.add_option("--zero-stage", o.zero_stage,
                   "what the processes shard: 0: nothing; 1: optimizer state and master weights; 2: gradients too; 3: "
                   "weights too (docs/understand/sharding.md)")
        ->check(CLI::IsMember({"0", "1", "2", "3"}))
        ->capture_default_str();
    app.add_option("--reduce-dtype", o.reduce_dtype,
                   "dtype in which processes sum their gradients; bf16 halves the traffic and is less accurate")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str();
    app.add_option("--reduce-bucket-mib", o.bucket_mib,
                   "with --zero-stage 0 or 1: sum gradients as soon as this many MiB of them are complete")
        ->check(at_least(0))
        ->capture_default_str();
}

CLI::Option* add_optimizer_option(CLI::App& app, OptimizerType& optimizer) {
    std::vector<std::string> names;
    for (const OptimizerFacts& facts : OPTIMIZERS) names.push_back(facts.name);
    return app
        .add_option_function<std::string>(
            "--optimizer",
            [&optimizer, names](const std::string& name) {
                optimizer = OptimizerType(std::find(names.begin(), names.end(), name) - names.begin());
            },
            "optimizer of the matrices of the blocks; embeddings, head, norms and biases always use AdamW")
        ->check(CLI::IsMember(names))
        ->default_str(names[size_t(optimizer)])
        ->group(help_group::LEARNING);
}

CLI::Option* add_optimizer_dtype_option(CLI::App& app, std::string& dtype) {
    return app
        .add_option(
            "--optimizer-dtype", dtype,
            "dtype of the optimizer's moments; bf16 is rounded stochastically and saves 4 bytes per weight; with "
            "Muon, which has one moment, 2 per weight of a hidden matrix")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str()
        ->group(help_group::MEMORY);
}

CLI::Option* add_grad_dtype_option(CLI::App& app, std::string& dtype) {
    return app
        .add_option(
            "--grad-dtype", dtype,
            "dtype in which the gradients of micro-steps add up; a bf16 sum is rounded after each micro-step "
            "(--grad-rounding) and saves 2 bytes per weight, minus 4 per weight of two layers and of the embedding")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str()
        ->group(help_group::MEMORY);
}

CLI::Option* add_grad_rounding_option(CLI::App& app, std::string& rounding) {
    return app
        .add_option(
            "--grad-rounding", rounding,
            "how sums of gradients are rounded to bf16: 'stochastic' adds in a pass of its own and has no "
            "bias; 'nearest' adds inside the matmuls, which is faster and needs no memory for two layers, and "
            "drops terms far smaller than their sum; not in --zero-stage 2 and 3, for up to about 128 micro-steps")
        ->check(CLI::IsMember({"stochastic", "nearest"}))
        ->capture_default_str()
        ->group(help_group::MEMORY);
}

// Some of what can be offloaded, each at most once, or none.
CLI::Validator offload_set() {
    const auto check = [](const std::string& value) -> std::string {
        std::set<std::string> left = {"optimizer", "master", "activations", "weights"};
        std::istringstream list(value + ",");
        for (std::string what; value != "none" && std::getline(list, what, ',');)
            if (!left.erase(what))
                return str("'", value, "' is not none, nor a set of optimizer, master, activations, weights");
        return "";
    };
    return CLI::Validator(check, "");
}

CLI::Option* add_offload_option(CLI::App& app, std::string& offload) {
    return app
        .add_option(
            "--offload", offload,
            "list of what to keep in pinned host memory, as in optimizer,activations. optimizer: the moments; master: "
            "the master weights; activations: the inputs of blocks until the backward pass (with --recompute block "
            "nothing else is kept); weights: the frozen weights under adapters, copied layer by layer ahead of "
            "use; none: nothing. On the CPU nothing is gained")
        ->check(offload_set())
        ->capture_default_str()
        ->group(help_group::MEMORY);
}

// "block:20" → level and layers.
static CLI::Validator recompute_levels() {
    std::string shown_levels;
    for (const char* name : RECOMPUTE_NAMES) shown_levels += (shown_levels.empty() ? "{" : ",") + std::string(name);
    shown_levels += "}";
    return {[](std::string& text) {
                const size_t colon = text.find(':');
                const bool known = find_enum<Recompute>(RECOMPUTE_NAMES, text.substr(0, colon)).has_value();
                const std::string layers = colon == std::string::npos ? "1" : text.substr(colon + 1);
                const bool counts = !layers.empty() && layers.size() < 10 && layers[0] != '0' &&
                                    layers.find_first_not_of("0123456789") == std::string::npos;
                const bool none = starts_with(text, "none:");
                return known && counts && !none ? ""
                                                : str(text, " is none of ", joined(RECOMPUTE_NAMES),
                                                      ", nor one of the last three with a number of layers, as in "
                                                      "block:20");
            },
            shown_levels};
}

CLI::Option* add_recompute_option(CLI::App& app, RunOptions& o) {
    return app
        .add_option_function<std::string>(
            "--recompute",
            [&o](const std::string& text) {
                const size_t colon = text.find(':');
                o.recompute = enum_of<Recompute>(RECOMPUTE_NAMES, text.substr(0, colon));
                o.recompute_layers = colon == std::string::npos ? ALL_LAYERS : std::stoll(text.substr(colon + 1));
            },
            "what the backward pass recomputes to save memory. none: nothing; activation: the output of the MLP's "
            "activation function; norms: the norms too; block: the whole block; block:20: that in the first 20 layers "
            "alone")
        ->check(recompute_levels())
        ->default_str("none")
        ->group(help_group::MEMORY);
}

CLI::Option* add_switch(CLI::App& app, const std::string& name, bool& on, const std::string& description) {
    return app
        .add_option_function<std::string>(
            name, [&on](const std::string& value) { on = value == "on"; }, description)
        ->check(CLI::IsMember({"on", "off"}))
        ->default_str(on ? "on" : "off");
}

CLI::Option* add_rollout_option(CLI::App& app, Sampler& sampler) {
    return app
        .add_option_function<std::string>(
            "--rollout", [&sampler](const std::string& how) { sampler = enum_of<Sampler>(SAMPLER_NAMES, how); },
            "fast: the engine's kernels sample; exact: training's own forward pass does, so that the recorded "
            "probabilities are those of training to the bit; auto: exact on a Hopper GPU, where the model allows it")
        ->check(CLI::IsMember(SAMPLER_NAMES))
        ->default_str(SAMPLER_NAMES[size_t(sampler)]);
}

void check_reference_options(const RolloutFlags& rollout, const LoraOptions& lora, const Fp8Options& fp8) {
    if (rollout.policy.kl > 0 && !lora.on() && fp8.on)
        throw UsageError(
            "--kl: with --matmul-dtype fp8 the copy of the first model has no codes; add --lora-rank and --qlora, or "
            "leave one out");
}

CLI::Option* add_master_weights_option(CLI::App& app, bool& master_weights) {
    return add_switch(app, "--master-weights", master_weights,
                      "with --dtype bf16: on: the optimizer updates fp32 copies of the weights; off: it updates the "
                      "bf16 weights with stochastic rounding, which saves 4 bytes per weight")
        ->group(help_group::MEMORY);
}

CLI::Option* add_nondeterministic_option(CLI::App& app, bool& nondeterministic) {
    return app
        .add_flag("--nondeterministic", nondeterministic,
                  "with --dtype bf16 on H100 and H200: attention's backward pass sums in any order; this is "
                  "faster and needs more memory, and two runs may differ in the last bits")
        ->group(help_group::SPEED);
}

CLI::Option* add_too_long_option(CLI::App& app, std::string& too_long) {
    return app
        .add_option("--too-long", too_long,
                    "examples that do not fit into --seq-len: error: refuse the data; skip: leave them out")
        ->check(CLI::IsMember({"error", "skip"}))
        ->capture_default_str();
}

void choose_training_dtype(ModelOptions& model, bool master_weights, const std::string& offload, const Target& target) {
    if (model.dtype == "auto") {
        model.dtype = target.device == Device::CUDA && target.sm >= 80 ? "bf16" : "fp32";
        model.auto_dtype = true;
    }
    if (model.type() == DType::F16) throw UsageError("--dtype fp16 is for inference only; train with --dtype bf16");
    if (!master_weights && model.type() == DType::F32)
        throw UsageError("--master-weights off needs 16-bit weights; add --dtype bf16");
    if (offload_options(offload).master && (!master_weights || model.type() == DType::F32))
        throw UsageError(str("--offload ", offload, ": there are no master weights with ",
                             master_weights ? "--dtype fp32" : "--master-weights off", "; leave master out"));
}

SamplingOptions sampling_options(const SamplingFlags& o, const ModelSource& source, const Args& args) {
    SamplingOptions out = {float(o.temperature),
                           o.top_k,
                           o.seed,
                           float(o.top_p),
                           float(o.min_p),
                           float(o.repeat_penalty),
                           float(o.presence_penalty),
                           float(o.frequency_penalty)};
    const auto is_given = [&](const std::string& option) { return is_typed(option, args); };
    const std::string note = take_declared_sampling(generation_config(source), is_given, out);
    if (!note.empty()) std::cerr << "train_gpt: " << note << "\n";
    return out;
}

void print_result(const nlohmann::ordered_json& result, bool as_json) {
    if (as_json) std::cout << result.dump() << "\n";
    for (const auto& [key, value] : result.items())
        if (!as_json) std::cout << key << " " << value << "\n";
}

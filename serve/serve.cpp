// `serve`: an HTTP server with OpenAI's API and a page to chat.
#include <algorithm>
#include <ctime>
#include <iostream>

#include "commands/cli.h"
#include "driver/inference.h"
#include "infer/prompts.h"
#include "runtime/files/files.h"
#include "runtime/limits.h"
#include "runtime/signals.h"
#include "runtime/text.h"
#include "serve/routes.h"

namespace {

struct ServeOptions {
    ModelOptions model;
    SamplingFlags sampling;
    std::vector<std::string> adapters, origins;
    std::string host = "127.0.0.1", key_file, name;
    int port = 8080;
    int64_t slots = 0, context = 0, max_queue = 256, prefill_chunk = 0;
    double drain_timeout = 30;
    bool batch_invariant = false, random_weights = false;
};

ServeOptions parse_serve(const Args& args) {
    ServeOptions o;
    CLI::App app(
        "Serves a model over HTTP: OpenAI's API under /v1, and a page to talk to it at /. The sampling options "
        "are those of requests that do not set them. SIGTERM or Ctrl-C stops when the running requests have ended.",
        "train_gpt serve");
    add_model_options(app, o.model);
    add_weights_option(app, o.model.weights, true);
    app.add_option(
           "--adapter", o.adapters,
           "NAME=DIR: LoRA adapter of the model, which requests choose as model NAME; may be given several times")
        ->allow_extra_args(false);
    app.add_option("--name", o.name, "the model's name in requests; default: the last part of its path");
    app.add_option("--host", o.host, "address to listen on; 0.0.0.0: all of this machine's")->capture_default_str();
    app.add_option("--port", o.port, "0: any free one")->check(number_in(0, 65535))->capture_default_str();
    app.add_option("--slots", o.slots, "sequences that generate at the same time; default: 64 on a GPU, 8 on the CPU")
        ->check(at_least(1));
    app.add_option(
           "--context", o.context,
           "maximum length of a sequence in tokens; default: the length that the model was trained for, or what "
           "memory holds")
        ->check(at_least(2));
    app.add_option("--max-queue", o.max_queue, "sequences that may wait for a slot; beyond it requests get 503")
        ->check(at_least(0))
        ->capture_default_str();
    app.add_option(
           "--prefill-chunk", o.prefill_chunk,
           str("tokens of prompts in a decode step or between two, a multiple of ", KV_PAGE,
               " (a prompt whose logprobs are asked for stays whole); default, as measured: what fills a step to ",
               Engine::JOINT_PASS_ROWS, " rows, or ", Engine::PROMPT_TOKENS_BESIDE_DECODING,
               " between steps; more where many prompts wait or nothing generates"))
        ->check(at_least(1));
    app.add_option("--api-key-file", o.key_file, "file with the keys that requests must send, one a line");
    app.add_option("--cors-origin", o.origins,
                   "web page that may ask besides the server's own, as https://example.org; * for all; may be given "
                   "several times")
        ->allow_extra_args(false);
    app.add_option("--drain-timeout", o.drain_timeout, "seconds that running requests have after SIGTERM")
        ->check(number_in(0, 86400))
        ->capture_default_str();
    app.add_flag("--batch-invariant", o.batch_invariant,
                 "on a GPU: a completion has the same bits whatever else is running; slower");
    app.add_flag("--random-weights", o.random_weights, "use random weights, also with a preset: to measure speed")
        ->group("");
    add_sampling_flags(app, o.sampling);
    parse(app, args);
    if (o.prefill_chunk % KV_PAGE != 0)
        throw UsageError(str("--prefill-chunk: ", o.prefill_chunk, " is not a multiple of ", KV_PAGE));
    return o;
}

std::string last_part(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path.substr(path.rfind('/') + 1);
}

// Splits NAME=DIR.
std::vector<std::string> take_adapters(const std::vector<std::string>& given, std::vector<std::string>& names) {
    std::vector<std::string> directories;
    for (const std::string& adapter : given) {
        const size_t at = adapter.find('=');
        if (at == 0 || at == std::string::npos || at + 1 == adapter.size())
            throw UsageError(str("--adapter ", adapter, ": write NAME=DIR"));
        const std::string name = adapter.substr(0, at);
        if (std::find(names.begin(), names.end(), name) != names.end())
            throw UsageError(str("--adapter ", adapter, ": there is another model '", name, "'"));
        names.push_back(name);
        directories.push_back(adapter.substr(at + 1));
    }
    return directories;
}

ServedModel served_model(const ModelSource& source, const std::string& name) {
    ServedModel m{{name}, Tokenizer(source.files), {}, source.config, {}, false, {}, {}, {}, 0, std::time(nullptr)};
    if (ChatTemplate::exists(source.files)) m.chat_template = std::make_unique<ChatTemplate>(source.files);
    m.start_tokens = {start_token(source.config, &m.tokenizer)};
    m.end_tokens = m.end_of_turn_tokens = end_tokens(source, &m.tokenizer);
    if (m.chats())
        for (const int32_t token : m.chat_template->end_tokens(m.tokenizer)) m.end_of_turn_tokens.push_back(token);
    return m;
}

// Whether a server with these options leaves a part of the memory free.
bool fits(const ModelSource& source, EngineOptions o, size_t adapters) {
    constexpr double OF_GPU = 0.95, OF_HOST = 0.5;
    constexpr int64_t USUAL_RANK = 64;
    o.adapters = int64_t(adapters);
    o.adapter_rank = USUAL_RANK;
    const Model model = inference_model(source.config, o.dtype, o.packing, o.nf4);
    const Engine engine(source.config, o, Stream{});
    const MemoryPlan plan = memory_plan(model, engine);
    const int64_t free = plan.available(device_memory_available(), device_bytes_in_use());
    return double(plan.total) <= double(free) * (plan.device == Device::CPU ? OF_HOST : OF_GPU);
}

// Fills in slots, context and pages where the user gave none: as much as memory holds.
void choose_sizes(const ModelSource& source, const ServeOptions& given, EngineOptions& o) {
    const bool cpu = backend_device() == Device::CPU;
    o.slots = given.slots ? given.slots : cpu ? 8 : 64;
    const auto with_context = [&](int64_t context) {
        o.context = context;
        o.prompt_tokens = std::max(context, Engine::prompt_chunk_tokens());
    };
    const auto pages = [&] { return (o.context + KV_PAGE - 1) / KV_PAGE; };
    const int64_t least = 512;
    with_context(given.context ? given.context : std::min<int64_t>(source.config.max_positions, 1 << 17));
    // The cache of one whole sequence must fit.
    const auto fits_with = [&](int64_t cache_pages) {
        o.cache_pages = cache_pages;
        return fits(source, o, given.adapters.size());
    };
    while (!given.context && o.context >= 2 * least && !fits_with(pages())) with_context(o.context / 2);
    int64_t low = pages(), high = o.slots * pages();
    if (fits_with(high)) low = high;
    while (high - low > std::max<int64_t>(high / 50, 1)) {
        const int64_t middle = (low + high) / 2;
        (fits_with(middle) ? low : high) = middle;
    }
    o.cache_pages = low;  // LoadedEngine says if not even that fits
}

}  // namespace

void run_serve(const Args& args) {
    const ServeOptions o = parse_serve(args);
    const Context ctx;
    const ModelSource source = o.model.resolve(0);
    require(!source.directory.empty(), "--model ", source.name, NO_WEIGHTS);
    require(Tokenizer::exists(source.files), source.directory,
            " has no tokenizer.json, which reading and writing text needs; put the model's own beside config.json");
    ServedModel model = served_model(source, o.name.empty() ? last_part(source.name) : o.name);
    const std::vector<std::string> adapters = take_adapters(o.adapters, model.names);
    Access access{o.host, o.key_file.empty() ? std::vector<std::string>() : read_keys(o.key_file), o.origins};

    EngineOptions engine_options;
    engine_options.dtype = o.model.type();
    engine_options.sampling = model.defaults = sampling_options(o.sampling, source, args);
    engine_options.sampled_vocab = sampled_vocab(source.config, &model.tokenizer);
    engine_options.sampling_classes = sampling_class::ANY;
    engine_options.top_logprobs = MAX_TOP_LOGPROBS;
    engine_options.prompt_logprobs = true;
    engine_options.batch_invariant = o.batch_invariant;
    engine_options.all_batch_sizes = true;
    take_weights(engine_options, source, o.model.weights);
    choose_sizes(source, o, engine_options);
    LoadedEngine m(ctx, source, engine_options, o.random_weights, adapters);
    model.context = engine_options.context;
    model.fixed_seed = is_typed("--seed", args);

    catch_stop_signals();
    Service service(m.engine, model, o.max_queue, o.prefill_chunk);
    Routes routes(service, access);
    http::Options http_options;
    http_options.host = o.host;
    http_options.port = o.port;
    http_options.on_headers = [&](const http::Request& q) {
        return ends_with(q.path, "/completions") ? service.expect() : nullptr;
    };
    http::Server server(
        http_options, [&](const http::Request& q, const std::shared_ptr<http::Reply>& r) { routes.answer(q, r); },
        too_large_body());
    const bool everywhere = o.host == "0.0.0.0" || o.host == "::";
    if (everywhere && access.keys.empty())
        std::cerr << "train_gpt: --host " << o.host
                  << " without --api-key-file: everybody who reaches this machine may use the model\n";
    std::cout << "serving " << model.names[0] << (model.chats() ? "" : " (no chat template: /v1/completions only)")
              << " at http://" << (everywhere ? "localhost" : o.host) << ":" << server.port() << ": "
              << engine_options.slots << " slots, a context of " << engine_options.context << " tokens, "
              << engine_options.cache_pages << " pages of " << KV_PAGE << " tokens\n"
              << std::flush;
    service.run(stop_requested, o.drain_timeout);
}

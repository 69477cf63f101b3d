// `info`: what a model, a run, a tokenizer or a token file contains, or the build, on stdout.
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands/cli.h"
#include "commands/show_examples.h"
#include "data/splitter.h"
#include "data/token_files.h"
#include "data/tokenizer.h"
#include "data/unicode.h"
#include "kernels/matmul.h"
#include "model.h"
#include "models/bin_models.h"
#include "models/family.h"
#include "models/gguf_model.h"
#include "models/lora_adapter.h"
#include "runtime/communication/comm.h"
#include "runtime/console.h"
#include "runtime/device/device.h"
#include "runtime/files/files.h"
#include "runtime/files/log.h"
#include "runtime/files/safetensors.h"
#include "runtime/files/weight_files.h"
#include "runtime/text.h"

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

constexpr char VERSION[] = "0.9.0";

struct InfoOptions {
    std::string path;  // empty: show the build
    int64_t show = 0;  // examples of a data directory to print
    bool json = false;
};

InfoOptions parse_info(const Args& args) {
    InfoOptions o;
    CLI::App app(
        "Shows what a token file, a data directory, a model or a run contains. Without a path, shows the build.",
        "train_gpt info");
    app.add_option("path,--data", o.path,
                   "token file or model (.bin, .gguf), data directory, model directory, run directory, LoRA adapter, "
                   ".safetensors file, "
                   "tokenizer.json or preset");
    app.add_option("--show", o.show,
                   "print the first examples of a data directory, with the loss tokens in colour, or in brackets where "
                   "stdout is not a terminal")
        ->check(at_least(1));
    app.add_flag("--json", o.json, "print one JSON object");
    parse(app, args);
    if (o.show && o.path.empty()) throw UsageError("--show prints examples of a data directory; name one with --data");
    return o;
}

ordered_json config_object(const ModelConfig& config) {
    return ordered_json::parse(config_to_json(config, nlohmann::json::object()).dump());
}

ordered_json build_info() {
    ordered_json info = {{"backend", backend_name()}, {"device", device_description()}};
    if (backend_device() == Device::CUDA) info["gpus"] = device_count();
    info.update({{"matmul", matmul_library()},
                 {"collectives", comm_library()},
                 {"regex", regex_library()},
                 {"unicode", unicode_library()},
                 {"compiler", "g++ " __VERSION__}});
    return info;
}

ordered_json token_info(const TokenFiles& files) {
    int32_t largest = 0;
    int64_t loss_tokens = 0, pairs = 0;
    std::vector<int32_t> block(1 << 16);
    std::vector<uint8_t> flags(block.size());
    for (int64_t begin = 0; begin < files.size(); begin += int64_t(block.size())) {
        const int64_t n = std::min(int64_t(block.size()), files.size() - begin);
        files.read(begin, n, block.data(), 0);
        largest = std::max(largest, *std::max_element(block.begin(), block.begin() + n));
        files.read_flags(begin, n, flags.data());
        for (int64_t i = 0; i < n; i++) {
            loss_tokens += flags[size_t(i)] & TokenFiles::LOSS;
            pairs += (flags[size_t(i)] & TokenFiles::REJECTED) != 0;
        }
    }
    ordered_json info = {{"shards", files.paths().size()}, {"tokens", files.size()}, {"largest_token", largest}};
    if (files.masked()) info["loss_tokens"] = loss_tokens;
    if (files.has_pairs()) info["pairs"] = pairs;
    return info;
}

ordered_json data_info(const std::string& path) {
    const DataDirectory data = open_data(path);
    ordered_json info = {{"kind", "data"}, {"vocab_size", data.vocab_size}, {"end_of_text", data.end_of_text}};
    if (!glob_files(data.train_pattern()).empty()) {
        info["train"] = token_info(open_split(data, true));
        info["train"]["bytes"] = data.train_bytes;
        info["train"]["documents"] = data.train_documents;
    }
    if (!glob_files(data.val_pattern()).empty()) {
        info["val"] = token_info(open_split(data, false));
        info["val"]["bytes"] = data.val_bytes;
        info["val"]["documents"] = data.val_documents;
    }
    return info;
}

ordered_json safetensors_info(const std::string& path) {
    const SafetensorsFile file(path);
    ordered_json tensors = ordered_json::object();
    int64_t elements = 0;
    for (const auto& [name, entry] : file.entries()) {
        int64_t n = 1;
        for (const int64_t size : entry.shape) n *= size;
        elements += n;
        tensors[name] = {{"dtype", dtype_name(entry.dtype)}, {"shape", entry.shape}};
    }
    return {{"kind", "safetensors"}, {"elements", elements}, {"tensors", tensors}};
}

ordered_json bin_info(const std::string& path) {
    const BinModel model(path);
    return {{"kind", "model"},
            {"format", model.format()},
            {"dtype", dtype_name(model.dtype())},
            {"config", config_object(model.config())}};
}

ordered_json tokenizer_info(const Tokenizer& tokenizer) {
    return {{"kind", "tokenizer"},
            {"vocab_size", tokenizer.vocab_size()},
            {"end_of_text", tokenizer.end_of_text()},
            {"start_of_text", tokenizer.start_of_text()}};
}

ordered_json file_info(const std::string& path) {
    if (ends_with(path, ".safetensors")) return safetensors_info(path);
    if (ends_with(path, ".json")) return tokenizer_info(Tokenizer(path));
    if (bin_model_kind(path) != BinKind::Other) return bin_info(path);
    ordered_json info = {{"kind", "tokens"}};
    info.update(token_info(TokenFiles(glob_escape(path))));
    return info;
}

// trainer.json of a checkpoint, and the checkpoints if it is that of a run.
void add_trainer(ordered_json& info, const std::string& directory, const std::string& path) {
    const std::string trainer = join_path(directory, "trainer.json");
    if (path_exists(trainer)) {
        ordered_json& keys = info["trainer"] = ordered_json::parse(read_json(trainer).dump());
        for (const char* numbers : {"history", "base_scales"})  // hundreds, thousands
            if (keys.contains("fp8")) keys["fp8"].erase(numbers);
    }
    if (directory != path) info["checkpoints"] = list_checkpoints(path);
}

ordered_json adapter_info(const std::string& path, const std::string& directory) {
    const json config = read_json(join_path(directory, ADAPTER_CONFIG));
    ordered_json info = {{"kind", "adapter"}, {"config", ordered_json::parse(config.dump())}};
    add_trainer(info, directory, path);
    return info;
}

ordered_json model_info(const std::string& path) {
    const ModelSource source = find_model(path);
    ordered_json info = {{"kind", "model"}};
    if (source.gguf)
        info["format"] = "GGUF";
    else
        info["directory"] = source.directory;
    info["config"] = config_object(source.config);
    if (source.gguf)
        info["tensors"] = source.gguf->types();
    else
        add_trainer(info, source.directory, path);
    // Both are loaded as far as their files say whether they are valid.
    info["weights"] = source.gguf || holds_weights(source.directory);
    if (source.packing) info["packing"] = packing_name(*source.packing);
    if (info["weights"]) stored_weights(source, parameter_table(source.config, 1));
    info["tokenizer"] = Tokenizer::exists(source.files);
    if (info["tokenizer"]) Tokenizer{source.files};
    return info;
}

// A name from a file, on one line.
std::string shown(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    return ControlEscaper()(text);
}

void print(const ordered_json& value, const std::string& prefix) {
    for (const auto& [key, part] : value.items()) {
        if (part.is_object())
            print(part, prefix + key + ".");
        else
            std::cout << shown(prefix + key) << " " << shown(part.is_string() ? part.get<std::string>() : part.dump())
                      << "\n";
    }
}

}  // namespace

std::string version_text(const std::string& build) {
    std::string text = str("train_gpt ", VERSION, "\n", build);
    const ordered_json info = build_info();
    for (const auto& [key, value] : info.items())
        text += str(key, " ", value.is_string() ? value.get<std::string>() : value.dump(), "\n");
    return text;
}

void run_info(const Args& args) {
    const InfoOptions o = parse_info(args);
    if (o.show) return show_examples(open_data(o.path), o.show, o.json);
    ordered_json info;
    if (o.path.empty()) {
        info = build_info();
    } else if (GgufModel::is_gguf(o.path)) {
        info = model_info(o.path);
    } else if (!is_directory(o.path)) {
        ModelConfig config;
        require(path_exists(o.path) || preset(o.path, config), o.path,
                ": no such file, directory or preset; check the path");
        if (!path_exists(o.path)) {
            info = {{"kind", "preset"}, {"config", config_object(config)}};
        } else {
            info = file_info(o.path);
        }
    } else if (holds_tokens(o.path)) {
        info = data_info(o.path);
    } else if (const std::string adapter = find_adapter(o.path); !adapter.empty()) {
        info = adapter_info(o.path, adapter);
    } else {
        info = model_info(o.path);
    }
    if (o.json)  // a path need not be UTF-8
        std::cout << info.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << "\n";
    else
        print(info, "");
}

// `convert`: a model in any format into another, one tensor at a time.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "commands/cli.h"
#include "data/tokenizer.h"
#include "data/tokenizer_import.h"
#include "model.h"
#include "models/bin_models.h"
#include "models/family.h"
#include "models/gguf_model.h"
#include "models/gguf_writer.h"
#include "models/lora_adapter.h"
#include "runtime/files/files.h"
#include "runtime/files/non_finite.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

struct ConvertOptions {
    std::string source, target, tokenizer;
    std::string dtype;    // empty: that of the source; in a .bin fp32
    std::string weights;  // one of PACKING_NAMES; of a .gguf a dtype, int8 or int4; empty: dtype
    std::string base;     // of an adapter
    bool merge = false;
};

bool is_bin(const std::string& path) {
    return ends_with(path, ".bin");
}

bool is_gguf(const std::string& path) {
    return ends_with(path, ".gguf");
}

// Refuses a name that stands for a format which is not written.
void check_extension(const std::string& path) {
    std::string extension = std::filesystem::path(path).extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    for (const char* other : {".gguf", ".ggml", ".bin", ".safetensors", ".pt", ".pth", ".ckpt", ".onnx"})
        if (extension == other && !is_gguf(path) && !is_bin(path))
            throw UsageError(path +
                             ": no model is written as a file of this name; let DST end in .gguf or .bin, or name a "
                             "directory");
}

// A model in any format that can be read.
struct Source {
    ModelSource model;  // the files of its directory are copied; none for a .bin file
    WeightSource weights;
    ParamTable table;
};

Source open_source(const ConvertOptions& o) {
    const std::string& path = o.source;
    require(o.merge == !find_adapter(path).empty(), path,
            o.merge ? ": is not an adapter, so there is nothing to merge; leave --merge out"
                    : ": is an adapter; add --merge to write its base with the adapter added");
    if (path_exists(path) && !is_directory(path) && !GgufModel::is_gguf(path)) {
        const BinModel file(path);
        ParamTable table = parameter_table(file.config(), 1);
        ModelSource model;
        model.config = file.config();
        model.original_config = json::object();
        return {std::move(model), file.weights(table), std::move(table)};
    }
    ModelSource model = find_model(path, o.base);
    require(!model.directory.empty(), path,
            ": a preset has no weights; name a model directory, a run directory or a .bin file");
    ParamTable table = parameter_table(model.config, 1);
    WeightSource weights = open_weight_source(model, table);
    return {std::move(model), std::move(weights), std::move(table)};
}

ConvertOptions parse_convert(const Args& args) {
    ConvertOptions o;
    CLI::App app(
        "Converts a model to a directory in Hugging Face layout, to llm.c's .bin format if DST ends in .bin, or to a "
        "file\n"
        "for llama.cpp if DST ends in .gguf.\n"
        "SRC is a model directory, a run directory, a GGUF file, or a .bin file of llm.c (v3, v5) or llama2.c (v0, "
        "v1).\n"
        "With --merge it is a LoRA adapter.",
        "train_gpt convert");
    app.add_option("SRC", o.source, "model to read")->required();
    app.add_option("DST", o.target, "directory, .bin or .gguf file to write; must not exist")->required();
    app.add_option("--tokenizer", o.tokenizer,
                   "the model's tokenizer: tokenizer.json, llama2.c's tokenizer.bin or llm.c's gpt2_tokenizer.bin");
    app.add_option(
           "--dtype", o.dtype,
           "dtype of the stored weights; default: of each tensor as in SRC (fp64: fp32), or fp32 in a .bin file")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    app.add_option(
           "--weights", o.weights,
           "how matrices are stored. fp8, int8, int4: a directory for inference, which loads as it is. In a .gguf "
           "file int8 and int4 are llama.cpp's Q8_0 and Q4_0. Default: --dtype")
        ->check(CLI::IsMember({"fp8", "int8", "int4", "bf16", "fp16", "fp32"}));
    app.add_flag("--merge", o.merge, "SRC is a LoRA adapter of peft: write its base with the adapter added");
    add_base_option(app, o.base);
    parse(app, args);
    if (!o.merge && !o.base.empty())
        throw UsageError("--base is the model that --merge adds an adapter to; add --merge");
    check_extension(o.target);
    const bool packed = find_enum<Packing>(PACKING_NAMES, o.weights).has_value();
    if (!o.weights.empty() && !packed && !is_gguf(o.target))
        throw UsageError("--weights " + o.weights + ": is for .gguf files; use --dtype");
    if (is_gguf(o.target) && o.weights == "fp8")
        throw UsageError("--weights fp8: a .gguf file cannot hold it; use int8, or name a directory");
    if (is_gguf(o.target) && !o.weights.empty() && !o.dtype.empty())
        throw UsageError("--weights and --dtype both say how a .gguf file stores matrices; give one");
    if (is_bin(o.target) && !o.tokenizer.empty())
        throw UsageError("--tokenizer: llm.c's .bin format holds no tokenizer; leave the option out");
    if (is_bin(o.target) && !o.weights.empty())
        throw UsageError("--weights " + o.weights + ": llm.c's .bin format holds fp32 or bf16; name a directory");
    if (is_bin(o.target) && o.dtype == "fp16")
        throw UsageError("--dtype fp16: llm.c's .bin format holds fp32 or bf16; use one of them");
    return o;
}

// The directory of the data that a run was trained on, as its run.toml says; "DIR" if there is none.
std::string data_of(const std::string& run_dir) {
    const std::string path = join_path(run_dir, "run.toml");
    if (!is_directory(run_dir) || !path_exists(path)) return "DIR";
    std::istringstream lines(read_file(path));
    for (std::string line; std::getline(lines, line);)
        if (starts_with(line, "data=\"") && ends_with(line, "\"")) return line.substr(6, line.size() - 7);
    return "DIR";
}

// The model's small files with another tokenizer.json.
ModelFiles with_tokenizer(const ModelFiles& model, const std::string& tokenizer) {
    ModelFiles::Contents contents;
    for (const std::string& name : model.names()) contents[name] = [model, name] { return model.read(name); };
    contents["tokenizer.json"] = [text = import_tokenizer(tokenizer)] { return text; };
    return {tokenizer, std::move(contents)};
}

void convert_to_gguf(const ConvertOptions& o, const Source& source) {
    const GgufFit fit = gguf_fit(source.model.config);
    require(fit.lacks.empty(), o.target, ": llama.cpp has no ", fit.lacks,
            ", which this model needs; a model that it can run comes from `train_gpt train --model llama-tiny --data ",
            data_of(o.source), " --out runs/llama`");
    GgufWeights types;
    const std::string& type = o.weights.empty() ? o.dtype : o.weights;
    types.as_stored = type.empty();
    types.quantised = type == "int4" || type == "int8";
    if (type == "int4") types.type = GgufType::Q4_0;
    if (type == "int8") types.type = GgufType::Q8_0;
    if (type == "bf16") types.type = GgufType::BF16;
    if (type == "fp16") types.type = GgufType::F16;
    const ModelFiles tokenizer =
        o.tokenizer.empty() ? source.model.files : with_tokenizer(source.model.files, o.tokenizer);
    std::cerr << write_gguf(o.target, source.model, tokenizer, source.table, source.weights, types);
}

}  // namespace

void run_convert(const Args& args) {
    const ConvertOptions o = parse_convert(args);
    Source source = open_source(o);
    if (source.model.gguf) std::cerr << source.model.gguf->warning();
    NonFiniteTensors non_finite;
    source.weights.fetch = non_finite.watch(source.weights.fetch);
    if (is_bin(o.target)) {
        write_llmc_model(o.target, source.model.config, source.table, source.weights.fetch,
                         o.dtype.empty() ? DType::F32 : float_type(o.dtype));
        std::cerr << non_finite.warning(o.source);
        return;
    }
    if (is_gguf(o.target)) {
        convert_to_gguf(o, source);
        std::cerr << non_finite.warning(o.source);
        return;
    }
    AtomicDirectory directory(o.target);
    const std::string tokenizer = join_path(directory.path(), "tokenizer.json");
    const ModelConfig& config = source.model.config;
    if (!o.tokenizer.empty()) write_file(tokenizer, import_tokenizer(o.tokenizer));
    save_model_files(directory.path(), config, source.model.original_config, {source.model.files});
    add_end_tokens(directory.path(), source.model, {});
    if (!o.tokenizer.empty()) {
        const int64_t vocab_size = Tokenizer(tokenizer, o.tokenizer).vocab_size();
        require(vocab_size <= config.vocab_size, o.tokenizer, " has ", vocab_size,
                " tokens, but the model's vocabulary has ", config.vocab_size, "; give the model's own tokenizer");
    }
    const auto stored_dtype = [&](const Param& p, const SourceTensor& tensor) {
        if (!o.dtype.empty()) return float_type(o.dtype);
        const DType dtype = source.weights.dtype(p, tensor);
        return dtype == DType::F64 ? DType::F32 : dtype;
    };
    const std::optional<Packing> packing = find_enum<Packing>(PACKING_NAMES, o.weights);
    PackedRows packed{};
    if (packing) {
        packed = {*packing, [&](const PackedWeight& rows, const Param& p, int64_t row, const float* values) {
                      quantise_rows(rows, p, row, values, o.source);
                  }};
        json content = read_json(join_path(directory.path(), "config.json"));
        add_packing(content, *packing);
        write_json(join_path(directory.path(), "config.json"), content);
        std::cerr << PackedWeights(source.table, *packing).note(source.table);
    }
    save_weights(join_path(directory.path(), "model.safetensors"), source.table, source.weights.fetch, stored_dtype,
                 packing ? &packed : nullptr);
    directory.commit();
    std::cerr << non_finite.warning(o.source);
}

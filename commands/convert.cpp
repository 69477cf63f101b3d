// `convert`: a model in any format into another, one tensor at a time.
#include <iostream>
#include <nlohmann/json.hpp>

#include "commands/cli.h"
#include "data/tokenizer.h"
#include "data/tokenizer_import.h"
#include "model.h"
#include "models/bin_models.h"
#include "models/gguf_model.h"
#include "models/lora_adapter.h"
#include "runtime/files/files.h"
#include "runtime/files/non_finite.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

struct ConvertOptions {
    std::string source, target, tokenizer;
    std::string dtype;  // empty: that of the source; in a .bin fp32
    std::string base;   // of an adapter
    bool merge = false;
};

bool is_bin(const std::string& path) {
    return ends_with(path, ".bin");
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
        "Converts a model to a directory in Hugging Face layout, or to llm.c's .bin format if DST ends in .bin.\n"
        "SRC is a model directory, a run directory, or a .bin file of llm.c (v3, v5) or llama2.c (v0, v1).\n"
        "With --merge it is a LoRA adapter.",
        "train_gpt convert");
    app.add_option("SRC", o.source, "model to read")->required();
    app.add_option("DST", o.target, "directory or .bin file to write; must not exist")->required();
    app.add_option("--tokenizer", o.tokenizer,
                   "the model's tokenizer: tokenizer.json, llama2.c's tokenizer.bin or llm.c's gpt2_tokenizer.bin");
    app.add_option(
           "--dtype", o.dtype,
           "dtype of the stored weights; default: of each tensor as in SRC (fp64: fp32), or fp32 in a .bin file")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    app.add_flag("--merge", o.merge, "SRC is a LoRA adapter of peft: write its base with the adapter added");
    add_base_option(app, o.base);
    parse(app, args);
    if (!o.merge && !o.base.empty())
        throw UsageError("--base is the model that --merge adds an adapter to; add --merge");
    if (is_bin(o.target) && !o.tokenizer.empty())
        throw UsageError("--tokenizer: llm.c's .bin format holds no tokenizer; leave the option out");
    if (is_bin(o.target) && o.dtype == "fp16")
        throw UsageError("--dtype fp16: llm.c's .bin format holds fp32 or bf16; use one of them");
    return o;
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
    save_weights(join_path(directory.path(), "model.safetensors"), source.table, source.weights.fetch, stored_dtype);
    directory.commit();
    std::cerr << non_finite.warning(o.source);
}

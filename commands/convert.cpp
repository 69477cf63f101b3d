#include <nlohmann/json.hpp>

#include "commands/cli.h"
#include "data/tokenizer.h"
#include "data/tokenizer_import.h"
#include "runtime/files/bin_models.h"
#include "runtime/files/files.h"

using nlohmann::json;

namespace {

bool is_bin(const std::string& path) {
    return path.size() > 4 && path.compare(path.size() - 4, 4, ".bin") == 0;
}

// A model in any of the forms that can be read.
struct Source {
    ModelConfig config;
    json original_config;
    std::string directory;  // whose tokenizer and other files go along; empty for a .bin file
    WeightSource weights;
    ParamTable table;
};

Source open_source(const std::string& path, const TableOf& table_of) {
    if (path_exists(path) && !is_directory(path)) {
        const BinModel file(path);
        ParamTable table = table_of(file.config());
        return {file.config(), json::object(), "", file.weights(table), std::move(table)};
    }
    const ModelSource model = find_model(path);
    require(!model.directory.empty(), path,
            ": is a preset without weights; name a model directory, a run or a .bin file");
    ParamTable table = table_of(model.config);
    WeightSource weights = open_weight_source(model.directory, table);
    return {model.config, model.original_config, model.directory, std::move(weights), std::move(table)};
}

DType dtype_of(const ConvertOptions& o, DType otherwise) {
    if (o.dtype.empty()) return otherwise == DType::F64 ? DType::F32 : otherwise;
    return o.dtype == "fp32" ? DType::F32 : o.dtype == "bf16" ? DType::BF16 : DType::F16;
}

}  // namespace

ConvertOptions parse_convert(const Args& args) {
    ConvertOptions o;
    CLI::App app(
        "Turns a model into a directory in Hugging Face layout, or into llm.c's .bin where DST ends in .bin.\n"
        "SRC: a model directory, a run, a .bin of llm.c (v3, v5) or of llama2.c (v0, v1).",
        "train_gpt convert");
    app.add_option("SRC", o.source, "the model to read")->required();
    app.add_option("DST", o.target, "the directory or the .bin file to write; must not exist")->required();
    app.add_option("--tokenizer", o.tokenizer,
                   "the model's tokenizer: a tokenizer.json, llama2.c's tokenizer.bin or llm.c's gpt2_tokenizer.bin");
    app.add_option("--dtype", o.dtype, "what weights are stored in; as in SRC if not given, in a .bin fp32")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    parse(app, args);
    if (is_bin(o.target) && !o.tokenizer.empty())
        throw UsageError("--tokenizer: llm.c's .bin holds no tokenizer; leave it out");
    if (is_bin(o.target) && o.dtype == "fp16") throw UsageError("--dtype fp16: llm.c's .bin holds fp32 or bf16");
    return o;
}

void convert_model(const ConvertOptions& o, const TableOf& table_of) {
    const Source source = open_source(o.source, table_of);
    if (is_bin(o.target)) {
        write_llmc_model(o.target, source.config, source.table, source.weights.fetch, dtype_of(o, DType::F32));
        return;
    }
    AtomicDirectory directory(o.target);
    if (!o.tokenizer.empty()) {
        const std::string path = join_path(directory.path(), "tokenizer.json");
        write_file(path, import_tokenizer(o.tokenizer));
        const int64_t vocab_size = Tokenizer(path).vocab_size();
        require(vocab_size <= source.config.vocab_size, o.tokenizer, ": has ", vocab_size, " tokens and the model ",
                source.config.vocab_size, "; it is not this model's tokenizer");
    }
    save_model_files(directory.path(), source.config, source.original_config, {source.directory});
    save_weights(join_path(directory.path(), "model.safetensors"), source.table, source.weights.fetch,
                 dtype_of(o, source.weights.dtype));
    directory.commit();
}

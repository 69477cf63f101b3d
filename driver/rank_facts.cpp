#include "driver/rank_facts.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "models/family.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/files.h"
#include "runtime/rng.h"
#include "runtime/text.h"

namespace {

std::string value_of(const RankFacts& facts, const std::string& name) {
    const auto found = facts.find(name);
    return found == facts.end() ? "none" : found->second;
}

// Facts as text in which equal facts are equal bytes, for ranks to exchange.
std::string to_text(const RankFacts& facts) {
    return nlohmann::json(facts).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string difference(int64_t rank, const RankFacts& first, const RankFacts& theirs) {
    RankFacts all = first;
    all.insert(theirs.begin(), theirs.end());
    std::string text;
    int64_t others = 0;
    for (const auto& [name, value] : all) {
        const std::string on_first = value_of(first, name), on_rank = value_of(theirs, name);
        if (on_first == on_rank) continue;
        if (text.empty())
            text = str("rank ", rank, " has ", name, " ", on_rank, ", rank 0 has ", on_first);
        else
            others++;
    }
    return str(text, others ? str(", and ", others, " more differ") : "",
               "; start all ranks with the same program, options and files");
}

constexpr int64_t HEAD_BYTES = 1 << 16;  // holds the header of a file of tokens, and most of one of tensors

// Of the bytes of a file from its start.
std::string file_fact(const std::string& path, int64_t most = HEAD_BYTES) {
    const FileReader file(path);
    const int64_t n = std::min(file.size(), most);
    std::string head(size_t(n), '\0');
    file.read(0, head.data(), n);
    std::ostringstream checksum;
    checksum << std::hex << crc32c(head.data(), n);
    return str("of ", file.size(), " bytes with checksum ", checksum.str());
}

void add_file(RankFacts& facts, const std::string& path, int64_t most = HEAD_BYTES) {
    facts[path] = path_exists(path) ? file_fact(path, most) : "none";
}

void add_tokens(RankFacts& facts, const TokenFiles& files) {
    for (const std::string& path : files.paths()) {
        add_file(facts, path);
        if (files.masked()) add_file(facts, std::filesystem::path(path).replace_extension(".mask").string());
    }
}

// The files of a model directory or a checkpoint, or a GGUF file.
void add_model_files(RankFacts& facts, const std::string& directory) {
    if (directory.empty()) return;
    if (!is_directory(directory)) return add_file(facts, directory);
    for (const std::string& name : list_directory(directory))
        if (ends_with(name, ".json") || ends_with(name, ".safetensors")) add_file(facts, join_path(directory, name));
}

void add_options(RankFacts& facts, const std::string& toml) {
    std::istringstream lines(toml);
    for (std::string line; std::getline(lines, line);) {
        const size_t equals = line.find('=');
        if (equals == std::string::npos) continue;
        std::string value = line.substr(equals + 1);
        value.erase(std::remove(value.begin(), value.end(), '"'), value.end());
        facts["--" + line.substr(0, equals)] = value;
    }
}

}  // namespace

void check_equal_on_ranks(const Context& ctx, const RankFacts& facts) {
    const std::string own = to_text(facts);
    const std::vector<uint64_t> digests = ctx.comm->all_gather_host(name_hash(own));
    const auto other = std::find_if(digests.begin(), digests.end(), [&](uint64_t d) { return d != digests[0]; });
    if (other == digests.end()) return;
    const int64_t rank = other - digests.begin();
    std::string first = own, theirs = own;
    ctx.comm->broadcast_host(first, 0);
    ctx.comm->broadcast_host(theirs, rank);
    const auto read = [](const std::string& text) { return nlohmann::json::parse(text).get<RankFacts>(); };
    throw Error(difference(rank, read(first), read(theirs)));
}

RankFacts facts_of(const TrainOptions& options) {
    RankFacts facts = {{"the program", file_fact("/proc/self/exe", INT64_MAX)},
                       {"--resume", options.resume ? "given" : "none"},
                       {"--fit", options.fit ? "given" : "none"},
                       {"--new-data", options.new_data.empty() ? "none" : options.new_data}};
    add_options(facts, options.toml);
    return facts;
}

RankFacts facts_of(const TrainSetup& setup) {
    RankFacts facts = {
        {"training tokens with the fingerprint", setup.data_use.fingerprint},
        {"a model with the config", config_to_json(setup.source.config, nlohmann::json::object()).dump()},
        {"as newest checkpoint", setup.resume.checkpoint.empty() ? "none" : setup.resume.checkpoint}};
    add_options(facts, setup.o.toml);
    for (const TrainingData& data : setup.data) {
        for (const char* name :
             {"meta.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"})
            add_file(facts, join_path(data.directory.path, name), INT64_MAX);
        add_tokens(facts, data.train_files);
        if (data.val_files) add_tokens(facts, *data.val_files);
    }
    if (setup.rollout) add_file(facts, setup.o.data, INT64_MAX);
    for (const std::string& path : {setup.o.eval_multiple_choice, setup.o.sample_prompts})
        if (!path.empty()) add_file(facts, path, INT64_MAX);
    for (const std::string& directory : {setup.source.directory, setup.source.adapter, setup.resume.checkpoint})
        add_model_files(facts, directory);
    return facts;
}

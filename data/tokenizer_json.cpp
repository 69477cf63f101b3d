#include "data/tokenizer_json.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <unordered_set>

#include "data/token_text.h"
#include "runtime/error.h"

using nlohmann::json;

namespace {

constexpr const char* LLAMA3_WORDS =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* QWEN2_WORDS =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* TEKKEN_WORDS =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// How llama.cpp splits text where a GGUF file does not say how: one expression after the other.
constexpr const char* LLAMACPP_DEFAULT_WORDS[] = {
    R"([\p{P}\$\+<=>\^~\|]+)", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S))", R"(\p{N}+)",
    R"([0-9][0-9][0-9])"};

json split(const char* pattern) {
    return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
}

json byte_level(bool use_regex) {
    return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

json start_template(const StartToken& start) {
    if (start.id < 0) return nullptr;
    const json token = {{"SpecialToken", {{"id", start.content}, {"type_id", 0}}}},
               a = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, b = {{"Sequence", {{"id", "B"}, {"type_id", 1}}}};
    const json described = {
        {"id", start.content}, {"ids", json::array({start.id})}, {"tokens", json::array({start.content})}};
    return {{"type", "TemplateProcessing"},
            {"single", {token, a}},
            {"pair", {token, a, b}},
            {"special_tokens", {{start.content, described}}}};
}

json assemble(const TokenTexts& tokens, json merges, const json& added, const StartToken& start) {
    json vocab = json::object();
    for (size_t id = 0; id < tokens.size(); id++)
        if (tokens[id]) vocab[*tokens[id]] = id;
    return {{"version", "1.0"},
            {"truncation", nullptr},
            {"padding", nullptr},
            {"added_tokens", added},
            {"normalizer", nullptr},
            {"pre_tokenizer", nullptr},
            {"post_processor", start_template(start)},
            {"decoder", nullptr},
            {"model",
             {{"type", "BPE"},
              {"dropout", nullptr},
              {"unk_token", nullptr},
              {"continuing_subword_prefix", nullptr},
              {"end_of_word_suffix", nullptr},
              {"fuse_unk", false},
              {"byte_fallback", false},
              {"ignore_merges", false},
              {"vocab", std::move(vocab)},
              {"merges", std::move(merges)}}}};
}

}  // namespace

json added_token(int64_t id, const std::string& content, bool special, bool rstrip) {
    return {{"id", id},         {"content", content},  {"single_word", false}, {"lstrip", false},
            {"rstrip", rstrip}, {"normalized", false}, {"special", special}};
}

json words_of(const std::string& name) {
    json steps = json::array();
    if (name == "smollm") steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
    if (name == "llama3" || name == "olmo2") steps.push_back(split(LLAMA3_WORDS));
    if (name == "qwen2") steps.push_back(split(QWEN2_WORDS));
    if (name == "tekken") steps.push_back(split(TEKKEN_WORDS));
    if (name == "llamacpp-default")
        for (const char* pattern : LLAMACPP_DEFAULT_WORDS) steps.push_back(split(pattern));
    const bool as_gpt2 = name == "gpt2" || name == "smollm";
    require(as_gpt2 || !steps.empty(), "words_of: there are no words named ", name);
    steps.push_back(byte_level(as_gpt2));
    return {
        {"normalizer", name == "qwen2" ? json({{"type", "NFC"}}) : json()},
        {"pre_tokenizer", steps.size() > 1 ? json({{"type", "Sequence"}, {"pretokenizers", steps}}) : json(steps[0])},
        {"ignore_merges", name == "llama3" || name == "tekken"}};
}

json byte_level_tokenizer(const TokenTexts& tokens, json merges, const json& added, const std::string& words,
                          const StartToken& start) {
    json out = assemble(tokens, std::move(merges), added, start);
    const json cut = words_of(words);
    out["normalizer"] = cut["normalizer"];
    out["pre_tokenizer"] = cut["pre_tokenizer"];
    out["decoder"] = byte_level(true);
    out["model"]["ignore_merges"] = cut["ignore_merges"];
    return out;
}

json merges_by_score(const TokenTexts& tokens, const std::vector<float>& scores, const json& added) {
    std::unordered_set<std::string_view> vocabulary, unmade;
    for (const auto& token : tokens)
        if (token) vocabulary.insert(*token);
    for (const json& token : added) unmade.insert(token["content"].get_ref<const std::string&>());
    std::vector<size_t> order(tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    json merges = json::array();
    for (const size_t id : order) {
        if (!tokens[id] || unmade.count(*tokens[id]) || fallback_byte(*tokens[id]) >= 0) continue;
        const std::string_view token = *tokens[id];
        for (size_t cut = token.size(); cut-- > 1;) {
            if ((uint8_t(token[cut]) & 0xC0) == 0x80) continue;  // inside a character
            const std::string_view left = token.substr(0, cut), right = token.substr(cut);
            if (vocabulary.count(left) && vocabulary.count(right)) merges.push_back({left, right});
        }
    }
    return merges;
}

json sentencepiece_tokenizer(const TokenTexts& tokens, const std::vector<float>& scores, const json& added,
                             const std::string& unknown, bool space_in_front, const StartToken& start) {
    const auto is_byte = [](const auto& token) { return token && fallback_byte(*token) >= 0; };
    const bool byte_fallback = std::count_if(tokens.begin(), tokens.end(), is_byte) == 256;
    json out = assemble(tokens, merges_by_score(tokens, scores, added), added, start);
    json normalizers = json::array(), decoders = json::array();
    if (space_in_front) normalizers.push_back({{"type", "Prepend"}, {"prepend", SPACE_MARK}});
    normalizers.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", SPACE_MARK}});
    decoders.push_back({{"type", "Replace"}, {"pattern", {{"String", SPACE_MARK}}}, {"content", " "}});
    if (byte_fallback) decoders.push_back({{"type", "ByteFallback"}});
    decoders.push_back({{"type", "Fuse"}});
    if (space_in_front) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    out["normalizer"] = {{"type", "Sequence"}, {"normalizers", normalizers}};
    out["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
    if (!unknown.empty()) {
        out["model"]["unk_token"] = unknown;
        out["model"]["fuse_unk"] = true;
    }
    out["model"]["byte_fallback"] = byte_fallback;
    return out;
}

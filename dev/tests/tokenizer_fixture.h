// Small tokenizers for tests: those of dev/fixtures/tokenizer (dev/peers/make_tokenizer_fixture.py), with further
// special tokens if wanted.
#pragma once

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "dev/tests/temp_dir.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

// The files of dev/fixtures/tokenizer, or of the directory that $TOKENIZER_FIXTURES names.
inline const std::vector<nlohmann::json>& tokenizer_fixtures() {
    static const std::vector<nlohmann::json> files = [] {
        const char* const directory = std::getenv("TOKENIZER_FIXTURES");
        std::vector<nlohmann::json> read;
        for (const std::string& path : glob_files(str(directory ? directory : "dev/fixtures/tokenizer", "/*.json")))
            read.push_back(nlohmann::json::parse(read_file(path, int64_t(1) << 32)));
        require(!read.empty(), "there are no fixtures of tokenizers");
        return read;
    }();
    return files;
}

// Calls use(case, file) for each tokenizer.
template <typename Use>
void for_each_tokenizer(const Use& use) {
    for (const nlohmann::json& file : tokenizer_fixtures())
        for (const nlohmann::json& one : file["cases"]) use(one, file);
}

// The tokenizer.json of a fixture, with additional special tokens.
inline nlohmann::json tokenizer_description(const std::string& name, const std::vector<std::string>& special = {}) {
    nlohmann::json description;
    for_each_tokenizer([&](const nlohmann::json& one, const nlohmann::json&) {
        if (one["name"] == name) description = one["tokenizer"];
    });
    require(!description.is_null(), "dev/fixtures/tokenizer lacks ", name);
    nlohmann::json& added = description["added_tokens"];
    for (const std::string& text : special) {
        nlohmann::json token = added[0];
        int64_t id = 0;
        for (const auto& [_, known] : description["model"]["vocab"].items())
            id = std::max(id, known.get<int64_t>() + 1);
        for (const nlohmann::json& known : added) id = std::max(id, known["id"].get<int64_t>() + 1);
        token["id"] = id;
        token["content"] = text;
        added.push_back(token);
    }
    return description;
}

inline Tokenizer tokenizer_fixture(const std::string& name, const std::vector<std::string>& special = {}) {
    const TempDir dir;
    write_file(dir.file("tokenizer.json"), tokenizer_description(name, special).dump());
    return Tokenizer(dir.file("tokenizer.json"));
}

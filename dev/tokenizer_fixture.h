// Small tokenizers for tests: those of dev/fixtures/tokenizer, with further special tokens if wanted.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "dev/temp_dir.h"
#include "runtime/files/files.h"

// The tokenizer.json of a fixture, with additional special tokens.
inline nlohmann::json tokenizer_description(const std::string& name, const std::vector<std::string>& special = {}) {
    const nlohmann::json fixture = nlohmann::json::parse(read_file("dev/fixtures/tokenizer/tokenizers.json"));
    for (const nlohmann::json& one : fixture["cases"]) {
        if (one["name"] != name) continue;
        nlohmann::json description = one["tokenizer"];
        nlohmann::json& added = description["added_tokens"];
        for (const std::string& text : special) {
            nlohmann::json token = added[0];
            int64_t id = 0;
            for (const auto& [_, known] : description["model"]["vocab"].items())
                id = std::max(id, known.get<int64_t>() + 1);
            for (const nlohmann::json& known : added) id = std::max(id, known["id"].get<int64_t>() + 1);
            token["id"] = id, token["content"] = text;
            added.push_back(token);
        }
        return description;
    }
    throw Error("dev/fixtures/tokenizer lacks " + name);
}

inline Tokenizer tokenizer_fixture(const std::string& name, const std::vector<std::string>& special = {}) {
    const TempDir dir;
    write_file(dir.file("tokenizer.json"), tokenizer_description(name, special).dump());
    return Tokenizer(dir.file("tokenizer.json"));
}

// The keys of a JSON object in a file, checked. Errors name the file, the key, the value found and the one expected.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

struct JsonKeys {
    std::string path;  // of the file
    nlohmann::json object;
    std::string inside = "";  // the keys in front of this object's: "train."

    bool has(const char* key) const { return object.contains(key); }
    int64_t whole_number(const char* key, int64_t least, int64_t most = INT64_MAX) const;
    std::string text(const char* key) const;
    JsonKeys keys_of(const char* key) const;  // of an object in this one

  private:
    nlohmann::json value(const char* key) const;
    [[noreturn]] void wrong(const char* key, const std::string& expected) const;
};

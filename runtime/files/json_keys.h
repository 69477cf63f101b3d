// JSON files, and the keys of an object in one, checked. Errors name the file, the key, the value found and the one
// expected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

constexpr size_t MOST_JSON_LEVELS = 100;  // of objects and arrays in each other

// What is wrong with JSON text, as "broken JSON at byte 7", or "". Text without a fault can be parsed without an
// exception, and code may recurse over its values. In linear time, which the JSON library's parser does not take if it
// calls back. unique_keys: a key given twice is a fault, of which the JSON library would keep the last value only.
std::string json_fault(std::string_view text, size_t max_depth = MOST_JSON_LEVELS, bool unique_keys = false);

// The value of JSON text. fault: what json_fault() finds; then there is no value. Text without a fault is read once.
nlohmann::json parse_json(std::string_view text, std::string& fault);

// Writes a JSON object and flushes it; reads one, with an Error if it is damaged or not an object. ordered: with the
// keys in the order of the file.
void write_json(const std::string& path, const nlohmann::json& json);
nlohmann::json read_json(const std::string& path);
nlohmann::ordered_json read_ordered_json(const std::string& path);
// The same of a file's text.
nlohmann::json parse_json_object(const std::string& text, const std::string& path);
nlohmann::ordered_json parse_ordered_json_object(const std::string& text, const std::string& path);
// Throws Error for text with a fault.
nlohmann::ordered_json parse_ordered_json(std::string_view text);

// A value as a message of one line shows it.
template <typename Json>
std::string shown(const Json& value) {
    std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() > 120 ? text.substr(0, 120) + "…" : text;
}

// Text from a file in such a message, without quotes.
std::string shown_text(const std::string& text);

struct JsonKeys {
    std::string path;  // of the file
    nlohmann::json object;
    std::string inside = "";  // the keys in front of this object's: "train."

    bool has(const char* key) const { return object.contains(key); }
    int64_t whole_number(const char* key, int64_t least, int64_t most = INT64_MAX) const;
    double number(const char* key, double least) const;
    bool boolean(const char* key) const;
    std::string text(const char* key) const;
    std::vector<float> numbers(const char* key) const;     // an array of numbers of at least 0
    JsonKeys keys_of(const char* key) const;               // of an object in this one
    std::vector<JsonKeys> objects(const char* key) const;  // of the objects in an array

  private:
    nlohmann::json value(const char* key) const;
    [[noreturn]] void wrong(const char* key, const std::string& expected) const;
};

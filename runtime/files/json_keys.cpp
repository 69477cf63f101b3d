#include "runtime/files/json_keys.h"

#include <set>
#include <unordered_map>
#include <utility>

#include "runtime/error.h"
#include "runtime/files/files.h"

using nlohmann::json;
using nlohmann::ordered_json;

void write_json(const std::string& path, const json& value) {
    write_file(path, value.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

namespace {

// Reads JSON without making values of it.
class FaultFinder : public json::json_sax_t {
  public:
    FaultFinder(size_t depth, bool unique) : max_depth(depth), unique_keys(unique) {}
    std::string fault;

    bool null() override { return true; }
    bool boolean(bool) override { return true; }
    bool number_integer(number_integer_t) override { return true; }
    bool number_unsigned(number_unsigned_t) override { return true; }
    bool number_float(number_float_t, const string_t&) override { return true; }
    bool string(string_t&) override { return true; }
    bool binary(binary_t&) override { return true; }
    bool start_object(size_t) override { return open(); }
    bool start_array(size_t) override { return open(); }
    bool end_object() override { return close(); }
    bool end_array() override { return close(); }

    bool key(string_t& name) override {
        if (!unique_keys || keys.back().insert(name).second) return true;
        fault = str("key ", shown(json(name)), " twice");
        return false;
    }

    bool parse_error(size_t byte, const std::string&, const json::exception& e) override {
        constexpr int OUT_OF_RANGE = 406;
        fault = e.id == OUT_OF_RANGE ? "a number out of range" : str("broken JSON at byte ", byte);
        return false;
    }

  private:
    bool open() {
        keys.emplace_back();
        if (keys.size() > max_depth) fault = str("JSON nested more than ", max_depth, " deep");
        return fault.empty();
    }
    bool close() {
        keys.pop_back();
        return true;
    }

    const size_t max_depth;
    const bool unique_keys;
    std::vector<std::set<std::string>> keys;  // of the objects and arrays that are open
};

// Makes an ordered_json. The library's own parser looks for each key among those before it, which takes a minute for
// 300,000 keys.
class OrderedBuilder : public nlohmann::json_sax<ordered_json> {
  public:
    ordered_json root;

    bool null() override { return add(nullptr); }
    bool boolean(bool value) override { return add(value); }
    bool number_integer(number_integer_t value) override { return add(value); }
    bool number_unsigned(number_unsigned_t value) override { return add(value); }
    bool number_float(number_float_t value, const string_t&) override { return add(value); }
    bool string(string_t& value) override { return add(std::move(value)); }
    bool binary(binary_t&) override { return false; }
    bool start_object(size_t) override { return open(ordered_json::object()); }
    bool start_array(size_t) override { return open(ordered_json::array()); }
    bool end_object() override { return close(); }
    bool end_array() override { return close(); }
    bool key(string_t& name) override {
        levels.back().key = std::move(name);
        return true;
    }
    bool parse_error(size_t, const std::string&, const json::exception&) override { return false; }

  private:
    struct Level {
        ordered_json value;
        std::string key;                                // of the value that comes next
        std::unordered_map<std::string, size_t> index;  // of an object: where its keys are
    };
    bool open(ordered_json&& container) {
        levels.push_back({std::move(container), "", {}});
        return true;
    }
    bool close() {
        ordered_json value = std::move(levels.back().value);
        levels.pop_back();
        return add(std::move(value));
    }
    bool add(ordered_json&& value) {
        if (levels.empty()) {
            root = std::move(value);
            return true;
        }
        Level& level = levels.back();
        if (level.value.is_array()) {
            level.value.push_back(std::move(value));
            return true;
        }
        auto& members = level.value.get_ref<ordered_json::object_t&>();
        const auto [found, is_new] = level.index.try_emplace(level.key, members.size());
        if (is_new)
            members.emplace_back(std::move(level.key), std::move(value));
        else
            (members.begin() + int64_t(found->second))->second = std::move(value);  // the last one counts, as in Python
        return true;
    }

    std::vector<Level> levels;
};

// Python's json module writes NaN and Infinity, which JSON lacks. As strings they are values that no known key accepts.
std::string quote_non_numbers(std::string_view text) {
    std::string out;
    bool in_string = false;
    while (!text.empty()) {
        size_t n = in_string && text[0] == '\\' && text.size() > 1 ? 2 : 1;
        if (text[0] == '"') in_string = !in_string;
        bool quote = false;
        for (const std::string_view name : {"-Infinity", "Infinity", "NaN"}) {
            quote = !in_string && text.substr(0, name.size()) == name;
            if (!quote) continue;
            n = name.size();
            break;
        }
        if (quote) out += '"';
        out += text.substr(0, n);
        if (quote) out += '"';
        text.remove_prefix(n);
    }
    return out;
}

}  // namespace

std::string json_fault(std::string_view text, size_t max_depth, bool unique_keys) {
    FaultFinder finder(max_depth, unique_keys);
    const size_t nul = text.find('\0');  // the JSON library takes it for the end of the text
    if (json::sax_parse(text, &finder) && nul != std::string_view::npos) return str("NUL at byte ", nul + 1);
    return finder.fault;
}

namespace {

// Whether JSON text is nested more than MOST_JSON_LEVELS deep. Of other text it may say anything.
bool is_too_deep(std::string_view text) {
    bool in_string = false;
    int64_t level = 0;
    for (size_t i = 0; i < text.size() && level <= int64_t(MOST_JSON_LEVELS); i++) {
        const char c = text[i];
        if (c == '"') in_string = !in_string;
        if (in_string)
            i += c == '\\';
        else
            level += (c == '[' || c == '{') - (c == ']' || c == '}');
    }
    return level > int64_t(MOST_JSON_LEVELS);
}

}  // namespace

json parse_json(std::string_view text, std::string& fault) {
    const bool whole = text.find('\0') == std::string_view::npos && !is_too_deep(text);
    json value = whole ? json::parse(text, nullptr, false) : json(json::value_t::discarded);
    fault = value.is_discarded() ? json_fault(text) : "";
    return value;
}

namespace {

constexpr int64_t LONGEST = int64_t(1) << 28;  // bytes of a file

// The text of a JSON file, without faults.
std::string checked_text(std::string text, const std::string& path) {
    const std::string fault = json_fault(text);
    if (fault.empty()) return text;
    text = quote_non_numbers(text);
    require(json_fault(text).empty(), path, ": ", fault, "; the file is damaged");
    return text;
}

template <typename Json>
Json checked_object(Json value, const std::string& path) {
    require(value.is_object(), path, ": JSON, but not an object; the file is damaged");
    return value;
}

}  // namespace

json parse_json_object(const std::string& text, const std::string& path) {
    return checked_object(json::parse(checked_text(text, path)), path);
}

json read_json(const std::string& path) {
    return parse_json_object(read_file(path, LONGEST), path);
}

ordered_json parse_ordered_json(std::string_view text) {
    OrderedBuilder builder;
    require(ordered_json::sax_parse(text, &builder), "broken JSON");
    return std::move(builder.root);
}

ordered_json parse_ordered_json_object(const std::string& text, const std::string& path) {
    return checked_object(parse_ordered_json(checked_text(text, path)), path);
}

ordered_json read_ordered_json(const std::string& path) {
    return parse_ordered_json_object(read_file(path, LONGEST), path);
}

std::string shown_text(const std::string& text) {
    const std::string quoted = shown(json(text));
    return quoted.substr(1, quoted.size() - (quoted.back() == '"' ? 2 : 1));
}

json JsonKeys::value(const char* key) const {
    return object.value(key, json());
}

void JsonKeys::wrong(const char* key, const std::string& expected) const {
    const std::string found = value(key).is_null() ? "missing" : shown(value(key));
    throw Error(str(path, ": key '", inside, key, "' is ", found, ", expected ", expected, "; the file is damaged"));
}

int64_t JsonKeys::whole_number(const char* key, int64_t least, int64_t most) const {
    const json number = value(key);
    // Numbers beyond 2^63 are unsigned: get<int64_t>() would wrap around.
    const bool fits = number.is_number_integer() &&
                      (!number.is_number_unsigned() || number.get<uint64_t>() <= uint64_t(INT64_MAX)) &&
                      number.get<int64_t>() >= least && number.get<int64_t>() <= most;
    if (!fits)
        wrong(key, str("a whole number ",
                       most < INT64_MAX ? str("from ", least, " to ", most) : str("of at least ", least)));
    return number.get<int64_t>();
}

double JsonKeys::number(const char* key, double least) const {
    const json number = value(key);
    if (!number.is_number() || !(number.get<double>() >= least)) wrong(key, str("a number of at least ", least));
    return number.get<double>();
}

bool JsonKeys::boolean(const char* key) const {
    if (!value(key).is_boolean()) wrong(key, "true or false");
    return value(key).get<bool>();
}

std::string JsonKeys::text(const char* key) const {
    if (!value(key).is_string()) wrong(key, "text");
    return value(key).get<std::string>();
}

std::vector<float> JsonKeys::numbers(const char* key) const {
    const json list = value(key);
    bool valid = list.is_array();
    for (const json& number : list) valid = valid && number.is_number() && number.get<double>() >= 0;
    if (!valid) wrong(key, "an array of numbers of at least 0");
    return list.get<std::vector<float>>();
}

JsonKeys JsonKeys::keys_of(const char* key) const {
    if (!value(key).is_object()) wrong(key, "an object");
    return {path, value(key), str(inside, key, ".")};
}

std::vector<JsonKeys> JsonKeys::objects(const char* key) const {
    const json list = value(key);
    bool valid = list.is_array();
    for (const json& item : list) valid = valid && item.is_object();
    if (!valid) wrong(key, "an array of objects");
    std::vector<JsonKeys> all;
    for (const json& item : list) all.push_back({path, item, str(inside, key, ".")});
    return all;
}

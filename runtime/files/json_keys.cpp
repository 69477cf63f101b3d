#include "runtime/files/json_keys.h"

#include "runtime/error.h"
#include "runtime/files/files.h"

using nlohmann::json;

void write_json(const std::string& path, const json& value) {
    write_file(path, value.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

namespace {

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

json read_json(const std::string& path) {
    const std::string text = read_file(path, int64_t(1) << 28);
    const auto limit_depth = [&](int depth, json::parse_event_t, json&) {  // later code recurses over the values
        require(depth <= 100, path, ": JSON nested more than 100 deep; the file is damaged");
        return true;
    };
    json object;
    try {
        object = json::parse(text, limit_depth);
    } catch (const json::parse_error& e) {
        object = json::parse(quote_non_numbers(text), limit_depth, false);
        require(!object.is_discarded(), path, ": broken JSON at byte ", e.byte, "; the file is damaged");
    } catch (const json::exception&) {
        throw Error(str(path, ": holds a number out of range; the file is damaged"));
    }
    require(object.is_object(), path, ": JSON, but not an object; the file is damaged");
    return object;
}

json JsonKeys::value(const char* key) const {
    return object.value(key, json());
}

void JsonKeys::wrong(const char* key, const std::string& expected) const {
    std::string found =
        value(key).is_null() ? "missing" : value(key).dump(-1, ' ', true, json::error_handler_t::replace);
    if (found.size() > 60) found = found.substr(0, 60) + "…";
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

#include "runtime/files/json_keys.h"

#include "runtime/error.h"

using nlohmann::json;

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

std::string JsonKeys::text(const char* key) const {
    if (!value(key).is_string()) wrong(key, "text");
    return value(key).get<std::string>();
}

JsonKeys JsonKeys::keys_of(const char* key) const {
    if (!value(key).is_object()) wrong(key, "an object");
    return {path, value(key), str(inside, key, ".")};
}

#include "data/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "data/utf8.h"

namespace jinja {

namespace {

// Python's repr(float): the shortest digits that give the same number, with an exponent from 1e16 on and below 1e-4.
std::string float_text(double x) {
    if (std::isnan(x)) return "nan";
    if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
    char digits[40];
    const double size = std::fabs(x);
    const auto format =
        size != 0 && (size >= 1e16 || size < 1e-4) ? std::chars_format::scientific : std::chars_format::fixed;
    std::string out(digits, std::to_chars(digits, digits + sizeof digits, x, format).ptr);
    return format == std::chars_format::fixed && out.find('.') == std::string::npos ? out + ".0" : out;
}

std::string hex(uint32_t code, size_t digits) {
    std::string out(digits, '0');
    for (size_t i = digits; i-- > 0; code /= 16) out[i] = "0123456789abcdef"[code % 16];
    return out;
}

// Whether Python's repr() writes the character as it is. Of the characters that are not printable, this knows controls,
// white space and the marks of direction and joining.
bool printable(uint32_t c) {
    return c == ' ' ||
           !(c < 0x20 || (0x7F <= c && c <= 0xA0) || c == 0xAD || c == 0x1680 || (0x2000 <= c && c <= 0x200F) ||
             (0x2028 <= c && c <= 0x202F) || (0x205F <= c && c <= 0x206F) || c == 0x3000 || c == 0xFEFF);
}

void repr_text(const Text& text, Text& out) {
    const bool has_single = text.chars.find('\'') != std::string::npos,
               has_double = text.chars.find('"') != std::string::npos;
    const char quote = has_single && !has_double ? '"' : '\'';
    out.append(std::string(1, quote), TEMPLATE);
    for (size_t i = 0, n; i < text.size(); i += n) {
        n = utf8_length(text.chars, i);
        const bool valid = n > 0;
        n = std::max<size_t>(n, 1);
        const uint32_t c = valid ? utf8_code_point(text.chars, i, n) : uint8_t(text.chars[i]);
        std::string escaped;
        if (c == '\n' || c == '\r' || c == '\t')
            escaped = c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
        else if (c == '\\' || c == uint8_t(quote))
            escaped = {'\\', char(c)};
        else if (!valid || !printable(c))
            escaped = c < 0x100 ? "\\x" + hex(c, 2) : "\\u" + hex(c, 4);
        if (escaped.empty())
            out += text.part(i, i + n);
        else
            out.append(escaped, text.marks[i]);
    }
    out.append(std::string(1, quote), TEMPLATE);
}

void json_text(const Text& text, bool ensure_ascii, Text& out) {
    out.append("\"", TEMPLATE);
    for (size_t i = 0, n; i < text.size(); i += n) {
        n = std::max<size_t>(utf8_length(text.chars, i), 1);
        const char c = text.chars[i];
        std::string escaped;
        const size_t known = std::string_view("\"\\\n\r\t\b\f").find(c);
        if (known != std::string_view::npos) {
            escaped = {'\\', "\"\\nrtbf"[known]};
        } else if (uint8_t(c) < 0x20) {
            escaped = "\\u" + hex(uint8_t(c), 4);
        } else if (uint8_t(c) >= 0x80 && ensure_ascii) {
            const uint32_t code = utf8_length(text.chars, i) ? utf8_code_point(text.chars, i, n) : 0xFFFD;
            if (code >= 0x10000)
                escaped = "\\u" + hex(0xD800 + ((code - 0x10000) >> 10), 4) + "\\u" + hex(0xDC00 + (code & 0x3FF), 4);
            else
                escaped = "\\u" + hex(code, 4);
        }
        if (escaped.empty())
            out += text.part(i, i + n);
        else
            out.append(escaped, text.marks[i]);
    }
    out.append("\"", TEMPLATE);
}

void write_json(const Value& value, const JsonStyle& style, const std::string& newline, Text& out, Meter& meter) {
    meter.work();
    const size_t before = out.size();
    const std::string inner = newline + style.indent;
    const auto separator = [&](bool first) {
        if (!first) out.append(style.item_separator, TEMPLATE);
        if (style.lines) out.append(inner, TEMPLATE);
    };
    if (value.is_string()) {
        json_text(value.text(), style.ensure_ascii, out);
    } else if (value.is_none()) {
        out.append("null", TEMPLATE);
    } else if (value.is_bool()) {
        out.append(value.truth() ? "true" : "false", TEMPLATE);
    } else if (value.is_float() && !std::isfinite(value.number())) {
        out.append(std::isnan(value.number()) ? "NaN" : value.number() > 0 ? "Infinity" : "-Infinity", TEMPLATE);
    } else if (value.is_number()) {
        out += value.str(meter);
    } else if (value.is_sequence(Sequence::Kind::List) || value.is_sequence(Sequence::Kind::Tuple)) {
        const std::vector<Value>& items = value.sequence().items;
        out.append("[", TEMPLATE);
        for (size_t i = 0; i < items.size(); i++) {
            separator(i == 0);
            write_json(items[i], style, inner, out, meter);
        }
        if (style.lines && !items.empty()) out.append(newline, TEMPLATE);
        out.append("]", TEMPLATE);
    } else if (value.is_dict()) {
        auto items = value.dict().items;
        const auto by_key = [](const auto& a, const auto& b) { return a.first.chars < b.first.chars; };
        if (style.sort_keys) std::stable_sort(items.begin(), items.end(), by_key);
        out.append("{", TEMPLATE);
        for (size_t i = 0; i < items.size(); i++) {
            separator(i == 0);
            json_text(items[i].first, style.ensure_ascii, out);
            out.append(style.key_separator, TEMPLATE);
            write_json(items[i].second, style, inner, out, meter);
        }
        if (style.lines && !items.empty()) out.append(newline, TEMPLATE);
        out.append("}", TEMPLATE);
    } else {
        throw Error("tojson: a value of type " + value.type_name() + " has no JSON");
    }
    meter.make(2 * (out.size() - before));
}

// What Python calls a sequence's order: that of the first elements that differ.
template <typename Less>
bool sequence_less(const std::vector<Value>& a, const std::vector<Value>& b, Meter& meter, const Less& less) {
    for (size_t i = 0; i < std::min(a.size(), b.size()); i++)
        if (!Value::equal(a[i], b[i], meter)) return less(a[i], b[i]);
    return a.size() < b.size();
}

}  // namespace

const Value* Dict::find(const std::string& key) const {
    for (const auto& [name, value] : items)
        if (name.chars == key) return &value;
    return nullptr;
}

void Dict::set(const Text& key, Value value) {
    for (auto& [name, old] : items) {
        if (name.chars != key.chars) continue;
        old = std::move(value);
        return;
    }
    items.emplace_back(key, std::move(value));
}

Value::Value(std::vector<Value> items, Sequence::Kind kind) {
    Sequence sequence{std::move(items), kind, 1};
    for (const Value& item : sequence.items) sequence.depth = std::max(sequence.depth, item.depth() + 1);
    require(sequence.depth <= MAX_DEPTH, "lists nested more than ", MAX_DEPTH, " deep");
    data = std::make_shared<Sequence>(std::move(sequence));
}

Value::Value(Dict dict) {
    for (const auto& item : dict.items) dict.depth = std::max(dict.depth, item.second.depth() + 1);
    require(dict.depth <= MAX_DEPTH, "dictionaries nested more than ", MAX_DEPTH, " deep");
    data = std::make_shared<const Dict>(std::move(dict));
}

Value::Value(const nlohmann::ordered_json& json, char mark) {
    if (json.is_null()) {
        data = None{};
    } else if (json.is_boolean()) {
        data = json.get<bool>();
    } else if (json.is_number_integer()) {
        require(!json.is_number_unsigned() || json.get<uint64_t>() <= uint64_t(INT64_MAX), "the number ", json.dump(),
                " is larger than 64 bits hold");
        data = json.get<int64_t>();
    } else if (json.is_number()) {
        data = json.get<double>();
    } else if (json.is_string()) {
        *this = Value(Text(json.get<std::string>(), mark));
    } else if (json.is_array()) {
        std::vector<Value> items;
        for (const auto& item : json) items.emplace_back(item, mark);
        *this = Value(std::move(items), Sequence::Kind::List);
    } else {
        Dict dict;
        for (const auto& [key, value] : json.items()) dict.items.emplace_back(Text(key, mark), Value(value, mark));
        *this = Value(std::move(dict));
    }
}

void require_defined(const Value& value) {
    if (value.is_undefined()) throw Error(value.undefined().what);
}

double Value::number() const {
    return is_float() ? std::get<double>(data) : double(integer());
}

int64_t Value::integer() const {
    return is_bool() ? int64_t(std::get<bool>(data)) : std::get<int64_t>(data);
}

std::string Value::type_name() const {
    if (is_sequence())
        return sequence().kind == Sequence::Kind::List    ? "list"
               : sequence().kind == Sequence::Kind::Tuple ? "tuple"
               : sequence().kind == Sequence::Kind::View  ? "dict view"
                                                          : "generator";
    return is_undefined()   ? "Undefined"
           : is_none()      ? "NoneType"
           : is_bool()      ? "bool"
           : is_int()       ? "int"
           : is_float()     ? "float"
           : is_string()    ? "str"
           : is_dict()      ? "dict"
           : is_namespace() ? "namespace"
           : is_loop()      ? "loop"
           : is_macro()     ? "macro"
                            : "method";
}

bool Value::truth() const {
    if (is_undefined() || is_none()) return false;
    if (is_number()) return number() != 0;
    if (is_string()) return !text().empty();
    if (is_sequence()) return sequence().kind == Sequence::Kind::Generator || !sequence().items.empty();
    if (is_dict()) return !dict().items.empty();
    return true;
}

void Value::repr(Text& out, Meter& meter) const {
    meter.work();
    const size_t before = out.size();
    if (is_string()) {
        repr_text(text(), out);
    } else if (is_sequence(Sequence::Kind::List) || is_sequence(Sequence::Kind::Tuple)) {
        const bool tuple = sequence().kind == Sequence::Kind::Tuple;
        out.append(tuple ? "(" : "[", TEMPLATE);
        for (size_t i = 0; i < sequence().items.size(); i++) {
            if (i) out.append(", ", TEMPLATE);
            sequence().items[i].repr(out, meter);
        }
        out.append(!tuple ? "]" : sequence().items.size() == 1 ? ",)" : ")", TEMPLATE);
    } else if (is_dict()) {
        out.append("{", TEMPLATE);
        for (size_t i = 0; i < dict().items.size(); i++) {
            if (i) out.append(", ", TEMPLATE);
            repr_text(dict().items[i].first, out);
            out.append(": ", TEMPLATE);
            dict().items[i].second.repr(out, meter);
        }
        out.append("}", TEMPLATE);
    } else if (is_undefined()) {
        out.append("Undefined", TEMPLATE);
    } else {
        out += str(meter);
    }
    meter.make(2 * (out.size() - before));
}

Text Value::str(Meter& meter) const {
    if (is_string()) return text();
    if (is_undefined()) return Text();
    if (is_none()) return Text("None");
    if (is_bool()) return Text(truth() ? "True" : "False");
    if (is_int()) return Text(std::to_string(integer()));
    if (is_float()) return Text(float_text(number()));
    require(is_dict() || is_sequence(Sequence::Kind::List) || is_sequence(Sequence::Kind::Tuple), "a value of type ",
            type_name(), " cannot be printed", is_sequence() ? "; the filter 'list' makes a list of it" : "");
    Text out;
    repr(out, meter);
    return out;
}

std::vector<Value> Value::iterate(Meter& meter) const {
    std::vector<Value> out;
    if (is_sequence(Sequence::Kind::Generator)) {
        std::swap(out, std::get<SequencePointer>(data)->items);
    } else if (is_sequence()) {
        meter.make(sequence().items.size() * sizeof(Value));
        out = sequence().items;
    } else if (is_dict()) {
        for (const auto& item : dict().items) {
            meter.make(sizeof(Value) + 2 * item.first.size());
            out.emplace_back(item.first);
        }
    } else if (is_string()) {
        const std::vector<size_t> bounds = character_bounds(text().chars);
        meter.make(bounds.size() * (sizeof(Value) + sizeof(Text) + 16));
        for (size_t i = 0; i + 1 < bounds.size(); i++) out.emplace_back(text().part(bounds[i], bounds[i + 1]));
    } else {
        require(is_undefined(), "a value of type ", type_name(), " cannot be iterated");
    }
    return out;
}

int64_t Value::length(Meter& meter) const {
    if (is_undefined()) return 0;
    if (is_dict()) return int64_t(dict().items.size());
    if (is_string()) {
        meter.make(8 * text().size());
        return int64_t(character_bounds(text().chars).size()) - 1;
    }
    require(is_sequence() && sequence().kind != Sequence::Kind::Generator, "a value of type ", type_name(),
            " has no length", is_sequence() ? "; the filter 'list' makes a list of it" : "");
    return int64_t(sequence().items.size());
}

bool Value::equal(const Value& a, const Value& b, Meter& meter) {
    meter.work();
    if (a.is_integer() && b.is_integer()) return a.integer() == b.integer();
    if (a.is_number() && b.is_number()) return a.number() == b.number();
    if (a.data.index() != b.data.index()) return false;
    if (a.is_string()) {
        meter.work(a.text().size());
        return a.text().chars == b.text().chars;
    }
    if (a.is_sequence()) {
        if (&a.sequence() == &b.sequence()) return true;
        const auto same = [&](const Value& x, const Value& y) { return equal(x, y, meter); };
        return a.sequence().kind == b.sequence().kind && a.sequence().kind <= Sequence::Kind::Tuple &&
               std::equal(a.sequence().items.begin(), a.sequence().items.end(), b.sequence().items.begin(),
                          b.sequence().items.end(), same);
    }
    if (a.is_dict()) {
        if (a.dict().items.size() != b.dict().items.size()) return false;
        for (const auto& [key, value] : a.dict().items) {
            meter.work(key.size() * b.dict().items.size());
            const Value* const other = b.dict().find(key.chars);
            if (!other || !equal(value, *other, meter)) return false;
        }
        return true;
    }
    if (a.is_namespace()) return &a.name_space() == &b.name_space();
    if (a.is_macro()) return a.macro() == b.macro();
    if (a.is_loop()) return &a.loop() == &b.loop();
    return a.is_none() || a.is_undefined();
}

bool Value::less(const Value& a, const Value& b, Meter& meter) {
    meter.work();
    require_defined(a);
    require_defined(b);
    if (a.is_integer() && b.is_integer()) return a.integer() < b.integer();
    if (a.is_number() && b.is_number()) return a.number() < b.number();
    if (a.is_string() && b.is_string()) {
        meter.work(a.text().size());
        return a.text().chars < b.text().chars;  // the order of UTF-8 is that of code points
    }
    require(a.is_sequence() && b.is_sequence(a.sequence().kind) && a.sequence().kind <= Sequence::Kind::Tuple,
            "values of types ", a.type_name(), " and ", b.type_name(), " have no order");
    return sequence_less(a.sequence().items, b.sequence().items, meter,
                         [&](const Value& x, const Value& y) { return less(x, y, meter); });
}

bool Value::contains(const Value& container, const Value& item, Meter& meter) {
    if (container.is_string()) {
        require(item.is_string(), "'in <string>' requires a string on the left, not ", item.type_name());
        meter.work(container.text().size());
        return container.text().chars.find(item.text().chars) != std::string::npos;
    }
    if (container.is_dict()) {
        meter.work(64 * container.dict().items.size());
        return item.is_string() && container.dict().find(item.text().chars);
    }
    if (container.is_undefined()) return false;
    require(container.is_sequence(), "a value of type ", container.type_name(), " cannot be searched with 'in'");
    for (const Value& one : container.sequence().items)
        if (equal(one, item, meter)) return true;
    return false;
}

Text to_json(const Value& value, const JsonStyle& style, Meter& meter) {
    Text out;
    write_json(value, style, "\n", out, meter);
    return out;
}

}  // namespace jinja

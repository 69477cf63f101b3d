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

void repr_text(const Text& text, Writer& out) {
    out.meter.scan(text.size());
    const bool has_single = text.chars.find('\'') != std::string::npos,
               has_double = text.chars.find('"') != std::string::npos;
    const char quote = has_single && !has_double ? '"' : '\'';
    out.put(std::string_view(&quote, 1));
    size_t plain = 0;  // the begin of what is not written yet
    for (size_t i = 0, n; i < text.size(); i += n) {
        n = character_length(text.chars, i);
        const bool valid = utf8_length(text.chars, i) > 0;
        const uint32_t c = valid ? utf8_code_point(text.chars, i, n) : uint8_t(text.chars[i]);
        std::string escaped;
        if (c == '\n' || c == '\r' || c == '\t')
            escaped = c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
        else if (c == '\\' || c == uint8_t(quote))
            escaped = {'\\', char(c)};
        else if (!valid || !printable(c))
            escaped = c < 0x100 ? "\\x" + hex(c, 2) : "\\u" + hex(c, 4);
        if (escaped.empty()) continue;
        out.put(text, {plain, i});
        out.put(escaped, text.marks[i]);
        plain = i + n;
    }
    out.put(text, {plain, text.size()});
    out.put(std::string_view(&quote, 1));
}

std::string json_escape(std::string_view text, size_t i, size_t n, bool ensure_ascii) {
    const char c = text[i];
    const size_t known = std::string_view("\"\\\n\r\t\b\f").find(c);
    if (known != std::string_view::npos) return {'\\', "\"\\nrtbf"[known]};
    if (uint8_t(c) < 0x20) return "\\u" + hex(uint8_t(c), 4);
    if (uint8_t(c) < 0x80 || !ensure_ascii) return "";
    const uint32_t code = utf8_length(text, i) ? utf8_code_point(text, i, n) : 0xFFFD;
    if (code < 0x10000) return "\\u" + hex(code, 4);
    return "\\u" + hex(0xD800 + ((code - 0x10000) >> 10), 4) + "\\u" + hex(0xDC00 + (code & 0x3FF), 4);
}

void json_text(const Text& text, bool ensure_ascii, Writer& out) {
    out.meter.scan(text.size());
    out.put("\"");
    size_t plain = 0;
    for (size_t i = 0, n; i < text.size(); i += n) {
        n = character_length(text.chars, i);
        const std::string escaped = json_escape(text.chars, i, n, ensure_ascii);
        if (escaped.empty()) continue;
        out.put(text, {plain, i});
        out.put(escaped, text.marks[i]);
        plain = i + n;
    }
    out.put(text, {plain, text.size()});
    out.put("\"");
}

// The key of a dictionary as json.dumps() writes it.
void json_key(const Value& key, const JsonStyle& style, Writer& out) {
    if (key.is_string()) return json_text(key.text(), style.ensure_ascii, out);
    require(key.is_none() || key.is_number(), "tojson: a key of type ", key.type_name(), " has no JSON");
    out.put("\"");
    if (key.is_none() || key.is_bool())
        out.put(key.is_none() ? "null" : key.truth() ? "true" : "false");
    else
        key.print(out);
    out.put("\"");
}

void write_json(const Value& value, const JsonStyle& style, int level, Writer& out) {
    const Meter::Level nested(out.meter);
    out.meter.work();
    const auto new_line = [&](int depth) {
        if (!style.lines) return;
        out.put("\n");
        out.put_times(style.indent, depth);
    };
    const auto separator = [&](bool first) {
        if (!first) out.put(style.item_separator);
        new_line(level + 1);
    };
    if (value.is_string()) {
        json_text(value.text(), style.ensure_ascii, out);
    } else if (value.is_none()) {
        out.put("null");
    } else if (value.is_bool()) {
        out.put(value.truth() ? "true" : "false");
    } else if (value.is_float() && !std::isfinite(value.number())) {
        out.put(std::isnan(value.number()) ? "NaN" : value.number() > 0 ? "Infinity" : "-Infinity");
    } else if (value.is_number()) {
        value.print(out);
    } else if (value.is_list() || value.is_tuple()) {
        const std::vector<Value>& items = value.items();
        out.put("[");
        for (size_t i = 0; i < items.size(); i++) {
            separator(i == 0);
            write_json(items[i], style, level + 1, out);
        }
        if (!items.empty()) new_line(level);
        out.put("]");
    } else if (value.is_dict()) {
        out.meter.make(value.dict().size() * sizeof(void*));
        std::vector<const Dict::Entry*> entries;
        for (const Dict::Entry& entry : value.dict().entries()) entries.push_back(&entry);
        const auto by_key = [&](const Dict::Entry* a, const Dict::Entry* b) {
            return Value::less(a->key, b->key, out.meter);
        };
        if (style.sort_keys) std::stable_sort(entries.begin(), entries.end(), by_key);
        out.put("{");
        for (size_t i = 0; i < entries.size(); i++) {
            separator(i == 0);
            json_key(entries[i]->key, style, out);
            out.put(style.key_separator);
            write_json(entries[i]->value, style, level + 1, out);
        }
        if (!entries.empty()) new_line(level);
        out.put("}");
        out.meter.give_back(value.dict().size() * sizeof(void*));
    } else {
        throw Error("tojson: a value of type " + value.type_name() + " has no JSON");
    }
}

// What identifies a dictionary's key: text as it is, other values behind a NUL.
std::string key_id(const Value& key, Meter& meter) {
    const Meter::Level nested(meter);
    meter.work();
    if (key.is_string()) {
        meter.work(key.text().size());
        return key.text().chars[0] == '\0' && !key.text().empty() ? std::string(1, '\0') + "s" + key.text().chars
                                                                  : key.text().chars;
    }
    const std::string begin(1, '\0');
    if (key.is_none()) return begin + "n";
    if (key.is_number()) {
        const double x = key.number();
        const bool whole = key.is_integer() || (std::fabs(x) < 9e18 && std::floor(x) == x);
        return begin + (whole ? "i" + std::to_string(key.is_integer() ? key.integer() : int64_t(x)) : float_text(x));
    }
    require(key.is_tuple(), "a value of type ", key.type_name(), " cannot be the key of a dictionary");
    std::string out = begin + "t";
    for (const Value& item : key.items()) {
        const std::string id = key_id(item, meter);
        out += std::to_string(id.size()) + ":" + id;
        meter.work(out.size());
        require(out.size() < 100'000, "the key of a dictionary has more than 100,000 bytes");
    }
    return out;
}

// What Python calls a sequence's order: that of the first elements that differ.
template <typename Less>
bool sequence_less(const std::vector<Value>& a, const std::vector<Value>& b, Meter& meter, const Less& less) {
    const Meter::Level nested(meter);
    for (size_t i = 0; i < std::min(a.size(), b.size()); i++)
        if (!Value::equal(a[i], b[i], meter)) return less(a[i], b[i]);
    return a.size() < b.size();
}

}  // namespace

Items& Items::operator=(Items&& other) noexcept {
    std::swap(all, other.all);
    std::swap(meter, other.meter);
    std::swap(charged, other.charged);
    return *this;
}

void Items::add(Value value) {
    charge(VALUE_BYTES);
    all.push_back(std::move(value));
}

Dict& Dict::operator=(Dict&& other) noexcept {
    std::swap(depth, other.depth);
    std::swap(changed, other.changed);
    std::swap(meter, other.meter);
    std::swap(charged, other.charged);
    std::swap(all, other.all);
    std::swap(places, other.places);
    return *this;
}

Dict Dict::copy(Meter* payer) const {
    Dict out(payer);
    for (const auto& [id, place] : places) {
        out.charge(2 * sizeof(Entry) + HEADER_BYTES + id.size());
        out.places.emplace(id, place);
    }
    out.all = all;
    out.depth = depth;
    return out;
}

const Value* Dict::find(const std::string& name) const {
    const auto found = places.find(name);
    return found == places.end() ? nullptr : &all[found->second].value;
}

const Value* Dict::find(const Value& key, Meter& work) const {
    return find(key_id(key, work));
}

void Dict::set(const Value& key, Value value, Meter& work) {
    put(key_id(key, work), key, std::move(value));
}

void Dict::put(const std::string& id, Value key, Value value) {
    const auto found = places.find(id);
    if (found != places.end()) {
        all[found->second].value = std::move(value);
        return;
    }
    charge(2 * sizeof(Entry) + HEADER_BYTES + id.size());
    places.emplace(id, all.size());
    all.push_back({std::move(key), std::move(value)});
}

void Dict::erase(const Value& key, Meter& work) {
    const auto found = places.find(key_id(key, work));
    if (found == places.end()) return;
    const size_t place = found->second;
    work.scan(16 * places.size());
    places.erase(found);
    all.erase(all.begin() + int64_t(place));
    for (auto& one : places) one.second -= one.second > place;
}

void Writer::put_times(const Text& other, int64_t times) {
    if (other.empty() || times <= 0) return;
    charge(times > MAX_BYTES ? SIZE_MAX / 2 : 2 * other.size() * size_t(times));
    for (; times > 0; times--) {
        text.chars += other.chars;
        text.marks += other.marks;
    }
}

Value Writer::value() {
    Meter* const payer = &meter;
    const size_t bytes = std::exchange(charged, 0);
    const auto end = [payer, bytes](const Text* ended) {
        delete ended;
        payer->give_back(bytes);
    };
    return std::shared_ptr<const Text>(new Text(std::exchange(text, Text())), end);
}

Value part_of(const Text& text, Range part, Meter& meter) {
    Writer out(meter);
    out.put(text, part);
    return out.value();
}

Value made(const Text& text, Meter& meter) {
    return part_of(text, {0, text.size()}, meter);
}

Value::Value(Items items, Kind kind) {
    auto sequence = std::make_shared<Sequence>(Sequence{std::move(items), kind});
    for (const Value& item : sequence->items) sequence->depth = std::max(sequence->depth, item.depth() + 1);
    require(sequence->depth <= MAX_DEPTH, "lists nested more than ", MAX_DEPTH, " deep");
    data = std::move(sequence);
}

Value::Value(Dict dict) {
    for (const Dict::Entry& entry : dict.entries()) dict.depth = std::max(dict.depth, entry.value.depth() + 1);
    require(dict.depth <= MAX_DEPTH, "dictionaries nested more than ", MAX_DEPTH, " deep");
    data = std::make_shared<Dict>(std::move(dict));
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
        Items items;
        for (const auto& item : json) items.add(Value(item, mark));
        *this = Value(std::move(items), Kind::List);
    } else {
        Dict dict;
        Meter unlimited;
        for (const auto& [key, value] : json.items()) dict.set(Text(key, mark), Value(value, mark), unlimited);
        *this = Value(std::move(dict));
    }
}

bool Value::is_sequence(Kind kind) const {
    return is_sequence() && sequence().kind == kind;
}

const std::vector<Value>& Value::items() const {
    if (sequence().growth) sequence().growth->depends();
    return sequence().items.all;
}

void Value::watch(Growth* growth, size_t left_out) const {
    Sequence& list = *std::get<SequencePointer>(data);
    list.growth = growth;
    list.left_out = left_out;
}

int Value::depth() const {
    return is_sequence() ? sequence().depth : is_dict() ? dict().depth : 0;
}

Sequence& Value::changed_list(Meter& meter) const {
    const SequencePointer list = std::get<SequencePointer>(data);
    if (meter.growth) meter.growth->changes();
    if (list->growth) list->growth->depends();
    if (std::exchange(list->changed, true)) return *list;
    std::vector<Value> original;
    if (!list->items.payer()) {
        meter.make(list->items.size() * sizeof(Value));
        original = list->items.all;
    }
    meter.make(HEADER_BYTES);
    meter.when_done([list, original] {
        list->items.all = original;
        list->changed = false;
    });
    return *list;
}

Dict& Value::changed_dict(Meter& meter) const {
    const DictPointer dict = std::get<DictPointer>(data);
    if (meter.growth) meter.growth->changes();
    if (std::exchange(dict->changed, true)) return *dict;
    const auto original = std::make_shared<Dict>(dict->payer() ? Dict() : dict->copy(&meter));
    meter.make(HEADER_BYTES + sizeof(Dict));
    meter.when_done([dict, original] { *dict = original->copy(nullptr); });
    return *dict;
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
        return is_list() ? "list" : is_tuple() ? "tuple" : sequence().kind == Kind::View ? "dict view" : "generator";
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
    if (is_sequence(Kind::Generator)) return true;
    // A watched list without its first elements may be empty in another conversation.
    if (is_sequence()) return sequence().left_out == 0 ? !sequence().items.empty() : !items().empty();
    if (is_dict()) return dict().size() > 0;
    return true;
}

void Value::repr(Writer& out) const {
    const Meter::Level nested(out.meter);
    out.meter.work();
    if (is_string()) {
        repr_text(text(), out);
    } else if (is_list() || is_tuple()) {
        out.put(is_tuple() ? "(" : "[");
        for (size_t i = 0; i < items().size(); i++) {
            if (i) out.put(", ");
            items()[i].repr(out);
        }
        out.put(is_list() ? "]" : items().size() == 1 ? ",)" : ")");
    } else if (is_dict()) {
        out.put("{");
        for (size_t i = 0; i < dict().size(); i++) {
            if (i) out.put(", ");
            dict().entries()[i].key.repr(out);
            out.put(": ");
            dict().entries()[i].value.repr(out);
        }
        out.put("}");
    } else if (is_undefined()) {
        out.put("Undefined");
    } else {
        print(out);
    }
}

void Value::print(Writer& out) const {
    if (is_undefined()) return;
    if (is_string()) return out.put(text());
    if (is_none()) return out.put("None");
    if (is_bool()) return out.put(truth() ? "True" : "False");
    if (is_int()) return out.put(std::to_string(integer()));
    if (is_float()) return out.put(float_text(number()));
    require(is_dict() || is_list() || is_tuple(), "a value of type ", type_name(), " cannot be printed",
            is_sequence() ? "; the filter 'list' makes a list of it" : "");
    repr(out);
}

Value Value::str(Meter& meter) const {
    if (is_string()) return *this;
    Writer out(meter);
    print(out);
    return out.value();
}

Items Value::iterate(Meter& meter) const {
    Items out(&meter);
    if (is_sequence(Kind::Generator)) {
        std::swap(out, std::get<SequencePointer>(data)->items);
    } else if (is_sequence()) {
        for (const Value& item : items()) out.add(item);
    } else if (is_dict()) {
        for (const Dict::Entry& entry : dict().entries()) out.add(entry.key);
    } else if (is_string()) {
        const Text& all = text();
        for (size_t i = 0, n; i < all.size(); i += n) {
            n = character_length(all.chars, i);
            out.add(part_of(all, {i, i + n}, meter));
        }
    } else {
        require(is_undefined(), "a value of type ", type_name(), " cannot be iterated");
    }
    return out;
}

int64_t Value::length(Meter& meter) const {
    if (is_undefined()) return 0;
    if (is_dict()) return int64_t(dict().size());
    if (is_string()) {
        meter.scan(text().size());
        return int64_t(count_characters(text().chars));
    }
    require(is_sequence() && !is_sequence(Kind::Generator), "a value of type ", type_name(), " has no length",
            is_sequence() ? "; the filter 'list' makes a list of it" : "");
    return int64_t(items().size());
}

bool Value::equal(const Value& a, const Value& b, Meter& meter) {
    const Meter::Level nested(meter);
    meter.work();
    if (a.is_integer() && b.is_integer()) return a.integer() == b.integer();
    if (a.is_number() && b.is_number()) return a.number() == b.number();
    if (a.data.index() != b.data.index()) return false;
    if (a.is_string()) {
        if (a.text().size() != b.text().size()) return false;
        meter.work(a.text().size());
        return a.text().chars == b.text().chars;
    }
    if (a.is_sequence()) {
        if (&a.sequence() == &b.sequence()) return true;
        const auto same = [&](const Value& x, const Value& y) { return equal(x, y, meter); };
        return ((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple())) &&
               std::equal(a.items().begin(), a.items().end(), b.items().begin(), b.items().end(), same);
    }
    if (a.is_dict()) {
        if (a.dict().size() != b.dict().size()) return false;
        for (const Dict::Entry& entry : a.dict().entries()) {
            const Value* const other = b.dict().find(entry.key, meter);
            if (!other || !equal(entry.value, *other, meter)) return false;
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
    require((a.is_list() && b.is_list()) || (a.is_tuple() && b.is_tuple()), "values of types ", a.type_name(), " and ",
            b.type_name(), " have no order");
    return sequence_less(a.items(), b.items(), meter,
                         [&](const Value& x, const Value& y) { return less(x, y, meter); });
}

bool Value::contains(const Value& container, const Value& item, Meter& meter) {
    if (container.is_string()) {
        require(item.is_string(), "'in <string>' requires a string on the left, not ", item.type_name());
        meter.scan(container.text().size() + item.text().size());
        return find_text(container.text().chars, item.text().chars) != std::string::npos;
    }
    if (container.is_dict()) return container.dict().find(item, meter);
    if (container.is_undefined()) return false;
    require(container.is_sequence(), "a value of type ", container.type_name(), " cannot be searched with 'in'");
    for (const Value& one : container.items())
        if (equal(one, item, meter)) return true;
    return false;
}

Value to_json(const Value& value, const JsonStyle& style, Meter& meter) {
    Writer out(meter);
    write_json(value, style, 0, out);
    return out.value();
}

}  // namespace jinja

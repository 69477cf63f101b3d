// The methods of text, lists, dictionaries and `loop`, and the look-up of attributes and elements.
#include <map>

#include "data/jinja/argument_reader.h"
#include "data/jinja/format.h"

namespace jinja {

namespace {

using StringMethod = Value (*)(ArgumentReader& in, const Text& text);
using ValueMethod = Value (*)(ArgumentReader& in, const Value& object);

template <Sides sides>
Value strip_method(ArgumentReader& in, const Text& text) {
    return strip_text(in, text, sides);
}

template <bool from_right>
Value split_method(ArgumentReader& in, const Text& text) {
    const Value* const separator = in.find(0, "sep");
    const int64_t limit = in.integer(1, "maxsplit", -1);
    const size_t most = limit < 0 ? SIZE_MAX : size_t(limit) + 1;
    const bool at_space = !separator || separator->is_none();
    const std::string& wanted = at_space ? std::string() : in.text(0, "sep").chars;
    in.meter.scan(text.size() + wanted.size());
    const size_t parts = std::min(most, at_space ? count_words(text.chars) : count_text(text.chars, wanted) + 1),
                 memory = (at_space ? count_words(text.chars) : parts) * 3 * sizeof(Range) + 2 * text.size();
    in.meter.make(memory);
    Value out = at_space ? list_of(text, split(text.chars, limit, from_right), in.meter)
                         : list_of(text, split(text.chars, wanted, limit, from_right), in.meter);
    in.meter.give_back(memory);
    return out;
}

Value splitlines_method(ArgumentReader& in, const Text& text) {
    in.meter.scan(text.size());
    const size_t memory = count_lines(text.chars) * 3 * sizeof(Range);
    in.meter.make(memory);
    Value out = list_of(text, split_lines(text.chars), in.meter);
    in.meter.give_back(memory);
    return out;
}

template <bool at_end>
bool has_affix(ArgumentReader& in, const Text& text, const Value& wanted) {
    require(wanted.is_string(), in.name, ": an argument is of type ", wanted.type_name(), ", not str");
    const std::string& affix = wanted.text().chars;
    in.meter.work(affix.size());
    return affix.size() <= text.size() &&
           text.chars.compare(at_end ? text.size() - affix.size() : 0, affix.size(), affix) == 0;
}

template <bool at_end>
Value affix_method(ArgumentReader& in, const Text& text) {
    const Value& wanted = in.get(0, at_end ? "suffix" : "prefix");
    if (!wanted.is_tuple()) return has_affix<at_end>(in, text, wanted);
    for (const Value& one : wanted.items())
        if (has_affix<at_end>(in, text, one)) return true;
    return false;
}

template <bool at_end>
Value remove_affix_method(ArgumentReader& in, const Text& text) {
    const Value& affix = in.get(0, at_end ? "suffix" : "prefix");
    const size_t n = has_affix<at_end>(in, text, affix) ? affix.text().size() : 0;
    return part_of(text, at_end ? Range{0, text.size() - n} : Range{n, text.size()}, in.meter);
}

template <bool from_right>
Value find_method(ArgumentReader& in, const Text& text) {
    const std::string& wanted = in.text(0, "sub").chars;
    const size_t memory = from_right ? text.size() + wanted.size() : 0;
    in.meter.scan(text.size() + wanted.size());
    in.meter.make(memory);
    const size_t found = from_right ? find_last_text(text.chars, wanted) : find_text(text.chars, wanted);
    in.meter.give_back(memory);
    if (found == std::string::npos) return int64_t(-1);
    return int64_t(count_characters(std::string_view(text.chars).substr(0, found)));
}

Value count_method(ArgumentReader& in, const Text& text) {
    const std::string& wanted = in.text(0, "sub").chars;
    in.meter.scan(text.size() + wanted.size());
    return int64_t(count_text(text.chars, wanted));
}

template <Case to>
Value case_method(ArgumentReader& in, const Text& text) {
    return cased(text, to, in.meter);
}

const std::map<std::string, StringMethod>& string_methods() {
    static const std::map<std::string, StringMethod> all = {
        {"capitalize", case_method<Case::Capitalized>},
        {"count", count_method},
        {"endswith", affix_method<true>},
        {"find", find_method<false>},
        {"format",
         [](ArgumentReader& in, const Text& text) {
             in.take_all();
             return format_braces(text, in.arguments, in.meter);
         }},
        {"join", [](ArgumentReader& in, const Text& text) { return join_strings(in, text, in.get(0, "iterable")); }},
        {"lower", case_method<Case::Lower>},
        {"lstrip", strip_method<LEFT>},
        {"removeprefix", remove_affix_method<false>},
        {"removesuffix", remove_affix_method<true>},
        {"replace", replace_text},
        {"rfind", find_method<true>},
        {"rsplit", split_method<true>},
        {"rstrip", strip_method<RIGHT>},
        {"split", split_method<false>},
        {"splitlines", splitlines_method},
        {"startswith", affix_method<false>},
        {"strip", strip_method<BOTH>},
        {"title", case_method<Case::Title>},
        {"upper", case_method<Case::Upper>},
    };
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Lists and tuples

Value count_items(ArgumentReader& in, const Value& object) {
    const Value& wanted = in.get(0, "value");
    int64_t n = 0;
    for (const Value& one : object.items()) n += Value::equal(one, wanted, in.meter);
    return n;
}

Value index_of(ArgumentReader& in, const Value& object) {
    const Value& wanted = in.get(0, "value");
    for (size_t i = 0; i < object.items().size(); i++)
        if (Value::equal(object.items()[i], wanted, in.meter)) return int64_t(i);
    throw Error("index: the value is not in the list");
}

// Puts a value into a list that grows. Memory for an input's list is never given back.
void add_to(Sequence& list, Value value, Meter& meter) {
    if (!list.items.payer()) meter.make(VALUE_BYTES);
    list.items.add(std::move(value));
}

Value append_method(ArgumentReader& in, const Value& object) {
    add_to(object.changed_list(in.meter), in.get(0, "object"), in.meter);
    return None{};
}

Value extend_method(ArgumentReader& in, const Value& object) {
    const Items more = in.get(0, "iterable").iterate(in.meter);
    Sequence& list = object.changed_list(in.meter);
    for (const Value& one : more) add_to(list, one, in.meter);
    return None{};
}

Value insert_method(ArgumentReader& in, const Value& object) {
    const auto n = int64_t(object.items().size());
    const int64_t index = in.integer(0, "index", 0), at = std::clamp<int64_t>(index < 0 ? index + n : index, 0, n);
    Sequence& list = object.changed_list(in.meter);
    in.meter.work(size_t(n) * sizeof(Value));
    add_to(list, in.get(1, "object"), in.meter);
    std::rotate(list.items.all.begin() + at, list.items.all.end() - 1, list.items.all.end());
    return None{};
}

Value pop_item(ArgumentReader& in, const Value& object) {
    const auto n = int64_t(object.items().size());
    const int64_t index = in.integer(0, "index", -1), at = index < 0 ? index + n : index;
    require(0 <= at && at < n, "pop: a list of ", n, " elements has no element ", index);
    std::vector<Value>& items = object.changed_list(in.meter).items.all;
    in.meter.work(size_t(n - at) * sizeof(Value));
    Value out = items[size_t(at)];
    items.erase(items.begin() + at);
    return out;
}

const std::map<std::string, ValueMethod>& tuple_methods() {
    static const std::map<std::string, ValueMethod> all = {{"count", count_items}, {"index", index_of}};
    return all;
}

const std::map<std::string, ValueMethod>& list_methods() {
    static const std::map<std::string, ValueMethod> all = {
        {"append", append_method}, {"count", count_items},    {"extend", extend_method},
        {"index", index_of},       {"insert", insert_method}, {"pop", pop_item},
    };
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Dictionaries

template <bool with_keys, bool with_values>
Value view_method(ArgumentReader& in, const Value& object) {
    Items out(&in.meter);
    for (const Dict::Entry& entry : object.dict().entries())
        out.add(!with_keys     ? entry.value
                : !with_values ? entry.key
                               : pair_of(entry.key, entry.value, Kind::Tuple, in.meter));
    return {std::move(out), Kind::View};
}

// Memory for an input's dictionary is never given back.
void put_into(Dict& dict, const Value& key, const Value& value, Meter& meter) {
    if (!dict.payer()) meter.make(4 * VALUE_BYTES + 2 * HEADER_BYTES);
    dict.set(key, value, meter);
}

Value get_method(ArgumentReader& in, const Value& object) {
    const Value* const otherwise = in.find(1, "default");
    const Value* const found = object.dict().find(in.get(0, "key"), in.meter);
    return found ? *found : otherwise ? *otherwise : Value(None{});
}

Value pop_key(ArgumentReader& in, const Value& object) {
    const Value& key = in.get(0, "key");
    const Value* const otherwise = in.find(1, "default");
    const Value* const found = object.dict().find(key, in.meter);
    require(found || otherwise, "pop: the dictionary has no such key");
    if (!found) return *otherwise;
    Value out = *found;
    object.changed_dict(in.meter).erase(key, in.meter);
    return out;
}

Value setdefault_method(ArgumentReader& in, const Value& object) {
    const Value& key = in.get(0, "key");
    const Value* const given = in.find(1, "default");
    if (const Value* const found = object.dict().find(key, in.meter)) return *found;
    const Value value = given ? *given : Value(None{});
    put_into(object.changed_dict(in.meter), key, value, in.meter);
    return value;
}

Value update_method(ArgumentReader& in, const Value& object) {
    Dict& dict = object.changed_dict(in.meter);
    if (const Value* const other = in.find(0, "other")) {
        require(other->is_dict(), "update: the argument is not a dictionary");
        const Dict added = other->dict().copy(&in.meter);
        for (const Dict::Entry& entry : added.entries()) put_into(dict, entry.key, entry.value, in.meter);
    }
    in.take_all();
    for (const auto& [key, value] : in.arguments.keywords) put_into(dict, Text(key), value, in.meter);
    return None{};
}

const std::map<std::string, ValueMethod>& dict_methods() {
    static const std::map<std::string, ValueMethod> all = {
        {"copy", [](ArgumentReader& in, const Value& object) { return Value(object.dict().copy(&in.meter)); }},
        {"get", get_method},
        {"items", view_method<true, true>},
        {"keys", view_method<true, false>},
        {"pop", pop_key},
        {"setdefault", setdefault_method},
        {"update", update_method},
        {"values", view_method<false, true>},
    };
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// loop

Value cycle_method(ArgumentReader& in, const Value& object) {
    require(in.count() > 0, "loop.cycle needs values");
    in.take_all();
    return in.arguments.values[object.loop().index % in.count()];
}

Value changed_method(ArgumentReader& in, const Value& object) {
    Loop& loop = object.loop();
    if (in.meter.growth) in.meter.growth->changes();
    in.take_all();
    const auto same = [&](const Value& a, const Value& b) { return Value::equal(a, b, in.meter); };
    const std::vector<Value>&now = in.arguments.values, &before = loop.last_changed;
    if (loop.any_changed && std::equal(now.begin(), now.end(), before.begin(), before.end(), same)) return false;
    loop.any_changed = true;
    loop.last_changed = now;
    return true;
}

const std::map<std::string, ValueMethod>& loop_methods() {
    static const std::map<std::string, ValueMethod> all = {{"changed", changed_method}, {"cycle", cycle_method}};
    return all;
}

const std::map<std::string, ValueMethod>* methods_of(const Value& object) {
    return object.is_list()    ? &list_methods()
           : object.is_tuple() ? &tuple_methods()
           : object.is_dict()  ? &dict_methods()
           : object.is_loop()  ? &loop_methods()
                               : nullptr;
}

Value loop_attribute(const Loop& loop, const std::string& name) {
    for (const char* at_end : {"revindex", "revindex0", "last", "length", "nextitem"})
        if (loop.growth && name == at_end) loop.growth->depends();
    const auto i = int64_t(loop.index), n = int64_t(loop.items.size());
    if (name == "index") return i + 1;
    if (name == "index0") return i;
    if (name == "revindex") return n - i;
    if (name == "revindex0") return n - i - 1;
    if (name == "first") return i == 0;
    if (name == "last") return i == n - 1;
    if (name == "length") return n;
    if (name == "depth") return int64_t(1);  // more only in recursive loops
    if (name == "depth0") return int64_t(0);
    if (name == "previtem" && i > 0) return loop.items.all[size_t(i) - 1];
    if (name == "nextitem" && i < n - 1) return loop.items.all[size_t(i) + 1];
    return Undefined{"'loop object' has no attribute '" + shortened(name) + "'"};
}

// object[key] of a list, a tuple or text; undefined if there is none.
Value element(const Value& object, int64_t key, Meter& meter) {
    int64_t i = key;
    if (object.is_list() || object.is_tuple()) {
        const Sequence& list = object.sequence();
        if (list.growth && i >= 0) list.growth->read(size_t(i) + list.left_out);
        const std::vector<Value>& items = i >= 0 ? list.items.all : object.items();
        if (i < 0) i += int64_t(items.size());
        if (0 <= i && i < int64_t(items.size())) return items[size_t(i)];
    } else if (object.is_string()) {
        const Text& text = object.text();
        if (i < 0) i += object.length(meter);
        meter.scan(size_t(std::clamp<int64_t>(i, 0, int64_t(text.size()))));
        const size_t at = i < 0 ? text.size() : character_start(text.chars, size_t(i));
        if (at < text.size()) return part_of(text, {at, at + character_length(text.chars, at)}, meter);
    }
    return Undefined{str(object.type_name(), " object has no element ", key)};
}

}  // namespace

std::vector<std::string> method_names() {
    std::vector<std::string> out;
    for (const auto& one : string_methods()) out.push_back("str." + one.first);
    for (const auto& one : list_methods()) out.push_back("list." + one.first);
    for (const auto& one : tuple_methods()) out.push_back("tuple." + one.first);
    for (const auto& one : dict_methods()) out.push_back("dict." + one.first);
    for (const auto& one : loop_methods()) out.push_back("loop." + one.first);
    return out;
}

bool has_method(const Value& object, const std::string& name) {
    const auto* const methods = methods_of(object);
    return object.is_string() ? string_methods().count(name) > 0 : methods && methods->count(name) > 0;
}

Value call_method(const std::string& name, const Value& object, const Arguments& arguments, Meter& meter) {
    meter.work();
    require_defined(object);
    require(has_method(object, name), "a value of type ", object.type_name(), " has no method '", name, "'");
    ArgumentReader in(name, arguments, meter);
    Value out =
        object.is_string() ? string_methods().at(name)(in, object.text()) : methods_of(object)->at(name)(in, object);
    in.done();
    return out;
}

Value attribute(const Value& object, const std::string& name) {
    require_defined(object);
    if (has_method(object, name)) return Method{name};
    if (object.is_loop()) return loop_attribute(object.loop(), name);
    if (object.is_sequence(Kind::Group) && (name == "grouper" || name == "list")) return object.items()[name == "list"];
    const Value* const found = object.is_dict()        ? object.dict().find(name)
                               : object.is_namespace() ? object.name_space().find(name)
                                                       : nullptr;
    return found ? *found
                 : Value(Undefined{str("'", object.type_name(), " object' has no attribute '", shortened(name), "'")});
}

Value item(const Value& object, const Value& key, Meter& meter) {
    require_defined(object);
    if (object.is_dict() && (key.is_string() || key.is_number() || key.is_none() || key.is_tuple()))
        if (const Value* const found = object.dict().find(key, meter)) return *found;
    if (key.is_integer()) return element(object, key.integer(), meter);
    if (!key.is_string()) return Undefined{str(object.type_name(), " object has no such element")};
    meter.work(key.text().size());
    return attribute(object, key.text().chars);
}

}  // namespace jinja

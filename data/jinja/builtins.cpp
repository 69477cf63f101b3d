#include "data/jinja/builtins.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "data/jinja/lexer.h"

namespace jinja {

namespace {

// The arguments of one call, by position or name. Reading marks them as used; done() refuses the others.
class Reader {
  public:
    Reader(const std::string& n, const Arguments& a, Meter& m) : name(n), arguments(a), meter(m) {}

    const Value* find(size_t position, const char* keyword) {
        if (position < arguments.values.size()) {
            used = std::max(used, position + 1);
            return &arguments.values[position];
        }
        for (const auto& [key, value] : arguments.keywords) {
            if (key != keyword) continue;
            keywords_used++;
            return &value;
        }
        return nullptr;
    }
    const Value& get(size_t position, const char* keyword) {
        const Value* const found = find(position, keyword);
        require(found, name, ": the argument '", keyword, "' is missing");
        return *found;
    }
    Text text(size_t position, const char* keyword, const char* otherwise) {
        const Value* const found = find(position, keyword);
        return found ? found->str(meter) : Text(otherwise);
    }
    int64_t integer(size_t position, const char* keyword, int64_t otherwise) {
        const Value* const found = find(position, keyword);
        if (!found || found->is_none()) return otherwise;
        require(found->is_integer(), name, ": the argument '", keyword, "' is of type ", found->type_name(),
                ", not int");
        return found->integer();
    }
    bool flag(size_t position, const char* keyword, bool otherwise) {
        const Value* const found = find(position, keyword);
        return found ? found->truth() : otherwise;
    }
    void done() const {
        require(used >= arguments.values.size() && keywords_used >= arguments.keywords.size(), name,
                ": an argument that is not supported");
    }
    // The arguments from a position on, for another filter or test.
    Arguments rest(size_t position) {
        Arguments out;
        for (size_t i = position; i < arguments.values.size(); i++) out.values.push_back(arguments.values[i]);
        used = arguments.values.size();
        return out;
    }
    size_t count() const { return arguments.values.size(); }

    const std::string& name;
    const Arguments& arguments;
    Meter& meter;

  private:
    size_t used = 0, keywords_used = 0;
};

Value list_of(std::vector<Text> strings, Meter& meter) {
    std::vector<Value> items;
    for (Text& text : strings) {
        meter.make(2 * text.size() + sizeof(Value) + sizeof(Text) + 16);
        items.emplace_back(std::move(text));
    }
    return {std::move(items), Sequence::Kind::List};
}

Value made(Text text, Meter& meter) {
    meter.make(2 * text.size());
    return text;
}

const Text& text_of(const std::string& name, const Value& value) {
    require(value.is_string(), name, ": an argument is of type ", value.type_name(), ", not str");
    return value.text();
}

// The mark of text that was made from another text as a whole: content if any of that is.
char origin_of(const Text& text) {
    return std::any_of(text.marks.begin(), text.marks.end(), [](char mark) { return mark & CONTENT; }) ? CONTENT
                                                                                                       : TEMPLATE;
}

Value tuple_of(Value first, Value second) {
    std::vector<Value> items;
    items.push_back(std::move(first));
    items.push_back(std::move(second));
    return {std::move(items), Sequence::Kind::Tuple};
}

// ---------------------------------------------------------------------------------------------------------------------
// Functions that filters and methods share

Value strip_text(Reader& in, const Text& text, Sides sides) {
    in.meter.make(10 * text.size());  // the result, and the bounds of the characters
    const Value* const characters = in.find(0, "chars");
    if (!characters || characters->is_none()) return strip(text, sides);
    const std::string& wanted = text_of(in.name, *characters).chars;
    in.meter.work(text.size() * wanted.size());
    return strip(text, wanted, sides);
}

Value replace_text(Reader& in, const Text& text) {
    const Text from = in.get(0, "old").str(in.meter), to = in.get(1, "new").str(in.meter);
    const int64_t count = in.integer(2, "count", -1);
    size_t found = from.empty() ? text.size() + 1 : 0;
    for (size_t i = 0; !from.empty() && (i = text.chars.find(from.chars, i)) != std::string::npos; i += from.size())
        found++;
    if (count >= 0) found = std::min(found, size_t(count));
    in.meter.make(10 * text.size());
    if (to.size() > 0) in.meter.make(2 * found * to.size());
    return replace(text, from.chars, to, count);
}

Value join_strings(Reader& in, const Text& separator, const Value& list) {
    Text out;
    bool first = true;
    for (const Value& item : list.iterate(in.meter)) {
        const Text text = item.str(in.meter);
        in.meter.make(2 * (text.size() + separator.size()));
        if (!first) out += separator;
        out += text;
        first = false;
    }
    return out;
}

Value cased(Reader& in, const Text& text, Case to) {
    in.meter.make(2 * text.size());
    return change_case(text, to);
}

// ---------------------------------------------------------------------------------------------------------------------
// Filters

using Filter = Value (*)(Reader& in, const Value& value);

template <Case to>
Value case_filter(Reader& in, const Value& value) {
    return cased(in, value.str(in.meter), to);
}

// jinja2's title differs from str.title(): words begin after -, white space and opening brackets only.
Value title_filter(Reader& in, const Value& value) {
    Text text = change_case(value.str(in.meter), Case::Lower);
    bool first = true;
    for (char& c : text.chars) {
        if (first && 'a' <= c && c <= 'z') c = char(c & ~0x20);
        first = std::string_view("- \t\n\r\f\v({[<").find(c) != std::string_view::npos;
    }
    return made(std::move(text), in.meter);
}

Value trim_filter(Reader& in, const Value& value) {
    return strip_text(in, value.str(in.meter), BOTH);
}

Value length_filter(Reader& in, const Value& value) {
    return value.length(in.meter);
}

Value tojson_filter(Reader& in, const Value& value) {
    JsonStyle style;
    style.ensure_ascii = in.flag(100, "ensure_ascii", false);
    style.sort_keys = in.flag(100, "sort_keys", false);
    const Value* const indent = in.find(0, "indent");
    if (indent && !indent->is_none()) {
        style.lines = true;
        style.item_separator = ",";
        if (indent->is_string()) {
            style.indent = indent->text().chars;
        } else {
            const int64_t width = in.integer(0, "indent", 0);
            require(width <= 100, "tojson: an indent of ", width, " is more than 100");
            style.indent.assign(size_t(std::max<int64_t>(width, 0)), ' ');
        }
    }
    if (const Value* const separators = in.find(100, "separators"); separators && !separators->is_none()) {
        const std::vector<Value> both = separators->iterate(in.meter);
        require(both.size() == 2, "tojson: separators are a pair of strings");
        style.item_separator = text_of(in.name, both[0]).chars;
        style.key_separator = text_of(in.name, both[1]).chars;
    }
    return to_json(value, style, in.meter);
}

Value default_filter(Reader& in, const Value& value) {
    const Value* const otherwise = in.find(0, "default_value");
    const bool also_false = in.flag(1, "boolean", false);
    if (!value.is_undefined() && !(also_false && !value.truth())) return value;
    return otherwise ? *otherwise : Value(Text());
}

Value first_filter(Reader& in, const Value& value) {
    const std::vector<Value> items = value.iterate(in.meter);
    return items.empty() ? Value(Undefined{"No first item, sequence was empty."}) : items.front();
}

Value last_filter(Reader& in, const Value& value) {
    const std::vector<Value> items = value.iterate(in.meter);
    return items.empty() ? Value(Undefined{"No last item, sequence was empty."}) : items.back();
}

Value list_filter(Reader& in, const Value& value) {
    return {value.iterate(in.meter), Sequence::Kind::List};
}

Value reverse_filter(Reader& in, const Value& value) {
    std::vector<Value> items = value.iterate(in.meter);
    std::reverse(items.begin(), items.end());
    if (!value.is_string()) return {std::move(items), Sequence::Kind::Generator};
    Text out;
    for (const Value& item : items) out += item.text();
    return made(std::move(out), in.meter);
}

Value items_filter(Reader& in, const Value& value) {
    std::vector<Value> out;
    require(value.is_dict() || value.is_undefined(), "items: a value of type ", value.type_name(),
            " is not a dictionary");
    if (value.is_dict()) {
        in.meter.make(value.dict().items.size() * 200);
        for (const auto& [key, item] : value.dict().items) out.push_back(tuple_of(key, item));
    }
    return {std::move(out), Sequence::Kind::Generator};
}

Value dictsort_filter(Reader& in, const Value& value) {
    const bool case_sensitive = in.flag(0, "case_sensitive", false);
    const Text by = in.text(1, "by", "key");
    const bool reversed = in.flag(2, "reverse", false);
    require(value.is_dict() && by.chars == "key", "dictsort sorts dictionaries by their keys only");
    auto items = value.dict().items;
    const auto sort_key = [&](const Text& key) { return case_sensitive ? key : change_case(key, Case::Lower); };
    std::vector<std::pair<std::string, Value>> sorted;
    in.meter.make(items.size() * 400);
    for (auto& [key, item] : items) sorted.emplace_back(sort_key(key).chars, tuple_of(key, item));
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](const auto& a, const auto& b) { return reversed ? b.first < a.first : a.first < b.first; });
    std::vector<Value> out;
    for (auto& one : sorted) out.push_back(one.second);
    return {std::move(out), Sequence::Kind::List};
}

// `a.b.0`, as map and selectattr take it.
Value dotted_attribute(Value value, const Value& path, Meter& meter) {
    if (!path.is_string()) return item(value, path, meter);
    const std::string& all = path.text().chars;
    for (size_t begin = 0, end; begin <= all.size(); begin = end + 1) {
        end = std::min(all.find('.', begin), all.size());
        const std::string part = all.substr(begin, end - begin);
        const bool number =
            !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
        value = item(value, number ? Value(int64_t(std::stoll(part))) : Value(Text(part)), meter);
    }
    return value;
}

Value map_filter(Reader& in, const Value& value) {
    std::vector<Value> out = value.iterate(in.meter);
    const Value* const path = in.count() ? nullptr : in.find(0, "attribute");
    if (path) {
        const Value* const otherwise = in.find(100, "default");
        for (Value& one : out) {
            one = dotted_attribute(one, *path, in.meter);
            if (otherwise && one.is_undefined()) one = *otherwise;
        }
    } else {
        const std::string filter = text_of(in.name, in.get(0, "name")).chars;
        const Arguments rest = in.rest(1);
        require(in.arguments.keywords.empty(), "map: a filter with named arguments is not supported");
        for (Value& one : out) one = call_filter(filter, one, rest, in.meter);
    }
    return {std::move(out), Sequence::Kind::Generator};
}

template <bool by_attribute, bool wanted>
Value select_filter(Reader& in, const Value& value) {
    const Value path = by_attribute ? in.get(0, "attribute") : Value();
    const Value* const test = in.find(by_attribute, "test");
    const Arguments rest = in.rest(size_t(by_attribute) + 1);
    std::vector<Value> out;
    for (Value& one : value.iterate(in.meter)) {
        const Value tested = by_attribute ? dotted_attribute(one, path, in.meter) : one;
        const bool holds = test ? call_test(text_of(in.name, *test).chars, tested, rest, in.meter) : tested.truth();
        if (holds == wanted) out.push_back(std::move(one));
    }
    return {std::move(out), Sequence::Kind::Generator};
}

Value string_filter(Reader& in, const Value& value) {
    return made(value.str(in.meter), in.meter);
}

// Python's int(text) and float(text): spaces around, and _ between digits.
template <typename Number, typename Parse>
bool parse_number(const Text& text, Number& out, const Parse& parse) {
    std::string digits = strip(text, BOTH).chars;
    for (size_t i = 1; i + 1 < digits.size(); i++)
        if (digits[i] == '_' && std::isdigit(uint8_t(digits[i - 1])) && std::isdigit(uint8_t(digits[i + 1])))
            digits.erase(i, 1);
    if (digits.empty() || digits.find_first_not_of("0123456789+-.eEinfatyINFATY") != std::string::npos) return false;
    try {
        size_t used = 0;
        out = parse(digits, used);
        return used == digits.size();
    } catch (const std::logic_error&) {  // not a number, or out of range
        return false;
    }
}

Value int_filter(Reader& in, const Value& value) {
    const Value* const given = in.find(0, "default");
    const Value otherwise = given ? *given : Value(int64_t(0));
    require(in.integer(1, "base", 10) == 10, "int: only base 10 is supported");
    require_defined(value);
    if (value.is_integer()) return value.integer();
    double number = 0;
    int64_t whole = 0;
    if (value.is_string() &&
        parse_number(value.text(), whole, [](const std::string& s, size_t& n) { return std::stoll(s, &n); }))
        return whole;
    if (value.is_float())
        number = value.number();
    else if (!value.is_string() ||
             !parse_number(value.text(), number, [](const std::string& s, size_t& n) { return std::stod(s, &n); }))
        return otherwise;
    return std::fabs(number) < 9.2e18 ? Value(int64_t(number)) : otherwise;
}

Value float_filter(Reader& in, const Value& value) {
    const Value* const given = in.find(0, "default");
    const Value otherwise = given ? *given : Value(0.0);
    require_defined(value);
    if (value.is_number()) return value.number();
    double number = 0;
    const bool ok = value.is_string() && parse_number(value.text(), number,
                                                      [](const std::string& s, size_t& n) { return std::stod(s, &n); });
    return ok ? Value(number) : otherwise;
}

Value abs_filter(Reader& in, const Value& value) {
    require(value.is_number(), in.name, ": a value of type ", value.type_name(), " is not a number");
    if (value.is_float()) return std::fabs(value.number());
    require(value.integer() != INT64_MIN, in.name, ": the result is larger than 64 bits hold");
    return std::abs(value.integer());
}

Value join_filter(Reader& in, const Value& value) {
    const Text separator = in.text(0, "d", "");
    const Value* const path = in.find(1, "attribute");
    if (!path || path->is_none()) return join_strings(in, separator, value);
    std::vector<Value> items = value.iterate(in.meter);
    for (Value& one : items) one = dotted_attribute(one, *path, in.meter);
    return join_strings(in, separator, {std::move(items), Sequence::Kind::List});
}

Value replace_filter(Reader& in, const Value& value) {
    return replace_text(in, value.str(in.meter));
}

Value indent_filter(Reader& in, const Value& value) {
    const Value* const width = in.find(0, "width");
    Text space("    ");
    if (width && width->is_string()) {
        space = width->text();
    } else if (width) {
        const int64_t n = in.integer(0, "width", 4);
        require(n <= 1000, "indent: a width of ", n, " is more than 1000");
        space = Text(std::string(size_t(std::max<int64_t>(n, 0)), ' '));
    }
    const bool first = in.flag(1, "first", false), blank = in.flag(2, "blank", false);
    Text text = value.str(in.meter);
    text.append("\n", TEMPLATE);
    const std::vector<Text> lines = split_lines(text);
    in.meter.make(2 * (text.size() + lines.size() * (space.size() + 1)) + lines.size() * sizeof(Text));
    Text out;
    if (first) out += space;
    for (size_t i = 0; i < lines.size(); i++) {
        if (i) out.append("\n", TEMPLATE);
        if (i && (blank || !lines[i].empty())) out += space;
        out += lines[i];
    }
    return out;
}

// Python marks the text as safe HTML. Nothing here escapes HTML.
Value safe_filter(Reader& in, const Value& value) {
    return made(value.str(in.meter), in.meter);
}

const std::map<std::string, Filter>& filters() {
    static const std::map<std::string, Filter> all = {
        {"abs", abs_filter},
        {"capitalize", case_filter<Case::Capitalized>},
        {"count", length_filter},
        {"d", default_filter},
        {"default", default_filter},
        {"dictsort", dictsort_filter},
        {"first", first_filter},
        {"float", float_filter},
        {"indent", indent_filter},
        {"int", int_filter},
        {"items", items_filter},
        {"join", join_filter},
        {"last", last_filter},
        {"length", length_filter},
        {"list", list_filter},
        {"lower", case_filter<Case::Lower>},
        {"map", map_filter},
        {"reject", select_filter<false, false>},
        {"rejectattr", select_filter<true, false>},
        {"replace", replace_filter},
        {"reverse", reverse_filter},
        {"safe", safe_filter},
        {"select", select_filter<false, true>},
        {"selectattr", select_filter<true, true>},
        {"string", string_filter},
        {"title", title_filter},
        {"tojson", tojson_filter},
        {"trim", trim_filter},
        {"upper", case_filter<Case::Upper>},
    };
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests

using Test = bool (*)(Reader& in, const Value& value);

int64_t remainder_of(const Value& value, int64_t divisor, const std::string& name) {
    require(value.is_integer(), name, ": a value of type ", value.type_name(), " is not a whole number");
    require(divisor != 0, name, ": division by zero");
    return divisor == -1 ? 0 : value.integer() % divisor;
}

const std::map<std::string, Test>& tests() {
    static const Test equal = [](Reader& in, const Value& v) { return Value::equal(v, in.get(0, "b"), in.meter); };
    static const Test differ = [](Reader& in, const Value& v) { return !Value::equal(v, in.get(0, "b"), in.meter); };
    static const Test less = [](Reader& in, const Value& v) { return Value::less(v, in.get(0, "b"), in.meter); };
    static const Test more = [](Reader& in, const Value& v) { return Value::less(in.get(0, "b"), v, in.meter); };
    static const Test at_most = [](Reader& in, const Value& v) {
        const Value& b = in.get(0, "b");
        return Value::less(v, b, in.meter) || Value::equal(v, b, in.meter);
    };
    static const Test at_least = [](Reader& in, const Value& v) {
        const Value& b = in.get(0, "b");
        return Value::less(b, v, in.meter) || Value::equal(v, b, in.meter);
    };
    static const Test is_true = [](Reader&, const Value& v) { return v.is_bool() && v.truth(); };
    static const Test is_false = [](Reader&, const Value& v) { return v.is_bool() && !v.truth(); };
    static const std::map<std::string, Test> all = {
        {"!=", differ},
        {"<", less},
        {"<=", at_most},
        {"==", equal},
        {">", more},
        {">=", at_least},
        {"boolean", [](Reader&, const Value& v) { return v.is_bool(); }},
        {"callable", [](Reader&, const Value& v) { return v.is_callable(); }},
        {"defined", [](Reader&, const Value& v) { return !v.is_undefined(); }},
        {"divisibleby",
         [](Reader& in, const Value& v) { return remainder_of(v, in.integer(0, "num", 0), in.name) == 0; }},
        {"eq", equal},
        {"equalto", equal},
        {"even", [](Reader& in, const Value& v) { return remainder_of(v, 2, in.name) == 0; }},
        {"false", is_false},
        {"float", [](Reader&, const Value& v) { return v.is_float(); }},
        {"ge", at_least},
        {"greaterthan", more},
        {"gt", more},
        {"in", [](Reader& in, const Value& v) { return Value::contains(in.get(0, "seq"), v, in.meter); }},
        {"integer", [](Reader&, const Value& v) { return v.is_int(); }},
        {"iterable",
         [](Reader&, const Value& v) { return v.is_undefined() || v.is_string() || v.is_sequence() || v.is_dict(); }},
        {"le", at_most},
        {"lessthan", less},
        {"lt", less},
        {"mapping", [](Reader&, const Value& v) { return v.is_dict(); }},
        {"ne", differ},
        {"none", [](Reader&, const Value& v) { return v.is_none(); }},
        {"number", [](Reader&, const Value& v) { return v.is_number(); }},
        {"odd", [](Reader& in, const Value& v) { return remainder_of(v, 2, in.name) != 0; }},
        // Values with a length and indices: in jinja2 also dictionaries and undefined values.
        {"sequence",
         [](Reader&, const Value& v) {
             return v.is_undefined() || v.is_string() || v.is_dict() || v.is_sequence(Sequence::Kind::List) ||
                    v.is_sequence(Sequence::Kind::Tuple);
         }},
        {"string", [](Reader&, const Value& v) { return v.is_string(); }},
        {"true", is_true},
        {"undefined", [](Reader&, const Value& v) { return v.is_undefined(); }},
    };
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Methods

using StringMethod = Value (*)(Reader& in, const Text& text);
using DictMethod = Value (*)(Reader& in, const Dict& dict);

template <Sides sides>
Value strip_method(Reader& in, const Text& text) {
    return strip_text(in, text, sides);
}

template <bool from_right>
Value split_method(Reader& in, const Text& text) {
    const Value* const separator = in.find(0, "sep");
    const int64_t count = in.integer(1, "maxsplit", -1);
    in.meter.work(16 * text.size());
    if (!separator || separator->is_none()) return list_of(split(text, count, from_right), in.meter);
    const std::string& wanted = text_of(in.name, *separator).chars;
    return list_of(split(text, wanted, count, from_right), in.meter);
}

template <bool at_end>
Value affix_method(Reader& in, const Text& text) {
    const Value& wanted = in.get(0, at_end ? "suffix" : "prefix");
    const auto has = [&](const Value& one) {
        const std::string& affix = text_of(in.name, one).chars;
        in.meter.work(affix.size());
        return affix.size() <= text.size() &&
               text.chars.compare(at_end ? text.size() - affix.size() : 0, affix.size(), affix) == 0;
    };
    if (!wanted.is_sequence(Sequence::Kind::Tuple)) return has(wanted);
    const auto& items = wanted.sequence().items;
    return std::any_of(items.begin(), items.end(), has);
}

template <bool at_end>
Value remove_affix_method(Reader& in, const Text& text) {
    const size_t n = affix_method<at_end>(in, text).truth() ? text_of(in.name, in.get(0, "")).size() : 0;
    return made(at_end ? text.part(0, text.size() - n) : text.part(n, text.size()), in.meter);
}

template <bool from_right>
Value find_method(Reader& in, const Text& text) {
    const std::string& wanted = text_of(in.name, in.get(0, "sub")).chars;
    in.meter.work(8 * text.size());
    const size_t found = from_right ? text.chars.rfind(wanted) : text.chars.find(wanted);
    if (found == std::string::npos) return int64_t(-1);
    return int64_t(character_bounds(std::string_view(text.chars).substr(0, found)).size()) - 1;
}

Value count_method(Reader& in, const Text& text) {
    const std::string& wanted = text_of(in.name, in.get(0, "sub")).chars;
    in.meter.work(8 * text.size());
    if (wanted.empty()) return int64_t(character_bounds(text.chars).size());
    int64_t n = 0;
    for (size_t i = 0; (i = text.chars.find(wanted, i)) != std::string::npos; i += wanted.size()) n++;
    return n;
}

template <Case to>
Value case_method(Reader& in, const Text& text) {
    return cased(in, text, to);
}

const std::map<std::string, StringMethod>& string_methods() {
    static const std::map<std::string, StringMethod> all = {
        {"capitalize", case_method<Case::Capitalized>},
        {"count", count_method},
        {"endswith", affix_method<true>},
        {"find", find_method<false>},
        {"join", [](Reader& in, const Text& text) { return join_strings(in, text, in.get(0, "iterable")); }},
        {"lower", case_method<Case::Lower>},
        {"lstrip", strip_method<LEFT>},
        {"removeprefix", remove_affix_method<false>},
        {"removesuffix", remove_affix_method<true>},
        {"replace", [](Reader& in, const Text& text) { return replace_text(in, text); }},
        {"rfind", find_method<true>},
        {"rsplit", split_method<true>},
        {"rstrip", strip_method<RIGHT>},
        {"split", split_method<false>},
        {"splitlines", [](Reader& in, const Text& text) { return list_of(split_lines(text), in.meter); }},
        {"startswith", affix_method<false>},
        {"strip", strip_method<BOTH>},
        {"title", case_method<Case::Title>},
        {"upper", case_method<Case::Upper>},
    };
    return all;
}

template <bool with_keys, bool with_values>
Value view_method(Reader& in, const Dict& dict) {
    std::vector<Value> out;
    in.meter.make(dict.items.size() * 200);
    for (const auto& [key, value] : dict.items)
        out.push_back(!with_keys ? value : !with_values ? Value(key) : tuple_of(key, value));
    return {std::move(out), Sequence::Kind::View};
}

const std::map<std::string, DictMethod>& dict_methods() {
    static const std::map<std::string, DictMethod> all = {
        {"get",
         [](Reader& in, const Dict& dict) {
             const Value& key = in.get(0, "key");
             const Value* const otherwise = in.find(1, "default");
             in.meter.work(64 * dict.items.size());
             const Value* const found = key.is_string() ? dict.find(key.text().chars) : nullptr;
             return found ? *found : otherwise ? *otherwise : Value(None{});
         }},
        {"items", view_method<true, true>},
        {"keys", view_method<true, false>},
        {"values", view_method<false, true>},
    };
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Functions

Value range_function(Reader& in) {
    const bool one = in.count() == 1;
    const int64_t begin = one ? 0 : in.integer(0, "start", 0), end = in.integer(one ? 0 : 1, "stop", 0),
                  step = in.integer(2, "step", 1);
    require(in.count() >= 1 && step != 0, "range takes one to three whole numbers, and no step of 0");
    require(std::max(std::abs(double(begin)), std::abs(double(end))) < 1e15, "range: ", begin, " to ", end,
            " is outside 1e15");
    const int64_t size = step > 0 ? (end > begin ? (end - begin - 1) / step + 1 : 0)
                                  : (begin > end && step > INT64_MIN ? (begin - end - 1) / -step + 1 : 0);
    require(size <= MAX_RANGE, "range: ", size, " numbers are more than ", MAX_RANGE);
    std::vector<Value> out;
    in.meter.make(size_t(size) * sizeof(Value));
    for (int64_t i = 0; i < size; i++) out.emplace_back(begin + i * step);
    return {std::move(out), Sequence::Kind::List};
}

Value strftime_function(Reader& in, const std::tm& now) {
    const Text& written = text_of(in.name, in.get(0, "format"));
    const std::string& format = written.chars;
    require(format.size() <= 100, "strftime_now: the format has more than 100 characters");
    char out[8192];
    const size_t n = std::strftime(out, sizeof out, format.c_str(), &now);
    return Text(std::string(out, n), origin_of(written));
}

Value dict_function(Reader& in) {
    Dict dict;
    if (in.count()) {
        require(in.get(0, "mapping").is_dict(), "dict: the argument is not a dictionary");
        dict = in.get(0, "mapping").dict();
        in.meter.make(dict.items.size() * 200);
    }
    for (const auto& [key, value] : in.arguments.keywords) dict.set(Text(key), value);
    return dict;
}

}  // namespace

bool is_function(const std::string& name) {
    return name == "raise_exception" || name == "strftime_now" || name == "range" || name == "dict" ||
           name == "namespace";
}
bool is_filter(const std::string& name) {
    return filters().count(name) > 0;
}
bool is_test(const std::string& name) {
    return tests().count(name) > 0;
}
bool is_method(const std::string& name) {
    return string_methods().count(name) > 0 || dict_methods().count(name) > 0;
}

Value call_filter(const std::string& name, const Value& value, const Arguments& arguments, Meter& meter) {
    meter.work();
    Reader in(name, arguments, meter);
    Value out = filters().at(name)(in, value);
    in.done();
    return out;
}

bool call_test(const std::string& name, const Value& value, const Arguments& arguments, Meter& meter) {
    meter.work();
    Reader in(name, arguments, meter);
    const bool out = tests().at(name)(in, value);
    in.done();
    return out;
}

Value call_method(const std::string& name, const Value& object, const Arguments& arguments, Meter& meter) {
    Reader in(name, arguments, meter);
    const auto of_string = string_methods().find(name);
    const auto of_dict = dict_methods().find(name);
    require_defined(object);
    const bool string = object.is_string() && of_string != string_methods().end(),
               dict = object.is_dict() && of_dict != dict_methods().end();
    require(string || dict, "a value of type ", object.type_name(), " has no method '", name, "'");
    Value out = string ? of_string->second(in, object.text()) : of_dict->second(in, object.dict());
    in.done();
    return out;
}

Value call_function(const std::string& name, const Arguments& arguments, const std::tm& now, Meter& meter) {
    Reader in(name, arguments, meter);
    if (name == "raise_exception") throw Refusal(one_line(in.get(0, "message").str(meter).chars));
    if (name == "dict") return dict_function(in);
    Value out = name == "range" ? range_function(in) : strftime_function(in, now);
    in.done();
    return out;
}

Value attribute(const Value& object, const std::string& name) {
    require_defined(object);
    if (object.is_dict()) {
        if (dict_methods().count(name)) return Method{name};
        if (const Value* const found = object.dict().find(name)) return *found;
    } else if (object.is_namespace()) {
        if (const Value* const found = object.name_space().find(name)) return *found;
    } else if (object.is_string()) {
        if (string_methods().count(name)) return Method{name};
    } else if (object.is_loop()) {
        const Loop& loop = object.loop();
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
        if (name == "previtem" && i > 0) return loop.items[size_t(i) - 1];
        if (name == "nextitem" && i < n - 1) return loop.items[size_t(i) + 1];
    }
    return Undefined{str("'", object.type_name(), " object' has no attribute '", name, "'")};
}

Value item(const Value& object, const Value& key, Meter& meter) {
    require_defined(object);
    if (key.is_integer()) {
        int64_t i = key.integer();
        if (object.is_sequence(Sequence::Kind::List) || object.is_sequence(Sequence::Kind::Tuple)) {
            const std::vector<Value>& items = object.sequence().items;
            if (i < 0) i += int64_t(items.size());
            if (0 <= i && i < int64_t(items.size())) return items[size_t(i)];
        } else if (object.is_string()) {
            meter.make(8 * object.text().size());
            const std::vector<size_t> bounds = character_bounds(object.text().chars);
            const auto n = int64_t(bounds.size()) - 1;
            if (i < 0) i += n;
            if (0 <= i && i < n) return object.text().part(bounds[size_t(i)], bounds[size_t(i) + 1]);
        }
        return Undefined{str(object.type_name(), " object has no element ", key.integer())};
    }
    if (!key.is_string()) return Undefined{str(object.type_name(), " object has no such element")};
    const std::string& name = key.text().chars;
    meter.work(name.size());
    if (object.is_dict()) {
        meter.work(16 * object.dict().items.size());
        if (const Value* const found = object.dict().find(name)) return *found;
    }
    return attribute(object, name);
}

}  // namespace jinja

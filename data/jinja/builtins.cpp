#include "data/jinja/builtins.h"

#include <array>
#include <cmath>
#include <map>

#include "data/jinja/argument_reader.h"
#include "data/jinja/format.h"
#include "data/jinja/lexer.h"
#include "data/jinja/operators.h"
#include "runtime/text.h"

namespace jinja {

Value list_of(const Text& text, const std::vector<Range>& parts, Meter& meter) {
    Items items(&meter);
    for (const Range& part : parts) items.add(part_of(text, part, meter));
    return {std::move(items), Kind::List};
}

Value pair_of(Value first, Value second, Kind kind, Meter& meter) {
    Items items(&meter);
    items.add(std::move(first));
    items.add(std::move(second));
    return {std::move(items), kind};
}

Value strip_text(ArgumentReader& in, const Text& text, Sides sides) {
    const Value* const characters = in.find(0, "chars");
    if (!characters || characters->is_none()) {
        const Range stripped = strip(text.chars, sides);
        in.meter.scan(text.size() - stripped.size());
        return part_of(text, stripped, in.meter);
    }
    const std::string& wanted = in.text(0, "chars").chars;
    // At most so many characters are compared with the wanted ones; the product of both sizes has no limit.
    require(wanted.size() <= 1000, in.name, ": more than 1,000 bytes of characters to strip");
    in.meter.scan(text.size() * (1 + wanted.size() / 2));
    return part_of(text, strip(text.chars, wanted, sides), in.meter);
}

Value replace_text(ArgumentReader& in, const Text& text) {
    const Value old = in.get(0, "old").str(in.meter), replacement = in.get(1, "new").str(in.meter);
    const std::string& from = old.text().chars;
    int64_t left = in.integer(2, "count", -1);
    in.meter.scan(text.size() + from.size());
    Writer out(in.meter);
    size_t begin = 0;
    // Python puts the replacement of "" between all characters.
    for (size_t at = 0; left != 0 && (at = find_text(text.chars, from, at)) != std::string::npos; left--) {
        if (from.empty()) in.meter.work();
        out.put(text, {begin, at});
        out.put(replacement.text());
        begin = at + from.size();
        at = from.empty() && at < text.size() ? at + character_length(text.chars, at) : begin + from.empty();
    }
    out.put(text, {begin, text.size()});
    return out.value();
}

Value join_strings(ArgumentReader& in, const Text& separator, const Value& list) {
    Writer out(in.meter);
    bool first = true;
    for (const Value& item : list.iterate(in.meter)) {
        if (!first) out.put(separator);
        item.print(out);
        first = false;
    }
    return out.value();
}

Value cased(const Text& text, Case to, Meter& meter) {
    const size_t memory = 4 * text.size();  // a character has at most twice as many bytes in another case
    meter.scan(text.size());
    meter.make(memory);
    Value out = made(change_case(text, to), meter);
    meter.give_back(memory);
    return out;
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Filters

using Filter = Value (*)(ArgumentReader& in, const Value& value);

template <Case to>
Value case_filter(ArgumentReader& in, const Value& value) {
    return cased(value.str(in.meter).text(), to, in.meter);
}

// jinja2's title differs from str.title(): words begin after -, white space and opening brackets only.
Value title_filter(ArgumentReader& in, const Value& value) {
    Writer out(in.meter);
    cased(value.str(in.meter).text(), Case::Lower, in.meter).print(out);
    bool first = true;
    for (char& c : out.text.chars) {
        require(!first || uint8_t(c) < 128, "title takes ASCII text only");
        if (first && 'a' <= c && c <= 'z') c = char(c & ~0x20);
        first = std::string_view("- \t\n\r\f\v({[<").find(c) != std::string_view::npos;
    }
    return out.value();
}

Value trim_filter(ArgumentReader& in, const Value& value) {
    return strip_text(in, value.str(in.meter).text(), BOTH);
}

Value length_filter(ArgumentReader& in, const Value& value) {
    return value.length(in.meter);
}

Value tojson_filter(ArgumentReader& in, const Value& value) {
    JsonStyle style;
    style.ensure_ascii = in.flag(100, "ensure_ascii", false);
    style.sort_keys = in.flag(100, "sort_keys", false);
    const Value* const indent = in.find(0, "indent");
    const auto copied = [&](const Value& text) {
        require(text.is_string() && text.text().size() <= 1000, in.name,
                ": an indent or a separator is a string of at most 1,000 bytes");
        return text.text();
    };
    if (indent && !indent->is_none()) {
        style.lines = true;
        style.item_separator = Text(",");
        if (indent->is_string()) {
            style.indent = copied(*indent);
        } else {
            const int64_t width = in.integer(0, "indent", 0);
            require(width <= 100, "tojson: an indent of ", width, " is more than 100");
            style.indent = Text(std::string(size_t(std::max<int64_t>(width, 0)), ' '));
        }
    }
    if (const Value* const separators = in.find(100, "separators"); separators && !separators->is_none()) {
        const Items both = separators->iterate(in.meter);
        require(both.size() == 2, "tojson: separators are a pair of strings");
        style.item_separator = copied(both.all[0]);
        style.key_separator = copied(both.all[1]);
    }
    return to_json(value, style, in.meter);
}

Value default_filter(ArgumentReader& in, const Value& value) {
    const Value* const otherwise = in.find(0, "default_value");
    const bool also_false = in.flag(1, "boolean", false);
    if (!value.is_undefined() && !(also_false && !value.truth())) return value;
    return otherwise ? *otherwise : Value(Text());
}

Value first_filter(ArgumentReader& in, const Value& value) {
    if (value.is_string() || value.is_list() || value.is_tuple()) return item(value, int64_t(0), in.meter);
    const Items items = value.iterate(in.meter);
    return items.empty() ? Value(Undefined{"No first item, sequence was empty."}) : items.all.front();
}

Value last_filter(ArgumentReader& in, const Value& value) {
    if (value.is_string() || value.is_list() || value.is_tuple()) return item(value, int64_t(-1), in.meter);
    const Items items = value.iterate(in.meter);
    return items.empty() ? Value(Undefined{"No last item, sequence was empty."}) : items.all.back();
}

Value list_filter(ArgumentReader& in, const Value& value) {
    return {value.iterate(in.meter), Kind::List};
}

Value reverse_filter(ArgumentReader& in, const Value& value) {
    Items items = value.iterate(in.meter);
    std::reverse(items.all.begin(), items.all.end());
    if (!value.is_string()) return {std::move(items), Kind::Generator};
    Writer out(in.meter);
    for (const Value& item : items) out.put(item.text());
    return out.value();
}

Value items_filter(ArgumentReader& in, const Value& value) {
    Items out(&in.meter);
    require(value.is_dict() || value.is_undefined(), "items: a value of type ", value.type_name(),
            " is not a dictionary");
    if (value.is_dict())
        for (const Dict::Entry& entry : value.dict().entries())
            out.add(pair_of(entry.key, entry.value, Kind::Tuple, in.meter));
    return {std::move(out), Kind::Generator};
}

// `a.b.0`, as map and selectattr take it.
Value dotted_attribute(Value value, const Value& path, Meter& meter) {
    if (!path.is_string()) return item(value, path, meter);
    const std::string& all = path.text().chars;
    meter.work(all.size());
    for (size_t begin = 0, end; begin <= all.size(); begin = end + 1) {
        end = std::min(all.find('.', begin), all.size());
        const std::string part = all.substr(begin, end - begin);
        const bool number =
            !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
        value = item(value, number ? Value(int64_t(std::stoll(part))) : Value(Text(part)), meter);
    }
    return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Filters that order or compare

// What a value is compared by: its attribute if one is given, text in lower case unless case_sensitive.
class SortKey {
  public:
    SortKey(const Value* p, bool c, Meter& m) : path(p && !p->is_none() ? p : nullptr), case_sensitive(c), meter(m) {}

    Value operator()(const Value& value) const { return folded(path ? dotted_attribute(value, *path, meter) : value); }
    // Several attributes, "a,b": a list.
    Value of_list(const Value& value) const {
        if (!path || !path->is_string() || path->text().chars.find(',') == std::string::npos) return (*this)(value);
        Items out(&meter);
        for (const Range& part : split(path->text().chars, ",", -1, false)) {
            const Value one = part_of(path->text(), part, meter);
            out.add(folded(dotted_attribute(value, one, meter)));
        }
        return {std::move(out), Kind::List};
    }
    Value folded(const Value& value) const {
        if (case_sensitive || !value.is_string()) return value;
        return cased(value.text(), Case::Lower, meter);
    }

  private:
    const Value* const path;
    const bool case_sensitive;
    Meter& meter;
};

// The places of the keys in their order; equal keys keep theirs.
std::vector<size_t> sorted_places(const Items& keys, bool reversed, Meter& meter) {
    std::vector<size_t> places;
    for (size_t i = 0; i < keys.size(); i++) places.push_back(i);
    std::stable_sort(places.begin(), places.end(), [&](size_t a, size_t b) {
        return reversed ? Value::less(keys.all[b], keys.all[a], meter) : Value::less(keys.all[a], keys.all[b], meter);
    });
    return places;
}

Value sorted(const Items& values, const Items& keys, bool reversed, Meter& meter) {
    Items out(&meter);
    for (const size_t place : sorted_places(keys, reversed, meter)) out.add(values.all[place]);
    return {std::move(out), Kind::List};
}

Value sort_filter(ArgumentReader& in, const Value& value) {
    const bool reversed = in.flag(0, "reverse", false), case_sensitive = in.flag(1, "case_sensitive", false);
    const SortKey key(in.find(2, "attribute"), case_sensitive, in.meter);
    const Items values = value.iterate(in.meter);
    Items keys(&in.meter);
    for (const Value& one : values) keys.add(key.of_list(one));
    return sorted(values, keys, reversed, in.meter);
}

Value dictsort_filter(ArgumentReader& in, const Value& value) {
    const bool case_sensitive = in.flag(0, "case_sensitive", false);
    const Value* const by = in.find(1, "by");
    const bool reversed = in.flag(2, "reverse", false);
    const std::string by_name = by ? in.text(1, "by").chars : "key";
    require(by_name == "key" || by_name == "value", "dictsort: by is 'key' or 'value', not '", shortened(by_name), "'");
    require(value.is_dict(), "dictsort: a value of type ", value.type_name(), " is not a dictionary");
    const SortKey key(nullptr, case_sensitive, in.meter);
    Items values(&in.meter), keys(&in.meter);
    for (const Dict::Entry& entry : value.dict().entries()) {
        values.add(pair_of(entry.key, entry.value, Kind::Tuple, in.meter));
        keys.add(key.folded(by_name == "key" ? entry.key : entry.value));
    }
    return sorted(values, keys, reversed, in.meter);
}

Value unique_filter(ArgumentReader& in, const Value& value) {
    const bool case_sensitive = in.flag(0, "case_sensitive", false);
    const SortKey key(in.find(1, "attribute"), case_sensitive, in.meter);
    Dict seen(&in.meter);
    Items out(&in.meter);
    for (const Value& one : value.iterate(in.meter)) {
        const size_t before = seen.size();
        seen.set(key(one), true, in.meter);
        if (seen.size() > before) out.add(one);
    }
    return {std::move(out), Kind::Generator};
}

Value groupby_filter(ArgumentReader& in, const Value& value) {
    const Value& path = in.get(0, "attribute");
    const Value* const otherwise = in.find(1, "default");
    const SortKey key(nullptr, in.flag(2, "case_sensitive", false), in.meter);
    const Items values = value.iterate(in.meter);
    Items shown(&in.meter), keys(&in.meter);
    for (const Value& one : values) {
        Value found = dotted_attribute(one, path, in.meter);
        if (otherwise && found.is_undefined()) found = *otherwise;
        keys.add(key.folded(found));
        shown.add(std::move(found));
    }
    const std::vector<size_t> places = sorted_places(keys, false, in.meter);
    Items groups(&in.meter);
    for (size_t begin = 0, end; begin < places.size(); begin = end) {
        Items group(&in.meter);
        const Value& first = keys.all[places[begin]];
        for (end = begin; end < places.size() && Value::equal(keys.all[places[end]], first, in.meter); end++)
            group.add(values.all[places[end]]);
        require(end > begin, "groupby: a value that is not equal to itself");
        groups.add(pair_of(shown.all[places[begin]], {std::move(group), Kind::List}, Kind::Group, in.meter));
    }
    return {std::move(groups), Kind::List};
}

template <bool largest>
Value extreme_filter(ArgumentReader& in, const Value& value) {
    const bool case_sensitive = in.flag(0, "case_sensitive", false);
    const SortKey key(in.find(1, "attribute"), case_sensitive, in.meter);
    Value best = Undefined{"No aggregated item, sequence was empty."}, best_key;
    for (const Value& one : value.iterate(in.meter)) {
        Value one_key = key(one);
        const bool better = best_key.is_undefined() || (largest ? Value::less(best_key, one_key, in.meter)
                                                                : Value::less(one_key, best_key, in.meter));
        if (!better) continue;
        best = one;
        best_key = std::move(one_key);
    }
    return best;
}

Value sum_filter(ArgumentReader& in, const Value& value) {
    const Value* const path = in.find(0, "attribute");
    const Value* const start = in.find(1, "start");
    Value sum = start ? *start : Value(int64_t(0));
    require(!sum.is_string(), "sum: text is joined with join");
    for (const Value& one : value.iterate(in.meter))
        sum = binary_operation("+", sum, path && !path->is_none() ? dotted_attribute(one, *path, in.meter) : one,
                               in.meter);
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Filters that call others

Value map_filter(ArgumentReader& in, const Value& value) {
    const Items values = value.iterate(in.meter);
    const Value* const path = in.count() ? nullptr : in.find(0, "attribute");
    Items out(&in.meter);
    if (path) {
        const Value* const otherwise = in.find(100, "default");
        for (const Value& one : values) {
            const Value found = dotted_attribute(one, *path, in.meter);
            out.add(otherwise && found.is_undefined() ? *otherwise : found);
        }
    } else {
        const std::string& filter = in.text(0, "name").chars;
        const Arguments rest = in.rest(1);
        for (const Value& one : values) out.add(call_filter(filter, one, rest, in.meter));
    }
    return {std::move(out), Kind::Generator};
}

template <bool by_attribute, bool wanted>
Value select_filter(ArgumentReader& in, const Value& value) {
    const Value path = by_attribute ? in.get(0, "attribute") : Value();
    const bool tests = in.count() > size_t(by_attribute);
    const std::string test = tests ? in.text(by_attribute, "test").chars : "";
    const Arguments rest = in.rest(size_t(by_attribute) + 1);
    Items out(&in.meter);
    for (const Value& one : value.iterate(in.meter)) {
        const Value tested = by_attribute ? dotted_attribute(one, path, in.meter) : one;
        if ((tests ? call_test(test, tested, rest, in.meter) : tested.truth()) == wanted) out.add(one);
    }
    return {std::move(out), Kind::Generator};
}

Value attr_filter(ArgumentReader& in, const Value& value) {
    const std::string& name = in.text(0, "name").chars;
    // jinja2's attr sees attributes only, not the keys of a dictionary.
    if (!value.is_dict() || has_method(value, name)) return attribute(value, name);
    return Undefined{"'dict object' has no attribute '" + shortened(name) + "'"};
}

// ---------------------------------------------------------------------------------------------------------------------
// Filters of text and numbers

Value string_filter(ArgumentReader& in, const Value& value) {
    return value.str(in.meter);
}

// '%s %s'|format(a, b), or with names.
Value format_filter(ArgumentReader& in, const Value& value) {
    const Value format = value.str(in.meter);
    require(in.arguments.values.empty() || in.arguments.keywords.empty(),
            "format: arguments by position and by name at once");
    in.take_all();
    if (in.arguments.keywords.empty()) {
        Items values(&in.meter);
        for (const Value& one : in.arguments.values) values.add(one);
        return format_percent(format.text(), {std::move(values), Kind::Tuple}, in.meter);
    }
    Dict named(&in.meter);
    for (const auto& [key, one] : in.arguments.keywords) named.set(key, one);
    return format_percent(format.text(), std::move(named), in.meter);
}

// Python's int(text) and float(text): spaces around, and _ between digits.
template <typename Number, typename Parse>
bool parse_number(const Text& text, Number& out, Meter& meter, const Parse& parse) {
    meter.scan(text.size());
    const Range stripped = strip(text.chars, BOTH);
    if (stripped.size() > 1000) return false;
    std::string digits = text.chars.substr(stripped.begin, stripped.size());
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

Value int_filter(ArgumentReader& in, const Value& value) {
    const Value* const given = in.find(0, "default");
    const Value otherwise = given ? *given : Value(int64_t(0));
    require(in.integer(1, "base", 10) == 10, "int: only base 10 is supported");
    require_defined(value);
    if (value.is_integer()) return value.integer();
    double number = 0;
    int64_t whole = 0;
    const auto as_whole = [](const std::string& s, size_t& n) { return std::stoll(s, &n); };
    const auto as_float = [](const std::string& s, size_t& n) { return std::stod(s, &n); };
    if (value.is_string() && parse_number(value.text(), whole, in.meter, as_whole)) return whole;
    if (value.is_float())
        number = value.number();
    else if (!value.is_string() || !parse_number(value.text(), number, in.meter, as_float))
        return otherwise;
    return std::fabs(number) < 9.2e18 ? Value(int64_t(number)) : otherwise;
}

Value float_filter(ArgumentReader& in, const Value& value) {
    const Value* const given = in.find(0, "default");
    const Value otherwise = given ? *given : Value(0.0);
    require_defined(value);
    if (value.is_number()) return value.number();
    double number = 0;
    const auto as_float = [](const std::string& s, size_t& n) { return std::stod(s, &n); };
    return value.is_string() && parse_number(value.text(), number, in.meter, as_float) ? Value(number) : otherwise;
}

Value abs_filter(ArgumentReader& in, const Value& value) {
    require(value.is_number(), in.name, ": a value of type ", value.type_name(), " is not a number");
    if (value.is_float()) return std::fabs(value.number());
    require(value.integer() != INT64_MIN, in.name, ": the result is larger than 64 bits hold");
    return std::abs(value.integer());
}

// Python's round(): halves to even, by the number's decimal digits.
Value round_filter(ArgumentReader& in, const Value& value) {
    const int64_t precision = in.integer(0, "precision", 0);
    const std::string method = in.count() > 1 || in.find(1, "method") ? in.text(1, "method").chars : "common";
    require(value.is_number(), in.name, ": a value of type ", value.type_name(), " is not a number");
    require(0 <= precision && precision <= 15, in.name, ": a precision of ", precision, " is not in 0 to 15");
    require(method == "common" || method == "ceil" || method == "floor", in.name,
            ": the method is common, ceil or floor");
    if (method == "common" && value.is_integer()) return value.integer();
    if (method == "common") {
        if (!(std::fabs(value.number()) < 1e300)) return value;
        std::array<char, 400> digits = {};
        std::snprintf(digits.data(), digits.size(), "%.*f", int(precision), value.number());
        return std::strtod(digits.data(), nullptr);
    }
    const double scale = std::pow(10, double(precision)), scaled = value.number() * scale;
    return (method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale;
}

Value join_filter(ArgumentReader& in, const Value& value) {
    const Value* const given = in.find(0, "d");
    const Value separator = given ? given->str(in.meter) : Value(Text());
    const Value* const path = in.find(1, "attribute");
    if (!path || path->is_none()) return join_strings(in, separator.text(), value);
    Items items(&in.meter);
    for (const Value& one : value.iterate(in.meter)) items.add(dotted_attribute(one, *path, in.meter));
    return join_strings(in, separator.text(), {std::move(items), Kind::List});
}

Value replace_filter(ArgumentReader& in, const Value& value) {
    return replace_text(in, value.str(in.meter).text());
}

Value indent_filter(ArgumentReader& in, const Value& value) {
    const Value* const width = in.find(0, "width");
    Value space{Text("    ")};
    if (width && width->is_string()) {
        space = *width;
    } else if (width) {
        const int64_t n = in.integer(0, "width", 4);
        require(n <= 1000, "indent: a width of ", n, " is more than 1000");
        space = Text(std::string(size_t(std::max<int64_t>(n, 0)), ' '));
    }
    const bool first = in.flag(1, "first", false), blank = in.flag(2, "blank", false);
    Writer lines(in.meter);
    value.print(lines);
    lines.put("\n");
    const Text& text = lines.written();
    in.meter.scan(text.size());
    const size_t memory = count_lines(text.chars) * 3 * sizeof(Range);
    in.meter.make(memory);
    Writer out(in.meter);
    if (first) out.put(space.text());
    bool begins = true;
    for (const Range& line : split_lines(text.chars)) {
        if (!begins) out.put("\n");
        if (!begins && (blank || line.size() > 0)) out.put(space.text());
        out.put(text, line);
        begins = false;
    }
    in.meter.give_back(memory);
    return out.value();
}

Value wordcount_filter(ArgumentReader& in, const Value& value) {
    const Value text = value.str(in.meter);
    in.meter.scan(text.text().size());
    int64_t words = 0;  // runs of letters, digits and underscores, Python's \w+
    bool inside = false;
    for (const char c : text.text().chars) {
        require(uint8_t(c) < 128, "wordcount takes ASCII text only");
        const bool word = is_digit(c) || c == '_' || ('a' <= (c | 0x20) && (c | 0x20) <= 'z');
        words += word && !inside;
        inside = word;
    }
    return words;
}

const std::map<std::string, Filter>& filters() {
    static const std::map<std::string, Filter> all = {
        {"abs", abs_filter},
        {"attr", attr_filter},
        {"capitalize", case_filter<Case::Capitalized>},
        {"count", length_filter},
        {"d", default_filter},
        {"default", default_filter},
        {"dictsort", dictsort_filter},
        {"first", first_filter},
        {"float", float_filter},
        {"format", format_filter},
        {"groupby", groupby_filter},
        {"indent", indent_filter},
        {"int", int_filter},
        {"items", items_filter},
        {"join", join_filter},
        {"last", last_filter},
        {"length", length_filter},
        {"list", list_filter},
        {"lower", case_filter<Case::Lower>},
        {"map", map_filter},
        {"max", extreme_filter<true>},
        {"min", extreme_filter<false>},
        {"reject", select_filter<false, false>},
        {"rejectattr", select_filter<true, false>},
        {"replace", replace_filter},
        {"reverse", reverse_filter},
        {"round", round_filter},
        {"safe", string_filter},  // Python marks the text as safe HTML; nothing here escapes HTML
        {"select", select_filter<false, true>},
        {"selectattr", select_filter<true, true>},
        {"sort", sort_filter},
        {"string", string_filter},
        {"sum", sum_filter},
        {"title", title_filter},
        {"tojson", tojson_filter},
        {"trim", trim_filter},
        {"unique", unique_filter},
        {"upper", case_filter<Case::Upper>},
        {"wordcount", wordcount_filter},
    };
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests

using Test = bool (*)(ArgumentReader& in, const Value& value);

int64_t remainder_of(const Value& value, int64_t divisor, const std::string& name) {
    require(value.is_integer(), name, ": a value of type ", value.type_name(), " is not a whole number");
    require(divisor != 0, name, ": division by zero");
    return divisor == -1 ? 0 : value.integer() % divisor;
}

template <Case to>
bool cased_as(ArgumentReader& in, const Value& value) {
    const Value text = value.str(in.meter);
    const std::string& chars = text.text().chars;
    in.meter.scan(chars.size());
    const bool has_letter = std::any_of(chars.begin(), chars.end(), [](char c) { return std::isalpha(uint8_t(c)); });
    return has_letter && cased(text.text(), to, in.meter).text().chars == chars;
}

const std::map<std::string, Test>& tests() {
    static const Test equal = [](ArgumentReader& in, const Value& v) {
        return Value::equal(v, in.get(0, "b"), in.meter);
    };
    static const Test differ = [](ArgumentReader& in, const Value& v) {
        return !Value::equal(v, in.get(0, "b"), in.meter);
    };
    static const Test less = [](ArgumentReader& in, const Value& v) {
        return Value::less(v, in.get(0, "b"), in.meter);
    };
    static const Test more = [](ArgumentReader& in, const Value& v) {
        return Value::less(in.get(0, "b"), v, in.meter);
    };
    static const Test at_most = [](ArgumentReader& in, const Value& v) {
        const Value& b = in.get(0, "b");
        return Value::less(v, b, in.meter) || Value::equal(v, b, in.meter);
    };
    static const Test at_least = [](ArgumentReader& in, const Value& v) {
        const Value& b = in.get(0, "b");
        return Value::less(b, v, in.meter) || Value::equal(v, b, in.meter);
    };
    static const Test is_true = [](ArgumentReader&, const Value& v) { return v.is_bool() && v.truth(); };
    static const Test is_false = [](ArgumentReader&, const Value& v) { return v.is_bool() && !v.truth(); };
    static const std::map<std::string, Test> all = {
        {"!=", differ},
        {"<", less},
        {"<=", at_most},
        {"==", equal},
        {">", more},
        {">=", at_least},
        {"boolean", [](ArgumentReader&, const Value& v) { return v.is_bool(); }},
        {"callable", [](ArgumentReader&, const Value& v) { return v.is_callable(); }},
        {"defined", [](ArgumentReader&, const Value& v) { return !v.is_undefined(); }},
        {"divisibleby",
         [](ArgumentReader& in, const Value& v) { return remainder_of(v, in.integer(0, "num", 0), in.name) == 0; }},
        {"eq", equal},
        {"equalto", equal},
        {"escaped", [](ArgumentReader&, const Value&) { return false; }},
        {"even", [](ArgumentReader& in, const Value& v) { return remainder_of(v, 2, in.name) == 0; }},
        {"false", is_false},
        {"filter",
         [](ArgumentReader&, const Value& v) { return v.is_string() && filters().count(v.text().chars) > 0; }},
        {"float", [](ArgumentReader&, const Value& v) { return v.is_float(); }},
        {"ge", at_least},
        {"greaterthan", more},
        {"gt", more},
        {"in", [](ArgumentReader& in, const Value& v) { return Value::contains(in.get(0, "seq"), v, in.meter); }},
        {"integer", [](ArgumentReader&, const Value& v) { return v.is_int(); }},
        {"iterable",
         [](ArgumentReader&, const Value& v) {
             return v.is_undefined() || v.is_string() || v.is_sequence() || v.is_dict();
         }},
        {"le", at_most},
        {"lessthan", less},
        {"lower", cased_as<Case::Lower>},
        {"lt", less},
        {"mapping", [](ArgumentReader&, const Value& v) { return v.is_dict(); }},
        {"ne", differ},
        {"none", [](ArgumentReader&, const Value& v) { return v.is_none(); }},
        {"number", [](ArgumentReader&, const Value& v) { return v.is_number(); }},
        {"odd", [](ArgumentReader& in, const Value& v) { return remainder_of(v, 2, in.name) != 0; }},
        {"sameas",
         [](ArgumentReader& in, const Value& v) {
             const Value& other = in.get(0, "other");
             return v.type_name() == other.type_name() && Value::equal(v, other, in.meter);
         }},
        // Values with a length and indices: in jinja2 also dictionaries and undefined values.
        {"sequence",
         [](ArgumentReader&, const Value& v) {
             return v.is_undefined() || v.is_string() || v.is_dict() || v.is_list() || v.is_tuple();
         }},
        {"string", [](ArgumentReader&, const Value& v) { return v.is_string(); }},
        {"test", [](ArgumentReader&, const Value& v) { return v.is_string() && tests().count(v.text().chars) > 0; }},
        {"true", is_true},
        {"undefined", [](ArgumentReader&, const Value& v) { return v.is_undefined(); }},
        {"upper", cased_as<Case::Upper>},
    };
    return all;
}

//

// ---------------------------------------------------------------------------------------------------------------------
// Functions

Value range_function(ArgumentReader& in) {
    const bool one = in.count() == 1;
    const int64_t begin = one ? 0 : in.integer(0, "start", 0), end = in.integer(one ? 0 : 1, "stop", 0),
                  step = in.integer(2, "step", 1);
    require(in.count() >= 1 && step != 0, "range takes one to three whole numbers, and no step of 0");
    require(std::max(std::abs(double(begin)), std::abs(double(end))) < 1e15, "range: ", begin, " to ", end,
            " is outside 1e15");
    const int64_t size = step > 0 ? (end > begin ? (end - begin - 1) / step + 1 : 0)
                                  : (begin > end && step > INT64_MIN ? (begin - end - 1) / -step + 1 : 0);
    require(size <= MAX_RANGE, "range: ", size, " numbers are more than ", MAX_RANGE);
    Items out(&in.meter);
    for (int64_t i = 0; i < size; i++) out.add(begin + i * step);
    return {std::move(out), Kind::List};
}

Value strftime_function(ArgumentReader& in, const std::tm& now) {
    const Text& format = in.text(0, "format");
    require(format.size() <= 100, "strftime_now: the format has more than 100 characters");
    char out[8192];
    const size_t n = std::strftime(out, sizeof out, format.chars.c_str(), &now);
    return made(Text(std::string(out, n), format.origin()), in.meter);
}

Value dict_function(ArgumentReader& in) {
    Dict dict(&in.meter);
    if (in.count()) {
        require(in.get(0, "mapping").is_dict(), "dict: the argument is not a dictionary");
        dict = in.get(0, "mapping").dict().copy(&in.meter);
    }
    in.take_all();
    for (const auto& [key, value] : in.arguments.keywords) dict.set(key, value);
    return dict;
}

constexpr const char* FUNCTIONS[] = {"dict", "namespace", "raise_exception", "range", "strftime_now"};

template <typename Map>
std::vector<std::string> names_of(const Map& map) {
    std::vector<std::string> out;
    for (const auto& one : map) out.push_back(one.first);
    return out;
}

}  // namespace

std::vector<std::string> function_names() {
    return {std::begin(FUNCTIONS), std::end(FUNCTIONS)};
}
std::vector<std::string> filter_names() {
    return names_of(filters());
}
std::vector<std::string> test_names() {
    return names_of(tests());
}
bool is_function(const std::string& name) {
    return std::find(std::begin(FUNCTIONS), std::end(FUNCTIONS), name) != std::end(FUNCTIONS);
}

Value call_filter(const std::string& name, const Value& value, const Arguments& arguments, Meter& meter) {
    const Meter::Level nested(meter);  // map('map', 'map', …)
    meter.work();
    const auto found = filters().find(name);
    require(found != filters().end(), "the filter '", shortened(name), "' is not supported");
    ArgumentReader in(name, arguments, meter);
    Value out = found->second(in, value);
    in.done();
    return out;
}

bool call_test(const std::string& name, const Value& value, const Arguments& arguments, Meter& meter) {
    meter.work();
    const auto found = tests().find(name);
    require(found != tests().end(), "the test '", shortened(name), "' is not supported");
    ArgumentReader in(name, arguments, meter);
    const bool out = found->second(in, value);
    in.done();
    return out;
}

Value call_function(const std::string& name, const Arguments& arguments, const std::tm& now, Meter& meter) {
    ArgumentReader in(name, arguments, meter);
    if (name == "raise_exception") throw Refusal(one_line(in.get(0, "message").str(meter).text().chars));
    Value out = name == "dict" ? dict_function(in) : name == "range" ? range_function(in) : strftime_function(in, now);
    in.done();
    return out;
}

}  // namespace jinja

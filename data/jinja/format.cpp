#include "data/jinja/format.h"

#include <algorithm>
#include <cmath>

#include "data/jinja/builtins.h"
#include "data/utf8.h"
#include "runtime/text.h"

namespace jinja {

namespace {

// How one value is written.
struct Spec {
    Text fill = Text(" ");
    char align = 0;  // <, >, ^; = puts the fill behind the sign
    char sign = '-';
    bool alternate = false;
    char grouping = 0;
    int64_t width = 0, precision = -1;
    char type = 0;
    char mark = TEMPLATE;  // of digits and padding
};

constexpr int64_t MAX_PRECISION = 100;

// The number at text[i], which moves behind it; −1 if there is none.
int64_t number_at(std::string_view text, size_t& i) {
    if (i >= text.size() || !is_digit(text[i])) return -1;
    int64_t n = 0;
    for (; i < text.size() && is_digit(text[i]); i++) {
        n = 10 * n + (text[i] - '0');
        require(n <= MAX_BYTES, "a format has a width of more than ", MAX_BYTES);
    }
    return n;
}

void pad(const Text& body, size_t sign_bytes, const Spec& spec, char align, Writer& out) {
    const int64_t missing = std::max<int64_t>(spec.width - int64_t(count_characters(body.chars)), 0),
                  before = align == '<'   ? 0
                           : align == '^' ? missing / 2
                                          : missing;
    if (align == '=') {
        out.put(body, {0, sign_bytes});
        out.put_times(spec.fill, missing);
        return out.put(body, {sign_bytes, body.size()});
    }
    out.put_times(spec.fill, before);
    out.put(body);
    out.put_times(spec.fill, missing - before);
}

void put_string(const Text& text, const Spec& spec, Writer& out) {
    out.meter.scan(text.size());
    const size_t end = spec.precision < 0 ? text.size() : character_start(text.chars, size_t(spec.precision));
    const Value cut = part_of(text, {0, end}, out.meter);
    pad(cut.text(), 0, spec, spec.align ? spec.align : '<', out);
}

// The digits of a whole number's size in base 2, 8, 10 or 16.
std::string whole_digits(uint64_t x, unsigned base, bool capital) {
    const std::string_view digits = capital ? "0123456789ABCDEF" : "0123456789abcdef";
    std::string out;
    do {
        out += digits[x % base];
        x /= base;
    } while (x > 0);
    return {out.rbegin(), out.rend()};
}

std::string float_digits(double x, const Spec& spec, char type) {
    const std::string form = std::string("%") + (spec.alternate ? "#" : "") + ".*" + type;
    char digits[512];
    const int n = std::snprintf(digits, sizeof digits, form.c_str(), int(spec.precision < 0 ? 6 : spec.precision), x);
    return {digits, size_t(n)};
}

// A comma between groups of three digits before the point.
void group(std::string& digits, char separator) {
    const size_t whole = std::min(digits.find_first_not_of("0123456789"), digits.size());
    for (size_t i = whole; i > 3; i -= 3) digits.insert(i - 3, 1, separator);
}

void put_number(const Value& value, const Spec& spec, Writer& out) {
    require(spec.precision <= MAX_PRECISION, "a format has a precision of ", spec.precision, ", more than ",
            MAX_PRECISION);
    std::string prefix, digits;
    bool negative = false;
    const unsigned base = spec.type == 'b' ? 2 : spec.type == 'o' ? 8 : spec.type == 'x' || spec.type == 'X' ? 16 : 10;
    if (base != 10 || spec.type == 'd' || (spec.type == 0 && value.is_integer())) {
        require(value.is_integer(), "the format '", spec.type, "' takes a whole number, not a value of type ",
                value.type_name());
        const int64_t x = value.integer();
        negative = x < 0;
        digits = whole_digits(negative ? 0 - uint64_t(x) : uint64_t(x), base, spec.type == 'X');
        if (spec.alternate && base != 10) prefix = std::string("0") + spec.type;
        if (spec.precision > int64_t(digits.size())) digits.insert(0, size_t(spec.precision) - digits.size(), '0');
    } else {
        const double x = value.number() * (spec.type == '%' ? 100 : 1);
        negative = std::signbit(x) && !std::isnan(x);
        if (!std::isfinite(x)) {
            digits = std::isnan(x) ? "nan" : "inf";
        } else if (spec.type == 0 && spec.precision < 0) {
            digits = Value(std::fabs(x)).str(out.meter).text().chars;
        } else {
            digits = float_digits(std::fabs(x), spec, spec.type == 0 ? 'g' : spec.type == '%' ? 'f' : spec.type);
            if (spec.type == 0 && digits.find_first_of(".e") == std::string::npos) digits += ".0";
        }
        if (spec.type == '%') digits += '%';
    }
    if (spec.grouping) group(digits, spec.grouping);
    std::string sign(negative ? "-" : spec.sign == '-' ? "" : std::string(1, spec.sign));
    sign += prefix;
    pad(Text(sign + digits, spec.mark), sign.size(), spec, spec.align ? spec.align : '>', out);
}

// A character by its number. Whoever chose the number chose the text, so it is content.
Text character_of(const Value& value) {
    require(value.is_integer() && 0 <= value.integer() && value.integer() <= 0x10FFFF &&
                (value.integer() < 0xD800 || value.integer() >= 0xE000),
            "the format 'c' takes the number of a character");
    return Text(utf8_character(uint32_t(value.integer())), CONTENT);
}

// ---------------------------------------------------------------------------------------------------------------------
// '%s' % values

class PercentFormat {
  public:
    PercentFormat(const Text& f, const Value& v, Meter& meter) : format(f), values(v), out(meter) {}

    Value run() {
        const std::string_view text = format.chars;
        out.meter.work(text.size());
        for (size_t i = 0, next; i < text.size(); i = next) {
            next = std::min(text.find('%', i), text.size());
            out.put(format, {i, next});
            if (next < text.size()) one(++next);
        }
        const bool all = !values.is_tuple() || used == values.items().size();
        require(all && (used > 0 || values.is_tuple() || values.is_dict() || values.is_list()),
                "%: not all arguments are converted by the format");
        return out.value();
    }

  private:
    char peek(size_t i) const {
        require(i < format.size(), "%: the format ends inside a conversion");
        return format.chars[i];
    }

    // The conversion behind a %, at i.
    void one(size_t& i) {
        Spec spec;
        spec.mark = format.marks[i - 1];
        spec.fill.marks = spec.mark;
        const Value* named = nullptr;
        if (peek(i) == '(') {
            const size_t end = find_text(format.chars, ")", i);
            require(end != std::string::npos && values.is_dict(),
                    "%: the format names a value, which needs a dictionary");
            const std::string name = format.chars.substr(i + 1, end - i - 1);
            named = values.dict().find(name);
            require(named, "%: the dictionary has no '", name, "'");
            used++;
            i = end + 1;
        }
        bool zero = false;
        for (; std::string_view("#0- +").find(peek(i)) != std::string_view::npos; i++) {
            const char flag = format.chars[i];
            if (flag == '#') spec.alternate = true;
            if (flag == '0') zero = true;
            if (flag == '-') spec.align = '<';
            if (flag == '+' || (flag == ' ' && spec.sign != '+')) spec.sign = flag;
        }
        spec.width = std::max<int64_t>(count_or_argument(i), 0);
        if (peek(i) == '.') spec.precision = std::max<int64_t>(count_or_argument(++i), 0);
        while (std::string_view("hlL").find(peek(i)) != std::string_view::npos) i++;
        const char conversion = format.chars[i++];
        if (conversion == '%') return out.put(format, {i - 1, i});
        if (zero && !spec.align) {
            spec.align = '=';
            spec.fill.chars = "0";
        }
        convert(conversion, named ? *named : argument(), spec);
    }

    int64_t count_or_argument(size_t& i) {
        if (peek(i) != '*') return number_at(format.chars, i);
        i++;
        const Value& given = argument();
        require(given.is_integer() && given.integer() <= MAX_BYTES, "%: * takes a whole number");
        return given.integer();
    }

    const Value& argument() {
        const size_t i = used++;
        if (!values.is_tuple()) {
            require(i == 0, "%: the format has more conversions than values");
            return values;
        }
        require(i < values.items().size(), "%: the format has more conversions than values");
        return values.items()[i];
    }

    void convert(char conversion, const Value& value, Spec& spec) {
        const auto as_text = [&](const Text& text) {
            if (spec.align == '=') {  // zeros are for numbers
                spec.align = 0;
                spec.fill.chars = " ";
            }
            if (!spec.align) spec.align = '>';
            put_string(text, spec, out);
        };
        switch (conversion) {
            case 's':
                return as_text(value.str(out.meter).text());
            case 'r': {
                Writer shown(out.meter);
                value.repr(shown);
                return as_text(shown.written());
            }
            case 'c':
                require(!value.is_string() || count_characters(value.text().chars) == 1,
                        "%: %c takes one character or its number");
                return as_text(value.is_string() ? value.text() : character_of(value));
            case 'd':
            case 'i':
            case 'u':
                require(value.is_number() && (value.is_integer() || std::fabs(value.number()) < 9e18), "%: %",
                        conversion, " takes a number of at most 64 bits, not a value of type ", value.type_name());
                spec.type = 'd';
                return put_number(value.is_float() ? Value(int64_t(value.number())) : value, spec, out);
            case 'o':
            case 'x':
            case 'X':
            case 'e':
            case 'E':
            case 'f':
            case 'F':
            case 'g':
            case 'G':
                require(value.is_number(), "%: %", conversion, " takes a number, not a value of type ",
                        value.type_name());
                spec.type = conversion;
                return put_number(value, spec, out);
            default:
                throw Error(str("%: the conversion %", conversion, " is not supported"));
        }
    }

    const Text& format;
    const Value& values;
    Writer out;
    size_t used = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// '{}'.format(…)

class BracesFormat {
  public:
    BracesFormat(const Text& f, const Arguments& a, Meter& meter) : format(f), arguments(a), out(meter) {}

    Value run() {
        const std::string_view text = format.chars;
        out.meter.work(text.size());
        for (size_t i = 0, next; i < text.size(); i = next) {
            next = std::min(text.find_first_of("{}", i), text.size());
            out.put(format, {i, next});
            if (next == text.size()) break;
            const bool twice = next + 1 < text.size() && text[next] == text[next + 1];
            if (twice) out.put(format, {next, next + 1});
            require(twice || text[next] == '{', "format: a single '}' in the format; write '}}'");
            next = twice ? next + 2 : field(next + 1);
        }
        return out.value();
    }

  private:
    // The field at i, behind its {. Returns the place behind its }.
    size_t field(size_t i) {
        const size_t end = std::min(find_text(format.chars, "}", i), format.size());
        require(end < format.size(), "format: a '{' has no '}'");
        const std::string whole = format.chars.substr(i, end - i);
        require(whole.find('{') == std::string::npos, "format: a field inside a field is not supported");
        const size_t name_end = std::min(whole.find_first_of("!:"), whole.size());
        Value value = argument(whole.substr(0, name_end));
        size_t at = name_end;
        if (at < whole.size() && whole[at] == '!') {
            const char conversion = at + 1 < whole.size() ? whole[at + 1] : ' ';
            require(conversion == 's' || conversion == 'r', "format: the conversion !", conversion,
                    " is not supported");
            Writer shown(out.meter);
            conversion == 's' ? value.print(shown) : value.repr(shown);
            value = shown.value();
            at += 2;
        }
        require(at == whole.size() || whole[at] == ':', "format: '", whole, "' is not a field");
        const size_t begin = std::min(at + 1, whole.size());
        Spec spec;
        spec.mark = format.marks[i - 1];
        put(value, read_spec(whole.substr(begin), i + begin, spec), spec);
        return end + 1;
    }

    // "", "0", "name", with .attribute and [key] behind it.
    Value argument(const std::string& path) {
        size_t at = std::min(path.find_first_of(".["), path.size());
        const std::string name = path.substr(0, at);
        size_t digits = 0;
        const int64_t number = name.empty() ? automatic++ : number_at(name, digits);
        Value value;
        if (name.empty() || digits == name.size()) {
            numbered |= !name.empty();
            require(!numbered || automatic == 0, "format: fields with numbers and fields without at once");
            require(size_t(number) < arguments.values.size(), "format: the format asks for argument ", number,
                    ", which is not given");
            value = arguments.values[size_t(number)];
        } else {
            const auto found = std::find_if(arguments.keywords.begin(), arguments.keywords.end(),
                                            [&](const auto& one) { return one.first == name; });
            require(found != arguments.keywords.end(), "format: the argument '", name, "' is not given");
            value = found->second;
        }
        while (at < path.size()) {
            const bool is_key = path[at] == '[';
            const size_t end = std::min(is_key ? path.find(']', at) : path.find_first_of(".[", at + 1), path.size());
            const std::string part = path.substr(at + 1, end - at - 1);
            size_t part_digits = 0;
            const int64_t index = number_at(part, part_digits);
            const bool is_index = is_key && index >= 0 && part_digits == part.size();
            value = is_index ? item(value, index, out.meter)
                    : is_key ? item(value, Text(part), out.meter)
                             : attribute(value, part);
            at = end + is_key;
        }
        require_defined(value);
        return value;
    }

    // [[fill]align][sign][#][0][width][,][.precision][type]. Returns whether there is anything.
    bool read_spec(const std::string& text, size_t place, Spec& spec) {
        const auto is_align = [&](size_t at) {
            return at < text.size() && std::string_view("<>^=").find(text[at]) != std::string_view::npos;
        };
        spec.fill.marks = spec.mark;
        if (text.empty()) return false;
        size_t i = 0;
        const size_t fill = character_length(text, 0);
        if (is_align(fill)) {
            spec.fill = Text(text.substr(0, fill), format.marks[place]);
            i = fill;
        }
        if (is_align(i)) spec.align = text[i++];
        if (i < text.size() && std::string_view("+- ").find(text[i]) != std::string_view::npos) spec.sign = text[i++];
        if (i < text.size() && text[i] == '#') spec.alternate = text[i++];
        if (i < text.size() && text[i] == '0' && !spec.align) {
            spec.align = '=';
            spec.fill.chars = "0";
        }
        spec.width = std::max<int64_t>(number_at(text, i), 0);
        if (i < text.size() && (text[i] == ',' || text[i] == '_')) spec.grouping = text[i++];
        if (i < text.size() && text[i] == '.') {
            spec.precision = number_at(text, ++i);
            require(spec.precision >= 0, "format: the precision is missing in '", text, "'");
        }
        if (i < text.size()) spec.type = text[i++];
        require(i == text.size() && (!spec.type || std::string_view("bcdeEfFgGosxX%").find(spec.type) < 14),
                "format: '", text, "' is not a format");
        return true;
    }

    void put(const Value& value, bool has_spec, Spec& spec) {
        if (!has_spec) return value.print(out);
        if (value.is_string()) {
            require((!spec.type || spec.type == 's') && spec.align != '=' && !spec.grouping,
                    "format: text takes no format of numbers");
            return put_string(value.text(), spec, out);
        }
        require(value.is_number(), "format: a value of type ", value.type_name(), " takes no format");
        if (spec.type == 'c') return pad(character_of(value), 0, spec, spec.align ? spec.align : '<', out);
        require(spec.type != 's', "format: a number takes no format of text");
        require(spec.precision < 0 || value.is_float() || (spec.type && std::string_view("bdoxX").find(spec.type) > 4),
                "format: a whole number takes no precision");
        put_number(value, spec, out);
    }

    const Text& format;
    const Arguments& arguments;
    Writer out;
    int64_t automatic = 0;
    bool numbered = false;
};

}  // namespace

Value format_percent(const Text& format, const Value& values, Meter& meter) {
    return PercentFormat(format, values, meter).run();
}

Value format_braces(const Text& format, const Arguments& arguments, Meter& meter) {
    return BracesFormat(format, arguments, meter).run();
}

}  // namespace jinja

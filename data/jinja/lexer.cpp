#include "data/jinja/lexer.h"

#include <algorithm>
#include <cctype>

#include "data/jinja/marked_text.h"
#include "data/utf8.h"
#include "runtime/text.h"

namespace jinja {

namespace {

bool is_name_start(char c) {
    return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '_';
}

// Line ends become \n, and one at the end of the template is dropped, as in jinja2.
std::string normalized(const std::string& source) {
    std::string out;
    for (size_t i = 0; i < source.size(); i++) {
        out += source[i] == '\r' ? '\n' : source[i];
        if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') i++;
    }
    if (!out.empty() && out.back() == '\n') out.pop_back();
    return out;
}

class Lexer {
  public:
    Lexer(const std::string& text, const std::string& n) : source(normalized(text)), name(n) {}

    std::vector<Token> run() {
        while (at < source.size()) text();
        add(Type::End, "");
        return std::move(tokens);
    }

  private:
    using Type = Token::Type;

    [[noreturn]] void fail(const std::string& message) const { fail_at(name, line, message); }

    bool next_is(std::string_view what) const { return source.compare(at, what.size(), what) == 0; }
    void add(Type type, std::string value) { tokens.push_back({type, std::move(value), line}); }

    void advance(size_t n) {
        line += int(std::count(source.begin() + int64_t(at), source.begin() + int64_t(at + n), '\n'));
        at += n;
        line_start = n > 0 ? source[at - 1] == '\n' : line_start;
    }
    void skip_space() {
        while (at < source.size()) {
            const size_t space = space_length(source, at);
            if (space == 0) return;
            advance(space);
        }
    }

    // Text up to the next tag, and the tag.
    void text() {
        size_t tag = at;
        while (tag = source.find('{', tag), tag != std::string::npos) {
            if (tag + 1 < source.size() && std::string_view("{%#").find(source[tag + 1]) != std::string_view::npos)
                break;
            tag++;
        }
        std::string before = source.substr(at, tag == std::string::npos ? tag : tag - at);
        if (tag == std::string::npos) {
            add(Type::Text, before);
            return advance(before.size());
        }
        const char type = source[tag + 1], sign = tag + 2 < source.size() ? source[tag + 2] : ' ';
        const size_t length = before.size();
        if (sign == '-') {
            before.resize(strip(before, RIGHT).end);
        } else if (sign != '+' && type != '{') {
            const size_t newline = before.rfind('\n'), begin = newline == std::string::npos ? 0 : newline + 1;
            if ((begin > 0 || line_start) && strip(std::string_view(before).substr(begin), BOTH).size() == 0)
                before.resize(begin);
        }
        if (!before.empty()) add(Type::Text, before);
        advance(length);
        advance(2 + (sign == '-' || (sign == '+' && type != '{')));
        if (type == '#') return comment();
        if (type == '%' && raw()) return;
        add(type == '{' ? Type::OutputBegin : Type::BlockBegin, "");
        inside(type == '{');
    }

    // The end of a block or comment, `mark` is '%' or '#'. Returns whether it is here.
    bool end_of(char mark) {
        const std::string end = {mark, '}'};
        if (next_is("-" + end)) {
            advance(3);
            skip_space();
        } else if (next_is("+" + end)) {
            advance(3);
        } else if (next_is(end)) {
            advance(2);
            if (next_is("\n")) advance(1);
        } else {
            return false;
        }
        return true;
    }

    void comment() {
        const int begin = line;
        while (!end_of('#')) {
            if (at == source.size()) fail_at(name, begin, "the comment {# has no end #}");
            advance(1);
        }
    }

    bool raw() {
        const auto spaces = [&](size_t i) {
            while (i < source.size() && space_length(source, i)) i += space_length(source, i);
            return i;
        };
        const size_t word = spaces(at);
        if (source.compare(word, 3, "raw") != 0) return false;
        size_t end = spaces(word + 3);
        const bool strips = source.compare(end, 3, "-%}") == 0;
        if (!strips && source.compare(end, 2, "%}") != 0) return false;
        advance(end + (strips ? 3 : 2) - at);
        if (strips) skip_space();
        const size_t begin = at;
        for (size_t i = begin; (i = source.find("{%", i)) != std::string::npos; i += 2) {
            const char sign = i + 2 < source.size() ? source[i + 2] : ' ';
            const size_t endraw = spaces(i + 2 + (sign == '-' || sign == '+'));
            if (source.compare(endraw, 6, "endraw") != 0) continue;
            std::string content = source.substr(begin, i - begin);
            if (sign == '-') content.resize(strip(content, RIGHT).end);
            if (!content.empty()) add(Type::Text, content);
            advance(spaces(endraw + 6) - at);
            if (!end_of('%')) fail("{% endraw does not end with %}");
            return true;
        }
        fail("{% raw %} has no {% endraw %}");
    }

    // The tokens of a tag, to its end.
    void inside(bool output) {
        std::string open;  // brackets, by what closes them
        const int begin = line;
        for (;;) {
            skip_space();
            if (at == source.size()) fail_at(name, begin, str("the tag ", output ? "{{" : "{%", " has no end"));
            if (open.empty() && at_end(output)) return;
            const char c = source[at];
            if (is_name_start(c)) {
                size_t end = at;
                while (end < source.size() && (is_name_start(source[end]) || is_digit(source[end]))) end++;
                take(Type::Name, end - at);
            } else if (is_digit(c)) {
                number();
            } else if (c == '\'' || c == '"') {
                string();
            } else {
                const std::string two = source.substr(at, 2);
                static const std::string_view TWO[] = {"//", "**", "==", "!=", ">=", "<="};
                const bool is_two = std::find(std::begin(TWO), std::end(TWO), two) != std::end(TWO);
                if (!is_two && std::string_view("+-/*%~[](){}><=.:|,").find(c) == std::string_view::npos)
                    fail(str("the character '", source.substr(at, std::max<size_t>(utf8_length(source, at), 1)),
                             "' is not part of an expression"));
                if (c == '(' || c == '[' || c == '{') open += c == '(' ? ')' : c == '[' ? ']' : '}';
                if (c == ')' || c == ']' || c == '}') {
                    if (open.empty() || open.back() != c) fail(str("'", c, "' closes nothing"));
                    open.pop_back();
                }
                take(Type::Operator, is_two ? 2 : 1);
            }
        }
    }

    bool at_end(bool output) {
        if (!output) {
            const int begin = line;
            if (!end_of('%')) return false;
            tokens.push_back({Type::BlockEnd, "", begin});
            return true;
        }
        const bool strips = next_is("-}}");
        if (!strips && !next_is("}}")) return false;
        add(Type::OutputEnd, "");
        advance(strips ? 3 : 2);
        if (strips) skip_space();
        return true;
    }

    void take(Type type, size_t n) {
        add(type, source.substr(at, n));
        advance(n);
    }

    void number() {
        size_t end = at;
        bool is_float = false;
        const auto digits = [&] {
            while (end < source.size() && (is_digit(source[end]) || source[end] == '_')) end++;
        };
        digits();
        if (end + 1 < source.size() && source[end] == '.' && is_digit(source[end + 1])) {
            is_float = true;
            end++;
            digits();
        }
        if (end < source.size() && (source[end] == 'e' || source[end] == 'E')) {
            size_t exponent = end + 1;
            if (exponent < source.size() && (source[exponent] == '+' || source[exponent] == '-')) exponent++;
            if (exponent < source.size() && is_digit(source[exponent])) {
                is_float = true;
                end = exponent;
                digits();
            }
        }
        // Hexadecimal, octal and binary numbers keep their prefix.
        if (source[at] == '0' && end == at + 1 && end + 1 < source.size() &&
            std::string_view("xXoObB").find(source[end]) != std::string_view::npos && std::isxdigit(source[end + 1]))
            for (end++; end < source.size() && (std::isxdigit(source[end]) || source[end] == '_');) end++;
        std::string text = source.substr(at, end - at);
        text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
        add(is_float ? Type::Float : Type::Integer, text);
        advance(end - at);
    }

    // A string with Python's escapes.
    void string() {
        const char quote = source[at];
        std::string value;
        bool by_name = false;
        size_t i = at + 1;
        for (;; i++) {
            if (i >= source.size()) fail(str("the string that begins with ", quote, " has no end"));
            if (source[i] == quote) break;
            if (source[i] != '\\') {
                value += source[i];
                continue;
            }
            if (++i >= source.size()) continue;
            const char c = source[i];
            const size_t simple = std::string_view("\\'\"abfnrtv").find(c);
            const size_t hex_digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
            if (simple != std::string_view::npos) {
                value += "\\'\"\a\b\f\n\r\t\v"[simple];
            } else if (hex_digits) {
                value += code_point(source.substr(i + 1, hex_digits), hex_digits, 16);
                i += hex_digits;
            } else if ('0' <= c && c <= '7') {
                size_t n = 1;
                while (n < 3 && i + n < source.size() && '0' <= source[i + n] && source[i + n] <= '7') n++;
                value += code_point(source.substr(i, n), n, 8);
                i += n - 1;
            } else if (c == 'N') {
                by_name = true;
            } else if (c != '\n') {  // an escaped line end is nothing, any other pair is itself
                (value += '\\') += c;
            }
        }
        if (by_name)
            add(Type::Unsupported, "a character by its name, \\N{…},");
        else
            add(Type::String, value);
        advance(i + 1 - at);
    }

    std::string code_point(const std::string& digits, size_t n, int base) const {
        size_t used = 0;
        uint32_t code = 0x110000;
        if (digits.size() == n && digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos)
            code = uint32_t(std::stoul(digits, &used, base));
        if (code > 0x10FFFF || (0xD800 <= code && code < 0xE000))
            fail(str("the escape of '", digits, "' in a string is not a character"));
        return utf8_character(code);
    }

    const std::string source, &name;
    std::vector<Token> tokens;
    size_t at = 0;
    int line = 1;
    bool line_start = true;  // the text so far ends a line
};

}  // namespace

std::string one_line(std::string message) {
    std::replace_if(
        message.begin(), message.end(), [](char c) { return uint8_t(c) < 32; }, ' ');
    return message;
}

void fail_at(const std::string& name, int line, const std::string& message) {
    throw Error(one_line(str(name, ":", line, ": ", message)));
}

std::vector<Token> tokenize(const std::string& source, const std::string& name) {
    return Lexer(source, name).run();
}

}  // namespace jinja

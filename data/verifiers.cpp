#include "data/verifiers.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>

#include "data/exact_number.h"
#include "data/splitter.h"
#include "data/token_text.h"
#include "data/unicode.h"
#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/files/json_keys.h"
#include "runtime/text.h"

using nlohmann::json;

namespace {

// A compiled regular expression, which several threads may use at once.
class Regex {
  public:
    explicit Regex(const std::string& pattern) : source(pattern) {
        int error = 0;
        PCRE2_SIZE offset = 0;
        code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                 PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF | PCRE2_NEVER_BACKSLASH_C, &error,
                                 &offset, nullptr));
        PCRE2_UCHAR what[256] = {};
        pcre2_get_error_message(error, what, sizeof what);
        require(code != nullptr, "the regular expression '", printable(pattern), "' is wrong at byte ", offset, ": ",
                reinterpret_cast<const char*>(what));
        pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without JIT, matching is only slower
    }

    // What a match captured: its first group that took part and is not empty, else all of it. last: of the last match.
    // Throws Error if it backtracks for too long.
    std::optional<std::string> find(std::string_view text, bool last) const {
        const Splitter::MatchData data(pcre2_match_data_create_from_pattern(code.get(), nullptr));
        const Splitter::MatchContext limits(pcre2_match_context_create(nullptr));
        require(data && limits, "out of memory");
        constexpr uint32_t MOST_STEPS = 10'000'000, MOST_KIB = 64 << 10;
        pcre2_set_match_limit(limits.get(), MOST_STEPS);
        pcre2_set_heap_limit(limits.get(), MOST_KIB);
        SplitTime time(text.size());
        std::optional<std::string> found;
        const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
        for (size_t from = 0; from <= text.size() && (last || !found);) {
            const auto match = [&](uint32_t flags) {
                return pcre2_match(code.get(), subject, text.size(), from, flags, data.get(), limits.get());
            };
            int groups = match(0);
            if (groups == PCRE2_ERROR_JIT_STACKLIMIT) groups = match(PCRE2_NO_JIT);
            if (groups == PCRE2_ERROR_NOMATCH) break;
            require(groups > 0 && !time.is_over(64), "the regular expression '", printable(source),
                    "' backtracks too much over a completion of ", text.size(),
                    " bytes; use one without nested "
                    "repetitions");
            const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(data.get());
            found = captured(text, range, groups);
            from = std::max(range[1], from + (range[1] > range[0] ? 0 : 1));
        }
        return found;
    }

  private:
    static std::string captured(std::string_view text, const PCRE2_SIZE* range, int groups) {
        for (int g = 1; g < groups; g++)
            if (range[2 * g] != PCRE2_UNSET && range[2 * g] < range[2 * g + 1])
                return std::string(text.substr(range[2 * g], range[2 * g + 1] - range[2 * g]));
        return std::string(text.substr(range[0], range[1] - range[0]));
    }

    const std::string source;
    std::unique_ptr<pcre2_code, Splitter::Free> code;
};

std::string_view trimmed(std::string_view text) {
    text.remove_prefix(space_at_start(text));
    return text.substr(0, text.size() - space_at_end(text));
}

// Without white space at the ends, and without one full stop behind it.
std::string_view without_stop(std::string_view text) {
    text = trimmed(text);
    if (ends_with(text, ".")) text.remove_suffix(1);
    return trimmed(text);
}

uint32_t lower(uint32_t c) {
    constexpr uint32_t CAPITAL_SIGMA = 0x3A3, FINAL_SIGMA = 0x3C2, SIGMA = 0x3C3, DOTTED_I = 0x130;
    if (c == CAPITAL_SIGMA || c == FINAL_SIGMA) return SIGMA;
    return c == DOTTED_I ? c : lower_case(c);
}

// As same_text() compares texts that are no numbers.
std::string normalized(std::string_view text) {
    const std::string composed = nfc(without_stop(text));
    std::string out;
    for (size_t i = 0; i < composed.size();) {
        const std::string_view rest = std::string_view(composed).substr(i);
        const size_t space = space_at_start(rest), n = utf8_length(composed, i);
        if (space) {
            out += ' ';
            i += space;
        } else if (n) {
            out += utf8_character(lower(utf8_code_point(composed, i, n)));
            i += n;
        } else {
            out += composed[i++];
        }
    }
    return out;
}

// The number that a text is, at the end of a sentence too.
std::optional<ExactNumber> number_of(std::string_view text) {
    return exact_number(without_stop(text));
}

// {…} at text[open], with both braces; "" if it is not closed. \{ and \} are no braces.
std::string_view group_at(std::string_view text, size_t open) {
    int depth = 0;
    for (size_t i = open; i < text.size(); i++) {
        if (text[i] == '\\')
            i++;
        else if (text[i] == '{')
            depth++;
        else if (text[i] == '}' && --depth == 0)
            return text.substr(open, i + 1 - open);
    }
    return "";
}

// The answer after lm-evaluation-harness's regexes_to_ignore and ignore_case.
std::string gsm8k_text(const std::string& text) {
    std::string out = replace_all(replace_all(text, ",", ""), "$", "");
    const size_t mark = out.rfind("#### ");
    if (mark != std::string::npos) out.erase(0, mark + 5);
    if (ends_with(out, ".")) out.pop_back();
    std::transform(out.begin(), out.end(), out.begin(),
                   [](char c) { return 'A' <= c && c <= 'Z' ? char(c - 'A' + 'a') : c; });
    return out;
}

Verifier gsm8k(const char* pattern, bool last, const std::string& answer) {
    const auto regex = std::make_shared<const Regex>(pattern);
    return [=, expected = gsm8k_text(answer)](std::string_view completion) {
        const std::optional<std::string> found = regex->find(completion, last);
        return double(found && gsm8k_text(*found) == expected);
    };
}

Verifier last_number_verifier(const std::string& answer) {
    const std::optional<ExactNumber> expected = number_of(answer);
    require(expected.has_value(), "answer ", shown(json(answer)), " is not a number, which last_number compares with");
    return
        [expected](std::string_view completion) { return double(exact_number(last_number(completion)) == expected); };
}

Verifier boxed_verifier(const std::string& answer) {
    const std::string_view inside = boxed(answer);  // an answer may be a whole solution
    const std::string expected = plain_latex(inside.empty() ? answer : inside);
    return [expected](std::string_view completion) {
        const std::string_view found = boxed(completion);
        return double(!found.empty() && same_text(plain_latex(found), expected));
    };
}

Verifier choice_verifier(const std::string& answer) {
    const std::string_view text = trimmed(answer);
    const char letter = chosen_letter(text);
    require(letter != '\0' && text.size() <= 3, "answer ", shown(json(answer)),
            " is not a letter, which multiple_choice compares with");
    return [letter](std::string_view completion) { return double(chosen_letter(completion) == letter); };
}

std::string text_option(const json& options, const char* key, const std::string& otherwise) {
    if (!options.contains(key)) return otherwise;
    require(options[key].is_string(), "key '", key, "' is ", shown(options[key]), ", expected text");
    return options[key];
}

Verifier regex_verifier(const json& options, const std::string& answer) {
    const std::string pattern = text_option(options, "pattern", ""), select = text_option(options, "select", "first");
    require(select == "first" || select == "last", "key 'select' is ", shown(json(select)), ", expected first or last");
    require(options.contains("pattern") || !options.contains("select"), "key 'select' needs the key 'pattern'");
    const auto regex = std::make_shared<const Regex>(options.contains("pattern") ? pattern : answer);
    if (!options.contains("pattern"))
        return [regex](std::string_view completion) { return double(regex->find(completion, false).has_value()); };
    return [=, last = select == "last"](std::string_view completion) {
        const std::optional<std::string> found = regex->find(completion, last);
        return double(found && same_text(*found, answer));
    };
}

Verifier length_verifier(const json& options) {
    const auto bound = [&](const char* key, int64_t otherwise) {
        if (!options.contains(key)) return otherwise;
        const json& value = options[key];
        const double size = value.is_number_integer() ? value.get<double>() : -1;
        require(size >= 0 && size < 9e18, "key '", key, "' is ", shown(value),
                ", expected a whole number of at least 0");
        return value.get<int64_t>();
    };
    require(options.contains("min") || options.contains("max"), "length needs the key 'min' or 'max', in characters");
    const int64_t least = bound("min", 0), most = bound("max", INT64_MAX);
    require(least <= most, "key 'min' is ", least, ", more than 'max', ", most);
    return [=](std::string_view completion) {
        const auto characters = std::count_if(completion.begin(), completion.end(),
                                              [](char byte) { return (uint8_t(byte) & 0xC0) != 0x80; });
        return double(least <= characters && characters <= most);
    };
}

struct NamedVerifier {
    const char* name;
    std::set<std::string> options;
    std::function<Verifier(const json& options, const std::string& answer)> make;
};

const std::vector<NamedVerifier>& all_verifiers() {
    static const std::vector<NamedVerifier> ALL = {
        {"exact_match",
         {},
         [](const json&, const std::string& answer) -> Verifier {
             return [answer](std::string_view completion) { return double(same_text(completion, answer)); };
         }},
        {"last_number", {}, [](const json&, const std::string& answer) { return last_number_verifier(answer); }},
        {"boxed_answer", {}, [](const json&, const std::string& answer) { return boxed_verifier(answer); }},
        {"multiple_choice", {}, [](const json&, const std::string& answer) { return choice_verifier(answer); }},
        {"regex", {"pattern", "select"}, regex_verifier},
        {"length", {"min", "max"}, [](const json& options, const std::string&) { return length_verifier(options); }},
        {"gsm8k_strict",
         {},
         [](const json&, const std::string& answer) { return gsm8k("#### (-?[0-9.,]+)", false, answer); }},
        {"gsm8k_flexible", {}, [](const json&, const std::string& answer) {
             return gsm8k("(-?[$0-9.,]{2,})|(-?[0-9]+)", true, answer);
         }}};
    return ALL;
}

}  // namespace

Verifier make_verifier(const json& options, const std::string& answer) {
    const json name = options.value("name", json());
    const auto& all = all_verifiers();
    const auto found = std::find_if(all.begin(), all.end(), [&](const NamedVerifier& v) { return name == v.name; });
    require(found != all.end(), "verifier ", shown(name), " is unknown; use ", verifier_names());
    for (const auto& [key, value] : options.items())
        require(key == "name" || found->options.contains(key), "verifier ", found->name, " has no option ",
                shown(json(key)));
    return found->make(options, answer);
}

std::string verifier_names() {
    std::string names;
    for (const NamedVerifier& v : all_verifiers()) names += str(names.empty() ? "" : ", ", v.name);
    return names;
}

bool same_text(std::string_view a, std::string_view b) {
    const std::optional<ExactNumber> x = number_of(a), y = number_of(b);
    return x && y ? *x == *y : normalized(a) == normalized(b);
}

std::string_view boxed(std::string_view completion) {
    for (size_t at = completion.size(); at > 0;) {
        at = completion.rfind('\\', at - 1);
        if (at == std::string_view::npos) break;
        for (const std::string_view start : {"\\boxed", "\\fbox"}) {
            if (!starts_with(completion.substr(at), start)) continue;
            size_t open = at + start.size();
            while (open < completion.size() && completion[open] == ' ') open++;
            const std::string_view group =
                open < completion.size() && completion[open] == '{' ? group_at(completion, open) : std::string_view();
            if (!group.empty()) return group.substr(1, group.size() - 2);
        }
    }
    return "";
}

std::string plain_latex(std::string_view latex) {
    std::string s(latex);
    for (const char* layout : {"\\left", "\\right", "\\displaystyle", "\\!", "\\,", "\\;", "\\:", "\\ ", "\\$", "$",
                               "~", "^{\\circ}", "^\\circ", "\\(", "\\)"})
        s = replace_all(s, layout, "");
    s = replace_all(replace_all(replace_all(s, "\\%", "%"), "\\dfrac", "\\frac"), "\\tfrac", "\\frac");
    for (const std::string command : {"\\text", "\\textbf", "\\mathrm", "\\mathbf", "\\mbox"}) {
        for (size_t at; (at = s.find(command + "{")) != std::string::npos;) {
            const std::string group(group_at(s, at + command.size()));
            if (group.empty()) break;
            const bool is_unit = exact_number(trimmed(std::string_view(s).substr(0, at))).has_value();
            s.replace(at, command.size() + group.size(), is_unit ? "" : group.substr(1, group.size() - 2));
        }
    }
    static const Regex FRACTION("^\\s*-?\\s*\\\\frac\\s*\\{\\s*\\d+\\s*\\}\\s*\\{\\s*\\d+\\s*\\}\\s*$");
    if (FRACTION.find(s, false)) {
        s = replace_all(replace_all(replace_all(s, "\\frac", ""), "}", "/"), "{", "");
        s.erase(s.find_last_of('/'));
    }
    // White space means nothing in LaTeX; in text it is kept, between words.
    const bool is_math = s.find_first_of("\\{}^_=+-*/()[]|<>0123456789") != std::string::npos;
    if (is_math)
        s.erase(std::remove_if(s.begin(), s.end(), [](char c) { return c == ' ' || c == '\n' || c == '\t'; }), s.end());
    return s;
}

char chosen_letter(std::string_view completion) {
    static const Regex NAMED(
        "(?i:\\b(?:answer|choice|option)\\b)(?:\\s+is\\b)?[\\s:=*_]*(?i:option\\s+)?[(\\[*_\\s]*"
        "([A-Z])(?![\\w'’])");
    static const Regex FIRST("^[\\s(\\[*_]*([A-Z])(?:[)\\].:,*_]|\\s*$|\\s*\\R)");
    static const Regex ALONE("^[\\s(\\[*_]*([A-Za-z])[\\s)\\].:*_]*$");
    static const Regex IN_PARENTHESES("\\(([A-Z])\\)");
    std::optional<std::string> found = NAMED.find(completion, true);
    if (!found) found = FIRST.find(completion, false);
    if (!found) found = ALONE.find(completion, false);
    if (!found) found = IN_PARENTHESES.find(completion, true);
    if (!found) return '\0';
    const char c = found->front();
    return 'a' <= c && c <= 'z' ? char(c - 'a' + 'A') : c;
}

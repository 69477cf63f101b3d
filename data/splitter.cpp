#include "data/splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstring>

#include "data/token_text.h"
#include "data/utf8.h"
#include "runtime/error.h"

namespace {

// A tokenizer.json writes regular expressions in Oniguruma's syntax. Those of known tokenizers mean the same in PCRE2,
// with two exceptions. ^ and $ are at each line's ends (PCRE2_MULTILINE). PCRE2's \s differs from Oniguruma's
// (Unicode's White_Space) in one character, U+180E, so the class is spelled out. Constructs that may mean something
// else are errors.
class PatternTranslator {
  public:
    PatternTranslator(const std::string& oniguruma, const std::string& path) : pattern(oniguruma), file(path) {}

    std::string translate() {
        for (; i < pattern.size(); i++) {
            const char c = pattern[i];
            if (c == '\\' && i + 1 < pattern.size()) {
                escape();
                continue;
            }
            if (in_class && (c == '[' || next_is("&&"))) refuse(c == '[' ? "[ in a class" : "&&");
            if (!in_class && next_is("}+")) refuse("{}+");
            if (!in_class && next_is("(?")) group();
            if (c == '[') in_class = true;
            if (c == ']') in_class = false;
            out += c;
        }
        return out;
    }

  private:
    bool next_is(std::string_view text) const { return pattern.compare(i, text.size(), text) == 0; }

    [[noreturn]] void refuse(const std::string& construct) const {
        throw Error(str(file, ": pre_tokenizer: the regular expression '", printable(pattern),
                        "' is not supported (PCRE2 may read ", construct, " differently)"));
    }

    void escape() {
        const std::string white = R"(\t-\r\x{85}\p{Z})";
        const char escaped = pattern[++i];
        if (escaped == 's') {
            out += in_class ? white : "[" + white + "]";
        } else if (escaped == 'S' && !in_class) {
            out += "[^" + white + "]";
        } else if (escaped == 'p' || escaped == 'P' || escaped == 'x') {  // \p{Lu}, \x{85}, \x85
            const size_t end = i + 1 < pattern.size() && pattern[i + 1] == '{' ? pattern.find('}', i) : i;
            if (end == std::string::npos || (escaped != 'x' && !is_category(pattern.substr(i + 1, end - i))))
                refuse("\\" + pattern.substr(i, end == std::string::npos ? end : end - i + 1));
            out += "\\" + pattern.substr(i, end - i + 1);
            i = end;
        } else {
            const bool letter = (escaped >= 'a' && escaped <= 'z') || (escaped >= 'A' && escaped <= 'Z');
            if ((letter && !std::strchr("SdDrnt", escaped)) || (escaped >= '0' && escaped <= '9'))
                refuse(std::string("\\") + escaped);
            (out += '\\') += escaped;
        }
    }

    // A general category in braces: PCRE2 has other ideas of which characters belong to a script.
    static bool is_category(const std::string& name) {
        const bool negated = name.size() > 1 && name[1] == '^';
        const std::string rest = name.substr(std::min<size_t>(name.size(), negated ? 2 : 1));
        return (rest.size() == 2 || (rest.size() == 3 && rest[1] >= 'a' && rest[1] <= 'z')) && rest.back() == '}' &&
               std::strchr("LMNPSZC", rest[0]);
    }

    void group() const {
        for (const char* known : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"})
            if (next_is(known)) return;
        refuse(pattern.substr(i, 4));
    }

    const std::string& pattern;
    const std::string& file;
    std::string out;
    size_t i = 0;
    bool in_class = false;
};

std::string pcre2_message(int code) {
    PCRE2_UCHAR text[256] = {};
    pcre2_get_error_message(code, text, sizeof text);
    return reinterpret_cast<const char*>(text);
}

}  // namespace

void Splitter::Free::operator()(pcre2_code* compiled) const {
    pcre2_code_free(compiled);
}
void Splitter::Free::operator()(pcre2_match_data* data) const {
    pcre2_match_data_free(data);
}

Splitter::Splitter(const std::string& pattern, bool literal, Between between, const std::string& path)
    : between_matches(between), file(path) {
    const std::string source = literal ? pattern : PatternTranslator(pattern, file).translate();
    int error = 0;
    PCRE2_SIZE offset = 0;
    const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
    code.reset(
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(), options, &error, &offset, nullptr));
    require(code != nullptr, file, ": pre_tokenizer: the regular expression '", printable(pattern),
            "' is not supported (", error ? pcre2_message(error) : "out of memory", ")");
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without JIT, matching is only slower
}

bool Splitter::find(std::string_view text, size_t from, const MatchData& data, size_t& begin, size_t& end) const {
    const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    while (from < text.size()) {
        int found = pcre2_match(code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, data.get(), nullptr);
        if (found == PCRE2_ERROR_JIT_STACKLIMIT)  // the interpreter does not use the JIT stack
            found = pcre2_match(code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data.get(),
                                nullptr);
        if (found == PCRE2_ERROR_NOMATCH) return false;
        require(found >= 0, file, ": splitting text into words failed: ", pcre2_message(found));
        const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(data.get());
        begin = range[0];
        end = range[1];
        if (begin < end) return true;
        from = std::max<size_t>(from, begin);  // an empty match splits nothing; continue after the next character
        from += from < text.size() ? utf8_length(text, from) : 1;
    }
    return false;
}

std::string_view Splitter::between(std::string_view text) const {
    require(between_matches == Between::Kept, file, ": pre_tokenizer Split with behavior Removed leaves out '",
            printable(text), "', which is not supported; use a regular expression that matches all text");
    return text;
}

Splitter::MatchData Splitter::match_data() const {
    MatchData data(pcre2_match_data_create_from_pattern(code.get(), nullptr));
    require(data != nullptr, "tokenizer: out of memory");
    return data;
}

std::string regex_library() {
    char version[64] = {}, unicode[64] = {};  // "10.42 2022-12-11", "14.0.0"
    pcre2_config(PCRE2_CONFIG_VERSION, version);
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, unicode);
    return str("PCRE2 ", std::string_view(version).substr(0, std::string_view(version).find(' ')), ", Unicode ",
               unicode);
}

#include "data/splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstring>
#include <ctime>

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

// A quick match gives up after so many steps of backtracking from one start. Each may read the whole text. Words need
// fewer; what needs more (a long run of spaces) is matched again, carefully.
constexpr uint32_t QUICK_STEPS = 200;
constexpr size_t STARTS = 32;  // in one call

double clock_seconds(clockid_t clock) {
    timespec now = {};
    clock_gettime(clock, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

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
void Splitter::Free::operator()(pcre2_match_context* context) const {
    pcre2_match_context_free(context);
}

SplitTime::SplitTime(size_t text_bytes) : most(2 + 20e-6 * double(text_bytes)) {}

bool SplitTime::is_over(int64_t work) {
    since_read += work;
    if (since_read < 64) return false;
    since_read = 0;
    // Reading the CPU time is a system call, so it is left out while even the time of day is not over.
    const double now = clock_seconds(CLOCK_MONOTONIC);
    if (start == 0) {
        start = now;
        cpu_start = clock_seconds(CLOCK_THREAD_CPUTIME_ID);
    }
    return now - start > most && clock_seconds(CLOCK_THREAD_CPUTIME_ID) - cpu_start > most;
}

Splitter::Splitter(const std::string& pattern, bool literal, Between between, const std::string& path)
    : source(pattern), between_matches(between), file(path) {
    const std::string translated = literal ? pattern : PatternTranslator(pattern, file).translate();
    const uint32_t options =
        PCRE2_UTF | PCRE2_USE_OFFSET_LIMIT | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
    code = compile(translated, options);
    careful_code = compile(translated, options | (literal ? 0 : PCRE2_AUTO_CALLOUT));
}

Splitter::Code Splitter::compile(const std::string& translated, uint32_t options) const {
    int error = 0;
    PCRE2_SIZE offset = 0;
    Code compiled(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(), options, &error,
                                &offset, nullptr));
    require(compiled != nullptr, file, ": pre_tokenizer: the regular expression '", printable(source),
            "' is not supported (", error ? pcre2_message(error) : "out of memory", ")");
    pcre2_jit_compile(compiled.get(), PCRE2_JIT_COMPLETE);  // without JIT, matching is only slower
    return compiled;
}

int Splitter::match(std::string_view text, size_t from, size_t last, const Matcher& matcher, SplitTime& time) const {
    const auto run = [&](const Code& which, const MatchContext& context, uint32_t options) {
        pcre2_set_offset_limit(context.get(), last);
        return pcre2_match(which.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                           PCRE2_NO_UTF_CHECK | options, matcher.data.get(), context.get());
    };
    int found = run(code, matcher.quick, 0);
    // The interpreter does not use the JIT stack.
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = run(code, matcher.quick, PCRE2_NO_JIT);
    if (found != PCRE2_ERROR_MATCHLIMIT) return found;
    const auto ask = [](pcre2_callout_block*, void* split_time) {
        return static_cast<SplitTime*>(split_time)->is_over(1) ? PCRE2_ERROR_CALLOUT : 0;
    };
    pcre2_set_callout(matcher.careful.get(), ask, &time);
    found = run(careful_code, matcher.careful, 0);
    return found == PCRE2_ERROR_JIT_STACKLIMIT ? run(careful_code, matcher.careful, PCRE2_NO_JIT) : found;
}

bool Splitter::find(std::string_view text, size_t from, const Matcher& matcher, SplitTime& time, size_t& begin,
                    size_t& end) const {
    while (from < text.size()) {
        const size_t last = std::min(from + STARTS, text.size());
        const int found = match(text, from, last, matcher, time);
        const bool none = found == PCRE2_ERROR_NOMATCH;
        const bool over = time.is_over(none && last < text.size() ? 64 : 1);
        if (over || found == PCRE2_ERROR_CALLOUT || found == PCRE2_ERROR_MATCHLIMIT || found == PCRE2_ERROR_HEAPLIMIT)
            give_up(text, from);
        if (none) {
            from = last + 1;
            while (from < text.size() && (uint8_t(text[from]) & 0xC0) == 0x80) from++;
            continue;
        }
        require(found >= 0, file, ": splitting text into words failed: ", pcre2_message(found));
        const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(matcher.data.get());
        begin = range[0];
        end = range[1];
        if (begin < end) return true;
        from = std::max<size_t>(from, begin);  // an empty match splits nothing; continue after the next character
        from += from < text.size() ? utf8_length(text, from) : 1;
    }
    return false;
}

void Splitter::give_up(std::string_view text, size_t at) const {
    throw Error(str(file, ": pre_tokenizer: the regular expression '", printable(source),
                    "' backtracks too much at byte ", at, " of ", text.size(),
                    " of a text; use an expression without it, or shorter documents"));
}

std::string_view Splitter::between(std::string_view text) const {
    require(between_matches == Between::Kept, file, ": pre_tokenizer Split with behavior Removed leaves out '",
            printable(text), "', which is not supported; use a regular expression that matches all text");
    return text;
}

Splitter::Matcher Splitter::matcher() const {
    Matcher all{MatchData(pcre2_match_data_create_from_pattern(code.get(), nullptr)),
                MatchContext(pcre2_match_context_create(nullptr)), MatchContext(pcre2_match_context_create(nullptr))};
    require(all.data && all.quick && all.careful, "tokenizer: out of memory");
    pcre2_set_match_limit(all.quick.get(), QUICK_STEPS);
    pcre2_set_match_limit(all.careful.get(), UINT32_MAX);
    return all;
}

std::string regex_library() {
    char version[64] = {}, unicode[64] = {};  // "10.42 2022-12-11", "14.0.0"
    pcre2_config(PCRE2_CONFIG_VERSION, version);
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, unicode);
    return str("PCRE2 ", std::string_view(version).substr(0, std::string_view(version).find(' ')), ", Unicode ",
               unicode);
}

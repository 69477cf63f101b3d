// Splits text into words by a regular expression, as the pre-tokenizer Split of the package `tokenizers` does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_context_8;
struct pcre2_real_match_data_8;

// The CPU time that splitting one text may take. Known expressions need 0.1 µs a byte; one that backtracks may need a
// time that grows with the square of the text's length.
class SplitTime {
  public:
    explicit SplitTime(size_t text_bytes);
    // work: since the call before. The clock is read after 64 units of it: a match takes less time than reading it.
    bool is_over(int64_t work);

  private:
    double most, start = 0, cpu_start = 0;
    int64_t since_read = 0;
};

// A compiled regular expression. May be used by several threads at once, each with a Matcher of its own.
class Splitter {
  public:
    struct Free {
        void operator()(pcre2_real_code_8* code) const;
        void operator()(pcre2_real_match_data_8* data) const;
        void operator()(pcre2_real_match_context_8* context) const;
    };
    using MatchData = std::unique_ptr<pcre2_real_match_data_8, Free>;
    using MatchContext = std::unique_ptr<pcre2_real_match_context_8, Free>;
    // What one thread needs to match.
    struct Matcher {
        MatchData data;
        MatchContext quick, careful;
    };
    enum class Between { Kept, Refused };  // text between matches; Refused: split() throws an Error if there is any

    // pattern is in Oniguruma's syntax (literal: a string). Throws an Error that names the file if PCRE2 does not
    // support it or may read it differently.
    Splitter(const std::string& pattern, bool literal, Between between, const std::string& path);

    // text is valid UTF-8. Calls piece(string_view) for the matches and the text between them, none empty, in order.
    // Throws an Error that names the expression and the place if it backtracks for longer than `time`.
    template <typename Piece>
    void split(std::string_view text, const Matcher& matcher, SplitTime& time, const Piece& piece) const {
        size_t done = 0, begin, end;
        while (find(text, done, matcher, time, begin, end)) {
            if (begin > done) piece(between(text.substr(done, begin - done)));
            piece(text.substr(begin, end - begin));
            done = end;
        }
        if (done < text.size()) piece(between(text.substr(done)));
    }
    Matcher matcher() const;

  private:
    // The next match that is not empty.
    bool find(std::string_view text, size_t from, const Matcher& matcher, SplitTime& time, size_t& begin,
              size_t& end) const;
    int match(std::string_view text, size_t from, size_t last, const Matcher& matcher, SplitTime& time) const;
    [[noreturn]] void give_up(std::string_view text, size_t at) const;
    std::string_view between(std::string_view text) const;

    using Code = std::unique_ptr<pcre2_real_code_8, Free>;
    Code compile(const std::string& translated, uint32_t options) const;

    Code code, careful_code;  // the second asks SplitTime while it matches
    std::string source;       // as the file writes it
    Between between_matches;
    std::string file;  // that errors name
};

// The library, and the version of Unicode that it knows: "PCRE2 10.42, Unicode 14.0.0".
std::string regex_library();

// Splits text into words by a regular expression, as the pre-tokenizer Split of the package `tokenizers` does.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;

// A compiled regular expression. May be used by several threads at once, each with a MatchData of its own.
class Splitter {
  public:
    struct Free {
        void operator()(pcre2_real_code_8* code) const;
        void operator()(pcre2_real_match_data_8* data) const;
    };
    using MatchData = std::unique_ptr<pcre2_real_match_data_8, Free>;
    enum class Between { Kept, Refused };  // text between matches; Refused: split() throws an Error if there is any

    // pattern is in Oniguruma's syntax (literal: a string). Throws an Error that names the file if PCRE2 does not
    // support it or may read it differently.
    Splitter(const std::string& pattern, bool literal, Between between, const std::string& path);

    // text is valid UTF-8. Calls piece(string_view) for the matches and the text between them, none empty, in order.
    template <typename Piece>
    void split(std::string_view text, const MatchData& data, const Piece& piece) const {
        size_t done = 0, begin, end;
        while (find(text, done, data, begin, end)) {
            if (begin > done) piece(between(text.substr(done, begin - done)));
            piece(text.substr(begin, end - begin));
            done = end;
        }
        if (done < text.size()) piece(between(text.substr(done)));
    }
    MatchData match_data() const;

  private:
    // The next match that is not empty.
    bool find(std::string_view text, size_t from, const MatchData& data, size_t& begin, size_t& end) const;
    std::string_view between(std::string_view text) const;

    std::unique_ptr<pcre2_real_code_8, Free> code;
    Between between_matches;
    std::string file;  // that errors name
};

// The library, and the version of Unicode that it knows: "PCRE2 10.42, Unicode 14.0.0".
std::string regex_library();

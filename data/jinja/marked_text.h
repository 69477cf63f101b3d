// Text with the origin of each byte: what the template wrote, and what came into it as content. Slicing, joining and
// replacing keep the bytes and their origin together, so special tokens can be told from the same characters in content
// after any filter. Positions and lengths are in characters, as in Python; a byte that is not UTF-8 is one character.
// All searches take linear time, and none allocates more than its result and a copy of its arguments.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jinja {

// Bits of a byte's mark.
enum Mark : char {
    TEMPLATE = 0,
    CONTENT = 1,     // came from the conversation, not from the template
    GENERATION = 2,  // inside {% generation %}
};

struct Text {
    std::string chars, marks;  // of equal length; marks: bits of Mark

    Text() = default;
    explicit Text(std::string c, char mark = TEMPLATE) : chars(std::move(c)), marks(chars.size(), mark) {}

    size_t size() const { return chars.size(); }
    bool empty() const { return chars.empty(); }
    void append(std::string_view text, char mark) {
        chars += text;
        marks.append(text.size(), mark);
    }
    char origin() const;  // of what is made of the whole text: CONTENT if a byte of it is
};

// Bytes [begin, end) of a text.
struct Range {
    size_t begin, end;

    size_t size() const { return end - begin; }
};

size_t count_characters(std::string_view text);
// The start of character `index`, counted from 0, in bytes; text.size() beyond the last.
size_t character_start(std::string_view text, size_t index);
size_t character_length(std::string_view text, size_t i);  // in bytes

// Python's str.isspace() for the character at text[i]: its length in bytes, 0 if it is not white space.
size_t space_length(std::string_view text, size_t i);

// The first place of `wanted` at or after `from`, and the last; std::string::npos if there is none.
size_t find_text(std::string_view text, std::string_view wanted, size_t from = 0);
size_t find_last_text(std::string_view text, std::string_view wanted);

// The methods of Python's str, as ranges of the text. count_text(): without overlap, at most `limit`.
enum Sides : uint8_t { LEFT = 1, RIGHT = 2, BOTH = 3 };
Range strip(std::string_view text, Sides sides);
Range strip(std::string_view text, std::string_view characters, Sides sides);
size_t count_text(std::string_view text, std::string_view wanted, size_t limit = SIZE_MAX);
size_t count_words(std::string_view text);
size_t count_lines(std::string_view text);
// At white space; max_splits −1: everywhere.
std::vector<Range> split(std::string_view text, int64_t max_splits, bool from_right);
std::vector<Range> split(std::string_view text, std::string_view separator, int64_t max_splits, bool from_right);
std::vector<Range> split_lines(std::string_view text);
// Throws Error for letters outside ASCII in upper case, and for two in lower case whose form depends on others.
enum class Case : uint8_t { Upper, Lower, Capitalized, Title };
Text change_case(const Text& text, Case to);

}  // namespace jinja

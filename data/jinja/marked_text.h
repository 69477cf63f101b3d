// Text with the origin of each byte: what the template wrote, and what came into it as content. Slicing, joining and
// replacing keep the bytes and their origin together, so special tokens can be told from the same characters in content
// after any filter. Positions and lengths are in characters, as in Python; a byte that is not UTF-8 is one character.
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
    Text part(size_t begin, size_t end) const;  // bytes [begin, end)
    Text& operator+=(const Text& other);
    void append(std::string_view text, char mark);
};

// The start of each character in bytes, and the end of the last.
std::vector<size_t> character_bounds(std::string_view text);

// Python's str.isspace() for the character at text[i]: its length in bytes, 0 if it is not white space.
size_t space_length(std::string_view text, size_t i);

// The methods of Python's str.
enum Sides : uint8_t { LEFT = 1, RIGHT = 2, BOTH = 3 };
Text strip(const Text& text, Sides sides);
Text strip(const Text& text, std::string_view characters, Sides sides);
std::vector<Text> split(const Text& text, int64_t max_splits, bool from_right);  // at white space; −1: everywhere
std::vector<Text> split(const Text& text, const std::string& separator, int64_t max_splits, bool from_right);
std::vector<Text> split_lines(const Text& text);
Text replace(const Text& text, const std::string& from, const Text& to, int64_t count);
// Throws Error for letters outside ASCII, whose case this program does not know.
enum class Case : uint8_t { Upper, Lower, Capitalized, Title };
Text change_case(const Text& text, Case to);

}  // namespace jinja

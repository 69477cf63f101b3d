// Finds the UTF-8 characters in bytes that may be invalid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

// Bytes of the well-formed UTF-8 character at text[i], 0 if there is none (Unicode 15, table 3-7: no overlong forms, no
// surrogates, nothing above U+10FFFF). i < text.size().
size_t utf8_length(std::string_view text, size_t i);

// The code point of the n bytes at text[i], n = utf8_length(text, i) > 0.
uint32_t utf8_code_point(std::string_view text, size_t i, size_t n);

std::string utf8_character(uint32_t code_point);

// Text that arrives in parts that may end inside a character, as the tokens of a model do. The output has the same
// bytes as the input, but only whole characters: the bytes of an incomplete character are held back until the rest
// arrives. Bytes that cannot become a character pass through at once.
class Utf8Stream {
  public:
    std::string put(std::string_view part);  // the text that is complete now
    std::string finish();                    // the bytes of an incomplete last character

  private:
    std::string held_back;  // at most 3 bytes
};

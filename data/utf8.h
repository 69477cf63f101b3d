// UTF-8: where characters begin and end in bytes that may be anything.
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

// Text that arrives in pieces which may end inside a character, as the tokens of a model do. What it gives back is what
// it was given, byte for byte, but a character comes whole: the bytes of one that is unfinished wait for the rest, and
// bytes that can't become one go through at once.
class Utf8Stream {
  public:
    std::string put(std::string_view piece);  // what can be shown now
    std::string finish();                     // what is left of a text that ends inside a character

  private:
    std::string waiting;  // at most 3 bytes
};

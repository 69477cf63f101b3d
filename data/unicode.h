// Unicode functions for tokenizers: normalization, and which characters are white space or belong to a word. The
// library is utf8proc. Bytes that are not UTF-8 stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

// False: text is in form C already. True: it may not be.
bool may_need_nfc(std::string_view text);

// Normalization form C (Unicode Standard Annex 15): canonical decomposition, canonical order, canonical composition.
// O(n log n). Each part of the text that is UTF-8 is normalized by itself.
std::string nfc(std::string_view text);

// Bytes of white space (Unicode's White_Space, a regular expression's \s) at the start and at the end of text.
size_t space_at_start(std::string_view text);
size_t space_at_end(std::string_view text);

// Whether the first or the last character belongs to a word (a regular expression's \w, Unicode Technical Standard 18,
// annex C: letters, marks, decimal digits, connectors). False for an empty text and for bytes that are not UTF-8.
bool starts_with_word(std::string_view text);
bool ends_with_word(std::string_view text);

// The character in lower case. Throws Error for the two whose form depends on the language or on what is around them.
uint32_t lower_case(uint32_t code_point);

// The library and the version of Unicode that it knows: "utf8proc 2.8.0, Unicode 15.0.0".
std::string unicode_library();

// How vocabularies write bytes and spaces in printable characters.
#pragma once

#include <array>
#include <string>
#include <string_view>

// GPT-2's byte alphabet: bytes that are printable in Latin-1 as themselves, the others in ascending order as U+0100,
// U+0101 … (Radford et al. 2019, as published with the model).
class ByteAlphabet {
  public:
    ByteAlphabet();
    // The bytes that a token stands for; false if it has a character outside of the alphabet.
    bool bytes(const std::string& token, std::string& out) const;
    std::string token(std::string_view bytes) const;

  private:
    std::array<int16_t, 256 + 68> byte_of;  // by code point; 68 bytes are not printable. −1: of no byte
    std::array<std::string, 256> character;
};

// SentencePiece's "<0x0A>": the byte that it stands for, −1 if the token is not of that form.
int fallback_byte(const std::string& token);

// What SentencePiece writes for a space: U+2581.
inline const std::string SPACE_MARK = "\xE2\x96\x81";

std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

// The printable characters that vocabularies use for bytes and spaces.
#pragma once

#include <array>
#include <string>
#include <string_view>

// GPT-2's byte alphabet: a byte that is printable in Latin-1 stands for itself. The other bytes, in ascending order,
// are written as U+0100, U+0101 … (Radford et al. 2019, as published with the model).
class ByteAlphabet {
  public:
    ByteAlphabet();
    // Sets out to the bytes of a token. Returns false if the token has a character outside the alphabet.
    bool bytes(const std::string& token, std::string& out) const;
    std::string token(std::string_view bytes) const;

  private:
    std::array<int16_t, 256 + 68> byte_of;  // by code point; 68 bytes are not printable. −1: not a byte
    std::array<std::string, 256> character;
};

// The byte of a SentencePiece fallback token such as "<0x0A>"; −1 for any other token.
int fallback_byte(const std::string& token);

// SentencePiece writes a space as U+2581.
inline const std::string SPACE_MARK = "\xE2\x96\x81";

std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

// Makes text from a file printable in a one-line message: at most 200 bytes, without control characters.
std::string printable(std::string_view text);

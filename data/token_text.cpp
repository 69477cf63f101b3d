#include "data/token_text.h"

#include <algorithm>
#include <cstring>

#include "data/utf8.h"

ByteAlphabet::ByteAlphabet() {
    byte_of.fill(-1);
    uint32_t other = 256;
    for (uint32_t byte = 0; byte < 256; byte++) {
        const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        const uint32_t code = printable ? byte : other++;
        byte_of[code] = int16_t(byte);
        character[byte] = utf8_character(code);
    }
}

bool ByteAlphabet::bytes(const std::string& token, std::string& out) const {
    out.clear();
    for (size_t i = 0; i < token.size();) {
        const size_t n = utf8_length(token, i);
        if (n == 0) return false;
        const uint32_t code = utf8_code_point(token, i, n);
        if (code >= byte_of.size() || byte_of[code] < 0) return false;
        out += char(byte_of[code]);
        i += n;
    }
    return true;
}

std::string ByteAlphabet::token(std::string_view bytes) const {
    std::string out;
    for (const char c : bytes) out += character[uint8_t(c)];
    return out;
}

int fallback_byte(const std::string& token) {
    if (token.size() != 6 || token.compare(0, 3, "<0x") != 0 || token[5] != '>') return -1;
    int value = 0;
    for (const char c : {token[3], token[4]}) {
        const char* const digits = "0123456789ABCDEF";
        const char* const digit = c ? std::strchr(digits, c) : nullptr;
        if (!digit) return -1;
        value = value * 16 + int(digit - digits);
    }
    return value;
}

std::string printable(std::string_view text) {
    std::string out(text.substr(0, 200));
    std::replace_if(
        out.begin(), out.end(), [](char c) { return uint8_t(c) < 32; }, '?');
    return out;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const size_t found = std::min(text.find(from, i), text.size());
        out += text.substr(i, found - i);
        if (found < text.size()) out += to;
        i = found + from.size();
    }
    return out;
}

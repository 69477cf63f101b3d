#include "data/utf8.h"

#include <utility>

size_t utf8_length(std::string_view text, size_t i) {
    const auto at = [&](size_t k) -> unsigned { return i + k < text.size() ? uint8_t(text[i + k]) : 0; };
    const auto tail = [&](size_t k) { return (at(k) & 0xC0) == 0x80; };
    const unsigned a = at(0), b = at(1);
    if (a < 0x80) return 1;
    if (a >= 0xC2 && a <= 0xDF) return tail(1) ? 2 : 0;
    if (a >= 0xE0 && a <= 0xEF) {
        const bool second = tail(1) && (a != 0xE0 || b >= 0xA0) && (a != 0xED || b < 0xA0);
        return second && tail(2) ? 3 : 0;
    }
    if (a >= 0xF0 && a <= 0xF4) {
        const bool second = tail(1) && (a != 0xF0 || b >= 0x90) && (a != 0xF4 || b < 0x90);
        return second && tail(2) && tail(3) ? 4 : 0;
    }
    return 0;
}

uint32_t utf8_code_point(std::string_view text, size_t i, size_t n) {
    const auto at = [&](size_t k) { return uint32_t(uint8_t(text[i + k])); };
    if (n == 1) return at(0);
    uint32_t code = at(0) & (0x7Fu >> n);
    for (size_t k = 1; k < n; k++) code = code << 6 | (at(k) & 0x3F);
    return code;
}

std::string utf8_character(uint32_t code) {
    const auto tail = [&](int shift) { return char(0x80 | (code >> shift & 0x3F)); };
    if (code < 0x80) return {char(code)};
    if (code < 0x800) return {char(0xC0 | code >> 6), tail(0)};
    if (code < 0x10000) return {char(0xE0 | code >> 12), tail(6), tail(0)};
    return {char(0xF0 | code >> 18), tail(12), tail(6), tail(0)};
}

namespace {

// Whether the bytes from text[i] to the end are an incomplete character: more bytes could complete it.
bool unfinished(std::string_view text, size_t i) {
    const size_t have = text.size() - i;
    if (have > 3 || utf8_length(text, i) > 0) return false;
    // The first byte determines the allowed second bytes; one of these three is always among them. The third and the
    // fourth byte may be any continuation byte.
    for (const char second : {char(0x90), char(0x8F), char(0xA0)}) {
        std::string whole(text.substr(i));
        if (have == 1) whole += second;
        whole.resize(4, char(0x80));
        if (utf8_length(whole, 0) > have) return true;
    }
    return false;
}

}  // namespace

std::string Utf8Stream::put(std::string_view part) {
    std::string text = std::exchange(held_back, {});
    text += part;
    const size_t from = text.size() > 3 ? text.size() - 3 : 0;
    for (size_t i = from; i < text.size(); i++) {
        if (!unfinished(text, i)) continue;
        held_back = text.substr(i);
        text.resize(i);
        break;
    }
    return text;
}

std::string Utf8Stream::finish() {
    return std::exchange(held_back, {});
}

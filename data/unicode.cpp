#include "data/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "data/utf8.h"
#include "runtime/error.h"

namespace {

// All characters below U+0300 are in form C, and none of them combines with a character before it. The first byte of
// the others is at least this.
constexpr uint8_t FIRST_COMBINING = 0xCC;

bool is_simple(char c) {
    return uint8_t(c) < FIRST_COMBINING;
}

// Bytes of the last character, 0 if there is none that is UTF-8.
size_t last_length(std::string_view text) {
    for (size_t n = 1; n <= std::min<size_t>(4, text.size()); n++)
        if (utf8_length(text, text.size() - n) == n) return n;
    return 0;
}

bool is_space(uint32_t code) {
    return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F ||
           code == 0x3000;
}

bool is_word(uint32_t code) {
    switch (utf8proc_category(utf8proc_int32_t(code))) {
        case UTF8PROC_CATEGORY_LU:
        case UTF8PROC_CATEGORY_LL:
        case UTF8PROC_CATEGORY_LT:
        case UTF8PROC_CATEGORY_LM:
        case UTF8PROC_CATEGORY_LO:
        case UTF8PROC_CATEGORY_MN:
        case UTF8PROC_CATEGORY_MC:
        case UTF8PROC_CATEGORY_ME:
        case UTF8PROC_CATEGORY_ND:
        case UTF8PROC_CATEGORY_NL:
        case UTF8PROC_CATEGORY_PC:
            return true;
        default:
            // The zero-width joiners, and the symbols that are Alphabetic: letters in circles and squares.
            return code == 0x200C || code == 0x200D || (code >= 0x24B6 && code <= 0x24E9) ||
                   (code >= 0x1F130 && code <= 0x1F149) || (code >= 0x1F150 && code <= 0x1F169) ||
                   (code >= 0x1F170 && code <= 0x1F189);
    }
}

// Appends the form C of UTF-8 text. buffer: memory that one call after another can reuse.
void append_nfc(std::string_view text, std::vector<utf8proc_int32_t>& buffer, std::string& out) {
    constexpr size_t LONGEST = 18;  // code points of the longest decomposition, U+FDFA's; canonical ones have 4
    const auto options = utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const auto combining_class = [](utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; };
    buffer.clear();
    for (size_t i = 0, n; i < text.size(); i += n) {
        n = utf8_length(text, i);
        utf8proc_int32_t parts[LONGEST];
        const auto count =
            utf8proc_decompose_char(utf8proc_int32_t(utf8_code_point(text, i, n)), parts, LONGEST, options, nullptr);
        require(count >= 0, "Unicode normalization failed: ", utf8proc_errmsg(count));
        buffer.insert(buffer.end(), parts, parts + count);
    }
    // Canonical order, here because utf8proc_decompose takes quadratic time for a long run of combining characters.
    for (size_t i = 0; i < buffer.size(); i++) {
        const size_t begin = i;
        while (i < buffer.size() && combining_class(buffer[i]) > 0) i++;
        std::stable_sort(
            buffer.begin() + int64_t(begin), buffer.begin() + int64_t(i),
            [&](utf8proc_int32_t a, utf8proc_int32_t b) { return combining_class(a) < combining_class(b); });
    }
    const auto count = utf8proc_normalize_utf32(buffer.data(), utf8proc_ssize_t(buffer.size()), options);
    require(count >= 0, "Unicode normalization failed: ", utf8proc_errmsg(count));
    for (int64_t i = 0; i < count; i++) {
        utf8proc_uint8_t bytes[4];
        out.append(reinterpret_cast<const char*>(bytes), size_t(utf8proc_encode_char(buffer[size_t(i)], bytes)));
    }
}

}  // namespace

bool may_need_nfc(std::string_view text) {
    return !std::all_of(text.begin(), text.end(), is_simple);
}

std::string nfc(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    std::vector<utf8proc_int32_t> buffer;
    size_t done = 0;
    for (size_t i = 0; i < text.size();) {
        if (is_simple(text[i])) {
            i++;
            continue;
        }
        // A run of characters that are not simple, with the character before it, which may combine with the first.
        const size_t before = last_length(text.substr(done, i - done)), begin = i - before;
        for (size_t n; i < text.size() && !is_simple(text[i]) && (n = utf8_length(text, i)) > 0;) i += n;
        out += text.substr(done, begin - done);
        append_nfc(text.substr(begin, i - begin), buffer, out);
        done = i;
        if (i == begin + before) i++;  // not UTF-8
    }
    return out += text.substr(done);
}

size_t space_at_start(std::string_view text) {
    size_t i = 0;
    for (size_t n; i < text.size() && (n = utf8_length(text, i)) > 0; i += n)
        if (!is_space(utf8_code_point(text, i, n))) break;
    return i;
}

size_t space_at_end(std::string_view text) {
    size_t end = text.size();
    for (size_t n; (n = last_length(text.substr(0, end))) > 0; end -= n)
        if (!is_space(utf8_code_point(text, end - n, n))) break;
    return text.size() - end;
}

bool starts_with_word(std::string_view text) {
    const size_t n = text.empty() ? 0 : utf8_length(text, 0);
    return n > 0 && is_word(utf8_code_point(text, 0, n));
}

bool ends_with_word(std::string_view text) {
    const size_t n = last_length(text);
    return n > 0 && is_word(utf8_code_point(text, text.size() - n, n));
}

uint32_t lower_case(uint32_t code_point) {
    require(code_point != 0x130 && code_point != 0x3A3, "the lower case of ", utf8_character(code_point),
            " depends on the text around it, which this program does not look at");
    return uint32_t(utf8proc_tolower(int32_t(code_point)));
}

std::string unicode_library() {
    return str("utf8proc ", utf8proc_version(), ", Unicode ", utf8proc_unicode_version());
}

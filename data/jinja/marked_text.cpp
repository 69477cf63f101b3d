#include "data/jinja/marked_text.h"

#include <algorithm>
#include <cstring>

#include "data/unicode.h"
#include "data/utf8.h"
#include "runtime/error.h"

namespace jinja {

namespace {

// The length of the line end at text[i], as str.splitlines() sees it; 0 if there is none.
size_t line_end_length(std::string_view text, size_t i) {
    if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') return 2;
    if (('\n' <= text[i] && text[i] <= '\r') || ('\x1c' <= text[i] && text[i] <= '\x1e')) return 1;
    for (const std::string_view end : {"\u0085", "\u2028", "\u2029"})
        if (text.substr(i, end.size()) == end) return end.size();
    return 0;
}

// The start of the character that ends before text[end].
size_t previous_character(std::string_view text, size_t end) {
    for (size_t n = 2; n <= std::min<size_t>(4, end); n++)
        if (utf8_length(text.substr(0, end), end - n) == n) return end - n;
    return end - 1;
}

template <typename Strips>
Range strip_while(std::string_view text, Sides sides, const Strips& strips) {
    Range left{0, text.size()};
    while (sides & LEFT && left.begin < left.end) {
        const size_t n = character_length(text, left.begin);
        if (!strips(Range{left.begin, left.begin + n})) break;
        left.begin += n;
    }
    while (sides & RIGHT && left.begin < left.end) {
        const size_t previous = previous_character(text, left.end);
        if (!strips(Range{previous, left.end})) break;
        left.end = previous;
    }
    return left;
}

// Calls use(Range) for each word between runs of white space.
template <typename Use>
void for_each_word(std::string_view text, const Use& use) {
    for (size_t i = 0; i < text.size();) {
        if (const size_t space = space_length(text, i)) {
            i += space;
            continue;
        }
        const size_t begin = i;
        while (i < text.size() && space_length(text, i) == 0) i += character_length(text, i);
        use(Range{begin, i});
    }
}

template <typename Use>
void for_each_line(std::string_view text, const Use& use) {
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
        const size_t end = line_end_length(text, i);
        if (end) {
            use(Range{begin, i});
            begin = i + end;
        }
        i += end ? end : character_length(text, i);
    }
    if (begin < text.size()) use(Range{begin, text.size()});
}

std::string reversed(std::string_view text) {
    return {text.rbegin(), text.rend()};
}

}  // namespace

char Text::origin() const {
    const bool content = std::any_of(marks.begin(), marks.end(), [](char mark) { return mark & CONTENT; });
    return content ? CONTENT : TEMPLATE;
}

size_t character_length(std::string_view text, size_t i) {
    return std::max<size_t>(utf8_length(text, i), 1);
}

size_t count_characters(std::string_view text) {
    size_t n = 0;
    for (size_t i = 0; i < text.size(); i += character_length(text, i)) n++;
    return n;
}

size_t character_start(std::string_view text, size_t index) {
    size_t i = 0;
    for (; index > 0 && i < text.size(); index--) i += character_length(text, i);
    return i;
}

size_t space_length(std::string_view text, size_t i) {
    const size_t n = utf8_length(text, i);
    if (n == 0) return 0;
    const uint32_t c = utf8_code_point(text, i, n);
    const bool space = (0x09 <= c && c <= 0x0D) || (0x1C <= c && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                       (0x2000 <= c && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
                       c == 0x3000;
    return space ? n : 0;
}

size_t find_text(std::string_view text, std::string_view wanted, size_t from) {
    if (from > text.size()) return std::string::npos;
    if (wanted.empty()) return from;
    if (wanted.size() == 1) return text.find(wanted[0], from);
    // memmem takes linear time; std::string::find() takes the product of both lengths. It sees a part at a time: the
    // address sanitizer looks at all that it is given, in each of many calls.
    for (size_t at = from; at + wanted.size() <= text.size();) {
        const size_t n = std::min(text.size() - at, 4096 + 4 * wanted.size());
        const void* const found = memmem(text.data() + at, n, wanted.data(), wanted.size());
        if (found) return size_t(static_cast<const char*>(found) - text.data());
        at += n - wanted.size() + 1;
    }
    return std::string::npos;
}

size_t find_last_text(std::string_view text, std::string_view wanted) {
    const size_t found = find_text(reversed(text), reversed(wanted));
    return found == std::string::npos ? found : text.size() - found - wanted.size();
}

Range strip(std::string_view text, Sides sides) {
    return strip_while(text, sides, [&](Range one) { return space_length(text, one.begin) == one.size(); });
}

Range strip(std::string_view text, std::string_view characters, Sides sides) {
    return strip_while(text, sides, [&](Range one) {
        for (size_t i = 0; i < characters.size(); i += character_length(characters, i))
            if (characters.substr(i, character_length(characters, i)) == text.substr(one.begin, one.size()))
                return true;
        return false;
    });
}

size_t count_text(std::string_view text, std::string_view wanted, size_t limit) {
    if (wanted.empty()) return std::min(limit, count_characters(text) + 1);
    size_t n = 0;
    for (size_t i = 0; n < limit && (i = find_text(text, wanted, i)) != std::string::npos; i += wanted.size()) n++;
    return n;
}

size_t count_words(std::string_view text) {
    size_t n = 0;
    for_each_word(text, [&](Range) { n++; });
    return n;
}

size_t count_lines(std::string_view text) {
    size_t n = 0;
    for_each_line(text, [&](Range) { n++; });
    return n;
}

std::vector<Range> split(std::string_view text, int64_t max_splits, bool from_right) {
    std::vector<Range> words;
    for_each_word(text, [&](Range word) { words.push_back(word); });
    if (max_splits < 0 || words.size() <= size_t(max_splits)) return words;
    // What remains after max_splits keeps its inner spaces, and those on its outer side.
    if (from_right) {
        const size_t joined = words.size() - size_t(max_splits);
        words[joined - 1].begin = 0;
        words.erase(words.begin(), words.begin() + int64_t(joined) - 1);
    } else {
        words.resize(size_t(max_splits) + 1);
        words.back().end = text.size();
    }
    return words;
}

std::vector<Range> split(std::string_view text, std::string_view separator, int64_t max_splits, bool from_right) {
    require(!separator.empty(), "split: the separator is empty");
    if (from_right) {
        std::vector<Range> parts = split(reversed(text), reversed(separator), max_splits, false);
        std::reverse(parts.begin(), parts.end());
        for (Range& part : parts) part = {text.size() - part.end, text.size() - part.begin};
        return parts;
    }
    std::vector<Range> parts;
    size_t begin = 0;
    for (size_t at; max_splits < 0 || parts.size() < size_t(max_splits); begin = at + separator.size()) {
        at = find_text(text, separator, begin);
        if (at == std::string::npos) break;
        parts.push_back({begin, at});
    }
    parts.push_back({begin, text.size()});
    return parts;
}

std::vector<Range> split_lines(std::string_view text) {
    std::vector<Range> lines;
    for_each_line(text, [&](Range line) { lines.push_back(line); });
    return lines;
}

Text change_case(const Text& text, Case to) {
    const auto is_letter = [](char c) { return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z'); };
    Text out;
    out.chars.reserve(text.size());
    out.marks.reserve(text.size());
    bool first = true;  // of the text, or of a word
    for (size_t i = 0, n; i < text.size(); i += n) {
        n = character_length(text.chars, i);
        const char c = text.chars[i];
        const bool upper = to == Case::Upper || (to != Case::Lower && first);
        first = to == Case::Title && !is_letter(c);
        if (n > 1 || uint8_t(c) >= 128) {
            require(to == Case::Lower, "upper, title and capitalize take ASCII text only");
            const bool valid = utf8_length(text.chars, i) > 0;
            out.append(valid ? utf8_character(lower_case(utf8_code_point(text.chars, i, n))) : std::string(1, c),
                       text.marks[i]);
        } else {
            out.append(std::string(1, !is_letter(c) ? c : char(upper ? c & ~0x20 : c | 0x20)), text.marks[i]);
        }
    }
    return out;
}

}  // namespace jinja

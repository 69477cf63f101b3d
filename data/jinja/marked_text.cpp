#include "data/jinja/marked_text.h"

#include <algorithm>

#include "data/utf8.h"
#include "runtime/error.h"

namespace jinja {

namespace {

size_t character_length(std::string_view text, size_t i) {
    return std::max<size_t>(utf8_length(text, i), 1);
}

// The length of the line end at text[i], as str.splitlines() sees it; 0 if there is none.
size_t line_end_length(std::string_view text, size_t i) {
    if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') return 2;
    if (('\n' <= text[i] && text[i] <= '\r') || ('\x1c' <= text[i] && text[i] <= '\x1e')) return 1;
    for (const std::string_view end : {"\u0085", "\u2028", "\u2029"})
        if (text.substr(i, end.size()) == end) return end.size();
    return 0;
}

Text strip_while(const Text& text, Sides sides, const std::vector<bool>& strips, const std::vector<size_t>& bounds) {
    size_t begin = 0, end = strips.size();
    while (sides & LEFT && begin < end && strips[begin]) begin++;
    while (sides & RIGHT && begin < end && strips[end - 1]) end--;
    return text.part(bounds[begin], bounds[end]);
}

}  // namespace

Text Text::part(size_t begin, size_t end) const {
    Text out;
    out.chars = chars.substr(begin, end - begin);
    out.marks = marks.substr(begin, end - begin);
    return out;
}

Text& Text::operator+=(const Text& other) {
    chars += other.chars;
    marks += other.marks;
    return *this;
}

void Text::append(std::string_view text, char mark) {
    chars += text;
    marks.append(text.size(), mark);
}

std::vector<size_t> character_bounds(std::string_view text) {
    std::vector<size_t> bounds;
    for (size_t i = 0; i < text.size(); i += character_length(text, i)) bounds.push_back(i);
    bounds.push_back(text.size());
    return bounds;
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

Text strip(const Text& text, Sides sides) {
    const std::vector<size_t> bounds = character_bounds(text.chars);
    std::vector<bool> strips(bounds.size() - 1);
    for (size_t i = 0; i < strips.size(); i++) strips[i] = space_length(text.chars, bounds[i]) > 0;
    return strip_while(text, sides, strips, bounds);
}

Text strip(const Text& text, std::string_view characters, Sides sides) {
    const std::vector<size_t> bounds = character_bounds(text.chars), wanted = character_bounds(characters);
    std::vector<bool> strips(bounds.size() - 1);
    const std::string_view all = text.chars;
    for (size_t i = 0; i < strips.size(); i++) {
        const std::string_view character = all.substr(bounds[i], bounds[i + 1] - bounds[i]);
        for (size_t j = 0; j + 1 < wanted.size() && !strips[i]; j++)
            strips[i] = characters.substr(wanted[j], wanted[j + 1] - wanted[j]) == character;
    }
    return strip_while(text, sides, strips, bounds);
}

std::vector<Text> split(const Text& text, int64_t max_splits, bool from_right) {
    // The words between runs of white space. What remains after max_splits keeps its inner spaces.
    std::vector<std::pair<size_t, size_t>> words;
    for (size_t i = 0; i < text.size();) {
        if (const size_t space = space_length(text.chars, i)) {
            i += space;
            continue;
        }
        const size_t begin = i;
        while (i < text.size() && space_length(text.chars, i) == 0) i += character_length(text.chars, i);
        words.emplace_back(begin, i);
    }
    if (max_splits >= 0 && words.size() > size_t(max_splits) + 1) {
        if (from_right) {
            const size_t joined = words.size() - size_t(max_splits);
            words[joined - 1].first = 0;
            words.erase(words.begin(), words.begin() + int64_t(joined) - 1);
        } else {
            words.resize(size_t(max_splits) + 1);
            words.back().second = text.size();
        }
        // The joined rest is stripped on its outer side only.
        auto& rest = from_right ? words.front() : words.back();
        const Text stripped = strip(text.part(rest.first, rest.second), from_right ? RIGHT : LEFT);
        if (from_right) rest.second = rest.first + stripped.size();
    }
    std::vector<Text> out;
    for (const auto& [begin, end] : words) out.push_back(text.part(begin, end));
    return out;
}

std::vector<Text> split(const Text& text, const std::string& separator, int64_t max_splits, bool from_right) {
    require(!separator.empty(), "split: the separator is empty");
    std::vector<size_t> cuts;
    const auto wanted = [&] { return max_splits < 0 || cuts.size() < size_t(max_splits); };
    if (from_right) {
        for (size_t end = text.size(); wanted() && end >= separator.size();) {
            const size_t at = text.chars.rfind(separator, end - separator.size());
            if (at == std::string::npos) break;
            cuts.insert(cuts.begin(), at);
            end = at;
        }
    } else {
        for (size_t at = 0; wanted() && (at = text.chars.find(separator, at)) != std::string::npos;
             at += separator.size())
            cuts.push_back(at);
    }
    std::vector<Text> out;
    size_t begin = 0;
    for (const size_t cut : cuts) {
        out.push_back(text.part(begin, cut));
        begin = cut + separator.size();
    }
    out.push_back(text.part(begin, text.size()));
    return out;
}

std::vector<Text> split_lines(const Text& text) {
    std::vector<Text> lines;
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
        const size_t end = line_end_length(text.chars, i);
        if (end) {
            lines.push_back(text.part(begin, i));
            begin = i + end;
        }
        i += end ? end : character_length(text.chars, i);
    }
    if (begin < text.size()) lines.push_back(text.part(begin, text.size()));
    return lines;
}

Text replace(const Text& text, const std::string& from, const Text& to, int64_t count) {
    Text out;
    size_t begin = 0;
    if (from.empty()) {  // Python: between all characters
        const std::vector<size_t> bounds = character_bounds(text.chars);
        for (size_t i = 0; i < bounds.size() && count != 0; i++, count--) {
            out += text.part(begin, bounds[i]);
            out += to;
            begin = bounds[i];
        }
        return out += text.part(begin, text.size());
    }
    for (size_t at; count != 0 && (at = text.chars.find(from, begin)) != std::string::npos; count--) {
        out += text.part(begin, at);
        out += to;
        begin = at + from.size();
    }
    return out += text.part(begin, text.size());
}

Text change_case(const Text& text, Case to) {
    const auto is_letter = [](char c) { return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z'); };
    Text out = text;
    bool first = true;  // of the text, or of a word
    for (char& c : out.chars) {
        require(uint8_t(c) < 128, "upper, lower, title and capitalize take ASCII text only");
        const bool upper = to == Case::Upper || (to != Case::Lower && first);
        first = to == Case::Title && !is_letter(c);
        if (is_letter(c)) c = char(upper ? c & ~0x20 : c | 0x20);
    }
    return out;
}

}  // namespace jinja

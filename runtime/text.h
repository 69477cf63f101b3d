// How text begins and ends, which C++20 has as members of std::string, and digits whatever the locale is.
#pragma once

#include <string_view>

inline bool starts_with(std::string_view text, std::string_view start) {
    return text.substr(0, start.size()) == start;
}

inline bool is_digit(char c) {
    return '0' <= c && c <= '9';
}

inline bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

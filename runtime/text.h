// How text begins and ends. C++20 has these as members of std::string.
#pragma once

#include <string_view>

inline bool starts_with(std::string_view text, std::string_view start) {
    return text.substr(0, start.size()) == start;
}

inline bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Enumerators by the names that options and files give them: names[i] is that of Enum(i).
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/error.h"

template <size_t N>
using Names = std::array<const char*, N>;

// "a, b, c": for messages. Of any list of texts.
template <typename Texts>
std::string joined(const Texts& texts) {
    std::string text;
    for (const std::string_view name : texts) text += (text.empty() ? "" : ", ") + std::string(name);
    return text;
}

// Nothing for another name.
template <typename Enum, size_t N>
std::optional<Enum> find_enum(const Names<N>& names, std::string_view name) {
    for (size_t i = 0; i < N; i++)
        if (name == names[i]) return Enum(i);
    return {};
}

// Throws Error for another name.
template <typename Enum, size_t N>
Enum enum_of(const Names<N>& names, std::string_view name) {
    const std::optional<Enum> found = find_enum<Enum>(names, name);
    require(found.has_value(), name, " is none of ", joined(names));
    return *found;
}

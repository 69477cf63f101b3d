// Files with one JSON object a line.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "runtime/files/files.h"

// Calls read(line, number) for each line that is not white space. Numbers count all lines from 1.
template <typename Read>
void for_each_line(const std::string& path, const Read& read) {
    const std::string text = read_file(path, int64_t(1) << 30);
    int64_t number = 0;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        begin = end + 1;
        number++;
        if (line.find_first_not_of(" \t\r") != std::string::npos) read(line, number);
    }
}

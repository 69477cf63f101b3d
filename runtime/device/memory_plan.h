// What a run needs of the device's memory, line by line, before anything is allocated.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

struct MemoryPlan {
    std::vector<std::pair<std::string, int64_t>> lines;  // what, bytes
    int64_t total = 0;

    void add(const std::string& what, int64_t bytes);  // nothing where it takes no bytes

    // A line each, indented. in_use_before: on the GPU, by this program's context and by others.
    std::string text(int64_t in_use_before) const;
    // Throws Error where it can't fit. advice(bytes that are free): what would.
    void check(const std::function<std::string(int64_t)>& advice) const;
};

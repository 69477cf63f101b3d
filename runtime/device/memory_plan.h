// The memory that a run needs, line by line, computed before anything is allocated.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/arena.h"

struct MemoryPlan {
    std::vector<std::pair<std::string, int64_t>> lines;  // name, bytes
    int64_t total = 0;
    Device device = backend_device();  // that the plan is for
    int64_t limit = 0;                 // what a run may take of a GPU, its context included; 0: all
    std::vector<std::pair<std::string, int64_t>> host_lines;  // memory of the host beside a GPU, not in total

    // Ignored if bytes is 0. On the CPU all places are the same.
    void add(const std::string& what, int64_t bytes, MemoryPlace place = MemoryPlace::Device);
    // The bytes of the host's memory. On the CPU that is total.
    int64_t host_total() const;

    // The table as text. in_use_before: bytes in use on the GPU by this program's context and by other programs.
    std::string text(int64_t in_use_before) const;
    // How many of `free` bytes a run may take under `limit`.
    int64_t available(int64_t free, int64_t in_use_before) const;
    // Throws Error if the plan exceeds the memory that is available. advice(those bytes) returns the remedy.
    void check(const std::function<std::string(int64_t)>& advice) const;
};

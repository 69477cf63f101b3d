#include "runtime/device/memory_plan.h"

#include <algorithm>

#include "runtime/error.h"
#include "runtime/files/log.h"

void MemoryPlan::add(const std::string& what, int64_t bytes, MemoryPlace place) {
    if (!bytes) return;
    const bool host = place == MemoryPlace::Host && device != Device::CPU;
    (host ? host_lines : lines).emplace_back(what, bytes);
    if (!host) total += bytes;
}

int64_t MemoryPlan::host_total() const {
    int64_t bytes = device == Device::CPU ? total : 0;
    for (const auto& [what, n] : host_lines) bytes += n;
    return bytes;
}

std::string MemoryPlan::text(int64_t in_use_before) const {
    std::vector<std::pair<std::string, int64_t>> all = lines;
    all.emplace_back("total", total);
    if (in_use_before) all.emplace_back("already in use", in_use_before);
    if (limit) all.emplace_back("limit (--gpu-memory)", limit);
    for (const auto& [what, bytes] : host_lines) all.emplace_back(what + " (host)", bytes);
    size_t width = 0;
    for (const auto& [what, bytes] : all) width = std::max(width, what.size());
    std::string out;
    for (const auto& [what, bytes] : all)
        out += str("  ", what, std::string(width + 2 - what.size(), ' '), human_bytes(bytes), "\n");
    return out;
}

int64_t MemoryPlan::available(int64_t free, int64_t in_use_before) const {
    return limit ? std::max<int64_t>(0, std::min(free, limit - in_use_before)) : free;
}

void MemoryPlan::check(const std::function<std::string(int64_t)>& advice) const {
    const int64_t free = device_memory_available(), left = available(free, device_bytes_in_use());
    if (total <= left) return;
    std::string parts;
    for (const auto& [what, bytes] : lines) parts += str(parts.empty() ? "" : ", ", what, " ", human_bytes(bytes));
    throw Error(str("this run needs ", human_bytes(total), " (", parts, ") and ", human_bytes(left),
                    left < free ? str(" are left of --gpu-memory ", human_bytes(limit)) : " are free", "; ",
                    advice(left)));
}

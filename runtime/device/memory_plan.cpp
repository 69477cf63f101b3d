#include "runtime/device/memory_plan.h"

#include <algorithm>

#include "runtime/device/device.h"
#include "runtime/error.h"
#include "runtime/files/log.h"

void MemoryPlan::add(const std::string& what, int64_t bytes) {
    if (!bytes) return;
    lines.emplace_back(what, bytes);
    total += bytes;
}

void MemoryPlan::add_host(const std::string& what, int64_t bytes) {
    if (backend_device() == Device::CPU) return add(what, bytes);
    if (bytes) host_lines.emplace_back(what, bytes);
}

int64_t MemoryPlan::host_total() const {
    int64_t bytes = backend_device() == Device::CPU ? total : 0;
    for (const auto& [what, n] : host_lines) bytes += n;
    return bytes;
}

std::string MemoryPlan::text(int64_t in_use_before) const {
    std::vector<std::pair<std::string, int64_t>> all = lines;
    all.emplace_back("total", total);
    if (in_use_before) all.emplace_back("already in use", in_use_before);
    for (const auto& [what, bytes] : host_lines) all.emplace_back(what + " (host)", bytes);
    size_t width = 0;
    for (const auto& [what, bytes] : all) width = std::max(width, what.size());
    std::string out;
    for (const auto& [what, bytes] : all)
        out += str("  ", what, std::string(width + 2 - what.size(), ' '), human_bytes(bytes), "\n");
    return out;
}

void MemoryPlan::check(const std::function<std::string(int64_t)>& advice) const {
    const int64_t available = device_memory_available();
    if (total <= available) return;
    std::string parts;
    for (const auto& [what, bytes] : lines) parts += str(parts.empty() ? "" : ", ", what, " ", human_bytes(bytes));
    throw Error(str("this run needs ", human_bytes(total), " (", parts, ") and ", human_bytes(available), " are free; ",
                    advice(available)));
}

#include "runtime/device/memory_plan.h"

#include "runtime/device/device.h"
#include "runtime/error.h"
#include "runtime/files/log.h"

void MemoryPlan::add(const std::string& what, int64_t bytes) {
    if (!bytes) return;
    lines.emplace_back(what, bytes);
    total += bytes;
}

std::string MemoryPlan::text(int64_t in_use_before) const {
    std::string all;
    for (const auto& [what, bytes] : lines)
        all += str("  ", what, std::string(24 - what.size(), ' '), human_bytes(bytes), "\n");
    all += str("  ", "total", std::string(19, ' '), human_bytes(total), "\n");
    if (in_use_before) all += str("  already in use          ", human_bytes(in_use_before), "\n");
    return all;
}

void MemoryPlan::check(const std::function<std::string(int64_t)>& advice) const {
    const int64_t available = device_memory_available();
    if (total <= available) return;
    std::string parts;
    for (const auto& [what, bytes] : lines) parts += str(parts.empty() ? "" : ", ", what, " ", human_bytes(bytes));
    throw Error(str("this run needs ", human_bytes(total), " (", parts, ") and ", human_bytes(available), " are free; ",
                    advice(available)));
}

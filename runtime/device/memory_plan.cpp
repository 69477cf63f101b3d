#include "runtime/device/memory_plan.h"

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
    std::string all;
    const auto line = [&](const std::string& what, int64_t bytes) {
        all += str("  ", what, std::string(24 - what.size(), ' '), human_bytes(bytes), "\n");
    };
    for (const auto& [what, bytes] : lines) line(what, bytes);
    all += str("  ", "total", std::string(19, ' '), human_bytes(total), "\n");
    if (in_use_before) all += str("  already in use          ", human_bytes(in_use_before), "\n");
    for (const auto& [what, bytes] : host_lines) line(what + " (host)", bytes);
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

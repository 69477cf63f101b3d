#include "runtime/files/non_finite.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/error.h"

bool all_finite(const float* values, int64_t n) {
    constexpr uint32_t EXPONENT = 0x7F800000;  // all ones: NaN or infinity
    int64_t bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : bad) if (n > 1 << 16)
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        bad += (bits & EXPONENT) == EXPONENT;
    }
    return bad == 0;
}

void NonFiniteTensors::add(const std::string& tensor) {
    if (std::find(names.begin(), names.end(), tensor) == names.end()) names.push_back(tensor);
}

FetchParam NonFiniteTensors::watch(FetchParam fetch) {
    return [this, fetch = std::move(fetch)](const Param& p, std::vector<float>& buffer) {
        const float* const values = fetch(p, buffer);
        for (const SourceTensor& source : p.sources) {
            if (!all_finite(values + source.row * p.row_size(), source.rows * p.row_size())) add(source.name);
        }
        return values;
    };
}

std::string NonFiniteTensors::warning(const std::string& where) const {
    if (names.empty()) return "";
    std::string list;
    for (size_t i = 0; i < names.size() && i < 3; i++) list += (i ? ", " : "") + names[i];
    if (names.size() > 3) list += str(" and ", names.size() - 3, " more");
    return str("train_gpt: warning: ", where, ": NaN or infinite values in ", list, "\n");
}

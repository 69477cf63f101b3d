#include "parallel/sharding.h"

#include <algorithm>

GroupSlots::GroupSlots(const ParamTable& table, int layer_slots, bool with_fp32) {
    const int groups = table.num_groups(), head = table.fp32_total ? groups - 2 : groups - 1;
    std::vector<int64_t> size(size_t(layer_slots) + 2, 0);
    for (int g = 0; g < groups; g++) {
        const int slot = g > head              ? with_fp32 ? layer_slots + 1 : -1
                         : g == 0 || g == head ? layer_slots
                                               : (g - 1) % layer_slots;
        slots.push_back(slot);
        if (slot >= 0) size[size_t(slot)] = std::max(size[size_t(slot)], table.group_size(g));
    }
    for (const int64_t n : size) end.push_back(total() + n);
}

std::vector<Tensor> GroupSlots::views(const ParamTable& table, Tensor memory) const {
    std::vector<Tensor> all(slots.size());
    for (size_t g = 0; g < all.size(); g++) {
        const int slot = slots[g];
        if (slot < 0) continue;
        const int64_t begin = slot ? end[size_t(slot) - 1] : 0;
        all[g] = memory.rows(begin, begin + table.group_size(int(g)));
    }
    return all;
}

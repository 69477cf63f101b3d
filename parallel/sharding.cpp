#include "parallel/sharding.h"

#include <algorithm>

GroupBuffers::GroupBuffers(const ParamTable& table, int layer_buffers, bool with_fp32) {
    const int groups = table.num_groups(), head = table.fp32_total ? groups - 2 : groups - 1;
    std::vector<int64_t> size(size_t(layer_buffers) + 2, 0);
    for (int g = 0; g < groups; g++) {
        const int buffer = g > head              ? with_fp32 ? layer_buffers + 1 : -1
                           : g == 0 || g == head ? layer_buffers
                                                 : (g - 1) % layer_buffers;
        buffers.push_back(buffer);
        if (buffer >= 0) size[size_t(buffer)] = std::max(size[size_t(buffer)], table.group_size(g));
    }
    for (const int64_t n : size) end.push_back(total() + n);
}

std::vector<Tensor> GroupBuffers::views(const ParamTable& table, Tensor memory) const {
    std::vector<Tensor> all(buffers.size());
    for (size_t g = 0; g < all.size(); g++) {
        const int buffer = buffers[g];
        if (buffer < 0) continue;
        const int64_t begin = buffer ? end[size_t(buffer) - 1] : 0;
        all[g] = memory.rows(begin, begin + table.group_size(int(g)));
    }
    return all;
}

#include <algorithm>

#include "kernels/generation/lora_rows.h"

HostAdapterTiles tiles_of_adapters(const std::vector<int32_t>& adapter_of_row, int64_t adapters) {
    const int64_t most = max_adapter_tiles(int64_t(adapter_of_row.size()), adapters);
    HostAdapterTiles tiles{std::vector<int32_t>(size_t(most * LORA_TILE), -1), std::vector<int32_t>(size_t(most), -1)};
    int64_t tile = 0;
    for (int32_t adapter = 0; adapter < adapters; adapter++) {
        int64_t used = 0;  // rows of this adapter's last tile
        for (size_t row = 0; row < adapter_of_row.size(); row++) {
            if (adapter_of_row[row] != adapter) continue;
            tiles.adapters[size_t(tile)] = adapter;
            tiles.rows[size_t(tile * LORA_TILE + used)] = static_cast<int32_t>(row);
            if (++used < LORA_TILE) continue;
            tile++;
            used = 0;
        }
        if (used > 0) tile++;
    }
    return tiles;
}

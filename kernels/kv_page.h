// Pages of a KV cache (PagedAttention, Kwon et al. 2023, section 4). The keys of a layer are [pages, KV_PAGE, NKV, HS],
// and so are its values. A page table [sequences, n] int32 names the pages of each sequence: its token at position p is
// row p % KV_PAGE of page table[sequence, p / KV_PAGE]. Sequences that begin alike may share pages.
//
// A page has as many tokens as the largest block of keys that attention loads at a time. Blocks and KV splits begin
// where pages do, so that the bits of a result do not depend on where a page lies.
#pragma once

#include "kernels/check.h"

constexpr int64_t KV_PAGE = 128;

struct KvPages {
    const int32_t* table = nullptr;  // null: there are no pages
    int64_t columns = 0;             // of the table
    int64_t pages = 0;               // of the cache

    const int32_t* of_sequence(int64_t row) const { return table + row * columns; }
};

// Checks a page table of a cache with `rows` rows.
inline KvPages check_pages(const char* op, const Tensor& table, int64_t rows) {
    require(table.rank == 2 && table.shape[1] > 0, op, ": pages is ", shape_string(table), ", expected [sequences, n]");
    check_tensor(op, "pages", table, DType::I32, {table.shape[0], table.shape[1]});
    check_contiguous(op, "pages", table);
    require(rows % KV_PAGE == 0, op, ": a paged cache of ", rows, " rows; expected whole pages of ", KV_PAGE);
    return {table.as<int32_t>(), table.shape[1], rows / KV_PAGE};
}

// For the CPU: checks the pages that the positions [begin, end) of a sequence are in.
inline void check_page_ids(const char* op, const int32_t* pages, int64_t begin, int64_t end, int64_t all) {
    for (int64_t i = begin / KV_PAGE; i * KV_PAGE < end; i++)
        require(pages[i] >= 0 && pages[i] < all, op, ": page ", pages[i], " of a sequence lies outside the cache of ",
                all, " pages");
}

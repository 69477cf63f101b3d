// Finds pages of a KV cache by their content: the tokens of a page, the page before it, and so on to the beginning of
// the sequence, and the name space that the sequence belongs to (Zheng et al. 2024, "SGLang", section 3: a radix tree
// of pages; here a hash table). Tokens are compared, not only their hash.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "kernels/kv_page.h"

class PrefixIndex {
  public:
    explicit PrefixIndex(int64_t pages = 0) : entries(size_t(pages)) {}

    // A number for each indexed page that is never given twice. Negative: the beginning of a name space.
    using Id = int64_t;
    static Id beginning(int64_t name_space) { return -1 - name_space; }
    Id id_of(int32_t page) const { return entries[size_t(page)].id; }

    // The page with these KV_PAGE tokens after `before`; −1: there is none.
    int32_t find(Id before, const int32_t* tokens) const {
        const auto [begin, end] = by_hash.equal_range(hash(before, tokens));
        for (auto i = begin; i != end; ++i) {
            const Entry& e = entries[size_t(i->second)];
            if (e.before == before && std::equal(e.tokens.begin(), e.tokens.end(), tokens)) return i->second;
        }
        return -1;
    }
    void add(int32_t page, Id before, const int32_t* tokens) {
        entries[size_t(page)] = {next_id++, before, {tokens, tokens + KV_PAGE}};
        by_hash.emplace(hash(before, tokens), page);
    }
    // Pages after it are not found any more, and are removed when they are taken.
    void remove(int32_t page) {
        const Entry& e = entries[size_t(page)];
        const auto [begin, end] = by_hash.equal_range(hash(e.before, e.tokens.data()));
        for (auto i = begin; i != end; ++i) {
            if (i->second != page) continue;
            by_hash.erase(i);
            return;
        }
    }

  private:
    struct Entry {
        Id id = 0, before = 0;
        std::vector<int32_t> tokens;
    };
    static uint64_t hash(Id before, const int32_t* tokens) {  // FNV-1a over words
        uint64_t h = 0xcbf29ce484222325u ^ uint64_t(before);
        for (int64_t i = 0; i < KV_PAGE; i++) h = (h ^ uint64_t(uint32_t(tokens[i]))) * 0x100000001b3u;
        return h;
    }

    std::vector<Entry> entries;  // by page
    std::unordered_multimap<uint64_t, int32_t> by_hash;
    Id next_id = 0;
};

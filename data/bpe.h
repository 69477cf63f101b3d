// Byte-pair encoding of one word by ranked merges (Sennrich et al. 2016, algorithm 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// The merge of a pair of tokens: its rank (the lowest rank is applied first) and the resulting token.
struct Merge {
    uint32_t rank;
    int32_t token;
};

// The bucket of key k in a hash table with open addressing, or the free bucket for it. The number of buckets is a power
// of two.
template <typename Bucket>
size_t find_bucket(const std::vector<Bucket>& buckets, uint64_t k) {
    const size_t mask = buckets.size() - 1;
    uint64_t h = k * 0x9E3779B97F4A7C15ull;  // 2^64/φ spreads neighbouring keys
    h ^= h >> 32;
    size_t i = size_t(h) & mask;
    while (buckets[i].key != Bucket::EMPTY && buckets[i].key != k) i = (i + 1) & mask;
    return i;
}

// Packs two ids that are not negative into one number.
inline uint64_t pair_key(int32_t left, int32_t right) {
    return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}

// Maps pairs of ids to merges. The look-up is the inner loop of encoding.
class MergeTable {
  public:
    using Pair = std::pair<int32_t, int32_t>;

    void build(const std::vector<std::pair<Pair, Merge>>& merges);  // a pair that is listed twice gets the later rank
    void add(Pair ids, Merge merge);
    bool empty() const { return count == 0; }
    const Merge* find(int32_t left, int32_t right) const {
        if (empty()) return nullptr;
        const Bucket& bucket = buckets[find_bucket(buckets, pair_key(left, right))];
        return bucket.key == Bucket::EMPTY ? nullptr : &bucket.merge;
    }

  private:
    struct Bucket {
        static constexpr uint64_t EMPTY = ~uint64_t(0);
        uint64_t key = EMPTY;
        Merge merge{};
    };
    void resize(size_t merges);

    std::vector<Bucket> buckets;
    size_t count = 0;
};

// Merges the ids of a word in place: repeatedly merges the pair of lowest rank, the leftmost one of equal rank.
// O(n log n). scratch: memory that one call after another can reuse.
void merge_word(std::vector<int32_t>& ids, std::vector<Merge>& scratch, const MergeTable& table);

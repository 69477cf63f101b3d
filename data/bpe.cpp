#include "data/bpe.h"

#include <functional>
#include <limits>
#include <queue>

void MergeTable::resize(size_t merges) {
    size_t size = 16;
    while (size < 2 * merges) size *= 2;
    std::vector<Bucket> before(size);
    before.swap(buckets);
    for (const Bucket& bucket : before)
        if (bucket.key != Bucket::EMPTY) buckets[find_bucket(buckets, bucket.key)] = bucket;
}

void MergeTable::build(const std::vector<std::pair<Pair, Merge>>& merges) {
    buckets.clear();
    count = 0;
    resize(merges.size());
    for (const auto& [ids, merge] : merges) add(ids, merge);
}

void MergeTable::add(Pair ids, Merge merge) {
    if (2 * (count + 1) > buckets.size()) resize(2 * (count + 1));
    Bucket& bucket = buckets[find_bucket(buckets, pair_key(ids.first, ids.second))];
    count += bucket.key == Bucket::EMPTY;
    bucket = {pair_key(ids.first, ids.second), merge};
}

namespace {

// Nearly all words are short. For short words, scanning for the lowest rank is faster than a queue.
void merge_short(std::vector<int32_t>& ids, std::vector<Merge>& merges, const MergeTable& table) {
    constexpr Merge NONE = {std::numeric_limits<uint32_t>::max(), -1};
    const auto look_up = [&](size_t i) {
        const Merge* merge = i + 1 < ids.size() ? table.find(ids[i], ids[i + 1]) : nullptr;
        return merge ? *merge : NONE;
    };
    merges.resize(ids.size());  // merges[i]: the merge of ids[i] and ids[i + 1]
    for (size_t i = 0; i < ids.size(); i++) merges[i] = look_up(i);
    for (;;) {
        size_t best = 0;
        for (size_t i = 1; i < ids.size(); i++)
            if (merges[i].rank < merges[best].rank) best = i;
        if (merges[best].rank == NONE.rank) return;
        ids[best] = merges[best].token;
        ids.erase(ids.begin() + int64_t(best) + 1);
        merges.erase(merges.begin() + int64_t(best) + 1);
        merges[best] = look_up(best);
        if (best > 0) merges[best - 1] = look_up(best - 1);
    }
}

// A queue of candidate merges over a doubly linked list of symbols.
void merge_long(std::vector<int32_t>& ids, const MergeTable& table) {
    struct Symbol {
        int32_t id;  // −1 once it has been merged into its left neighbour
        int64_t previous, next;
    };
    const int64_t n = int64_t(ids.size());
    std::vector<Symbol> symbols(ids.size());
    for (int64_t i = 0; i < n; i++) symbols[size_t(i)] = {ids[size_t(i)], i - 1, i + 1};
    const auto candidate = [&](int64_t i) -> const Merge* {
        if (i < 0 || symbols[size_t(i)].id < 0 || symbols[size_t(i)].next >= n) return nullptr;
        return table.find(symbols[size_t(i)].id, symbols[size_t(symbols[size_t(i)].next)].id);
    };

    using Candidate = std::pair<uint32_t, int64_t>;  // rank, position of the left symbol
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto push = [&](int64_t i) {
        if (const Merge* merge = candidate(i)) queue.push({merge->rank, i});
    };
    for (int64_t i = 0; i < n; i++) push(i);
    while (!queue.empty()) {
        const auto [rank, i] = queue.top();
        queue.pop();
        const Merge* merge = candidate(i);
        if (!merge || merge->rank != rank) continue;  // a neighbour was merged after this was queued
        Symbol& left = symbols[size_t(i)];
        Symbol& right = symbols[size_t(left.next)];
        left.id = merge->token;
        left.next = right.next;
        right.id = -1;
        if (left.next < n) symbols[size_t(left.next)].previous = i;
        push(i);
        push(left.previous);
    }
    ids.clear();
    for (int64_t i = 0; i < n; i = symbols[size_t(i)].next) ids.push_back(symbols[size_t(i)].id);
}

}  // namespace

void merge_word(std::vector<int32_t>& ids, std::vector<Merge>& scratch, const MergeTable& table) {
    if (ids.empty()) return;
    if (ids.size() <= 64)
        merge_short(ids, scratch, table);
    else
        merge_long(ids, table);
}

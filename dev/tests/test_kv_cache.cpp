// The KV cache: its sizes, that layers and sequences have memory of their own, and which pages are in use.
#include "infer/kv_cache.h"

#include "dev/tests/test_util.h"
#include "runtime/rng.h"

namespace {

ModelConfig config_of(const char* attention) {
    ModelConfig c;
    c.set_attention(attention);
    c.layers = int64_t(c.layer.size());
    c.heads = 4;
    c.kv_heads = 2;
    c.head_size = 24;
    return c;
}

KvCacheSize size_of(int64_t slots, int64_t capacity, int64_t pages = 0, int64_t pass_tokens = 64) {
    return {slots, capacity, pages, pass_tokens};
}

// Only layers with softmax attention keep keys and values, in whole pages.
TEST(KvCache, SizeCountsSoftmaxLayersOnly) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const auto cache = [&](const char* attention) { return KvCache(config_of(attention), size_of(3, 150), dtype); };
        const KvCache all = cache("SSSS"), half = cache("LSGS"), none = cache("LGGL");
        const int64_t row = 2 * 2 * 24 * dtype_size(dtype);  // k and v, KV heads, head size
        EXPECT_GE(all.bytes(), 4 * 3 * 2 * KV_PAGE * row + all.table_bytes());
        EXPECT_LE(all.bytes(), 4 * 3 * 2 * KV_PAGE * row + all.table_bytes() + 9 * ArenaPlan::ALIGNMENT);
        EXPECT_EQ(all.bytes_read(1), 4 * row);
        EXPECT_EQ(half.bytes_read(1), 2 * row);
        EXPECT_LT(half.bytes(), all.bytes() / 2 + 2 * ArenaPlan::ALIGNMENT);
        EXPECT_EQ(none.bytes(), 0);
        EXPECT_EQ(none.bytes_read(1), 0);
    }
    // A page less for all sequences together.
    const KvCache fewer(config_of("S"), size_of(3, 150, 5), DType::F32);
    EXPECT_EQ(fewer.pages_available(), 5);
    EXPECT_EQ(KvCache(config_of("S"), size_of(3, 150), DType::F32).bytes() - fewer.bytes(), KV_PAGE * 2 * 2 * 24 * 4);
}

// Fills the keys and the values of each layer with a byte of their own; none overwrites another, nor a page table.
TEST(KvCache, LayersDoNotOverlap) {
    ModelConfig c = config_of("SSLGS");
    c.layer[1].window = 9;
    KvCache cache(c, size_of(3, 150), DType::F32);
    cache.allocate();
    std::vector<Tensor> all;
    for (const int64_t l : {0, 1, 4}) {
        const LayerCache layer = cache.layer(l);
        EXPECT_EQ(cache.k_rows(l).data, layer.k.data);
        EXPECT_EQ(shape_string(cache.v_rows(l)), str("[", layer.v.shape[0] * KV_PAGE, ", 2, 24]"));
        EXPECT_EQ(shape_string(layer.pages), "[3, 2]");
        all.push_back(layer.k);
        all.push_back(layer.v);
        if (l < 4) all.push_back(layer.pages);
    }
    EXPECT_EQ(cache.layer(4).pages.data, cache.layer(0).pages.data);  // layers of equal windows share pages
    int value = 0;
    for (const Tensor& t : all) device_fill(t.data, ++value, size_t(t.bytes()), {});
    value = 0;
    for (const Tensor& t : all) {
        std::vector<uint8_t> bytes(size_t(t.bytes()));
        copy_to_host(bytes.data(), t.data, bytes.size(), {});
        EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), uint8_t(++value)));
    }
}

// The rows of all positions that a cache holds are different, and inside it. Sequences of random lengths grow, are cut
// and end; the pages in use are those that their tokens need, and the tables on the device are those on the host.
TEST(KvCache, PagesFollowTheSequences) {
    constexpr int64_t SLOTS = 4, CAPACITY = 1000, PASS = 200;
    ModelConfig c = config_of("SSS");
    c.layer[1].window = 130;
    c.layer[2].window = 1;
    KvCache cache(c, size_of(SLOTS, CAPACITY, 20, PASS), DType::F32);
    cache.allocate();
    Staging staging(cache.table_bytes(), 2);
    std::vector<int64_t> length(SLOTS, 0);
    const auto random = [](uint64_t i, uint64_t j, uint64_t n) { return int64_t(philox(5, i, j).v[0] % n); };
    const int64_t windows[] = {0, 130, 1};
    for (uint64_t step = 0; step < 600; step++) {
        const int64_t slot = random(step, 0, SLOTS), kind = random(step, 1, 10);
        int64_t& n = length[size_t(slot)];
        if (kind == 0) {
            cache.cut(slot, n = 0);
        } else if (kind == 1 && n > 2) {
            EXPECT_TRUE(cache.holds(slot, n - KvCache::STEPS_BACK));
            cache.cut(slot, n -= KvCache::STEPS_BACK);
        } else {
            const int64_t longer = std::min(n + 1 + random(step, 2, kind < 4 ? PASS : 3), CAPACITY);
            if (cache.pages_missing(slot, longer) > cache.pages_available()) {
                expect_error([&] { cache.grow(slot, longer); },
                             str("the KV cache has ", cache.pages_available(),
                                 " free pages, too few for a sequence of ", longer, " tokens"));
                cache.cut(slot, n = 0);
            } else {
                cache.grow(slot, longer);
                for (int64_t l = 0; l < 3; l++)  // while the pass runs, all new tokens have rows
                    for (int64_t p = n; p < longer; p++) ASSERT_GE(cache.row(l, slot, p), 0);
                cache.forget(slot, n = longer);
            }
        }
        int64_t pages = 0;
        for (int64_t l = 0; l < 3; l++) {
            const int64_t w = windows[l];
            std::vector<bool> taken(size_t(cache.k_rows(l).shape[0]), false);
            for (int64_t s = 0; s < SLOTS; s++) {
                const int64_t end = length[size_t(s)], begin = w ? std::max<int64_t>(end + 1 - w, 0) : 0;
                for (int64_t p = begin; p < end; p++) {
                    const int32_t row = cache.row(l, s, p);
                    ASSERT_TRUE(row >= 0 && row < int64_t(taken.size()) && !taken[size_t(row)]) << "step " << step;
                    taken[size_t(row)] = true;
                }
                pages += w ? 0 : (end + KV_PAGE - 1) / KV_PAGE;
                ASSERT_TRUE(cache.holds(s, end));
            }
        }
        ASSERT_GE(cache.pages_in_use(), pages);
        ASSERT_LE(cache.pages_in_use(), pages + SLOTS * ((130 + 2 + 127) / 128 + 1 + 2));
        ASSERT_EQ(cache.pages_available(), 20 - pages);
        staging.next();
        cache.upload_tables(staging, {});
        EXPECT_FALSE(cache.tables_changed());
        for (int64_t l = 0; l < 3; l++) {
            const Tensor t = cache.layer(l).pages;
            std::vector<int32_t> table(size_t(t.numel()));
            copy_to_host(table.data(), t.data, size_t(t.bytes()), {});
            for (int64_t s = 0; s < SLOTS; s++)
                for (int64_t p = 0; p < CAPACITY; p += KV_PAGE)
                    ASSERT_EQ(table[size_t(s * t.shape[1] + p / KV_PAGE)] * KV_PAGE, cache.row(l, s, p));
        }
    }
    for (int64_t s = 0; s < SLOTS; s++) cache.cut(s, 0);
    EXPECT_EQ(cache.pages_in_use(), 0);
}

// The pages of a window of 10: a sequence of any length can be cut back by STEPS_BACK tokens, and by more where no page
// was freed in between.
TEST(KvCache, HoldsTheKeysThatTheNextTokenSees) {
    ModelConfig c = config_of("SS");
    c.layer[0].window = 10;
    for (int64_t longest = 1; longest <= 400; longest++) {
        KvCache cache(c, size_of(1, 500, 0, 500), DType::F32);
        cache.grow(0, longest);
        cache.forget(0, longest);
        const int64_t oldest = std::max<int64_t>(longest - KvCache::STEPS_BACK + 1 - 10, 0) / KV_PAGE * KV_PAGE;
        for (int64_t length = 1; length <= longest; length++)
            EXPECT_EQ(cache.holds(0, length), length - 9 >= oldest || oldest == 0) << length << " of " << longest;
    }
    EXPECT_TRUE(KvCache(config_of("SS"), size_of(1, 50), DType::F32).holds(0, 3));
}

TEST(PagePool, PagesAreFreeWhenNobodyUsesThem) {
    PagePool pool(2);
    const int32_t a = pool.take(), b = pool.take();
    EXPECT_NE(a, b);
    expect_error([&] { pool.take(); }, "the KV cache has no free page of its 2");
    pool.share(a);
    pool.release(a);
    EXPECT_EQ(pool.available(), 0);
    EXPECT_EQ(pool.users_of(a), 1);
    pool.release(a);
    EXPECT_EQ(pool.available(), 1);
    expect_error([&] { pool.release(a); }, str("page ", a, " of the KV cache is free"));
    expect_error([&] { pool.share(a); }, str("page ", a, " of the KV cache is free"));
    EXPECT_EQ(pool.take(), a);
}

TEST(KvCache, TooManyRowsAreErrors) {
    const auto make = [](const char* attention, int64_t slots, int64_t capacity) {
        KvCache cache(config_of(attention), size_of(slots, capacity), DType::BF16);
    };
    EXPECT_NO_THROW(make("S", 1 << 10, 1 << 20));
    EXPECT_THROW(make("S", 1 << 10, (1 << 20) + 1), Error);
    EXPECT_THROW(make("S", int64_t(1) << 40, int64_t(1) << 40), Error);
    EXPECT_NO_THROW(make("L", 1 << 10, (1 << 20) + 1));
}

}  // namespace

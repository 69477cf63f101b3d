// The KV cache: its sizes, and that layers and slots have memory of their own.
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

// Only layers with softmax attention keep keys and values.
TEST(KvCache, SizeCountsSoftmaxLayersOnly) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const KvCache all(config_of("SSSS"), 3, 50, dtype), half(config_of("LSGS"), 3, 50, dtype),
            none(config_of("LGGL"), 3, 50, dtype);
        EXPECT_GE(all.bytes(), 3 * all.bytes_read(50));
        EXPECT_EQ(all.bytes_read(1), 4 * 2 * 2 * 24 * dtype_size(dtype));  // layers, k and v, KV heads, head size
        EXPECT_EQ(half.bytes(), all.bytes() / 2);
        EXPECT_EQ(half.bytes_read(1), all.bytes_read(1) / 2);
        EXPECT_EQ(none.bytes(), 0);
        EXPECT_EQ(none.bytes_read(1), 0);
    }
}

// Fills the keys and the values of each layer with a byte of their own; none overwrites another.
TEST(KvCache, LayersDoNotOverlap) {
    KvCache cache(config_of("SSLGS"), 3, 7, DType::F32);
    cache.allocate();
    const int64_t layers[] = {0, 1, 4};
    int value = 0;
    for (const int64_t l : layers) {
        for (const Tensor& t : {cache.k(l), cache.v(l)}) device_fill(t.data, ++value, size_t(t.bytes()), {});
    }
    value = 0;
    for (const int64_t l : layers) {
        for (const Tensor& t : {cache.k(l), cache.v(l)}) {
            std::vector<uint8_t> bytes(size_t(t.bytes()));
            copy_to_host(bytes.data(), t.data, bytes.size(), {});
            EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), uint8_t(++value))) << "layer " << l;
        }
    }
}

// k_rows and v_rows are the same memory as k and v, with the slots' tokens in one dimension.
TEST(KvCache, RowViewsShareTheCacheMemory) {
    KvCache cache(config_of("LSS"), 3, 7, DType::F32);
    cache.allocate();
    for (const int64_t l : {1, 2}) {
        EXPECT_EQ(cache.k_rows(l).data, cache.k(l).data);
        EXPECT_EQ(cache.v_rows(l).data, cache.v(l).data);
        EXPECT_EQ(shape_string(cache.k(l)), "[3, 7, 2, 24]");
        EXPECT_EQ(shape_string(cache.v_rows(l)), "[21, 2, 24]");
        EXPECT_EQ(cache.v(l).rows(1, 2).data, cache.v_rows(l).rows(7, 8).data);  // slot 1's first token
    }
}

// A layer with a window w has w rows and one more, never more than the capacity.
TEST(KvCache, RingsHaveTheRowsOfTheirWindow) {
    ModelConfig c = config_of("SSGS");
    c.layer[0].window = 10;
    c.layer[3].window = 49;
    KvCache cache(c, 3, 50, DType::F32);
    EXPECT_EQ(cache.rows(0), 9 + KvCache::STEPS_BACK);
    EXPECT_EQ(cache.rows(1), 50);
    EXPECT_EQ(cache.rows(3), 50);
    EXPECT_EQ(cache.window(0), 10);
    EXPECT_EQ(cache.window(3), 49);
    EXPECT_EQ(cache.windows(), (std::vector<int64_t>{10, 49}));
    const int64_t row = 2 * 2 * 24 * 4;  // k and v, KV heads, head size
    EXPECT_EQ(cache.bytes_read(7), 3 * 7 * row);
    EXPECT_EQ(cache.bytes_read(50), (10 + 50 + 49) * row);
    EXPECT_GE(cache.bytes(), 3 * (11 + 50 + 50) * row);
    EXPECT_LE(cache.bytes(), 3 * (11 + 50 + 50) * row + 6 * ArenaPlan::ALIGNMENT);
    cache.allocate();
    EXPECT_EQ(shape_string(cache.k(0)), "[3, 11, 2, 24]");
    EXPECT_EQ(cache.v(0).rows(1, 2).data, cache.v_rows(0).rows(11, 12).data);
    c.layer[0].window = 50;
    c.layer[1].window = 80;
    c.layer[3].window = 1 << 20;  // as many tokens as the capacity: no window has an effect
    EXPECT_TRUE(KvCache(c, 3, 50, DType::F32).windows().empty());
}

// A ring of 11 rows and a window of 10: the next token sees the 9 tokens before it.
TEST(KvCache, HoldsTheKeysThatTheNextTokenSees) {
    ModelConfig c = config_of("SS");
    c.layer[0].window = 10;
    const KvCache cache(c, 1, 50, DType::F32);
    for (int64_t longest = 0; longest <= 50; longest++)
        for (int64_t length = 0; length <= longest; length++) {
            const bool expected = length == 0 || longest <= 11 || length - 9 >= longest - 11;
            EXPECT_EQ(cache.holds(length, longest), expected) << length << " of " << longest;
        }
    EXPECT_TRUE(KvCache(config_of("SS"), 1, 50, DType::F32).holds(3, 50));
}

// Replays passes of any lengths on a ring of position numbers: the packed keys must be those that the chunks see, in
// order.
TEST(KvCache, RingPassPacksTheKeysThatChunksSee) {
    constexpr int64_t SLOTS = 3;
    for (const auto& [window, rows] : {std::pair<int64_t, int64_t>{1, 3}, {5, 5}, {5, 7}, {20, 22}}) {
        std::vector<int64_t> ring(size_t(SLOTS * rows), -1), length(SLOTS, 0);
        for (int64_t pass = 0; pass < 40; pass++) {
            std::vector<PassChunk> chunks;
            for (int64_t slot = 0; slot < SLOTS; slot++) {
                const int64_t tokens = int64_t(philox(3, uint64_t(pass), uint64_t(slot)).v[0] % 9);
                if (tokens) chunks.push_back({slot, length[size_t(slot)], tokens * (pass % 5 == 0 ? 6 : 1)});
            }
            const RingPass p = ring_pass(chunks, window, rows);
            std::vector<int64_t> packed(size_t(p.cum_k.back()), -1);
            for (size_t i = 0; i < p.past_to.size(); i++) packed[size_t(p.past_to[i])] = ring[size_t(p.past_from[i])];
            size_t token = 0;
            int64_t longest = 0;
            for (size_t s = 0; s < chunks.size(); s++) {
                for (int64_t i = 0; i < chunks[s].tokens; i++)
                    packed[size_t(p.new_keys[token++])] = chunks[s].slot * 1000 + chunks[s].past + i;
                const int64_t past = std::min(chunks[s].past, window - 1);
                ASSERT_EQ(p.cum_k[s + 1] - p.cum_k[s], past + chunks[s].tokens);
                for (int64_t i = 0; i < past + chunks[s].tokens; i++)
                    ASSERT_EQ(packed[size_t(p.cum_k[s] + i)], chunks[s].slot * 1000 + chunks[s].past - past + i);
                longest = std::max(longest, past + chunks[s].tokens);
                length[size_t(chunks[s].slot)] += chunks[s].tokens;
            }
            ASSERT_EQ(p.longest, longest);
            std::vector<bool> written(ring.size(), false);
            for (size_t i = 0; i < p.kept_to.size(); i++) {
                ASSERT_FALSE(written[size_t(p.kept_to[i])]);  // no row is given twice
                written[size_t(p.kept_to[i])] = true;
                ring[size_t(p.kept_to[i])] = packed[size_t(p.kept_from[i])];
            }
            for (int64_t slot = 0; slot < SLOTS; slot++)
                for (int64_t at = std::max<int64_t>(0, length[size_t(slot)] - rows); at < length[size_t(slot)]; at++)
                    ASSERT_EQ(ring[size_t(slot * rows + at % rows)], slot * 1000 + at);
        }
    }
}

TEST(KvCache, TooManyRowsAreErrors) {
    EXPECT_NO_THROW(KvCache(config_of("S"), 1 << 10, 1 << 20, DType::BF16));
    EXPECT_THROW(KvCache(config_of("S"), 1 << 10, (1 << 20) + 1, DType::BF16), Error);
    EXPECT_THROW(KvCache(config_of("S"), int64_t(1) << 40, int64_t(1) << 40, DType::BF16), Error);
    EXPECT_NO_THROW(KvCache(config_of("L"), 1 << 10, (1 << 20) + 1, DType::BF16));
}

}  // namespace

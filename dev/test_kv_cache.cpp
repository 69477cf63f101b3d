// The KV cache: its sizes, and that layers and slots have memory of their own.
#include "infer/kv_cache.h"

#include "dev/test_util.h"

namespace {

ModelConfig config_of(const char* attention) {
    ModelConfig c;
    c.set_attention(attention);
    c.layers = int64_t(c.layer.size());
    c.heads = 4, c.kv_heads = 2, c.head_size = 24;
    return c;
}

// Only layers with softmax attention keep keys and values.
TEST(KvCache, SizeCountsSoftmaxLayersOnly) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const KvCache all(config_of("SSSS"), 3, 50, dtype), half(config_of("LSGS"), 3, 50, dtype),
            none(config_of("LGGL"), 3, 50, dtype);
        EXPECT_GE(all.bytes(), 3 * 50 * all.bytes_per_token());
        EXPECT_EQ(all.bytes_per_token(), 4 * 2 * 2 * 24 * dtype_size(dtype));  // layers, k and v, KV heads, head size
        EXPECT_EQ(half.bytes(), all.bytes() / 2);
        EXPECT_EQ(half.bytes_per_token(), all.bytes_per_token() / 2);
        EXPECT_EQ(none.bytes(), 0);
        EXPECT_EQ(none.bytes_per_token(), 0);
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

TEST(KvCache, TooManyRowsAreErrors) {
    EXPECT_NO_THROW(KvCache(config_of("S"), 1 << 10, 1 << 20, DType::BF16));
    EXPECT_THROW(KvCache(config_of("S"), 1 << 10, (1 << 20) + 1, DType::BF16), Error);
    EXPECT_THROW(KvCache(config_of("S"), int64_t(1) << 40, int64_t(1) << 40, DType::BF16), Error);
    EXPECT_NO_THROW(KvCache(config_of("L"), 1 << 10, (1 << 20) + 1, DType::BF16));
}

}  // namespace

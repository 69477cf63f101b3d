// A task is one KV split of one sequence with all its heads, so that the cache is read in memory order. Each split
// stores the maximum, sum and output of every head; a second loop combines the splits in order.
#include "kernels/generation/decode_attention.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_loops.h"
#include "kernels/generation/decode_attention_check.h"
#include "kernels/generation/kv_write.h"

namespace {

// Keys of a KV split of a sequence of `length` tokens. Short splits keep all threads busy where the context is short;
// long ones keep the combination of their results small.
int64_t split_keys(int64_t length) {
    return length <= 2048 ? 64 : 256;
}

// Upper bound of the number of splits: of the longest sequence, or of a shorter one whose splits are shorter.
int64_t max_splits(int64_t max_length) {
    const int64_t fine = std::min<int64_t>(max_length, 2048);
    return std::max((fine + 63) / 64, (max_length + 255) / 256);
}

constexpr int64_t MAX_SPLIT_KEYS = 256;

// One head of a split: maximum, sum of exp(S − maximum), and Σ exp(S_j − maximum)·v_j.
struct Partial {
    float max, sum;
};

int64_t partial_floats(int64_t HS) {
    return HS + 2;
}

// The keys of a KV split: the positions first … first + keys − 1 of a sequence.
struct SplitKeys {
    const int32_t* pages;  // of the sequence
    int64_t first, keys;
};

// f(j, row) for the keys of a split, in order; row: the key's first float.
template <typename F>
ALWAYS_INLINE void for_each_key(const float* cache, const SplitKeys& rows, int64_t stride, F f) {
    for (int64_t begin = 0, end; begin < rows.keys; begin = end) {  // of a page
        const int64_t position = rows.first + begin, in_page = position % KV_PAGE;
        end = std::min(begin + KV_PAGE - in_page, rows.keys);
        const float* row = cache + (rows.pages[position / KV_PAGE] * KV_PAGE + in_page) * stride;
        for (int64_t j = begin; j < end; j++, row += stride) f(j, row);
    }
}

// out [n] = Σ_j p[j]·v_j over rows of v, `stride` apart, in order.
ALWAYS_INLINE void weighted_sum(float* out, const float* p, const float* v, const SplitKeys& rows, int64_t stride,
                                int64_t n) {
    constexpr int64_t WIDE = 64;
    int64_t c = 0;
    for (; c + WIDE <= n; c += WIDE) {
        LaneSums sums[WIDE / 16];
        for_each_key(v + c, rows, stride, [&](int64_t j, const float* row) INLINE_LAMBDA {
            for (int i = 0; i < WIDE / 16; i++) sums[i].add_products(row + 16 * i, p[j]);
        });
        for (int i = 0; i < WIDE / 16; i++) sums[i].store(out + c + 16 * i);
    }
    for_each_vector(n - c, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        vec16 sum = {};
        for_each_key(v + c + i, rows, stride,
                     [&](int64_t j, const float* row) INLINE_LAMBDA { sum += p[j] * vec_load_lanes(row, lanes); });
        vec_store_lanes(out + c + i, sum, lanes);
    });
}

// s becomes exp(s − maximum).
ALWAYS_INLINE Partial exponentials(float* s, int64_t n) {
    vec16 max = vec_set(-std::numeric_limits<float>::infinity());
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        max = vec_max(max, lanes == 16 ? vec_load(s + i) : vec_load_partial(s + i, lanes, max));
    });
    const float m = vec_hmax(max);
    vec16 sum = {};
    for_each_vector(n, [&](int64_t i, int64_t lanes) INLINE_LAMBDA {
        const vec16 p = vec_exp(vec_load_lanes(s + i, lanes) - m);
        vec_store_lanes(s + i, p, lanes);
        sum += vec_load_lanes(s + i, lanes);
    });
    return {m, vec_sum(sum)};
}

// partial [NH, 2 + HS] of a split. k, v: the cache.
MULTIARCH void attend_split(float* partial, const float* q, const float* k, const float* v, const SplitKeys& rows,
                            const DecodeSizes& z, float scale) {
    const int64_t group = z.NH / z.NKV, row = z.NKV * z.HS, n = rows.keys;
    alignas(64) float s[MAX_SPLIT_KEYS];
    for (int64_t h = 0; h < z.NH; h++) {
        const int64_t column = h / group * z.HS;
        for_each_key(k + column, rows, row, [&](int64_t j, const float* key) INLINE_LAMBDA {
            s[j] = scale * vec_dot(q + h * z.HS, key, z.HS);
        });
        float* to = partial + h * partial_floats(z.HS);
        const Partial p = exponentials(s, n);
        to[0] = p.max;
        to[1] = p.sum;
        weighted_sum(to + 2, s, v + column, rows, row, z.HS);
    }
}

// out [HS] of one head from its partials, `stride` floats apart.
MULTIARCH void combine(float* out, const float* partial, int64_t stride, int64_t splits, int64_t HS) {
    float max = partial[0];
    for (int64_t i = 1; i < splits; i++) max = partial[i * stride] > max ? partial[i * stride] : max;
    float sum = 0;
    std::fill_n(out, HS, 0.0f);
    for (int64_t i = 0; i < splits; i++) {
        const float* p = partial + i * stride;
        const float weight = std::exp(p[0] - max);
        sum += weight * p[1];
        for (int64_t c = 0; c < HS; c++) out[c] += weight * p[2 + c];
    }
    for (int64_t c = 0; c < HS; c++) out[c] /= sum;
}

}  // namespace

int64_t decode_attention_scratch(int64_t N, int64_t NH, int64_t HS, int64_t max_length) {
    return N * max_splits(max_length) * NH * partial_floats(HS) * int64_t(sizeof(float)) + N * int64_t(sizeof(int32_t));
}

void decode_attention(Tensor out, Tensor qkv, Tensor k_cache, Tensor v_cache, const DecodeBatch& batch, int64_t window,
                      float scale, Tensor scratch, Stream stream) {
    const char* op = "decode_attention";
    const DecodeSizes z = check_decode_attention(op, DType::F32, out, qkv, k_cache, v_cache, batch, window, scale);
    check_scratch(op, scratch, decode_attention_scratch(z.N, z.NH, z.HS, batch.max_length));
    const int32_t *slot = batch.slots.as<int32_t>(), *position = batch.positions.as<int32_t>();
    const int64_t splits = max_splits(batch.max_length);
    float* const partials = static_cast<float*>(scratch.data);
    const Tensor rows =
        make_tensor(partials + z.N * splits * z.NH * partial_floats(z.HS), DType::I32, Device::CPU, {z.N});
    for (int64_t n = 0; n < z.N; n++) {
        require(slot[n] >= 0 && slot[n] < z.slots, op, ": slot ", slot[n], " of sequence ", n,
                " lies outside the page table of ", z.slots, " rows");
        require(position[n] < batch.max_length, op, ": position ", position[n], " of sequence ", n,
                " is not below max_length, ", batch.max_length);
        int32_t& row_of_key = rows.as<int32_t>()[n];
        row_of_key = -1;
        if (position[n] < 0 || position[n] >= z.capacity()) continue;
        const int32_t* const pages = z.pages.of_sequence(slot[n]);
        check_page_ids(op, pages, window ? std::max<int64_t>(position[n] + 1 - window, 0) : 0, position[n] + 1,
                       z.pages.pages);
        row_of_key = static_cast<int32_t>(pages[position[n] / KV_PAGE] * KV_PAGE + position[n] % KV_PAGE);
    }
    const auto flat = [&](const Tensor& t) {
        return make_tensor(t.data, t.dtype, t.device, {z.pages.pages * KV_PAGE, z.NKV, z.HS});
    };
    kv_append(flat(k_cache), flat(v_cache), qkv, rows, batch.angles, batch.table, z.NH, stream);

    // The keys that a sequence sees.
    const auto length = [&](int64_t n) {
        const int64_t all = rows.as<int32_t>()[n] < 0 ? 0 : int64_t(position[n]) + 1;
        return window ? std::min(all, window) : all;
    };
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < z.N * splits; task++) {
        const int64_t n = task / splits, size = split_keys(length(n)), begin = task % splits * size;
        if (begin >= length(n)) continue;
        const SplitKeys keys{z.pages.of_sequence(slot[n]), position[n] + 1 - length(n) + begin,
                             std::min(size, length(n) - begin)};
        attend_split(partials + task * z.NH * partial_floats(z.HS), qkv.as<float>() + n * row_stride(qkv),
                     k_cache.as<float>(), v_cache.as<float>(), keys, z, scale);
    }
#pragma omp parallel for schedule(static) if (z.N * z.NH * z.HS > PARALLEL_MIN)
    for (int64_t n = 0; n < z.N; n++) {
        float* to = out.as<float>() + n * row_stride(out);
        if (length(n) == 0) {
            std::fill_n(to, z.NH * z.HS, 0.0f);
            continue;
        }
        const int64_t used = (length(n) + split_keys(length(n)) - 1) / split_keys(length(n));
        for (int64_t h = 0; h < z.NH; h++) {
            combine(to + h * z.HS, partials + (n * splits * z.NH + h) * partial_floats(z.HS),
                    z.NH * partial_floats(z.HS), used, z.HS);
        }
    }
}

void advance(Tensor positions, Tensor steps, Tensor ids, Tensor host_tokens, Tensor buffer_index, Stream) {
    check_advance("advance", positions, steps, ids, host_tokens, buffer_index);
    int32_t& row = *buffer_index.as<int32_t>();
    for (int64_t n = 0; n < positions.shape[0]; n++) {
        host_tokens.as<int32_t>()[row * host_tokens.stride[0] + n] = ids.as<int32_t>()[n];
        positions.as<int32_t>()[n] += positions.as<int32_t>()[n] >= 0;
        steps.as<int64_t>()[n]++;
    }
    row ^= 1;
}

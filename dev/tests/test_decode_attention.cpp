// kv_append, decode_attention and advance. Attention is compared with the oracle over lengths, heads and head sizes;
// rows of the cache that no sequence may read are poisoned. Some results must not change by a bit.
#include "kernels/generation/decode_attention.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/embedding.h"
#include "kernels/generation/kv_write.h"
#include "kernels/generation/linear.h"
#include "runtime/device/blas_stream.h"

namespace {

class DecodeAttention : public DTypeTest {};

struct Shape {
    int64_t NH, NKV, HS, capacity;  // capacity: tokens that the page table has room for
    int64_t window = 0;
    int64_t columns() const { return (capacity + KV_PAGE - 1) / KV_PAGE; }
    bool room(int64_t p) const { return p >= 0 && p < columns() * KV_PAGE; }
    // The first position that a token at position p sees.
    int64_t first_seen(int64_t p) const { return window ? std::max<int64_t>(p + 1 - window, 0) : 0; }
    int64_t channels() const { return (NH + 2 * NKV) * HS; }
    int64_t row() const { return NKV * HS; }
};

constexpr int64_t TABLE_EXTRA = 3;

// A cache that holds random numbers in the rows that each sequence sees, and NaN in all others. Its first and last page
// belong to nobody. The pages are in the order of the sequences, or the other way round.
struct Cache {
    Shape z;
    int64_t slots, used = 0;  // pages
    std::vector<int32_t> slot, position, table;
    bool reversed;
    TestArray pages, k, v;

    Cache(DType T, const Shape& shape, int64_t n, const std::vector<int32_t>& owners, const std::vector<int32_t>& at,
          bool reverse = true)
        : z(shape),
          slots(n),
          slot(owners),
          position(at),
          table(size_t(n * shape.columns()), -1),
          reversed(reverse),
          pages(assign_pages()),
          k(filled(T, 11)),
          v(filled(T, 12)) {}

    int64_t row(int32_t of_slot, int64_t p) const {
        return int64_t(table[size_t(of_slot * z.columns() + p / KV_PAGE)]) * KV_PAGE + p % KV_PAGE;
    }
    // f(slot, position) for each position before a sequence's newest that it sees.
    template <typename F>
    void for_each_seen(F f) const {
        for (size_t n = 0; n < slot.size(); n++)
            for (int64_t p = z.first_seen(position[n]); z.room(position[n]) && p < position[n]; p++) f(slot[n], p);
    }

  private:
    TestArray assign_pages() {
        std::vector<int32_t*> wanted;
        for (size_t n = 0; n < slot.size(); n++)
            for (int64_t i = z.first_seen(position[n]) / KV_PAGE; z.room(position[n]) && i <= position[n] / KV_PAGE;
                 i++)
                wanted.push_back(&table[size_t(slot[n] * z.columns() + i)]);
        used = int64_t(wanted.size());
        for (int64_t i = 0; i < used; i++) *wanted[size_t(i)] = static_cast<int32_t>(reversed ? used - i : i + 1);
        return TestArray::ints(table, {slots, z.columns()});
    }
    TestArray filled(DType T, uint64_t seed) const {
        const int64_t page = KV_PAGE * z.row();
        const std::vector<double> random =
            TestArray::random(T, {used + 2, KV_PAGE, z.NKV, z.HS}, seed).values();  // in the order of the sequences
        std::vector<double> values(random.size(), NAN);
        for_each_seen([&](int32_t s, int64_t p) {
            const int64_t to = row(s, p) * z.row(), i = to / page,
                          from = (reversed ? used + 1 - i : i) * page + to % page;
            std::copy_n(random.begin() + from, z.row(), values.begin() + to);
        });
        return TestArray::of(T, values, {used + 2, KV_PAGE, z.NKV, z.HS});
    }
};

std::vector<double> angle_table(int64_t T, int64_t R) {
    return reference::rope_table(T, R, 10000, {});
}

struct Call {
    const Shape z;
    TestArray qkv, slots, positions, table, scratch;
    DecodeBatch batch;
    float scale;
    int64_t N;
    // Rows of the table, and an upper bound of the lengths.
    static int64_t rows(const Shape& z, const std::vector<int32_t>& position) {
        return std::max<int64_t>(z.capacity, *std::max_element(position.begin(), position.end())) + TABLE_EXTRA;
    }
    Call(DType T, const Cache& c, int64_t R, int64_t gap = 0) : Call(T, c, c.slot, c.position, R, gap) {}
    Call(DType T, const Cache& cache, const std::vector<int32_t>& slot, const std::vector<int32_t>& position, int64_t R,
         int64_t gap = 0)
        : z(cache.z),
          qkv(TestArray::random(T, {int64_t(slot.size()), z.channels() + gap}, 13)),
          slots(TestArray::ints(slot, {int64_t(slot.size())})),
          positions(TestArray::ints(position, {int64_t(slot.size())})),
          table(TestArray::of(angle_table(rows(z, position), std::max<int64_t>(R, 2)),
                              {rows(z, position), std::max<int64_t>(R, 2) / 2, 2})),
          scratch(TestArray::scratch(decode_attention_scratch(int64_t(slot.size()), z.NH, z.HS, rows(z, position)))),
          scale(float(1 / std::sqrt(double(z.HS)))),
          N(int64_t(slot.size())) {
        device_fill(scratch.tensor().data, 0, size_t(scratch.tensor().bytes()), {});
        batch.slots = slots;
        batch.positions = positions;
        batch.pages = cache.pages;
        batch.max_length = rows(z, position);
        if (R) {
            batch.angles = positions;
            batch.table = table;
        }
    }
};

// Sequences in slots of their own at the given positions; negative: finished.
void check(DType T, const Shape& z, int64_t slots, const std::vector<int32_t>& slot,
           const std::vector<int32_t>& position, int64_t R, int64_t gap = 0) {
    SCOPED_TRACE(str("NH ", z.NH, " NKV ", z.NKV, " HS ", z.HS, " capacity ", z.capacity, " window ", z.window, " R ",
                     R, " N ", slot.size(), " first position ", position[0]));
    const Cache cache(T, z, slots, slot, position);
    const Call call(T, cache, R, gap);
    const int64_t Q = z.NH * z.HS;
    const TestArray out = TestArray::poisoned(T, {call.N, Q});
    decode_attention(out, call.qkv.tensor().columns(0, z.channels()), cache.k, cache.v, call.batch, z.window,
                     call.scale, call.scratch, Stream{});
    const std::vector<double> got = out.fetch(), k_after = cache.k.fetch(), v_after = cache.v.fetch();
    const std::vector<double> qkv = take_columns(call.qkv.values(), z.channels() + gap, z.channels());

    reference::Values ref(call.N * Q);
    for (int64_t n = 0; n < call.N; n++) {
        const int64_t p = position[size_t(n)];
        if (!z.room(p)) continue;  // zeros
        const int64_t newest = cache.row(slot[size_t(n)], p) * z.row();
        std::vector<double> q(qkv.begin() + n * z.channels(), qkv.begin() + n * z.channels() + Q);
        reference::Values key(z.row());
        key.value.assign(qkv.begin() + n * z.channels() + Q, qkv.begin() + n * z.channels() + Q + z.row());
        if (R) {
            const int32_t at = int32_t(p);
            q = reference::rope(q.data(), &at, call.table.data(), 1, z.NH, z.HS, R, false).value;
            key = reference::rope(key.value.data(), &at, call.table.data(), 1, z.NKV, z.HS, R, false);
        }
        // Appended are k after rotation and v unchanged. In fp32 the products of k = x·cos ∓ y·sin err by at most
        // u·(|x·cos| + |y·sin|) together, and so does their sum. Rounding to T adds unit·|k|, or half of fp16's
        // smallest number.
        const double unit = T == DType::F32 ? UNIT_ROUNDOFF : T == DType::F16 ? 0x1p-11 : 0x1p-8;
        std::vector<double> k, v;
        for (int64_t j = z.first_seen(p); j < p; j++) {
            const auto append = [&](std::vector<double>& to, const std::vector<double>& values) {
                const auto row = values.begin() + cache.row(slot[size_t(n)], j) * z.row();
                to.insert(to.end(), row, row + z.row());
            };
            append(k, cache.k.values());
            append(v, cache.v.values());
        }
        for (int64_t i = 0; i < z.row(); i++) {
            const double stored = k_after[size_t(newest + i)], value = qkv[size_t(n * z.channels() + Q + z.row() + i)];
            const double exact = key.value[size_t(i)], mag = key.mag[size_t(i)];
            const double allowed = unit * std::fabs(exact) + 2 * UNIT_ROUNDOFF * mag + (T == DType::F16 ? 0x1p-25 : 0);
            ASSERT_NEAR(stored, exact, R ? allowed : 0) << "key " << i;
            ASSERT_EQ(v_after[size_t(newest + i)], value) << "value " << i;
            k.push_back(stored);
            v.push_back(value);
        }
        for (int64_t h = 0; h < z.NH; h++) {
            const int64_t kv = h / (z.NH / z.NKV) * z.HS, to = (n * z.NH + h) * z.HS;
            reference::attention_query(&ref.value[size_t(to)], &ref.mag[size_t(to)], &q[size_t(h * z.HS)],
                                       &k[size_t(kv)], &v[size_t(kv)], p + 1 - z.first_seen(p), z.row(), z.HS,
                                       double(call.scale));
        }
    }
    expect_close("out", got, ref.value, ref.mag, z.HS + *std::max_element(position.begin(), position.end()), z.HS, T,
                 2);

    // Nothing else was written.
    std::vector<bool> written(size_t((cache.used + 2) * KV_PAGE), false);
    for (size_t n = 0; n < slot.size(); n++)
        if (z.room(position[n])) written[size_t(cache.row(slot[n], position[n]))] = true;
    for (size_t row = 0; row < written.size(); row++) {
        if (written[row]) continue;
        const auto unchanged = [&](const std::vector<double>& before, const std::vector<double>& after) {
            const auto begin = int64_t(row) * z.row();
            return std::equal(after.begin() + begin, after.begin() + begin + z.row(), before.begin() + begin,
                              [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); });
        };
        ASSERT_TRUE(unchanged(cache.k.values(), k_after) && unchanged(cache.v.values(), v_after)) << "row " << row;
    }
}

TEST_P(DecodeAttention, Lengths) {
    // Around the edges of KV splits. CPU: splits of 64 keys up to 2048, then of 256.
    for (const int32_t p : {0, 1, 62, 63, 64, 65, 127, 200, 1023, 2047, 2048, 2100})
        check(activation(), {2, 2, 16, 2200}, 1, {0}, {p}, 16);
    // CUDA, 16-bit dtypes: one split up to 512 keys, then splits of 256 as long as 32 of them suffice.
    for (const int32_t p : {254, 255, 256, 510, 511, 512, 767, 768, 4096, 8191, 8192, 8999})
        check(activation(), {8, 2, 64, 9000}, 1, {0}, {p}, 64);
    check(activation(), {4, 1, 64, 33000}, 1, {0}, {32767}, 64);
    check(activation(), {2, 2, 8, 128}, 1, {0}, {127}, 8);  // the last row of the table
}

TEST_P(DecodeAttention, HeadSizes) {
    for (const int64_t HS : {2, 6, 8, 16, 32, 40, 64, 80, 96, 112, 128, 160, 256})
        check(activation(), {4, 2, HS, 150}, 2, {1, 0}, {100, 7}, HS);
    check(activation(), {3, 1, 7, 90}, 1, {0}, {70}, 4);  // odd, and partly rotated
}

TEST_P(DecodeAttention, MultiQueryGroupedQueryAndMultiHead) {
    for (const int64_t NKV : {1, 2, 3, 6}) check(activation(), {6, NKV, 32, 80}, 2, {0, 1}, {79, 64}, 32);
    check(activation(), {12, 1, 64, 80}, 1, {0}, {70}, 0);
    check(activation(), {9, 3, 64, 300}, 1, {0}, {299}, 64);
    // CUDA: enough blocks for the kernels that run more of them on each SM.
    for (const int64_t HS : {32, 64}) {
        check(activation(), {140, 140, HS, 70}, 4, {2, 0, 1, 3}, {69, 0, 33, 64}, HS);
        check(activation(), {240, 120, HS, 70}, 4, {2, 0, 1, 3}, {69, 0, 33, 64}, 0);
    }
    for (const int64_t group : {4, 8, 9, 20}) check(activation(), {2 * group, 2, 64, 600}, 1, {0}, {530}, 64);
}

// Slots in any order, sequences of different lengths in one batch, finished sequences and sequences without room, and
// gaps between the rows of qkv.
TEST_P(DecodeAttention, UnequalSequences) {
    for (const int64_t gap : {0, 8, 5})
        check(activation(), {4, 2, 32, 300}, 7, {3, 0, 6, 2, 5}, {299, 0, 64, -1, 128}, 32, gap);
    const Shape z{2, 1, 16, 64};
    check(activation(), z, 3, {2, 1}, {128, 10}, 16);  // position 128 has no page
}

// Below, at and above the window, at the edges of pages, tiles and KV splits; windows that begin anywhere in a page.
TEST_P(DecodeAttention, Windows) {
    for (const int32_t p : {0, 5, 18, 19, 20, 21, 39, 126, 127, 128, 140, 146, 147, 148, 255, 256, 1000}) {
        check(activation(), {4, 2, 16, 2100, 20}, 2, {1}, {p}, 16);
        check(activation(), {2, 2, 40, 2100, 20}, 2, {0, 1}, {p, 2 * p + 1}, 0);
    }
    check(activation(), {2, 1, 8, 36, 1}, 1, {0}, {3}, 8);  // a query sees only itself
    check(activation(), {2, 1, 8, 300, 1}, 1, {0}, {256}, 8);
    for (const int32_t p : {300, 598, 599, 600, 611, 627, 639, 640, 700, 1200, 1255, 5000})  // 600 keys: several splits
        check(activation(), {8, 2, 64, 5100, 600}, 2, {1, 0}, {p, 70}, 64);
    check(activation(), {4, 1, 128, 9100, 4096}, 1, {0}, {9000}, 128);
    check(activation(), {3, 1, 7, 300, 80}, 1, {0}, {170}, 4);  // rows that are not aligned
    check(activation(), {4, 2, 160, 300, 80}, 1, {0}, {170}, 160);
    check(activation(), {4, 2, 32, 100001, 64}, 5, {3, 0, 4}, {69, -1, 100000}, 0, 5);
    for (const int64_t HS : {32, 64})
        check(activation(), {140, 140, HS, 500, 40}, 4, {2, 0, 1, 3}, {69, 0, 33, 470}, HS);
}

// A window of all keys changes no bit.
TEST_P(DecodeAttention, AWindowThatHidesNothingChangesNoBit) {
    for (const int32_t p : {0, 63, 200, 599}) {
        const Shape z{4, 2, 64, 600};
        const auto run = [&](int64_t window) {
            const Cache cache(activation(), z, 1, {0}, {p});
            const Call call(activation(), cache, z.HS);
            const TestArray out = TestArray::poisoned(activation(), {1, z.NH * z.HS});
            decode_attention(out, call.qkv, cache.k, cache.v, call.batch, window, call.scale, call.scratch, Stream{});
            return out.fetch();
        };
        expect_same_bits("out", run(0), run(600));
    }
}

// A sequence has the same bits alone and in a batch, for any max_length, in every call, with any number of threads.
TEST_P(DecodeAttention, BitsDoNotDependOnTheBatch) {
    struct Case {
        Shape z;
        std::vector<int32_t> positions;
    };
    for (const Case& tested : std::vector<Case>{{{4, 2, 64, 700}, {500, 64, 699, 3}},
                                                {{2, 1, 32, 8300}, {8299, 64}},
                                                {{4, 2, 64, 6500, 640}, {500, 6400, 1399, 3}},
                                                {{140, 140, 40, 60}, {59, 3, 31, 32}}}) {
        const Shape& z = tested.z;
        const std::vector<int32_t>& positions = tested.positions;
        std::vector<int32_t> slots(positions.size());
        std::iota(slots.begin(), slots.end(), 0);
        const auto run = [&](const std::vector<int32_t>& slot, const std::vector<int32_t>& position,
                             int64_t max_length) {
            const Cache cache(activation(), z, int64_t(slots.size()), slots, positions);
            Call call(activation(), cache, z.HS), own(activation(), cache, slot, position, z.HS);
            own.batch.max_length = max_length;
            const TestArray out = TestArray::poisoned(activation(), {int64_t(slot.size()), z.NH * z.HS});
            const int64_t first = slot[0];
            Tensor qkv = call.qkv.tensor().rows(first, first + int64_t(slot.size()));
            decode_attention(out, qkv, cache.k, cache.v, own.batch, z.window, call.scale, own.scratch, Stream{});
            return out.fetch();
        };
        const int64_t longest = *std::max_element(positions.begin(), positions.end()) + 1;
        const std::vector<double> together = run(slots, positions, longest);
        const int64_t width = z.NH * z.HS;
        for (size_t s = 0; s < slots.size(); s++) {
            const std::vector<double> row(together.begin() + int64_t(s) * width,
                                          together.begin() + int64_t(s + 1) * width);
            expect_same_bits("alone", row, run({slots[s]}, {positions[s]}, positions[s] + 1));
        }
        expect_deterministic("decode_attention", [&] { return run(slots, positions, longest + 3); });
    }
}

// The result has the same bits wherever the pages lie, also where sequences share the pages of an equal beginning.
TEST_P(DecodeAttention, BitsDoNotDependOnWhereThePagesLie) {
    for (const Shape& z : {Shape{4, 2, 64, 800}, Shape{4, 1, 40, 800}, Shape{2, 2, 64, 800, 300}}) {
        const std::vector<int32_t> slots{0, 1}, positions{700, 390};
        const auto run = [&](const Cache& cache, const Tensor& table) {
            Call call(activation(), cache, z.HS);
            call.batch.pages = table;
            const TestArray out = TestArray::poisoned(activation(), {2, z.NH * z.HS});
            decode_attention(out, call.qkv, cache.k, cache.v, call.batch, z.window, call.scale, call.scratch, Stream{});
            return out.fetch();
        };
        const Cache reversed(activation(), z, 2, slots, positions),
            in_order(activation(), z, 2, slots, positions, false);
        const std::vector<double> expected = run(reversed, reversed.pages);
        expect_same_bits("another order", expected, run(in_order, in_order.pages));
        if (z.window) continue;
        // Sequence 1 begins like sequence 0: by copies of its first three pages, and by sharing them.
        const Cache copied(activation(), z, 2, slots, positions);
        std::vector<int32_t> shared = copied.table;
        for (int64_t i = 0; i < 3; i++) {
            const int64_t from = copied.table[size_t(i)], to = copied.table[size_t(z.columns() + i)];
            shared[size_t(z.columns() + i)] = copied.table[size_t(i)];
            for (const TestArray* a : {&copied.k, &copied.v}) {
                const Tensor t = a->tensor();
                std::vector<char> page(size_t(t.rows(from, from + 1).bytes()));
                copy_to_host(page.data(), t.rows(from, from + 1).data, page.size(), Stream{});
                copy_to_device(t.rows(to, to + 1).data, page.data(), page.size(), Stream{});
                synchronize(Stream{});
            }
        }
        expect_same_bits("shared pages", run(copied, copied.pages),
                         run(copied, TestArray::ints(shared, {2, z.columns()})));
    }
}

// One scratch serves consecutive calls of any size, as a batch that shrinks and grows needs it.
TEST_P(DecodeAttention, ScratchMayBeReusedForAnySize) {
    const Shape z{4, 2, 16, 400};
    const DType T = activation();
    const TestArray scratch = TestArray::scratch(decode_attention_scratch(6, z.NH, z.HS, 400));
    device_fill(scratch.tensor().data, 0, size_t(scratch.tensor().bytes()), {});
    for (const int64_t N : {6, 1, 6, 2, 5, 6}) {
        std::vector<int32_t> slot, position;
        for (int32_t n = 0; n < N; n++) {
            slot.push_back(n);
            position.push_back(399 - 60 * n);
        }
        const auto run = [&](const Tensor& memory) {
            const Cache cache(T, z, 6, slot, position);
            Call call(T, cache, 16);
            call.batch.max_length = 400;
            const TestArray out = TestArray::poisoned(T, {N, z.NH * z.HS});
            decode_attention(out, call.qkv, cache.k, cache.v, call.batch, 0, call.scale, memory ? memory : call.scratch,
                             Stream{});
            return out.fetch();
        };
        expect_same_bits("out", run({}), run(scratch));
    }
}

// The launches of a step: an ordinary one, which waits for all earlier work, the QKV layer, and attention, which may
// read the cache before the QKV layer has finished. Three steps append to one cache; one sequence is finished.
TEST_P(DecodeAttention, InputsReadyReadsTheCacheEarly) {
    const DType T = activation();
    const Shape z{12, 12, 64, 70};
    const int64_t N = 16, C = 64, Q = z.NH * z.HS;
    const Stream stream = create_blas_stream();
    std::vector<int32_t> slot, position;
    for (int32_t n = 0; n < N; n++) {
        slot.push_back(n);
        position.push_back(n == 7 ? -1 : 4 * n);
    }
    const TestArray table = TestArray::random(T, {N, C}, 5), weight = TestArray::random(T, {z.channels(), C}, 6);
    const TestArray rows = TestArray::ints(slot, {N});
    const auto run = [&](bool inputs_ready) {
        const Cache cache(T, z, N, slot, position);
        const Call call(T, cache, z.HS);
        DecodeBatch batch = call.batch;
        batch.inputs_ready = inputs_ready;
        const TestArray inp = TestArray::poisoned(T, {N, C}), qkv = TestArray::poisoned(T, {N, z.channels()});
        const TestArray scratch = TestArray::scratch(linear_scratch(N, C, z.channels(), T));
        std::vector<double> all;
        for (int32_t step = 0; step < 3; step++) {
            const TestArray out = TestArray::poisoned(T, {N, Q}), positions = [&] {
                std::vector<int32_t> next = position;
                for (int32_t& p : next) p += p < 0 ? 0 : step;
                return TestArray::ints(next, {N});
            }();
            batch.positions = batch.angles = positions;
            embedding_forward(inp, rows, rows, table, {}, stream);
            linear({qkv}, inp, {}, {weight}, scratch, false, stream);
            decode_attention(out, qkv, cache.k, cache.v, batch, 0, call.scale, call.scratch, stream);
            synchronize(stream);
            const std::vector<double> got = out.fetch();
            all.insert(all.end(), got.begin(), got.end());
        }
        for (const TestArray* a : {&cache.k, &cache.v}) {
            const std::vector<double> got = a->fetch();
            std::transform(got.begin(), got.end(), std::back_inserter(all),
                           [](double x) { return std::isnan(x) ? -1e30 : x; });
        }
        return all;
    };
    const std::vector<double> late = run(false);
    for (int i = 0; i < 3; i++) expect_same_bits("early", late, run(true));
    destroy_stream(stream);
}

INSTANTIATE_DTYPES(DecodeAttention);

class KvAppend : public DTypeTest {};

// Tokens of several sequences go to rows in any order: q is rotated in place, k is rotated and v copied to the cache.
// Row −1 and rows beyond the cache are not written, and their tokens' q stays. So do v and the gaps of qkv.
TEST_P(KvAppend, AppendsStridedRows) {
    const DType T = activation();
    for (const auto& [NH, NKV, HS, R, gap] : {std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>{4, 2, 64, 64, 0},
                                              {2, 1, 32, 16, 0},
                                              {3, 1, 10, 6, 5},
                                              {2, 2, 8, 0, 0}}) {
        const int64_t N = 8, total = 9, row = NKV * HS, channels = (NH + 2 * NKV) * HS;
        const std::vector<int32_t> rows{7, 8, 0, -1, 3, 9, 2, INT32_MAX}, angles{5, 6, 0, 1, 0, 7, 1, 2};
        const TestArray k = TestArray::poisoned(T, {total, NKV, HS}), v = TestArray::poisoned(T, {total, NKV, HS});
        const TestArray qkv = TestArray::random(T, {N, channels + gap}, 3);
        const TestArray table =
            TestArray::of(angle_table(8, std::max<int64_t>(R, 2)), {8, std::max<int64_t>(R, 2) / 2, 2});
        kv_append(k, v, qkv.tensor().columns(0, channels), TestArray::ints(rows, {N}), TestArray::ints(angles, {N}),
                  R ? table.tensor() : Tensor{}, NH, Stream{});
        const std::vector<double> before = take_columns(qkv.values(), channels + gap, channels),
                                  after = take_columns(qkv.fetch(), channels + gap, channels), got_k = k.fetch(),
                                  got_v = v.fetch();
        const auto part = [](const std::vector<double>& all, int64_t begin, int64_t count) {
            return std::vector<double>(all.begin() + begin, all.begin() + begin + count);
        };
        std::vector<bool> written(size_t(total), false);
        for (int64_t n = 0; n < N; n++) {
            const int64_t width = channels + gap, end_of_k = n * width + channels - row;
            expect_same_bits("v and the gap of qkv", part(qkv.values(), end_of_k, row + gap),
                             part(qkv.fetch(), end_of_k, row + gap));
            if (rows[size_t(n)] < 0 || rows[size_t(n)] >= total) {
                expect_same_bits("q without a row", part(before, n * channels, NH * HS),
                                 part(after, n * channels, NH * HS));
                continue;
            }
            written[size_t(rows[size_t(n)])] = true;
            const double* x = before.data() + n * channels;
            reference::Values rotated(NH * HS + row);
            rotated.value.assign(x, x + NH * HS + row);
            if (R)
                rotated = reference::rope(x, &angles[size_t(n)], table.data(), 1, NH + NKV, HS, R, false);
            else
                std::transform(x, x + NH * HS + row, rotated.mag.begin(), [](double a) { return std::fabs(a); });
            expect_close("q", part(after, n * channels, NH * HS), part(rotated.value, 0, NH * HS),
                         part(rotated.mag, 0, NH * HS), 2, HS, T);
            expect_close("k", part(got_k, rows[size_t(n)] * row, row), part(rotated.value, NH * HS, row),
                         part(rotated.mag, NH * HS, row), 2, HS, T);
            expect_same_bits("v", part(got_v, rows[size_t(n)] * row, row),
                             part(before, n * channels + NH * HS + row, row));
        }
        for (int64_t r = 0; r < total; r++) {
            if (written[size_t(r)]) continue;
            for (int64_t i = r * row; i < (r + 1) * row; i++)
                EXPECT_TRUE(std::isnan(got_k[size_t(i)]) && std::isnan(got_v[size_t(i)])) << r;
        }
    }
}

// Rows outside either cache are skipped.
TEST_P(KvAppend, CopiesRows) {
    const DType T = activation();
    const int64_t NKV = 3, HS = 10, row = NKV * HS;
    const TestArray k_from = TestArray::random(T, {5, NKV, HS}, 3), v_from = TestArray::random(T, {5, NKV, HS}, 4),
                    k = TestArray::random(T, {7, NKV, HS}, 5), v = TestArray::random(T, {7, NKV, HS}, 6);
    const std::vector<int32_t> to{6, -1, 0, 7, 2, 5, 3}, from{0, 1, 4, 2, 0, -1, 5};
    std::vector<double> expected_k = k.values(), expected_v = v.values();
    for (const size_t i : {0u, 2u, 4u}) {
        std::copy_n(k_from.values().begin() + from[i] * row, row, expected_k.begin() + to[i] * row);
        std::copy_n(v_from.values().begin() + from[i] * row, row, expected_v.begin() + to[i] * row);
    }
    kv_copy(k, v, TestArray::ints(to, {7}), k_from, v_from, TestArray::ints(from, {7}), Stream{});
    expect_same_bits("k", k.fetch(), expected_k);
    expect_same_bits("v", v.fetch(), expected_v);
    const TestArray narrow = TestArray::random(T, {5, NKV, HS - 1}, 3);
    EXPECT_THROW(kv_copy(k, v, TestArray::ints(to, {7}), k_from, narrow, TestArray::ints(from, {7}), Stream{}), Error);
    EXPECT_THROW(kv_copy(k, v, TestArray::ints(to, {7}), k_from, v_from, TestArray::ints({0}, {1}), Stream{}), Error);
}

INSTANTIATE_DTYPES(KvAppend);

TEST(DecodeAttentionArguments, InvalidArgumentsAreErrors) {
    const Shape z{4, 2, 8, 10};
    const Cache cache(DType::F32, z, 2, {0, 1}, {3, 4});
    Call call(DType::F32, cache, 8);
    const TestArray out = TestArray::poisoned({2, 32});
    int64_t window = 0;
    const auto run = [&] {
        decode_attention(out, call.qkv, cache.k, cache.v, call.batch, window, call.scale, call.scratch, Stream{});
    };
    run();
    window = -1;
    expect_error(run, "decode_attention: window is -1; it must be 0 (none) or positive");
    window = 0;
    call.scale = 0;
    expect_error(run, "decode_attention: scale is 0; it must be positive");
    call.scale = 1;
    call.batch.slots = call.positions.tensor().rows(0, 1);
    expect_error(run, "decode_attention: slots is int32 [1], expected int32 [2]");
    call.batch.slots = call.slots;
    call.batch.pages = {};
    expect_error(run, "decode_attention: pages is [], expected [sequences, n]");
    call.batch.pages = cache.pages;
    const TestArray odd = TestArray::random({2, 60}, 1);
    expect_error([&] { decode_attention(out, odd, cache.k, cache.v, call.batch, 0, 1, call.scratch, Stream{}); },
                 "decode_attention: qkv has rows of 60, expected (NH + 2*NKV)*HS with 2 KV heads of 8 that divide NH");
#ifndef USE_CUDA
    const TestArray far = TestArray::ints({0, 2}, {2}), late = TestArray::ints({3, 13}, {2});
    call.batch.slots = far;
    expect_error(run, "decode_attention: slot 2 of sequence 1 lies outside the page table of 2 rows");
    call.batch.slots = call.slots;
    const TestArray wrong = TestArray::ints({0, 4}, {2, 1});
    call.batch.pages = wrong;
    expect_error(run, "decode_attention: page 4 of a sequence lies outside the cache of 4 pages");
    call.batch.pages = cache.pages;
    call.batch.positions = late;
    expect_error(run, "decode_attention: position 13 of sequence 1 is not below max_length, 13");
#endif
}

TEST(Advance, FinishedSequencesDoNotAdvance) {
    const TestArray positions = TestArray::ints({0, -1, 41}, {3});
    const std::vector<int64_t> before{5, 6, 7};
    const TestArray bytes = TestArray::bytes(before.data(), 24);
    const TestArray ids = TestArray::ints({50, 51, 52}, {3}), buffer_index = TestArray::ints({0}, {1});
    const HostMemory memory(host_alloc(2 * 4 * sizeof(int32_t)), host_free);
    int32_t* const host_tokens = static_cast<int32_t*>(memory.get());
    std::fill_n(host_tokens, 8, -7);
    const auto step = [&] {
        advance(positions, make_tensor(bytes.tensor().data, DType::I64, bytes.tensor().device, {3}), ids,
                make_tensor(host_tokens, DType::I32, Device::CPU, {2, 4}), buffer_index, Stream{});
        synchronize(Stream{});
    };
    step();
    EXPECT_EQ(positions.fetch_ints(), (std::vector<int32_t>{1, -1, 42}));
    std::vector<int64_t> after(3);
    bytes.fetch_bytes(after.data());
    EXPECT_EQ(after, (std::vector<int64_t>{6, 7, 8}));
    EXPECT_EQ(std::vector<int32_t>(host_tokens, host_tokens + 8),
              (std::vector<int32_t>{50, 51, 52, -7, -7, -7, -7, -7}));
    step();
    step();
    EXPECT_EQ(std::vector<int32_t>(host_tokens, host_tokens + 8),
              (std::vector<int32_t>{50, 51, 52, -7, 50, 51, 52, -7}));
    EXPECT_EQ(buffer_index.fetch_ints(), std::vector<int32_t>{1});
}

}  // namespace

// Attention against the oracle over packed, grouped, causal, windowed and degenerate shapes, and common mistakes: a row
// maximum that starts at 0, an epsilon in the sum, a fully masked row, future tokens that change past results.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/kv_page.h"

namespace {

constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

struct Shape {
    std::vector<int64_t> qlens, klens;  // of each sequence
    int64_t NH, NKV, HS;
    reference::AttentionMask mask = {};
};

std::vector<int32_t> cumulative(const std::vector<int64_t>& lengths) {
    std::vector<int32_t> cum{0};
    for (const int64_t n : lengths) cum.push_back(cum.back() + int32_t(n));
    return cum;
}

// All inputs of one problem. Tests may change values before run().
struct Problem {
    Shape shape;
    std::vector<int32_t> cum_q, cum_k;
    int64_t Nq, Nk;
    float scale;
    DType dtype;
    std::vector<double> q, k, v, dout;  // rounded to the dtype

    Problem(DType T, const Shape& s, uint64_t seed = 1, double q_scale = 1)
        : shape(s),
          cum_q(cumulative(s.qlens)),
          cum_k(cumulative(s.klens)),
          Nq(cum_q.back()),
          Nk(cum_k.back()),
          scale(1 / std::sqrt(float(s.HS))),
          dtype(T) {
        q = TestArray::random(T, {Nq, s.NH, s.HS}, seed, q_scale).values();
        k = TestArray::random(T, {Nk, s.NKV, s.HS}, seed + 1).values();
        v = TestArray::random(T, {Nk, s.NKV, s.HS}, seed + 2).values();
        dout = TestArray::random(T, {Nq, s.NH, s.HS}, seed + 3).values();
    }
    int64_t longest(const std::vector<int64_t>& lengths) const {
        return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    }
};

struct Result {
    std::vector<double> out, lse, dq, dk, dv;
    std::vector<double> sums;  // of dq, dk and dv over the tokens, where attention_backward computes them; not in all()
    std::vector<double> all() const {
        std::vector<double> values;
        for (const auto* part : {&out, &lse, &dq, &dk, &dv}) values.insert(values.end(), part->begin(), part->end());
        return values;
    }
};

// max_k may exceed every sequence. With so many keys, the nondeterministic pass takes heads of all sizes.
constexpr int64_t LONG = 4096;

// extra: tokens after the last sequence.
// room: empty sequences after the last one, and their count on the device; the maxima are upper bounds. −1: no count.
Result run(const Problem& p, int64_t extra = 0, bool deterministic = true, int64_t room = -1) {
    const auto& [qlens, klens, NH, NKV, HS, mask] = p.shape;
    const int64_t Nq = p.Nq + extra, Nk = p.Nk + extra, S = int64_t(qlens.size());
    auto padded = [&](std::vector<double> values, int64_t n) {
        values.resize(size_t(n), NOT_A_NUMBER);
        return values;
    };
    const TestArray q = TestArray::of(p.dtype, padded(p.q, Nq * NH * HS), {Nq, NH, HS});
    const TestArray k = TestArray::of(p.dtype, padded(p.k, Nk * NKV * HS), {Nk, NKV, HS});
    const TestArray v = TestArray::of(p.dtype, padded(p.v, Nk * NKV * HS), {Nk, NKV, HS});
    const TestArray dout = TestArray::of(p.dtype, padded(p.dout, Nq * NH * HS), {Nq, NH, HS});
    const TestArray out = TestArray::poisoned(p.dtype, {Nq, NH, HS}), lse = TestArray::poisoned({NH, Nq});
    const TestArray dq = TestArray::poisoned(p.dtype, {Nq, NH, HS});
    const TestArray dk = TestArray::poisoned(p.dtype, {Nk, NKV, HS}), dv = TestArray::poisoned(p.dtype, {Nk, NKV, HS});
    const auto with_room = [&](std::vector<int32_t> cum) {
        cum.resize(cum.size() + size_t(std::max<int64_t>(room, 0)), cum.back());
        return TestArray::ints(cum, {int64_t(cum.size())});
    };
    const TestArray cum_q = with_room(p.cum_q), cum_k = with_room(p.cum_k), count = TestArray::ints({int32_t(S)}, {1});
    AttentionSequences sequences{cum_q, cum_k, p.longest(qlens), p.longest(klens), mask.causal, mask.window, {}};
    if (room >= 0) {
        sequences.count = count;
        sequences.max_q = Nq;
        sequences.max_k = Nk;
    }
    if (!deterministic) sequences.max_k = std::max(sequences.max_k, LONG);
    const TestArray scratch =
        TestArray::scratch(attention_backward_scratch(Nq, NH, HS, deterministic, sequences.max_k));
    const TestArray forward_scratch = TestArray::scratch(attention_forward_scratch());
    attention_forward(out, lse, q, k, v, sequences, p.scale, forward_scratch, Stream{});
    const AttentionSumRows rows =
        attention_gradient_sum_rows(S, sequences.max_q, sequences.max_k, NH, HS, p.dtype, deterministic);
    const bool sums = rows.dq > 0 && Nq > 0 && Nk > 0 && room < 0;
    const TestArray dq_sums = TestArray::poisoned({std::max<int64_t>(rows.dq, 1), NH * HS});
    const TestArray dkv_sums = TestArray::poisoned({std::max<int64_t>(rows.dkv, 1), 2 * NKV * HS});
    attention_backward(dq, dk, dv, dout, q, k, v, out, lse, sequences, p.scale, scratch, Stream{}, deterministic,
                       sums ? AttentionGradientSums{dq_sums, dkv_sums} : AttentionGradientSums{});
    Result result{out.fetch(), lse.fetch(), dq.fetch(), dk.fetch(), dv.fetch(), {}};
    if (!sums) return result;
    for (const TestArray* array : {&dq_sums, &dkv_sums}) {
        const std::vector<double> values = array->fetch();
        const size_t columns = size_t(array->tensor().shape[1]);
        std::vector<double> total(columns);
        for (size_t i = 0; i < values.size(); i++) total[i % columns] += values[i];
        result.sums.insert(result.sums.end(), total.begin(), total.end());
    }
    return result;
}

// The sums against those of the stored gradients. They are in fp32, of `tokens` terms, each added with an error of up
// to 2^-24 of the sum so far.
void check_sums(const Problem& p, const Result& got) {
    if (got.sums.empty()) return;
    size_t at = 0;
    for (const auto* gradient : {&got.dq, &got.dk, &got.dv}) {
        const size_t columns = size_t((gradient == &got.dq ? p.shape.NH : p.shape.NKV) * p.shape.HS);
        const size_t tokens = gradient->size() / columns;
        for (size_t c = 0; c < columns; c++, at++) {
            double sum = 0, mag = 0;
            for (size_t i = c; i < gradient->size(); i += columns) {
                sum += (*gradient)[i];
                mag += std::fabs((*gradient)[i]);
            }
            ASSERT_LE(std::fabs(got.sums[at] - sum), mag * double(tokens) * 0x1p-24)
                << "sum " << at << ": got " << got.sums[at] << ", expected " << sum;
        }
    }
    ASSERT_EQ(at, got.sums.size());
}

// Whether attention_backward has a nondeterministic pass for this problem.
bool has_nondeterministic(const Problem& p) {
    const auto& z = p.shape;
    return p.dtype != DType::F32 &&
           attention_backward_scratch(p.Nq, z.NH, z.HS, false, LONG) > attention_backward_scratch(p.Nq, z.NH, z.HS);
}
// Both modes, or the deterministic one alone. With up to 256 keys, dq has at most two terms, whose order does not
// matter.
std::vector<bool> modes(const Problem& p) {
    return has_nondeterministic(p) ? std::vector<bool>{true, false} : std::vector<bool>{true};
}

// |got − ref| ≤ 2 roundings to 16 bits of each term, plus `lost`: what fp16 loses below its normal range.
void expect_within_magnitude(const char* what, const std::vector<double>& got, const reference::Values& ref,
                             DType dtype, double lost) {
    const double unit = dtype == DType::BF16 ? 0x1p-8 : 0x1p-11;
    ASSERT_EQ(got.size(), ref.value.size()) << what;
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_LE(std::fabs(got[i] - ref.value[i]), 2 * unit * ref.mag[i] + lost)
            << what << "[" << i << "]: got " << got[i] << ", expected " << ref.value[i];
}

// cancels: dS sums to nearly 0 over similar keys, so that dq and dk are small compared with their terms. In 16 bits,
// where each term is rounded, only the terms' magnitudes then bound the errors.
void check(const Problem& p, bool cancels = false) {
    const auto& [qlens, klens, NH, NKV, HS, mask] = p.shape;
    const Result got = run(p);
    check_sums(p, got);
    reference::Attention ref = reference::attention_forward(p.q.data(), p.k.data(), p.v.data(), p.cum_q, p.cum_k, NH,
                                                            NKV, HS, double(p.scale), mask);
    const reference::AttentionGradients grad =
        reference::attention_backward(p.dout.data(), p.q.data(), p.k.data(), p.v.data(), got.out.data(), got.lse.data(),
                                      p.cum_q, p.cum_k, NH, NKV, HS, double(p.scale), mask);
    // A query that sees no key has lse = −∞ exactly; the others are compared.
    std::vector<double> lse = got.lse;
    for (size_t i = 0; i < lse.size(); i++) {
        if (ref.lse.value[i] == -INF) {
            ASSERT_EQ(lse[i], -INF);
            lse[i] = ref.lse.value[i] = ref.lse.mag[i] = 0;
        }
    }
    const int64_t K = std::max(HS, p.longest(klens));
    expect_close("lse", lse, ref.lse.value, ref.lse.mag, K, 1);
    // In 16 bits P (or dS) is rounded before its matmul and the result after it. The error of rounding P is random over
    // the columns and not proportional to each of them: rows of fewer than 16 columns are too small a sample, so the
    // whole tensor counts as one row.
    const int64_t row = p.dtype != DType::F32 && HS < 16 ? 0 : HS;
    auto compare = [&](const char* what, const std::vector<double>& x, const reference::Values& y, int64_t terms) {
        expect_close(what, x, y.value, y.mag, terms, row ? row : int64_t(x.size()), p.dtype, 2);
    };
    compare("out", got.out, ref.out, K);
    const auto compare_gradients = [&](const Result& r) {
        compare("dv", r.dv, grad.dv, K * NH / NKV);
        if (cancels && p.dtype != DType::F32) {
            const double largest = std::fabs(*std::max_element(
                p.q.begin(), p.q.end(), [](double x, double y) { return std::fabs(x) < std::fabs(y); }));
            const double lost = p.dtype == DType::F16 ? 0x1p-25 * double(K) * std::max(1.0, largest) : 0;
            expect_within_magnitude("dq", r.dq, grad.dq, p.dtype, lost);
            expect_within_magnitude("dk", r.dk, grad.dk, p.dtype, lost);
        } else {
            compare("dq", r.dq, grad.dq, K);
            compare("dk", r.dk, grad.dk, K * NH / NKV);
        }
    };
    compare_gradients(got);
    if (has_nondeterministic(p)) {
        SCOPED_TRACE("not deterministic");
        compare_gradients(run(p, 0, false));
    }
}

void check(DType dtype, const Shape& shape, double q_scale = 1, bool cancels = false) {
    SCOPED_TRACE(str("qlen ", shape.qlens.empty() ? 0 : shape.qlens[0], " klen ",
                     shape.klens.empty() ? 0 : shape.klens[0], " NH ", shape.NH, " NKV ", shape.NKV, " HS ", shape.HS,
                     shape.mask.causal ? " causal" : " full", " window ", shape.mask.window));
    check(Problem(dtype, shape, 1, q_scale), cancels);
}

class Attention : public DTypeTest {};
INSTANTIATE_DTYPES(Attention);

TEST_P(Attention, Lengths) {
    for (const int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 127, 129}) check(activation(), {{T}, {T}, 2, 2, 16});
    for (const int64_t T : {1, 63, 64, 65, 127, 129, 191, 193, 257}) check(activation(), {{T}, {T}, 2, 1, 64});
    for (const int64_t T : {1, 63, 64, 65, 127, 129, 193}) check(activation(), {{T}, {T}, 2, 1, 128});
    check(activation(), {{257}, {391}, 3, 1, 128});
    check(activation(), {{640}, {640}, 1, 1, 64});
}

// Sampled rows of 16k tokens: the first, the last, those at tile edges and some between.
TEST_P(Attention, LongSequence) {
#ifdef USE_CUDA
    constexpr int64_t T = 16384, HS = 64;  // a size that tensor cores take
#else
    constexpr int64_t T = 16384, HS = 16;
#endif
    const Problem p(activation(), {{T}, {T}, 1, 1, HS});
    const Result got = run(p);
    std::vector<int64_t> rows{0, 1, 63, 64, 65, 127, 128, 191, 192, 255, 256, T / 2 - 1, T / 2, T - 64, T - 2, T - 1};
    while (rows.size() < 64) rows.push_back((rows.back() + 5417) % T);

    std::vector<reference::Value> delta;
    for (int64_t i = 0; i < T; i++)
        delta.push_back(reference::dot(p.dout.data() + i * HS, 1, got.out.data() + i * HS, 1, HS));
    auto pair = [&](int64_t i, int64_t j) {
        return reference::attention_pair(p.q.data() + i * HS, p.dout.data() + i * HS, got.lse[size_t(i)],
                                         delta[size_t(i)], p.k.data() + j * HS, p.v.data() + j * HS, HS,
                                         double(p.scale));
    };
    const int64_t n = int64_t(rows.size()) * HS;
    reference::Values out(n), lse(int64_t(rows.size())), dq(n), dk(n), dv(n);
    auto add = [&](reference::Values& d, size_t r, reference::Value weight, double factor, const double* row) {
        for (size_t c = 0; c < HS; c++) {
            d.value[r * HS + c] += factor * weight.value * row[c];
            d.mag[r * HS + c] += std::fabs(factor * weight.mag * row[c]);
        }
    };
    for (size_t r = 0; r < rows.size(); r++) {
        const int64_t row = rows[r];
        lse.set(int64_t(r), reference::attention_query(&out.value[r * HS], &out.mag[r * HS], p.q.data() + row * HS,
                                                       p.k.data(), p.v.data(), row + 1, HS, HS, double(p.scale)));
        for (int64_t j = 0; j <= row; j++) add(dq, r, pair(row, j).ds, double(p.scale), p.k.data() + j * HS);
        for (int64_t i = row; i < T; i++) {
            const reference::AttentionPair x = pair(i, row);
            add(dk, r, x.ds, double(p.scale), p.q.data() + i * HS);
            add(dv, r, x.p, 1, p.dout.data() + i * HS);
        }
    }
    auto compare = [&](const char* what, const std::vector<double>& x, const reference::Values& ref, int64_t width) {
        std::vector<double> sampled;
        for (const int64_t row : rows)
            sampled.insert(sampled.end(), &x[size_t(row * width)], &x[size_t(row * width)] + width);
        expect_close(what, sampled, ref.value, ref.mag, T, width, width == 1 ? DType::F32 : p.dtype, 2);
    };
    compare("lse", got.lse, lse, 1);
    compare("out", got.out, out, HS);
    for (const bool deterministic : modes(p)) {
        SCOPED_TRACE(deterministic ? "deterministic" : "not deterministic");
        const Result r = deterministic ? got : run(p, 0, false);
        compare("dq", r.dq, dq, HS);
        compare("dk", r.dk, dk, HS);
        compare("dv", r.dv, dv, HS);
    }
}

TEST_P(Attention, HeadSizes) {
    for (const int64_t HS : {1, 2, 3, 7, 15, 17, 31, 32, 33, 48, 64, 65, 80, 96, 100, 128, 200})
        check(activation(), {{70}, {70}, 2, 1, HS});
    for (const int64_t HS : {256, 257, 1024})  // beyond 256 the tiles are narrower
        if (HS <= attention_max_head_size()) check(activation(), {{37}, {37}, 1, 1, HS});
}

TEST_P(Attention, GroupedKVHeads) {
    for (const int64_t NKV : {1, 2, 3, 6}) check(activation(), {{33, 20}, {33, 20}, 6, NKV, 24});
}

TEST_P(Attention, PackedSequences) {
    check(activation(), {{3, 2, 5}, {3, 2, 5}, 2, 1, 8});
    check(activation(), {{0, 1, 70, 0, 1, 16, 0}, {0, 1, 70, 0, 1, 16, 0}, 2, 2, 32});
    check(activation(), {{}, {}, 2, 2, 8});
    check(activation(), {{0}, {0}, 2, 2, 8});
}

TEST_P(Attention, MoreKeysThanQueries) {
    check(activation(), {{1}, {1000}, 2, 1, 64});  // one query, many keys
    for (const int64_t past : {1, 15, 16, 17, 48, 63, 64, 65, 100}) check(activation(), {{40}, {40 + past}, 2, 1, 32});
    check(activation(), {{70, 1, 5}, {75, 130, 5}, 4, 2, 20});
}

TEST_P(Attention, QueriesWithoutKeys) {
    for (const int64_t unseeing : {1, 4, 15, 16, 17, 63, 64, 65, 90})
        check(activation(), {{100}, {100 - unseeing}, 2, 1, 16});
    check(activation(), {{5, 4}, {0, 4}, 2, 2, 16});
    const Result r = run(Problem(activation(), {{7}, {3}, 1, 1, 4}));
    for (size_t i = 0; i < 4 * 4; i++) EXPECT_EQ(r.out[i], 0) << i;
    for (size_t i = 0; i < 4 * 4; i++) EXPECT_EQ(r.dq[i], 0) << i;
    for (size_t i = 0; i < 7; i++) EXPECT_EQ(std::isinf(r.lse[i]), i < 4) << i;
}

// Windows below, at and above the steps and tiles of the kernels; some sequences have no keys or queries.
TEST_P(Attention, Masks) {
    for (const bool causal : {true, false})
        for (const int64_t window : {0, 1, 2, 15, 64, 65, 1000}) {
            if (causal && window == 0) continue;  // covered by the other tests
            const reference::AttentionMask mask{causal, window};
            check(activation(), {{150, 0, 1, 33}, {150, 0, 1, 33}, 2, 1, 16, mask});
            check(activation(), {{40, 3, 0, 1}, {190, 0, 5, 66}, 4, 2, 20, mask});  // more keys than queries
            check(activation(), {{120, 80}, {90, 3}, 2, 2, 8, mask});               // queries before the first key
        }
    for (const int64_t HS : {64, 128})
        for (const int64_t window : {0, 100}) check(activation(), {{191}, {193}, 2, 1, HS, {window == 0, window}});
}

// Rows whose logits are all −20 or −80 reveal a running maximum that starts at 0 and an epsilon in the sum.
TEST_P(Attention, EqualNegativeLogits) {
    for (const double logit : {-20.0, -80.0}) {
        for (const int64_t T : {5, 70}) {
            Problem p(activation(), {{T}, {T}, 1, 1, 16});
            std::fill(p.q.begin(), p.q.end(), -0.5);
            std::fill(p.k.begin(), p.k.end(), -logit / 2);  // q·k/√16 = 16·(−½)·(−logit/2)/4 = logit
            check(p, true);
            const Result r = run(p);
            // fp32: rounding a logit of −80 errs by up to 4e-6, and so does the final sum.
            for (int64_t i = 0; i < T; i++) EXPECT_NEAR(r.lse[size_t(i)], logit + std::log(double(i + 1)), 1e-5);
        }
    }
}

TEST_P(Attention, LargeLogits) {
    for (const auto& [T, HS, key] : {std::tuple(90, 64, 10.0), std::tuple(200, 128, 7.0625)}) {
        Problem p(activation(), {{T}, {T}, 2, 1, HS}, 5);
        for (int64_t j = 0; j < T; j++)  // some logits of ±80, the others of ordinary size
            if (j % 3 > 0) std::fill_n(p.k.begin() + j * HS, HS, j % 3 == 1 ? key : -key);
        for (int64_t i = 0; i < T; i++) std::fill_n(p.q.begin() + i * 2 * HS, HS, 1.0);
        check(p, true);
    }
    check(activation(), {{65}, {65}, 1, 1, 32}, 30, true);  // softmax close to a maximum
}

// Values that a query does not see must not change any bit of its results; on the CPU not even NaN
// (kernels/attention/attention.h).
std::vector<double> poisons(DType dtype) {
#ifdef USE_CUDA
    return {rounded(dtype, dtype == DType::F16 ? 6e4 : 1e30)};
#else
    return {rounded(dtype, 1e30), INF, NOT_A_NUMBER};
#endif
}

TEST_P(Attention, FutureTokensDoNotAffectPastOutputs) {
    for (const int64_t HS : {20, 24}) {  // 16-bit heads of a multiple of 8 have kernels of their own
        const Problem clean(activation(), {{130}, {130}, 2, 1, HS});
        for (const bool deterministic : modes(clean)) {
            const Result expected = run(clean, 0, deterministic);
            for (const double poison : poisons(activation())) {
                for (const int64_t t : {1, 8, 16, 17, 63, 64, 65, 100, 129}) {
                    SCOPED_TRACE(str("HS ", HS, ", deterministic ", deterministic, ", from token ", t, ": ", poison));
                    Problem p = clean;
                    std::fill(p.q.begin() + t * 2 * HS, p.q.end(), poison);
                    std::fill(p.k.begin() + t * HS, p.k.end(), poison);
                    std::fill(p.v.begin() + t * HS, p.v.end(), poison);
                    const Result r = run(p, 0, deterministic);
                    auto head = [&](const std::vector<double>& x, int64_t n) {
                        return std::vector<double>(x.begin(), x.begin() + n);
                    };
                    expect_same_bits("out", head(expected.out, t * 2 * HS), head(r.out, t * 2 * HS));
                    expect_same_bits("lse", head(expected.lse, t), head(r.lse, t));
                    expect_same_bits("dq", head(expected.dq, t * 2 * HS), head(r.dq, t * 2 * HS));
                }
            }
        }
    }
}

// Tokens before the window must not change any bit either.
TEST_P(Attention, TokensBeforeTheWindowHaveNoEffect) {
    constexpr int64_t T = 200;
    for (const int64_t HS : {20, 24}) {
        for (const int64_t window : {1, 20, 64, 77}) {
            const Problem clean(activation(), {{T}, {T}, 2, 1, HS, {true, window}});
            for (const bool deterministic : modes(clean)) {
                const Result expected = run(clean, 0, deterministic);
                for (const int64_t t : {1, 16, 63, 100}) {
                    SCOPED_TRACE(
                        str("HS ", HS, ", deterministic ", deterministic, ", window ", window, ", tokens before ", t));
                    Problem p = clean;
                    std::fill_n(p.q.begin(), t * 2 * HS, poisons(activation()).back());
                    std::fill_n(p.k.begin(), t * HS, poisons(activation()).back());
                    std::fill_n(p.v.begin(), t * HS, poisons(activation()).back());
                    const Result r = run(p, 0, deterministic);
                    auto tail = [&](const std::vector<double>& x) {
                        return std::vector<double>(x.begin() + (t + window - 1) * 2 * HS, x.end());
                    };
                    expect_same_bits("out", tail(expected.out), tail(r.out));
                    expect_same_bits("dq", tail(expected.dq), tail(r.dq));
                    for (int64_t i = t + window - 1; i < T; i++)
                        EXPECT_EQ(r.lse[size_t(i)], expected.lse[size_t(i)]) << i;
                }
            }
        }
    }
}

// A sequence of NaN changes no bit of its neighbours' results and gradients, nor do tokens after the last sequence.
void expect_isolated(DType dtype, int64_t HS, bool deterministic) {
    SCOPED_TRACE(str("HS ", HS, ", deterministic ", deterministic));
    const Shape shape{{20, 9, 70}, {31, 9, 70}, 2, 1, HS};
    const Problem clean(dtype, shape);
    const Result expected = run(clean, 0, deterministic);
    Problem p = clean;
    const int64_t q_begin = 20 * 2 * HS, q_end = 29 * 2 * HS, k_begin = 31 * HS, k_end = 40 * HS;
    for (auto [x, begin, end] : {std::tuple(&p.q, q_begin, q_end), std::tuple(&p.k, k_begin, k_end),
                                 std::tuple(&p.v, k_begin, k_end), std::tuple(&p.dout, q_begin, q_end)}) {
        std::fill(x->begin() + begin, x->begin() + end, NOT_A_NUMBER);
    }
    const Result r = run(p, 0, deterministic);
    auto without = [](std::vector<double> x, int64_t begin, int64_t end) {
        x.erase(x.begin() + begin, x.begin() + end);
        return x;
    };
    expect_same_bits("out", without(expected.out, q_begin, q_end), without(r.out, q_begin, q_end));
    expect_same_bits("dq", without(expected.dq, q_begin, q_end), without(r.dq, q_begin, q_end));
    expect_same_bits("dk", without(expected.dk, k_begin, k_end), without(r.dk, k_begin, k_end));
    expect_same_bits("dv", without(expected.dv, k_begin, k_end), without(r.dv, k_begin, k_end));

    const Result longer = run(clean, 3, deterministic);
    auto with_zeros = [](std::vector<double> x, int64_t zeros) {
        x.resize(x.size() + size_t(zeros));
        return x;
    };
    expect_same_bits("out", with_zeros(expected.out, 3 * 2 * HS), longer.out);
    expect_same_bits("dq", with_zeros(expected.dq, 3 * 2 * HS), longer.dq);
    expect_same_bits("dk", with_zeros(expected.dk, 3 * HS), longer.dk);
    expect_same_bits("dv", with_zeros(expected.dv, 3 * HS), longer.dv);
    for (int64_t h = 0; h < 2; h++)
        for (int64_t i = 0; i < 102; i++) {
            const double got = longer.lse[size_t(h * 102 + i)];
            EXPECT_EQ(got, i < 99 ? expected.lse[size_t(h * 99 + i)] : -INF);
        }
}

TEST_P(Attention, SequencesAreIsolated) {
    for (const int64_t HS : {12, 64, 128})
        for (const bool deterministic : modes(Problem(activation(), {{1}, {1}, 2, 1, HS})))
            expect_isolated(activation(), HS, deterministic);
}

// q, k, v and their gradients as views into packed rows: the same bits as with separate arrays, and the gaps between
// rows are not written.
TEST_P(Attention, PackedQKV) {
    constexpr int64_t N = 83, NH = 4, NKV = 2, HS = 24, width = (NH + 2 * NKV) * HS,
                      gap = 8;  // keeps the alignment, so that the same kernels run
    const Problem p(activation(), {{50, 33}, {50, 33}, NH, NKV, HS});
    std::vector<double> rows(size_t(N * (width + gap)), NOT_A_NUMBER);
    for (int64_t n = 0; n < N; n++) {
        double* row = rows.data() + n * (width + gap);
        std::copy_n(p.q.data() + n * NH * HS, NH * HS, row);
        std::copy_n(p.k.data() + n * NKV * HS, NKV * HS, row + NH * HS);
        std::copy_n(p.v.data() + n * NKV * HS, NKV * HS, row + (NH + NKV) * HS);
    }
    const TestArray qkv = TestArray::of(activation(), rows, {N, width + gap});
    const TestArray dout = TestArray::of(activation(), p.dout, {N, NH, HS}),
                    out = TestArray::poisoned(activation(), {N, NH, HS});
    const TestArray lse = TestArray::poisoned({NH, N});
    const TestArray cum = TestArray::ints(p.cum_q, {3});
    auto q = [&](const Tensor& t) { return split_heads(t.columns(0, NH * HS), NH); };
    auto k = [&](const Tensor& t) { return split_heads(t.columns(NH * HS, (NH + NKV) * HS), NKV); };
    auto v = [&](const Tensor& t) { return split_heads(t.columns((NH + NKV) * HS, width), NKV); };
    const AttentionSequences sequences{cum, cum, 50, LONG};
    const TestArray scratch = TestArray::scratch(attention_backward_scratch(N, NH, HS, false, LONG));
    attention_forward(out, lse, q(qkv), k(qkv), v(qkv), sequences, p.scale, scratch, Stream{});
    expect_same_bits("out", run(p).out, out.fetch());
    for (const bool deterministic : modes(p)) {
        SCOPED_TRACE(deterministic ? "deterministic" : "not deterministic");
        const Result expected = run(p, 0, deterministic);
        const TestArray dqkv = TestArray::poisoned(activation(), {N, width + gap});
        attention_backward(q(dqkv), k(dqkv), v(dqkv), dout, q(qkv), k(qkv), v(qkv), out, lse, sequences, p.scale,
                           scratch, Stream{}, deterministic);
        const std::vector<double> got = dqkv.fetch();
        expect_gaps_untouched("dqkv", got, width + gap, width);
        for (int64_t n = 0; n < N; n++) {
            auto part = [&](const std::vector<double>& x, int64_t begin, int64_t size) {
                return std::vector<double>(x.begin() + begin, x.begin() + begin + size);
            };
            const int64_t row = n * (width + gap);
            expect_same_bits("dq", part(expected.dq, n * NH * HS, NH * HS), part(got, row, NH * HS));
            expect_same_bits("dk", part(expected.dk, n * NKV * HS, NKV * HS), part(got, row + NH * HS, NKV * HS));
            expect_same_bits("dv", part(expected.dv, n * NKV * HS, NKV * HS),
                             part(got, row + (NH + NKV) * HS, NKV * HS));
        }
    }

    const TestArray without_lse = TestArray::poisoned(activation(), {N, NH, HS});
    attention_forward(without_lse, Tensor{}, q(qkv), k(qkv), v(qkv), sequences, p.scale, scratch, Stream{});
    expect_same_bits("out without lse", out.fetch(), without_lse.fetch());
}

// With enough KV heads each is one task, else their tiles are split over threads: the bits are the same.
// With a count of sequences on the device, and room for more, the bits are the same.
TEST_P(Attention, CountOfSequencesOnTheDevice) {
    using Lengths = std::vector<int64_t>;
    Lengths many(70, 3);
    many[20] = 300;
    many[21] = 0;
    many[69] = 65;
    for (const int64_t HS : {16, 64, 128}) {
        for (const Lengths& lengths : {Lengths{1}, Lengths{257}, Lengths{0, 5, 64, 1, 193, 130, 0, 128}, many}) {
            for (const int64_t window : {0, 40}) {
                const Problem p(activation(), {lengths, lengths, 4, 2, HS, {true, window}});
                for (const auto& [extra, room] : {std::pair<int64_t, int64_t>{0, 0}, {0, 50}, {300, 1}}) {
                    SCOPED_TRACE(str("HS ", HS, ", ", lengths.size(), " sequences, window ", window, ", room ", room));
                    const Result expected = run(p, extra), got = run(p, extra, true, room);
                    for (const auto part : {&Result::out, &Result::lse, &Result::dq, &Result::dk, &Result::dv})
                        ASSERT_EQ(got.*part, expected.*part);
                }
                if (has_nondeterministic(p)) {
                    const Result expected = run(p, 0, false), got = run(p, 0, false, 50);
                    EXPECT_EQ(got.dk, expected.dk);
                    EXPECT_EQ(got.dv, expected.dv);
                }
            }
        }
    }
    // Keys of their own.
    const Problem p(activation(), {{3, 200, 1}, {70, 200, 300}, 4, 2, 64});
    EXPECT_EQ(run(p, 7, true, 9).all(), run(p, 7).all());
}

// out and lse of the forward pass alone. keys: where k and v lie, {} for one after the other. extra and room: see
// run().
Result forward(const Problem& p, const Tensor& k, const Tensor& v, AttentionSequences keys = {}, int64_t extra = 0,
               int64_t room = -1) {
    const auto& [qlens, klens, NH, NKV, HS, mask] = p.shape;
    const int64_t Nq = p.Nq + extra, S = int64_t(qlens.size());
    std::vector<double> queries = p.q;
    queries.resize(size_t(Nq * NH * HS), NOT_A_NUMBER);
    const auto with_room = [&](std::vector<int32_t> cum) {
        cum.resize(cum.size() + size_t(std::max<int64_t>(room, 0)), cum.back());
        return TestArray::ints(cum, {int64_t(cum.size())});
    };
    const TestArray q = TestArray::of(p.dtype, queries, {Nq, NH, HS}), cum_q = with_room(p.cum_q),
                    cum_k = with_room(p.cum_k), count = TestArray::ints({int32_t(S)}, {1}),
                    out = TestArray::poisoned(p.dtype, {Nq, NH, HS}), lse = TestArray::poisoned({NH, Nq}),
                    scratch = TestArray::scratch(attention_forward_scratch());
    AttentionSequences sequences{cum_q, cum_k, p.longest(qlens), p.longest(klens), mask.causal, mask.window, {}};
    if (room >= 0) sequences.count = count;
    sequences.pages = keys.pages;
    sequences.page_rows = keys.page_rows;
    attention_forward(out, lse, q, k, v, sequences, p.scale, scratch, Stream{});
    return {out.fetch(), lse.fetch(), {}, {}, {}, {}};
}
Result forward(const Problem& p, int64_t extra = 0) {
    const int64_t NKV = p.shape.NKV, HS = p.shape.HS;
    return forward(p, TestArray::of(p.dtype, p.k, {p.Nk, NKV, HS}), TestArray::of(p.dtype, p.v, {p.Nk, NKV, HS}), {},
                   extra);
}

// The keys of a problem in a paged cache: each sequence's pages in an order of its own, NaN in rows that no key has.
// Pages before the first query's window are not there.
Result forward_paged(const Problem& p, bool reversed, int64_t extra = 0, int64_t room = -1) {
    const auto& [qlens, klens, NH, NKV, HS, mask] = p.shape;
    const int64_t S = int64_t(qlens.size()), columns = p.longest(klens) / KV_PAGE + 2, row = NKV * HS;
    std::vector<int32_t> table(size_t((S + 1) * columns), -1), rows;
    std::vector<int32_t*> wanted;
    for (int64_t s = 0; s < S; s++) {
        rows.push_back(static_cast<int32_t>(S - s));  // row 0 of the table belongs to nobody
        const int64_t first =
            mask.window ? std::max<int64_t>(klens[size_t(s)] - qlens[size_t(s)] + 1 - mask.window, 0) : 0;
        for (int64_t i = first / KV_PAGE; i * KV_PAGE < klens[size_t(s)]; i++)
            wanted.push_back(&table[size_t(rows.back() * columns + i)]);
    }
    const int64_t used = int64_t(wanted.size());
    for (int64_t i = 0; i < used; i++) *wanted[size_t(i)] = static_cast<int32_t>(reversed ? used - i : i + 1);
    const auto paged = [&](const std::vector<double>& keys) {
        std::vector<double> values(size_t((used + 2) * KV_PAGE * row), NOT_A_NUMBER);
        for (int64_t s = 0; s < S; s++)
            for (int64_t j = 0; j < klens[size_t(s)]; j++) {
                const int64_t page = table[size_t(rows[size_t(s)] * columns + j / KV_PAGE)];
                if (page >= 0)
                    std::copy_n(keys.begin() + (p.cum_k[size_t(s)] + j) * row, row,
                                values.begin() + (page * KV_PAGE + j % KV_PAGE) * row);
            }
        return TestArray::of(p.dtype, values, {(used + 2) * KV_PAGE, NKV, HS});
    };
    rows.resize(size_t(S + std::max<int64_t>(room, 0)));
    const TestArray k = paged(p.k), v = paged(p.v), pages = TestArray::ints(table, {S + 1, columns}),
                    page_rows = TestArray::ints(rows, {int64_t(rows.size())});
    AttentionSequences keys;
    keys.pages = pages;
    keys.page_rows = page_rows;
    return forward(p, k, v, keys, extra, room);
}

// Keys in pages: the oracle's results, the same bits wherever the pages lie, and those of keys in a row.
TEST_P(Attention, KeysInPages) {
    for (const auto& [NH, NKV, HS] :
         {std::tuple<int64_t, int64_t, int64_t>{4, 2, 64}, {2, 1, 128}, {2, 2, 40}, {1, 1, 160}})
        for (const int64_t window : {0, 20, 300}) {
            const Problem p(activation(), {{5, 300, 1, 128}, {133, 700, 128, 128}, NH, NKV, HS, {true, window}});
            SCOPED_TRACE(str("HS ", HS, " window ", window));
            const std::vector<double> out = forward_paged(p, true).out;
            const reference::Attention ref = reference::attention_forward(
                p.q.data(), p.k.data(), p.v.data(), p.cum_q, p.cum_k, NH, NKV, HS, double(p.scale), p.shape.mask);
            expect_close("out", out, ref.out.value, ref.out.mag, 700, HS, p.dtype, 2);
            expect_same_bits("another order", out, forward_paged(p, false).out);
            expect_same_bits("keys in a row", out, run(p).out);
        }
}

#ifndef USE_CUDA
// A query alone, or in a chunk of queries, after the keys of its sequence: the bits that it has in a pass over the
// whole sequence, which is what exact rollouts rest on (rl/exact_forward.h). Windows end on the edges of blocks of keys
// and within them; heads of 300 channels have narrower tiles.
TEST_P(Attention, BitsOfAQueryDependOnItsKeysAlone) {
    constexpr int64_t T = 141;
    for (const auto& [NH, NKV, HS] : {std::tuple<int64_t, int64_t, int64_t>{4, 2, 24}, {1, 1, 300}})
        for (const int64_t window : {0, 1, 20, 64, 77}) {
            const Problem whole(activation(), {{T}, {T}, NH, NKV, HS, {true, window}});
            const std::vector<double> out = run(whole).out;
            for (const int64_t n : {1, 7, 50, 100}) {
                Shape shape{{}, {}, NH, NKV, HS, {true, window}};
                for (int64_t i = 0; i < T; i += n) {
                    shape.qlens.push_back(std::min(n, T - i));
                    shape.klens.push_back(std::min(i + n, T));
                }
                Problem parts(activation(), shape);
                parts.q = whole.q;
                for (size_t s = 0; s < shape.klens.size(); s++)
                    for (const auto& [to, from] : {std::pair(&parts.k, &whole.k), {&parts.v, &whole.v}})
                        std::copy_n(from->begin(), shape.klens[s] * NKV * HS, to->begin() + parts.cum_k[s] * NKV * HS);
                SCOPED_TRACE(str("HS ", HS, " window ", window, " chunks of ", n));
                expect_same_bits("out", forward_paged(parts, true).out, out);
            }
        }
}
#endif

// The last query of each sequence that has queries, alone after the same keys.
Problem last_queries(const Problem& whole) {
    Problem last = whole;
    const int64_t row = whole.shape.NH * whole.shape.HS;
    last.q.clear();
    for (size_t s = 0; s < whole.shape.qlens.size(); s++) {
        if (whole.shape.qlens[s] == 0) continue;
        last.shape.qlens[s] = 1;
        last.q.insert(last.q.end(), &whole.q[size_t((whole.cum_q[s + 1] - 1) * row)],
                      &whole.q[size_t((whole.cum_q[s + 1] - 1) * row)] + row);
    }
    last.cum_q = cumulative(last.shape.qlens);
    last.Nq = last.cum_q.back();
    return last;
}

// Expects the bits that these tokens have in `whole`, and nothing in the `extra` tokens after them.
void expect_rows(const Result& got, const Result& whole, const Shape& shape, const std::vector<int64_t>& tokens,
                 int64_t extra = 0) {
    const int64_t row = shape.NH * shape.HS, Nq = int64_t(whole.lse.size()) / shape.NH;
    std::vector<double> out, lse;
    for (const int64_t t : tokens)
        out.insert(out.end(), &whole.out[size_t(t * row)], &whole.out[size_t(t * row)] + row);
    out.resize(out.size() + size_t(extra * row));
    for (int64_t h = 0; h < shape.NH; h++) {
        for (const int64_t t : tokens) lse.push_back(whole.lse[size_t(h * Nq + t)]);
        lse.insert(lse.end(), size_t(extra), -INF);
    }
    expect_same_bits("out", got.out, out);
    expect_same_bits("lse", got.lse, lse);
}

// A lone query has the bits that it has in a pass over its whole sequence, on the GPU too, where the query heads of a
// KV head are then the rows of one tile: keys in a row and in pages, windows that end on the edges of key blocks and
// within them, more heads than a warp and than a tile has rows, scores that move the softmax's base.
TEST_P(Attention, LoneQueriesHaveTheBitsOfAWholePass) {
    using Lengths = std::vector<int64_t>;
    const Lengths few{129, 300, 1}, all{1, 127, 128, 129, 1000, 40, 256, 300};
    for (const auto& [NH, NKV, HS] : {std::tuple<int64_t, int64_t, int64_t>{3, 3, 64},
                                      {4, 2, 64},
                                      {8, 2, 64},
                                      {16, 2, 64},
                                      {7, 1, 64},
                                      {8, 2, 128},
                                      {14, 2, 80},
                                      {3, 1, 96},
                                      {20, 1, 64},
                                      {64, 1, 128},
                                      {65, 1, 64}}) {
        const Lengths& klens = NH > 8 ? few : all;
        Lengths qlens = klens, tokens;
        if (NH <= 8) qlens[2] = 3;  // fewer queries than keys
        if (NH <= 8) qlens[5] = 0;
        Problem whole(activation(), {qlens, klens, NH, NKV, HS}, 1, 6);
        for (size_t s = 0; s < qlens.size(); s++)
            if (qlens[s] > 0) tokens.push_back(whole.cum_q[s + 1] - 1);
        for (const int64_t window : {0, 20, 128, 300}) {
            SCOPED_TRACE(str("NH ", NH, " NKV ", NKV, " HS ", HS, " window ", window));
            whole.shape.mask.window = window;
            const Problem last = last_queries(whole);
            const Result expected = forward(whole);
            expect_rows(forward(last), expected, whole.shape, tokens);
            expect_rows(forward(last, 3), expected, whole.shape, tokens, 3);
            expect_rows(forward_paged(last, true), expected, whole.shape, tokens);
            expect_rows(forward_paged(last, false, 70, 9), expected, whole.shape, tokens, 70);
        }
    }
}

// The same for every query of a sequence at once, all after the same pages: more tasks than a GPU runs at a time.
TEST_P(Attention, LoneQueriesOfSharedPages) {
    constexpr int64_t T = 400, NH = 8, NKV = 4, pages = (T + KV_PAGE - 1) / KV_PAGE;
    for (const int64_t HS : {64, 128})
        for (const int64_t window : {0, 1, 128, 200}) {
            SCOPED_TRACE(str("HS ", HS, " window ", window));
            const Problem whole(activation(), {{T}, {T}, NH, NKV, HS, {true, window}}, 1, 6);
            const std::vector<int64_t> ones(T, 1);
            Problem lone(activation(), {ones, ones, NH, NKV, HS, {true, window}});
            lone.q = whole.q;
            std::vector<int64_t> tokens;
            for (int64_t t = 0; t < T; t++) {
                tokens.push_back(t);
                lone.shape.klens[size_t(t)] = t + 1;
            }
            lone.cum_k = cumulative(lone.shape.klens);
            std::vector<int32_t> table(pages);
            std::iota(table.begin(), table.end(), 0);
            const auto cache = [&](std::vector<double> keys) {
                keys.resize(size_t(pages * KV_PAGE * NKV * HS), NOT_A_NUMBER);
                return TestArray::of(activation(), keys, {pages * KV_PAGE, NKV, HS});
            };
            const TestArray of_all = TestArray::ints(table, {1, pages}),
                            page_rows = TestArray::ints(std::vector<int32_t>(T), {T});
            AttentionSequences keys;
            keys.pages = of_all;
            keys.page_rows = page_rows;
            expect_rows(forward(lone, cache(whole.k), cache(whole.v), keys), forward(whole), whole.shape, tokens);
        }
}

TEST_P(Attention, Deterministic) {
    for (const Shape& shape : {Shape{{200}, {200}, 2, 1, 40}, Shape{{150}, {181}, 1, 1, 16},
                               Shape{{150}, {119}, 2, 1, 33}, Shape{{30, 80, 7}, {30, 80, 7}, 4, 2, 64},
                               Shape{{150}, {181}, 2, 1, 64, {false, 70}}, Shape{{200}, {90}, 1, 1, 128, {true, 40}},
                               Shape{{40}, {50}, 1, 1, std::min<int64_t>(300, attention_max_head_size())}}) {
        const Problem p(activation(), shape);
        expect_deterministic("attention", [&] { return run(p).all(); });
    }
}

// In the nondeterministic mode, only dq may differ between runs.
TEST_P(Attention, OnlyDqIsNondeterministic) {
    for (const Shape& shape : {Shape{{700}, {700}, 2, 1, 64}, Shape{{30, 400, 7}, {30, 400, 7}, 4, 2, 128}}) {
        const Problem p(activation(), shape);
        expect_deterministic("out, dk and dv", [&] {
            Result r = run(p, 0, false);
            if (has_nondeterministic(p)) r.dq.clear();
            return r.all();
        });
    }
}

#ifdef USE_CUDA
// Whatever cum_q and cum_k hold, kernels end and access nothing outside the tensors (run under compute-sanitizer).
TEST_P(Attention, InvalidSequencesStayInBounds) {
    for (const std::vector<int32_t>& cum :
         {std::vector<int32_t>{-5, 20, 10}, {0, 1000000, 2000000}, {30, 10, 40}, {0, 40, 2147483647}}) {
        Problem p(activation(), {{20, 20}, {20, 20}, 2, 1, 32});
        p.cum_q = p.cum_k = cum;
        for (const bool deterministic : modes(p)) run(p, 0, deterministic);
    }
}
#endif

// The oracle's gradients match central differences of its own forward pass: h²/6 = 2e-11 of a third derivative, and
// rounding of 1e-15/h = 1e-10.
TEST(AttentionOracle, AgreesWithCentralDifferences) {
    const Problem p(DType::F32, {{4, 3}, {6, 2}, 2, 1, 3});
    const double scale = p.scale;
    auto loss = [&](const std::vector<double>& q, const std::vector<double>& k, const std::vector<double>& v) {
        const reference::Values out =
            reference::attention_forward(q.data(), k.data(), v.data(), p.cum_q, p.cum_k, 2, 1, 3, scale).out;
        double sum = 0;
        for (size_t i = 0; i < p.dout.size(); i++) sum += out.value[i] * p.dout[i];
        return sum;
    };
    const reference::Attention f =
        reference::attention_forward(p.q.data(), p.k.data(), p.v.data(), p.cum_q, p.cum_k, 2, 1, 3, scale);
    const reference::AttentionGradients g =
        reference::attention_backward(p.dout.data(), p.q.data(), p.k.data(), p.v.data(), f.out.data(), f.lse.data(),
                                      p.cum_q, p.cum_k, 2, 1, 3, scale);
    constexpr double h = 1e-5;
    for (size_t i = 0; i < p.q.size(); i++) {
        std::vector<double> up = p.q, down = p.q;
        up[i] += h;
        down[i] -= h;
        EXPECT_NEAR(g.dq.value[i], (loss(up, p.k, p.v) - loss(down, p.k, p.v)) / (2 * h), 1e-8) << i;
    }
    for (size_t i = 0; i < p.k.size(); i++) {
        std::vector<double> up = p.k, down = p.k;
        up[i] += h;
        down[i] -= h;
        EXPECT_NEAR(g.dk.value[i], (loss(p.q, up, p.v) - loss(p.q, down, p.v)) / (2 * h), 1e-8) << i;
        up = down = p.v;
        up[i] += h;
        down[i] -= h;
        EXPECT_NEAR(g.dv.value[i], (loss(p.q, p.k, up) - loss(p.q, p.k, down)) / (2 * h), 1e-8) << i;
    }
}

TEST(AttentionErrors, NameTheInvalidArgument) {
    const TestArray q = TestArray::random({10, 4, 8}, 1), k = TestArray::random({10, 2, 8}, 2);
    const TestArray out = TestArray::poisoned({10, 4, 8}), lse = TestArray::poisoned({4, 10});
    const TestArray dk = TestArray::poisoned({10, 2, 8}), dv = TestArray::poisoned({10, 2, 8});
    const TestArray cum = TestArray::ints({0, 10}, {2}), scratch = TestArray::scratch(100);
    auto forward = [&](Tensor q_, Tensor k_, Tensor v_, const std::vector<int32_t>& cum_q, int64_t max_q) {
        const TestArray c = TestArray::ints(cum_q, {int64_t(cum_q.size())});
        attention_forward(out, lse, q_, k_, v_, {c, cum, max_q, 10}, 1, scratch, Stream{});
    };
    const TestArray three = TestArray::random({10, 3, 8}, 2),
                    wide = TestArray::random({1, 1, attention_max_head_size() + 1}, 2);
    expect_error([&] { forward(q, three, three, {0, 10}, 10); }, "attention_forward: 3 KV heads do not divide 4 heads");
    expect_error(
        [&] {
            forward(q, k, q, {0, 10}, 10);
        },
        "attention_forward: v is fp32 [10, 4, 8], expected fp32 [10, 2, 8]");
    expect_error(
        [&] {
            forward(wide, wide, wide, {0, 1}, 1);
        },
        str("attention_forward: head size ", attention_max_head_size() + 1, " lies outside [1, ",
            attention_max_head_size(), "]"));
    expect_error(
        [&] {
            forward(q, k, k, {0, 5, 10}, 10);
        },
        "attention_forward: cum_k is int32 [2], expected int32 [3]");
    expect_error(
        [&] {
            forward(q.tensor().columns(0, 4), k, k, {0, 10}, 10);
        },
        "attention_forward: k is fp32 [10, 2, 8], expected fp32 [10, 2, 4]");
    expect_error(
        [&] {
            attention_backward(out, dk, dv, q, q, k, k, q, lse, {cum, cum, 10, 10}, 1, scratch, Stream{});
        },
        str("attention_backward: scratch is uint8 [100], expected uint8 [", attention_backward_scratch(10, 4, 8),
            "] or more"));
    const TestArray enough = TestArray::scratch(attention_backward_scratch(10, 4, 8));
    expect_error(
        [&] {
            attention_backward(out, dk, dv, q, q, k, k, q, lse, {cum, cum, 10, 10}, 1, enough, Stream{}, true,
                               {lse, lse});
        },
        "attention_backward: sums of the gradients are not computed here (attention.h)");
    expect_error(
        [&] {
            attention_forward(out, lse, q, k, k, {cum, cum, 10, 10}, 0, scratch, Stream{});
        },
        "attention_forward: scale is 0; it must be positive");
    expect_error(
        [&] {
            attention_forward(out, lse, q, k, k, {cum, cum, 10, 10, true, -1}, 1, scratch, Stream{});
        },
        "attention_forward: window is -1; it must be 0 (no window) or positive");
    expect_error(
        [&] {
            attention_forward(out, lse, q, k, k, {cum, cum, 10, (int64_t(1) << 30) + 1}, 1, scratch, Stream{});
        },
        "attention_forward: a sequence of 1073741825 tokens; at most 1073741824 are supported");
#ifdef USE_CUDA
    const TestArray half = TestArray::random(DType::BF16, {10, 2, 8}, 2);
    expect_error(
        [&] {
            attention_forward(out, lse, q, k, half, {cum, cum, 10, 10}, 1, scratch, Stream{});
        },
        "attention_forward: v is bf16 [10, 2, 8], expected fp32 [10, 2, 8]");
#else
    // Only the CPU checks the contents of cum_q and cum_k.
    expect_error([&] { forward(q, k, k, {1, 10}, 10); }, "attention_forward: cum_q[0] is 1, expected 0");
    expect_error(
        [&] {
            forward(q, k, k, {0, 11}, 11);
        },
        "attention_forward: cum_q ends at 11, past the 10 tokens of the tensor");
    expect_error(
        [&] {
            forward(q, k, k, {0, 10}, 9);
        },
        "attention_forward: sequence 0 of cum_q has 10 tokens, more than the given maximum, 9");
    const TestArray falling = TestArray::ints({0, 6, 4}, {3});
    expect_error(
        [&] {
            attention_forward(out, lse, q, k, k, {falling, falling, 10, 10}, 1, scratch, Stream{});
        },
        "attention_forward: cum_q decreases after sequence 1");
#endif
}

}  // namespace

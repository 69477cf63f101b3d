// Linear attention against the oracle: lengths, head sizes and numbers of heads in all pairs, attention types linear
// and gated_linear and what lies between them, states, packed and strided rows; and the mistakes known from others: a
// feature that becomes 0 for very negative inputs, decays that overflow, gradients that cancel, a result that depends
// on the chunk.
#include "kernels/linear_attention/linear_attention.h"

#include <algorithm>
#include <limits>
#include <set>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"

namespace {

using Form = LinearAttentionType::Form;
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

struct Shape {
    std::vector<int64_t> lengths;  // of each sequence
    int64_t NH, NKV, E, M;
};

struct Type {
    FeatureMap features = FeatureMap::EluPlusOne;
    bool normalise = true, gated = false, states = false;
    LinearAttentionType arguments(Form form) const { return {features, normalise, form}; }
};
const Type LINEAR{}, GATED_LINEAR{FeatureMap::Identity, false, true}, RAW{FeatureMap::Identity, false, false},
    FEATURES{FeatureMap::EluPlusOne, false, false}, GATED_NORMALISED{FeatureMap::EluPlusOne, true, true};

Type with_states(Type type) {
    type.states = true;
    return type;
}

// All inputs of one problem. Values may be changed before run().
struct Problem {
    DType dtype;
    Shape shape;
    Type type;
    std::vector<int32_t> cum{0};
    int64_t N, S;
    std::vector<double> q, k, v, dout;                               // rounded to the dtype
    std::vector<double> gate, initial, initial_z, dfinal, dfinal_z;  // empty: not given

    Problem(DType T, const Shape& s, const Type& type_, uint64_t seed = 1)
        : dtype(T), shape(s), type(type_), S(int64_t(s.lengths.size())) {
        for (const int64_t n : s.lengths) cum.push_back(cum.back() + int32_t(n));
        N = cum.back();
        q = random(N * s.NH * s.E, seed);
        k = random(N * s.NKV * s.E, seed + 1);
        v = random(N * s.NKV * s.M, seed + 2);
        dout = random(N * s.NH * s.M, seed + 3);
        if (type.gated) {  // decays between none and nearly all, most of them slow
            const TestArray normal = TestArray::random({N, s.NKV}, seed + 4);
            for (const double x : normal.values()) gate.push_back(rounded(DType::F32, -std::exp(1.5 * x - 3)));
        }
        if (!type.states) return;
        initial = TestArray::random({S, s.NKV, s.E, s.M}, seed + 5).values();
        dfinal = TestArray::random({S, s.NKV, s.E, s.M}, seed + 6).values();
        if (!type.normalise) return;
        const TestArray normal = TestArray::random({S, s.NKV, s.E}, seed + 7);
        for (const double x : normal.values()) initial_z.push_back(std::fabs(x) * 4);  // a sum of features
        dfinal_z = TestArray::random({S, s.NKV, s.E}, seed + 8).values();
    }
    // n numbers, of which a prime number are different: drawing them is what takes the time of a large problem.
    std::vector<double> random(int64_t n, uint64_t seed) const {
        const int64_t different = std::min<int64_t>(n, 65537);
        std::vector<double> values = TestArray::random(dtype, {different}, seed).values();
        values.resize(size_t(n));
        for (int64_t i = different; i < n; i++) values[size_t(i)] = values[size_t(i - different)];
        return values;
    }
    reference::LinearAttentionInputs inputs() const {
        auto given = [](const std::vector<double>& x) { return x.empty() ? nullptr : x.data(); };
        return {q.data(),       k.data(),         v.data(), given(gate),
                given(initial), given(initial_z), cum,      shape.NH,
                shape.NKV,      shape.E,          shape.M,  type.features == FeatureMap::EluPlusOne,
                type.normalise};
    }
    int64_t longest() const {
        return shape.lengths.empty() ? 0 : *std::max_element(shape.lengths.begin(), shape.lengths.end());
    }
};

struct Result {
    std::vector<double> out, norm, final, final_z, dq, dk, dv, dgate, dinitial, dinitial_z;
    std::vector<double> all() const {
        std::vector<double> values;
        for (const auto* x : {&out, &norm, &final, &final_z, &dq, &dk, &dv, &dgate, &dinitial, &dinitial_z})
            values.insert(values.end(), x->begin(), x->end());
        return values;
    }
};

// An input that may not be given, an output that may not be asked for.
struct Maybe {
    std::vector<TestArray> array;
    static Maybe of(bool given, const std::vector<double>& values, std::initializer_list<int64_t> shape) {
        Maybe m;
        if (given) m.array.push_back(TestArray::of(values, shape));
        return m;
    }
    static Maybe poisoned(bool wanted, std::initializer_list<int64_t> shape) {
        Maybe m;
        if (wanted) m.array.push_back(TestArray::poisoned(shape));
        return m;
    }
    operator Tensor() const { return array.empty() ? Tensor{} : array[0].tensor(); }
    std::vector<double> fetch() const { return array.empty() ? std::vector<double>{} : array[0].fetch(); }
};

// extra: tokens after the last sequence.
Result run(const Problem& p, Form form = Form::Automatic, int64_t extra = 0) {
    const auto [lengths, NH, NKV, E, M] = p.shape;
    const int64_t N = p.N + extra, S = p.S;
    const bool z = p.type.normalise, states = p.type.states;
    auto padded = [](std::vector<double> values, int64_t n) {
        values.resize(size_t(n), NOT_A_NUMBER);
        return values;
    };
    const TestArray q = TestArray::of(p.dtype, padded(p.q, N * NH * E), {N, NH, E}),
                    k = TestArray::of(p.dtype, padded(p.k, N * NKV * E), {N, NKV, E}),
                    v = TestArray::of(p.dtype, padded(p.v, N * NKV * M), {N, NKV, M}),
                    dout = TestArray::of(p.dtype, padded(p.dout, N * NH * M), {N, NH, M});
    const Maybe gate = Maybe::of(p.type.gated, padded(p.gate, N * NKV), {N, NKV});
    const Maybe initial = Maybe::of(states, p.initial, {S, NKV, E, M}),
                initial_z = Maybe::of(states && z, p.initial_z, {S, NKV, E}),
                dfinal = Maybe::of(states, p.dfinal, {S, NKV, E, M}),
                dfinal_z = Maybe::of(states && z, p.dfinal_z, {S, NKV, E});
    const TestArray out = TestArray::poisoned(p.dtype, {N, NH, M}), dq = TestArray::poisoned(p.dtype, {N, NH, E}),
                    dk = TestArray::poisoned(p.dtype, {N, NKV, E}), dv = TestArray::poisoned(p.dtype, {N, NKV, M});
    const Maybe norm = Maybe::poisoned(z, {NH, N}), final = Maybe::poisoned(states, {S, NKV, E, M}),
                final_z = Maybe::poisoned(states && z, {S, NKV, E}), dinitial = Maybe::poisoned(states, {S, NKV, E, M}),
                dinitial_z = Maybe::poisoned(states && z, {S, NKV, E}), dgate = Maybe::poisoned(p.type.gated, {N, NKV});
    const TestArray cum = TestArray::ints(p.cum, {S + 1});
    const LinearAttentionSequences sequences{cum, p.longest()};
    const LinearAttentionSizes sizes{N, S, NH, NKV, E, M, p.longest(), states};
    const LinearAttentionType type = p.type.arguments(form);
    const TestArray forward = TestArray::scratch(linear_attention_forward_scratch(sizes)),
                    backward = TestArray::scratch(linear_attention_backward_scratch(sizes));
    linear_attention_forward(out, norm, {final, final_z}, q, k, v, gate, {initial, initial_z}, sequences, type, forward,
                             Stream{});
    linear_attention_backward(dq, dk, dv, dgate, {dinitial, dinitial_z}, dout, {dfinal, dfinal_z}, q, k, v, gate,
                              {initial, initial_z}, out, norm, sequences, type, backward, Stream{});
    return {out.fetch(), norm.fetch(), final.fetch(), final_z.fetch(),  dq.fetch(),
            dk.fetch(),  dv.fetch(),   dgate.fetch(), dinitial.fetch(), dinitial_z.fetch()};
}

// In 16 bits features, ĝ, scores or states, what a gate has scaled, and results are rounded. In the gradients of
// normalised features the part of a state that all features share cancels; the error that rounding it made remains. It
// is E[φ²]/Var[φ] = 3.2 times as large, as a square, as what is left, so that a state counts for three.
constexpr int ROUNDINGS = 5, ROUNDINGS_OF_NORMALISED = 7;

// |got − ref| of each element within what its terms' roundings allow, whatever cancels between the terms.
void expect_within_magnitude(const char* what, const std::vector<double>& got, const std::vector<double>& ref,
                             const std::vector<double>& mag) {
    ASSERT_EQ(got.size(), ref.size()) << what;
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_LE(std::fabs(got[i] - ref[i]), ROUNDINGS_OF_NORMALISED * 0x1p-8 * mag[i] + 0x1p-100)
            << what << "[" << i << "]: got " << got[i] << ", expected " << ref[i];
}

// row: elements of a head. cancels: of the gradients of normalised features, whose terms nearly cancel where a query
// sees few keys, so that in 16 bits short sequences hold no digits.
void compare(const Problem& p, const char* what, const std::vector<double>& got, const std::vector<double>& ref,
             const std::vector<double>& mag, int64_t row, bool cancels = false) {
    if (got.empty()) return;
    const int64_t K = std::max({p.longest(), p.shape.E, p.shape.M});
    if (p.dtype == DType::F32) return expect_close(what, got, ref, mag, K, row);
    if (cancels && p.longest() < 63) return expect_within_magnitude(what, got, ref, mag);
    expect_close(what, got, ref, mag, K, cancels || row < 16 ? int64_t(got.size()) : row, p.dtype,
                 cancels ? ROUNDINGS_OF_NORMALISED : ROUNDINGS);
}

// Everything, by the recurrent oracle.
void check(const Problem& p, Form form = Form::Automatic) {
    const auto [lengths, NH, NKV, E, M] = p.shape;
    const Result got = run(p, form);
    const reference::LinearAttentionInputs inputs = p.inputs();
    const reference::LinearAttentionResult f = reference::linear_attention_forward(inputs);
    const reference::LinearAttentionGradients g = reference::linear_attention_backward(
        inputs, p.dout.data(), got.out.data(), got.norm.data(), p.dfinal.empty() ? nullptr : p.dfinal.data(),
        p.dfinal_z.empty() ? nullptr : p.dfinal_z.data());
    const bool normalised = p.type.normalise;
    compare(p, "out", got.out, f.out.value, f.out.mag, M);
    compare(p, "norm", got.norm, f.norm.value, f.norm.mag, 1);
    compare(p, "final.s", got.final, f.final.value, f.final.mag, M);
    compare(p, "final.z", got.final_z, f.final_z.value, f.final_z.mag, E);
    compare(p, "dv", got.dv, g.dv.value, g.dv.mag, M);
    compare(p, "dq", got.dq, g.dq.value, g.dq.mag, E, normalised);
    compare(p, "dk", got.dk, g.dk.value, g.dk.mag, E, normalised);
    compare(p, "dinitial.s", got.dinitial, g.dinitial.value, g.dinitial.mag, M);
    compare(p, "dinitial.z", got.dinitial_z, g.dinitial_z.value, g.dinitial_z.mag, E, true);
    if (!p.type.gated) return;
    if (p.dtype == DType::F32)
        expect_close("dgate", got.dgate, g.dgate.value, g.dgate.mag, p.longest(), 1);
    else if (normalised)  // φ(q)·dφ(q) is 0 but for ε: what is normalised does not see the length of a query
        expect_within_magnitude("dgate", got.dgate, g.dgate.value, g.dgate.mag);
    else
        // A running sum of differences: each chunk of 64 adds the roundings of two states.
        expect_close("dgate", got.dgate, g.dgate.value, g.dgate.mag, p.longest(), int64_t(got.dgate.size()), p.dtype,
                     int(ROUNDINGS + 2 * std::min<int64_t>(p.longest() / 64, 32)));
}

void check(DType dtype, const Shape& shape, const Type& type, Form form = Form::Automatic) {
    SCOPED_TRACE(str("T ", shape.lengths.empty() ? 0 : shape.lengths[0], " NH ", shape.NH, " NKV ", shape.NKV, " E ",
                     shape.E, " M ", shape.M, type.normalise ? ", normalised" : "", type.gated ? ", gated" : "",
                     type.states ? ", with states" : "", form == Form::Recurrent ? ", recurrent" : ""));
    check(Problem(dtype, shape, type), form);
}

// Columns [begin, end) of the given rows of x [rows, columns].
std::vector<double> block(const std::vector<double>& x, int64_t columns, int64_t first_row, int64_t rows, int64_t begin,
                          int64_t end) {
    std::vector<double> part(size_t(rows * (end - begin)));
    for (int64_t r = 0; r < rows; r++)
        std::copy_n(x.begin() + (first_row + r) * columns + begin, end - begin, part.begin() + r * (end - begin));
    return part;
}

// Rows of single tokens of one sequence and KV head, by the oracle of pairs: the first and the last, the edges of
// chunks, and any; 4,096 numbers or more.
void check_samples(const Problem& p) {
    const auto [lengths, NH, NKV, E, M] = p.shape;
    const Result got = run(p);
    const int64_t group = NH / NKV, sequence = p.S - 1, kv = NKV / 2, first = p.cum[size_t(sequence)], T = p.longest();
    ASSERT_EQ(lengths[size_t(sequence)], T);
    auto query_heads = [&](const std::vector<double>& x, int64_t size) {
        return block(x, NH * size, first, T, kv * group * size, (kv + 1) * group * size);
    };
    auto kv_head = [&](const std::vector<double>& x, int64_t size) {
        return block(x, NKV * size, first, T, kv * size, (kv + 1) * size);
    };
    Problem part(p.dtype, {{T}, group, 1, E, M}, p.type);
    part.q = query_heads(p.q, E);
    part.k = kv_head(p.k, E);
    part.v = kv_head(p.v, M);
    part.dout = query_heads(p.dout, M);
    if (p.type.gated) part.gate = kv_head(p.gate, 1);
    const std::vector<double> out = query_heads(got.out, M), dq = query_heads(got.dq, E), dk = kv_head(got.dk, E),
                              dv = kv_head(got.dv, M);
    std::vector<double> norm;
    if (p.type.normalise) norm = block(got.norm, p.N, kv * group, group, first, first + T);
    const reference::LinearAttentionInputs inputs = part.inputs();
    const reference::LinearAttentionPairs pairs(inputs, part.dout.data(), out.data(), norm.data());
    std::vector<double> x[4], ref[4], mag[4];
    auto add = [&](int i, const std::vector<double>& all, int64_t at, const reference::Values& row) {
        const int64_t n = int64_t(row.value.size());
        x[i].insert(x[i].end(), all.begin() + at * n, all.begin() + (at + 1) * n);
        ref[i].insert(ref[i].end(), row.value.begin(), row.value.end());
        mag[i].insert(mag[i].end(), row.mag.begin(), row.mag.end());
    };
    const int64_t samples = std::max<int64_t>(8, 2048 / (E + M));
    for (int64_t i = 0; i < samples; i++) {
        const Philox4 r = philox(7, uint64_t(i), 0);
        const int64_t edges[] = {0, T - 1, 63, 64, 65, T / 2, 1023, 1024};
        const int64_t t = std::clamp<int64_t>(i < 8 ? edges[i] : r.v[0] % T, 0, T - 1), h = r.v[1] % group;
        add(0, out, t * group + h, pairs.out_row(t, h, 0));
        add(1, dq, t * group + h, pairs.dq_row(t, h, 0));
        add(2, dk, t, pairs.dk_row(t, 0, T));
        add(3, dv, t, pairs.dv_row(t, 0, T));
    }
    const char* names[] = {"out", "dq", "dk", "dv"};
    for (int i = 0; i < 4; i++)
        compare(p, names[i], x[i], ref[i], mag[i], i == 0 || i == 3 ? M : E, (i == 1 || i == 2) && p.type.normalise);
}

class LinearAttentionTest : public DTypeTest {};
#ifdef USE_CUDA
INSTANTIATE_TEST_SUITE_P(Op, LinearAttentionTest, testing::Values(DType::F32, DType::BF16),
                         [](const auto& test) { return dtype_name(test.param); });
#else
INSTANTIATE_TEST_SUITE_P(Op, LinearAttentionTest, testing::Values(DType::F32),
                         [](const auto& test) { return dtype_name(test.param); });
#endif

// The oracle is slow under the address sanitizer, and longer sequences touch memory in no other way.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t LONGEST = 1000;
#else
constexpr int64_t LONGEST = 65536;
#endif

// Every length meets every size of heads, every length every number of heads, every size every number of heads: by the
// cheapest problem that has the pair, linear and gated_linear alternately. What would take the oracle more than 1e9
// multiply-adds is sampled.
TEST_P(LinearAttentionTest, AllPairsOfSizes) {
    const int64_t lengths[] = {1, 2, 15, 17, 63, 64, 65, 100, 127, 129, 500, 1000, 2048, 8192};
    const std::pair<int64_t, int64_t> sizes[] = {{64, 64}, {128, 128}, {60, 60},  {25, 64},
                                                 {64, 32}, {80, 112},  {10, 255}, {256, 256}};
    const int64_t heads[] = {1, 12, 39, 40, 41, 96};  // sequences · heads
    struct Case {
        int64_t T, size, heads, work;
    };
    std::vector<Case> cases;
    int64_t num_lengths = 0;
    for (const int64_t T : lengths) {
        if (T > LONGEST) continue;
        num_lengths++;
        for (int64_t size = 0; size < 8; size++)
            for (const int64_t BH : heads)
                if (T * BH * (sizes[size].first + sizes[size].second) <= 9000000)  // what fits into seconds
                    cases.push_back({T, size, BH, T * sizes[size].first * sizes[size].second * BH});
    }
    std::stable_sort(cases.begin(), cases.end(), [](const Case& a, const Case& b) { return a.work < b.work; });
    std::set<std::pair<int64_t, int64_t>> seen;
    int64_t checked = 0;
    for (const Case& c : cases) {
        const std::pair<int64_t, int64_t> pairs[] = {
            {c.T, -1 - c.size}, {c.T, 100000 + c.heads}, {-1 - c.size, c.heads}};
        bool covers = false;
        for (const auto& pair : pairs) covers = seen.insert(pair).second || covers;
        if (!covers) continue;
        const auto [E, M] = sizes[c.size];
        const int64_t B = c.heads % 3 == 0 ? 3 : 1, NH = c.heads / B;  // 12 and 96 heads: of three sequences
        const Shape shape{std::vector<int64_t>(size_t(B), c.T), NH, NH % 2 == 0 ? NH / 2 : NH, E, M};
        SCOPED_TRACE(
            str("T ", c.T, ", ", c.heads, " heads of ", E, " x ", M, checked % 2 ? ", gated" : ", normalised"));
        const Problem p(activation(), shape, checked % 2 ? GATED_LINEAR : LINEAR);
        if (c.work <= (1 << 20))
            check(p);
        else
            check_samples(p);
        checked++;
        if (HasFatalFailure()) return;
    }
    EXPECT_GE(checked, num_lengths * 8);
}

TEST_P(LinearAttentionTest, VeryLong) {
    if (LONGEST < 65536) GTEST_SKIP() << "too slow under the address sanitizer";
    for (const Type& type : {LINEAR, GATED_LINEAR}) check_samples(Problem(activation(), {{65536}, 1, 1, 64, 64}, type));
}

// Enough tokens and heads for a GPU to split sequences into long ranges, whose states are made of two halves.
TEST_P(LinearAttentionTest, ManyHeads) {
    for (const Type& type : {LINEAR, GATED_LINEAR})
        check_samples(Problem(activation(), {{900, 2200, 2100, 2200}, 30, 30, 16, 16}, type));
}

TEST_P(LinearAttentionTest, Types) {
    for (const Type& type : {LINEAR, GATED_LINEAR, RAW, FEATURES, GATED_NORMALISED})
        for (const Form form : {Form::Recurrent, Form::Chunked}) {
            check(activation(), {{150}, 2, 1, 32, 24}, type, form);
            check(activation(), {{70, 3, 129}, 4, 2, 20, 48}, with_states(type), form);
        }
}

TEST_P(LinearAttentionTest, PackedSequencesAndStates) {
    for (const Type& type : {LINEAR, GATED_LINEAR, GATED_NORMALISED}) {
        check(activation(), {{3, 2, 5}, 2, 1, 8, 8}, type);
        check(activation(), {{0, 1, 70, 0, 1, 16, 0}, 2, 2, 32, 32}, type);
        check(activation(), {{0, 1, 70, 0, 1, 16, 0}, 2, 2, 32, 32}, with_states(type));
        check(activation(), {{}, 2, 2, 8, 8}, type);
        check(activation(), {{0}, 2, 2, 8, 8}, with_states(type));
        check(activation(), {{700, 1, 2100}, 2, 1, 16, 16}, with_states(type));  // several splits
    }
}

TEST_P(LinearAttentionTest, MultiQueryGroupedQueryAndMultiHead) {
    for (const int64_t NKV : {1, 2, 3, 6})
        for (const Type& type : {LINEAR, GATED_LINEAR}) check(activation(), {{90, 20}, 6, NKV, 24, 40}, type);
}

// Heads beyond 256 take the scan.
TEST_P(LinearAttentionTest, LargeHeads) {
    check(activation(), {{33}, 2, 1, 300, 20}, LINEAR);
    check(activation(), {{33}, 2, 2, 20, 511}, with_states(GATED_LINEAR));
    check(activation(), {{20}, 1, 1, 512, 512}, GATED_NORMALISED);
}

// Where a token sees itself alone, dq and dk are ε/d of their terms: the terms must cancel to a few roundings.
TEST_P(LinearAttentionTest, OneToken) {
    const double u = activation() == DType::F32 ? 0x1p-24 : 0x1p-9;
    for (const int64_t E : {16, 64, 128})
        for (const Form form : {Form::Recurrent, Form::Chunked}) {
            SCOPED_TRACE(str("heads of ", E, form == Form::Recurrent ? ", recurrent" : ", chunked"));
            const Problem p(activation(), {std::vector<int64_t>(30, 1), 1, 1, E, E}, LINEAR);
            const Result got = run(p, form);
            const reference::LinearAttentionInputs inputs = p.inputs();
            const reference::LinearAttentionResult f = reference::linear_attention_forward(inputs);
            const reference::LinearAttentionGradients exact = reference::linear_attention_backward(
                inputs, p.dout.data(), f.out.data(), f.norm.data(), nullptr, nullptr);
            const size_t row = size_t(E);
            for (size_t t = 0; t < 30; t++) {
                double gg = 0, vv = 0, q_max = 0, k_max = 0;
                for (size_t i = t * row; i < (t + 1) * row; i++) {
                    gg += p.dout[i] * p.dout[i];
                    vv += p.v[i] * p.v[i];
                    q_max = std::max(q_max, reference::feature(p.q[i], true).value);
                    k_max = std::max(k_max, reference::feature(p.k[i], true).value);
                }
                const double bound = 16 * u * std::sqrt(gg * vv) / f.norm.value[t];
                for (size_t i = t * row; i < (t + 1) * row; i++) {
                    EXPECT_LE(std::fabs(got.dq[i] - exact.dq.value[i]), bound * k_max) << i;
                    EXPECT_LE(std::fabs(got.dk[i] - exact.dk.value[i]), bound * q_max) << i;
                }
            }
        }
}

// Features of −100 are 0 in fp32, and then d is ε alone; of −20 they are small and must not be.
TEST_P(LinearAttentionTest, VeryNegativeInputs) {
    for (const double x : {-20.0, -100.0}) {
        Problem p(activation(), {{70}, 2, 1, 16, 16}, LINEAR);
        std::fill(p.k.begin(), p.k.begin() + 40 * 16, x);
        std::fill(p.q.begin() + 20 * 32, p.q.begin() + 60 * 32, x);
        const Result r = run(p);
        for (const double y : r.all()) ASSERT_TRUE(std::isfinite(y));
        if (x == -20) {
            std::fill(p.q.begin(), p.q.end(), 100.0);  // d = 16·101·e^−20·(t + 1) + ε, of which ε is little
            const Result small = run(p);
            for (int64_t t = 0; t < 40; t++) {
                const double d = 16 * 101 * std::exp(-20.0) * double(t + 1) + 1e-6;
                // φ rounded to bf16 errs by 2⁻⁸, for q and for k: 0.8%. In fp32, 640 terms of one sign: some u.
                EXPECT_NEAR(small.norm[size_t(t)], d, d * (activation() == DType::F32 ? 1e-5 : 2e-2)) << t;
            }
        }
    }
}

// Decays that forget all, at once or within a chunk, and gates of 0.
TEST_P(LinearAttentionTest, Gates) {
    Problem p(activation(), {{200}, 2, 1, 16, 16}, GATED_LINEAR);
    for (const size_t t : {5, 64, 100, 101}) p.gate[t] = -100;
    check(p);
    std::fill(p.gate.begin(), p.gate.end(), -100.0);
    check(p);
    std::fill(p.gate.begin(), p.gate.end(), std::log(0.9f));  // RetNet
    check(p);

    std::fill(p.gate.begin(), p.gate.end(), 0.0);
    for (const Form form : {Form::Recurrent, Form::Chunked}) {
        Problem plain = p;
        plain.type.gated = false;
        plain.gate.clear();
        const Result gated = run(p, form), raw = run(plain, form);
        expect_same_bits("out", raw.out, gated.out);
        expect_same_bits("dq", raw.dq, gated.dq);
        expect_same_bits("dk", raw.dk, gated.dk);
        expect_same_bits("dv", raw.dv, gated.dv);
    }
}

// fast-transformers' own cases: the causal product of numbers in [0, 1), and 10 sequences of 4 heads of 25 x 64, where
// the parallel form must equal the recurrent one. 1e-5 is their bound of the relative error.
TEST(LinearAttentionFP32, MatchesFastTransformers) {
    for (uint64_t draw = 0; draw < 3; draw++) {
        const Philox4 r = philox(11, draw, 0);
        const int64_t E = 10 + r.v[0] % 502, M = 10 + r.v[1] % 502;
        Problem p(DType::F32, {{100}, 2, 2, E, M}, RAW);
        for (auto* x : {&p.q, &p.k, &p.v, &p.dout})
            for (size_t i = 0; i < x->size(); i++)
                (*x)[i] = float(uniform01(philox(12 + draw, i, uint64_t(x == &p.q)).v[0], 0));
        const Result got = run(p);
        const reference::LinearAttentionInputs inputs = p.inputs();
        const reference::LinearAttentionResult f = reference::linear_attention_forward(inputs);
        const reference::LinearAttentionGradients g =
            reference::linear_attention_backward(inputs, p.dout.data(), nullptr, nullptr, nullptr, nullptr);
        auto worst = [](const std::vector<double>& x, const std::vector<double>& ref) {
            double error = 0;
            for (size_t i = 0; i < x.size(); i++) error = std::max(error, std::fabs(x[i] / ref[i] - 1));
            return error;
        };
        EXPECT_LT(worst(got.out, f.out.value), 1e-5) << E << " x " << M;
        EXPECT_LT(worst(got.dq, g.dq.value), 1e-5) << E << " x " << M;
        EXPECT_LT(worst(got.dk, g.dk.value), 1e-5) << E << " x " << M;
        EXPECT_LT(worst(got.dv, g.dv.value), 1e-5) << E << " x " << M;
    }
    const Problem p(DType::F32, {std::vector<int64_t>(10, 100), 4, 4, 25, 64}, LINEAR);
    const Result parallel = run(p, Form::Chunked), recurrent = run(p, Form::Recurrent);
    const auto f = reference::linear_attention_forward(p.inputs());
    expect_close("parallel", parallel.out, recurrent.out, f.out.mag, 100, 64);
}

// Later tokens change no bit of the outputs before them. In 16 bits heads of a multiple of 8 have kernels of their own.
TEST_P(LinearAttentionTest, FutureTokensDoNotAffectPastOutputs) {
    for (const auto& [E, T] : {std::pair<int64_t, int64_t>{20, 1300}, {24, 1300}, {128, 130}})
        for (const Type& type : {LINEAR, GATED_LINEAR}) {
            SCOPED_TRACE(str("heads of ", E, type.gated ? ", gated" : ", normalised"));
            const Problem clean(activation(), {{T}, 2, 1, E, E}, type);
            const Result expected = run(clean);
            for (const int64_t t : {1, 16, 17, 63, 64, 65, 100, 1024, 1299, 129}) {
                if (t >= T) continue;
                Problem p = clean;
                std::fill(p.q.begin() + t * 2 * E, p.q.end(), rounded(activation(), 300));
                std::fill(p.k.begin() + t * E, p.k.end(), rounded(activation(), 500));
                std::fill(p.v.begin() + t * E, p.v.end(), rounded(activation(), -1e6));
                if (type.gated) std::fill(p.gate.begin() + t, p.gate.end(), -7.0);
                const Result r = run(p);
                auto head = [n = t * 2 * E](const std::vector<double>& x) {
                    return std::vector<double>(x.begin(), x.begin() + n);
                };
                expect_same_bits("out", head(expected.out), head(r.out));
                expect_same_bits("dq", head(expected.dq), head(r.dq));
            }
        }
}

// A sequence of NaN changes no bit of its neighbours', gradients included; nor do tokens after the last sequence, which
// get zeros.
TEST_P(LinearAttentionTest, SequencesAreIsolated) {
    for (const int64_t E : {12, 16, 72})
        for (const Type& type : {LINEAR, GATED_LINEAR}) {
            SCOPED_TRACE(str("heads of ", E, type.gated ? ", gated" : ", normalised"));
            const Problem clean(activation(), {{20, 9, 70}, 2, 1, E, E}, type);
            const Result expected = run(clean);
            Problem p = clean;
            for (auto [x, row] :
                 {std::pair(&p.q, 2 * E), std::pair(&p.k, E), std::pair(&p.v, E), std::pair(&p.dout, 2 * E)})
                std::fill(x->begin() + 20 * row, x->begin() + 29 * row, NOT_A_NUMBER);
            if (type.gated) std::fill(p.gate.begin() + 20, p.gate.begin() + 29, NOT_A_NUMBER);
            const Result r = run(p);
            auto without = [](std::vector<double> x, int64_t row) {
                x.erase(x.begin() + 20 * row, x.begin() + 29 * row);
                return x;
            };
            expect_same_bits("out", without(expected.out, 2 * E), without(r.out, 2 * E));
            expect_same_bits("dq", without(expected.dq, 2 * E), without(r.dq, 2 * E));
            expect_same_bits("dk", without(expected.dk, E), without(r.dk, E));
            expect_same_bits("dv", without(expected.dv, E), without(r.dv, E));
            if (type.gated) expect_same_bits("dgate", without(expected.dgate, 1), without(r.dgate, 1));

            const Result longer = run(clean, Form::Automatic, 3);
            auto extended = [](std::vector<double> x, int64_t row) {
                x.resize(x.size() + size_t(3 * row), 0.0);
                return x;
            };
            expect_same_bits("out and zeros", extended(expected.out, 2 * E), longer.out);
            expect_same_bits("dq and zeros", extended(expected.dq, 2 * E), longer.dq);
            expect_same_bits("dk and zeros", extended(expected.dk, E), longer.dk);
            expect_same_bits("dv and zeros", extended(expected.dv, E), longer.dv);
            if (type.gated) expect_same_bits("dgate and zeros", extended(expected.dgate, 1), longer.dgate);
        }
}

// q, k and v as views into packed rows with gaps between them, the gradients likewise: the bits of separate tensors
// where rows are aligned to 16 bytes, and of other gaps where they are not and other kernels may take them.
TEST_P(LinearAttentionTest, PackedRows) {
    constexpr int64_t NH = 4, NKV = 2, HS = 24, width = (NH + 2 * NKV) * HS;
    const Problem p(activation(), {{100, 30}, NH, NKV, HS, HS}, LINEAR);
    Result expected = run(p);
    for (const int64_t gap : {8, 5, 3}) {
        const int64_t N = p.N;
        std::vector<double> rows(size_t(N * (width + gap)), NOT_A_NUMBER);
        for (int64_t n = 0; n < N; n++) {
            double* row = rows.data() + n * (width + gap);
            std::copy_n(p.q.data() + n * NH * HS, NH * HS, row);
            std::copy_n(p.k.data() + n * NKV * HS, NKV * HS, row + NH * HS);
            std::copy_n(p.v.data() + n * NKV * HS, NKV * HS, row + (NH + NKV) * HS);
        }
        const TestArray qkv = TestArray::of(activation(), rows, {N, width + gap}),
                        dqkv = TestArray::poisoned(activation(), {N, width + gap}),
                        dout = TestArray::of(activation(), p.dout, {N, NH, HS}),
                        out = TestArray::poisoned(activation(), {N, NH, HS}), norm = TestArray::poisoned({NH, N}),
                        cum = TestArray::ints(p.cum, {3});
        const LinearAttentionSizes sizes{N, 2, NH, NKV, HS, HS, 100};
        const TestArray scratch = TestArray::scratch(
            std::max(linear_attention_forward_scratch(sizes), linear_attention_backward_scratch(sizes)));
        auto part = [&](const Tensor& t, int64_t first, int64_t heads) {
            return split_heads(t.columns(first * HS, (first + heads) * HS), heads);
        };
        auto q = [&](const Tensor& t) { return part(t, 0, NH); };
        auto k = [&](const Tensor& t) { return part(t, NH, NKV); };
        auto v = [&](const Tensor& t) { return part(t, NH + NKV, NKV); };
        linear_attention_forward(out, norm, {}, q(qkv), k(qkv), v(qkv), Tensor{}, {}, {cum, 100}, LinearAttentionType{},
                                 scratch, Stream{});
        linear_attention_backward(q(dqkv), k(dqkv), v(dqkv), Tensor{}, {}, dout, {}, q(qkv), k(qkv), v(qkv), Tensor{},
                                  {}, out, norm, {cum, 100}, LinearAttentionType{}, scratch, Stream{});
        const std::vector<double> got = dqkv.fetch();
        expect_gaps_untouched("dqkv", got, width + gap, width);
        std::vector<double> dq, dk, dv;
        for (int64_t n = 0; n < N; n++) {
            const double* row = got.data() + n * (width + gap);
            dq.insert(dq.end(), row, row + NH * HS);
            dk.insert(dk.end(), row + NH * HS, row + (NH + NKV) * HS);
            dv.insert(dv.end(), row + (NH + NKV) * HS, row + width);
        }
        if (gap == 5) {
            expected.out = out.fetch();
            expected.dq = dq;
            expected.dk = dk;
            expected.dv = dv;
            continue;
        }
        expect_same_bits("out", expected.out, out.fetch());
        expect_same_bits("dq", expected.dq, dq);
        expect_same_bits("dk", expected.dk, dk);
        expect_same_bits("dv", expected.dv, dv);
    }
}

// Two halves with the state handed on, and token by token through decode, are the whole.
TEST_P(LinearAttentionTest, StatesAndDecodeContinue) {
    for (const Type& type : {LINEAR, GATED_LINEAR, GATED_NORMALISED}) {
        constexpr int64_t S = 3, T = 20, NH = 4, NKV = 2, E = 24, M = 40;
        const Problem p(activation(), {std::vector<int64_t>(S, T), NH, NKV, E, M}, with_states(type));
        const Result whole = run(p);
        // Prefix of 7 tokens of each sequence, then decode.
        auto tokens = [&](const std::vector<double>& x, int64_t row, int64_t begin, int64_t end) {
            std::vector<double> part(size_t(S * (end - begin) * row));
            for (int64_t s = 0; s < S; s++)
                std::copy_n(x.begin() + (s * T + begin) * row, (end - begin) * row,
                            part.begin() + s * (end - begin) * row);
            return part;
        };
        Problem prefix(activation(), {std::vector<int64_t>(S, 7), NH, NKV, E, M}, with_states(type));
        prefix.q = tokens(p.q, NH * E, 0, 7);
        prefix.k = tokens(p.k, NKV * E, 0, 7);
        prefix.v = tokens(p.v, NKV * M, 0, 7);
        if (type.gated) prefix.gate = tokens(p.gate, NKV, 0, 7);
        prefix.initial = p.initial;
        prefix.initial_z = p.initial_z;
        const Result first = run(prefix);
        const TestArray s = TestArray::of(first.final, {S, NKV, E, M});
        const Maybe z = Maybe::of(type.normalise, first.final_z, {S, NKV, E});
        const reference::LinearAttentionResult ref = reference::linear_attention_forward(p.inputs());
        for (int64_t t = 7; t < T; t++) {
            const TestArray q = TestArray::of(activation(), tokens(p.q, NH * E, t, t + 1), {S, NH, E}),
                            k = TestArray::of(activation(), tokens(p.k, NKV * E, t, t + 1), {S, NKV, E}),
                            v = TestArray::of(activation(), tokens(p.v, NKV * M, t, t + 1), {S, NKV, M}),
                            out = TestArray::poisoned(activation(), {S, NH, M});
            const Maybe gate = Maybe::of(type.gated, type.gated ? tokens(p.gate, NKV, t, t + 1) : p.gate, {S, NKV});
            linear_attention_decode(out, {s, z}, q, k, v, gate, type.arguments(Form::Automatic), Stream{});
            compare(p, "decoded out", out.fetch(), tokens(ref.out.value, NH * M, t, t + 1),
                    tokens(ref.out.mag, NH * M, t, t + 1), M);
        }
        compare(p, "state", s.fetch(), ref.final.value, ref.final.mag, M);
        compare(p, "sums", z.fetch(), ref.final_z.value, ref.final_z.mag, E);
        compare(p, "final state", whole.final, ref.final.value, ref.final.mag, M);
    }
}

// States among those of other sequences: the same bits as where they lie by themselves, and the others stay as they
// were. A sequence without a row leaves none.
TEST_P(LinearAttentionTest, StatesMayBeStrided) {
    constexpr int64_t S = 3, R = 5, NH = 4, NKV = 2, E = 24, M = 40;
    const std::vector<int32_t> where = {4, -1, 1};
    for (const Type& type : {with_states(LINEAR), with_states(GATED_LINEAR)})
        for (const Form form : {Form::Recurrent, Form::Chunked}) {
            const Problem p(activation(), {{70, 1, 700}, NH, NKV, E, M}, type);
            const Result plain = run(p, form);
            const TestArray q = TestArray::of(activation(), p.q, {p.N, NH, E}),
                            k = TestArray::of(activation(), p.k, {p.N, NKV, E}),
                            v = TestArray::of(activation(), p.v, {p.N, NKV, M}),
                            out = TestArray::poisoned(activation(), {p.N, NH, M}),
                            cum = TestArray::ints(p.cum, {S + 1}), rows = TestArray::ints(where, {S}),
                            initial = TestArray::of(p.initial, {S, NKV, E, M}), s = TestArray::poisoned({R, NKV, E, M});
            const Maybe gate = Maybe::of(type.gated, p.gate, {p.N, NKV}),
                        initial_z = Maybe::of(type.normalise, p.initial_z, {S, NKV, E}),
                        z = Maybe::poisoned(type.normalise, {R, NKV, E});
            const TestArray scratch =
                TestArray::scratch(linear_attention_forward_scratch({p.N, S, NH, NKV, E, M, p.longest()}));
            linear_attention_forward(out, Tensor{}, {s, z, rows}, q, k, v, gate, {initial, initial_z},
                                     {cum, p.longest()}, type.arguments(form), scratch, Stream{});
            expect_same_bits("out", plain.out, out.fetch());
            auto in_rows = [&](const std::vector<double>& states) {
                const size_t n = states.size() / size_t(S);
                std::vector<double> all(n * size_t(R), NOT_A_NUMBER);
                for (size_t i = 0; i < where.size(); i++)
                    if (where[i] >= 0)
                        std::copy_n(states.begin() + long(i * n), n, all.begin() + long(where[i]) * long(n));
                return all;
            };
            expect_same_bits("final.s", in_rows(plain.final), s.fetch());
            expect_same_bits("final.z", in_rows(plain.final_z), z.fetch());

            // A step of decode, of each sequence's last token once more.
            auto last = [&](const std::vector<double>& x, int64_t row) {
                std::vector<double> tokens;
                for (const int32_t end : {70, 71, 771})
                    tokens.insert(tokens.end(), x.begin() + (end - 1) * row, x.begin() + end * row);
                return tokens;
            };
            const TestArray q1 = TestArray::of(activation(), last(p.q, NH * E), {S, NH, E}),
                            k1 = TestArray::of(activation(), last(p.k, NKV * E), {S, NKV, E}),
                            v1 = TestArray::of(activation(), last(p.v, NKV * M), {S, NKV, M}),
                            out1 = TestArray::poisoned(activation(), {S, NH, M}),
                            ref1 = TestArray::poisoned(activation(), {S, NH, M}),
                            ref_s = TestArray::of(plain.final, {S, NKV, E, M});
            const Maybe gate1 = Maybe::of(type.gated, type.gated ? last(p.gate, NKV) : p.gate, {S, NKV}),
                        ref_z = Maybe::of(type.normalise, plain.final_z, {S, NKV, E});
            linear_attention_decode(out1, {s, z, rows}, q1, k1, v1, gate1, type.arguments(form), Stream{});
            linear_attention_decode(ref1, {ref_s, ref_z}, q1, k1, v1, gate1, type.arguments(form), Stream{});
            std::vector<double> expected = ref1.fetch();
            std::fill_n(expected.begin() + NH * M, NH * M, 0.0);
            expect_same_bits("decoded out", expected, out1.fetch());
            expect_same_bits("decoded s", in_rows(ref_s.fetch()), s.fetch());
            expect_same_bits("decoded z", in_rows(ref_z.fetch()), z.fetch());
        }
}

// A long document among many short ones, with the scratch that one sequence asks for.
TEST_P(LinearAttentionTest, ScratchDoesNotGrowWithSequences) {
    for (const Type& type : {LINEAR, GATED_LINEAR}) {
        std::vector<int64_t> lengths(300, 3);
        lengths[7] = 1500;
        const Problem p(activation(), {lengths, 2, 1, 32, 32}, type);
        LinearAttentionSizes one{p.N, 1, 2, 1, 32, 32, 1500, false}, all = one;
        all.S = 300;
        EXPECT_EQ(linear_attention_forward_scratch(all), linear_attention_forward_scratch(one));
        EXPECT_EQ(linear_attention_backward_scratch(all), linear_attention_backward_scratch(one));
        check(p);
    }
}

TEST_P(LinearAttentionTest, Deterministic) {
    for (const Type& type : {LINEAR, with_states(GATED_LINEAR)})
        for (const Form form : {Form::Recurrent, Form::Chunked}) {
            const Problem p(activation(), {{100, 600}, 4, 2, 40, 24}, type);
            expect_deterministic("linear attention", [&] { return run(p, form).all(); });
        }
}

#ifdef USE_CUDA
// Whatever cum holds, nothing outside the tensors is touched: compute-sanitizer looks on, and the run ends.
TEST_P(LinearAttentionTest, InvalidSequencesStayInBounds) {
    for (const Type& type : {with_states(LINEAR), with_states(GATED_LINEAR), with_states(GATED_NORMALISED)})
        for (const std::vector<int32_t>& cum :
             {std::vector<int32_t>{-5, 20, 10}, {0, 1000000, 2000000}, {30, 10, 40}, {0, 40, 2147483647}}) {
            Problem p(activation(), {{20, 20}, 2, 1, 32, 32}, type);
            p.cum = cum;
            run(p);
        }
}
#endif

// The oracle's gradients are those of its own forward pass, states and gates included; and its two forms agree.
TEST(LinearAttentionOracle, AgreesWithCentralDifferences) {
    for (const Type& type : {with_states(LINEAR), with_states(GATED_LINEAR), with_states(GATED_NORMALISED)}) {
        Problem p(DType::F32, {{5, 3}, 2, 1, 3, 2}, type);
        auto loss = [&] {
            const reference::LinearAttentionResult f = reference::linear_attention_forward(p.inputs());
            double sum = 0;
            for (size_t i = 0; i < p.dout.size(); i++) sum += f.out.value[i] * p.dout[i];
            for (size_t i = 0; i < p.dfinal.size(); i++) sum += f.final.value[i] * p.dfinal[i];
            for (size_t i = 0; i < p.dfinal_z.size(); i++) sum += f.final_z.value[i] * p.dfinal_z[i];
            return sum;
        };
        const reference::LinearAttentionResult f = reference::linear_attention_forward(p.inputs());
        const reference::LinearAttentionGradients g = reference::linear_attention_backward(
            p.inputs(), p.dout.data(), f.out.data(), f.norm.data(), p.dfinal.data(), p.dfinal_z.data());
        constexpr double h = 1e-5;
        for (auto [x, gradient] :
             {std::pair(&p.q, &g.dq), std::pair(&p.k, &g.dk), std::pair(&p.v, &g.dv), std::pair(&p.gate, &g.dgate),
              std::pair(&p.initial, &g.dinitial), std::pair(&p.initial_z, &g.dinitial_z)})
            for (size_t i = 0; i < x->size(); i++) {
                const double was = (*x)[i];
                (*x)[i] = was + h;
                const double up = loss();
                (*x)[i] = was - h;
                const double down = loss();
                (*x)[i] = was;
                EXPECT_NEAR(gradient->value[i], (up - down) / (2 * h), 1e-7) << i;
            }
    }
    for (const Type& type : {LINEAR, GATED_LINEAR, GATED_NORMALISED}) {
        const Problem p(DType::F32, {{7, 6}, 4, 2, 3, 5}, type);
        const reference::LinearAttentionInputs inputs = p.inputs();
        const auto f = reference::linear_attention_forward(inputs);
        const auto g =
            reference::linear_attention_backward(inputs, p.dout.data(), f.out.data(), f.norm.data(), nullptr, nullptr);
        const reference::LinearAttentionPairs pairs(inputs, p.dout.data(), f.out.data(), f.norm.data());
        auto same = [](const reference::Values& all, int64_t row, const reference::Values& x) {
            for (size_t i = 0; i < x.value.size(); i++) {
                const size_t at = size_t(row) * x.value.size() + i;
                EXPECT_NEAR(all.value[at], x.value[i], 1e-12);
                EXPECT_LE(std::fabs(all.mag[at] - x.mag[i]), 0.9 * all.mag[at]);  // alike, but for how gates enter
            }
        };
        for (int64_t t = 0; t < p.N; t++) {
            const int64_t begin = t < 7 ? 0 : 7, end = t < 7 ? 7 : 13;
            for (int64_t head = 0; head < 4; head++) {
                same(f.out, t * 4 + head, pairs.out_row(t, head, begin));
                same(g.dq, t * 4 + head, pairs.dq_row(t, head, begin));
            }
            for (int64_t kv = 0; kv < 2; kv++) {
                same(g.dk, t * 2 + kv, pairs.dk_row(t, kv, end));
                same(g.dv, t * 2 + kv, pairs.dv_row(t, kv, end));
            }
        }
    }
}

TEST(LinearAttentionErrors, NameTheInvalidArgument) {
    const TestArray q = TestArray::random({10, 4, 8}, 1), k = TestArray::random({10, 2, 8}, 2),
                    v = TestArray::random({10, 2, 6}, 3), three = TestArray::random({10, 3, 8}, 2);
    const TestArray out = TestArray::poisoned({10, 4, 6}), cum = TestArray::ints({0, 10}, {2}),
                    gate = TestArray::random({10, 2}, 4), scratch = TestArray::scratch(1 << 20);
    auto forward = [&](Tensor k_, Tensor v_, Tensor gate_, const LinearAttentionType& type,
                       const LinearAttentionState& initial = {}) {
        linear_attention_forward(out, Tensor{}, {}, q, k_, v_, gate_, initial, {cum, 10}, type, scratch, Stream{});
    };
    expect_error([&] { forward(three, three, Tensor{}, {}); },
                 "linear_attention_forward: 3 KV heads do not divide 4 heads");
    expect_error([&] { forward(k, three, Tensor{}, {}); },
                 "linear_attention_forward: v is fp32 [10, 3, 8], expected fp32 [10, 2, 8]");
    expect_error([&] { forward(k, v, three, {}); },
                 "linear_attention_forward: gate is fp32 [10, 3, 8], expected fp32 [10, 2]");
    expect_error(
        [&] {
            forward(k, v, gate, {FeatureMap::Identity, true});
        },
        "linear_attention_forward: the normaliser needs positive features, those of elu + 1");
    const TestArray s = TestArray::random({1, 2, 8, 6}, 5);
    expect_error([&] { forward(k, v, Tensor{}, {}, {s, Tensor{}}); }, "linear_attention_forward: initial.z is missing");
    expect_error(
        [&] {
            forward(k, v, Tensor{}, {FeatureMap::Identity, false}, {s, s});
        },
        "linear_attention_forward: initial.z is given, but nothing is normalised");
    const TestArray wide = TestArray::random({10, 2, 513}, 6), wide_out = TestArray::poisoned({10, 4, 513});
    auto wide_forward = [&](Form form) {
        linear_attention_forward(wide_out, Tensor{}, {}, q, k, wide, Tensor{}, {}, {cum, 10},
                                 {FeatureMap::EluPlusOne, true, form}, scratch, Stream{});
    };
    expect_error([&] { wide_forward(Form::Automatic); },
                 "linear_attention_forward: heads of 8 x 513 lie outside [1, 512]");
    expect_error([&] { wide_forward(Form::Chunked); },
                 "linear_attention_forward: heads of 8 x 513 lie outside [1, 256]");
    const TestArray dq = TestArray::poisoned({10, 4, 8}), dk = TestArray::poisoned({10, 2, 8}),
                    dv = TestArray::poisoned({10, 2, 6}), norm = TestArray::random({4, 10}, 7);
    expect_error(
        [&] {
            linear_attention_backward(dq, dk, dv, Tensor{}, {}, out, {}, q, k, v, gate, {}, out, norm, {cum, 10}, {},
                                      scratch, Stream{});
        },
        "linear_attention_backward: gate and dgate are given together or not at all");
    expect_error(
        [&] {
            linear_attention_backward(dq, dk, dv, Tensor{}, {}, out, {}, q, k, v, Tensor{}, {}, out, Tensor{},
                                      {cum, 10}, {}, scratch, Stream{});
        },
        "linear_attention_backward: norm is missing");
    expect_error([&] { linear_attention_decode(out, {}, q, k, v, Tensor{}, {}, Stream{}); },
                 "linear_attention_decode: state.s is missing");
#ifdef USE_CUDA
    const TestArray half = TestArray::random(DType::F16, {10, 4, 8}, 1);
    expect_error(
        [&] {
            linear_attention_forward(out, Tensor{}, {}, half, k, v, Tensor{}, {}, {cum, 10}, {}, scratch, Stream{});
        },
        "linear_attention_forward: q is fp16 [10, 4, 8], expected fp32 or bf16");
#else
    const TestArray late = TestArray::ints({0, 11}, {2});
    expect_error(
        [&] {
            linear_attention_forward(out, Tensor{}, {}, q, k, v, Tensor{}, {}, {late, 11}, {}, scratch, Stream{});
        },
        "linear_attention_forward: cum ends at 11, past the 10 tokens of the tensor");
#endif
}

}  // namespace

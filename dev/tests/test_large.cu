// Tensors of more than 2³¹ elements, where a 32-bit index overflows. CUDA only: a CPU would take minutes.
//
// value_at() generates the inputs on the device, and any single element on the host. So only the compared outputs are
// copied: at least 4096 samples of each, with the first, the last and those around 2³¹, against the oracle. Plain
// kernels in double repeat the sums over all rows.
// run_tests.py: alone on a GPU, because it needs most of the GPU's memory.
#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/muon.h"
#include "kernels/norm.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/convert_dtype.h"
#include "tensor_library/tensor_ops.h"

namespace {

constexpr int64_t LIMIT = int64_t(1) << 31;
constexpr float EPS = 1e-5f;

// Element i of the tensor of this seed before rounding to its dtype: uniform in [−scale, scale).
__host__ __device__ float value_at(uint64_t seed, int64_t i, float scale) {
    return float(int32_t(philox(seed, uint64_t(i), 0).v[0])) * 0x1p-31f * scale;
}

template <typename T>
__global__ void fill_kernel(T* x, int64_t n, uint64_t seed, float scale, bool positive) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const float value = value_at(seed, i, scale);
        x[i] = from_float<T>(positive ? fabsf(value) : value);
    }
}

// Device memory, poisoned with NaN; fill() writes the values of a seed.
class LargeArray {
  public:
    LargeArray(DType dtype, std::initializer_list<int64_t> shape)
        : view(make_tensor(nullptr, dtype, backend_device(), shape)) {
        view.data = device_alloc(size_t(view.bytes()));
        device_fill(view.data, 0xFF, size_t(view.bytes()), Stream{});
    }
    ~LargeArray() { device_free(view.data); }
    LargeArray(const LargeArray&) = delete;

    void fill(uint64_t of_seed, float of_scale, bool are_positive = false) {
        seed = of_seed;
        scale = of_scale;
        positive = are_positive;
        dispatch_dtype("fill", view.dtype, [&](auto zero) {
            using T = decltype(zero);
            fill_kernel<<<unsigned(16 * num_sms()), 256>>>(view.as<T>(), view.numel(), seed, scale, positive);
        });
        check_launch("fill", Stream{});
    }
    // The values that fill() wrote.
    double filled(int64_t i) const {
        const float value = value_at(seed, i, scale);
        return rounded(view.dtype, positive ? std::fabs(value) : value);
    }
    std::vector<double> filled(int64_t begin, int64_t count) const {
        std::vector<double> values;
        for (int64_t i = begin; i < begin + count; i++) values.push_back(filled(i));
        return values;
    }
    // The present values.
    std::vector<double> fetch(int64_t begin, int64_t count) const {
        const int64_t size = dtype_size(view.dtype);
        std::vector<char> stored(static_cast<size_t>(count * size));
        std::vector<float> floats(static_cast<size_t>(count));
        copy_to_host(stored.data(), static_cast<const char*>(view.data) + begin * size, stored.size(), Stream{});
        convert_to_float(floats.data(), stored.data(), view.dtype, count);
        return {floats.begin(), floats.end()};
    }
    operator Tensor() const { return view; }
    Tensor tensor() const { return view; }

  private:
    Tensor view;
    uint64_t seed = 0;
    float scale = 0;
    bool positive = false;
};

// Starts of runs of `length` within [0, n): the first, the last, those around 2³¹ and random ones, at least 8192
// elements in total.
std::vector<int64_t> sampled_runs(int64_t n, int64_t length) {
    std::vector<int64_t> begins = {0, n - length};
    for (const int64_t at : {LIMIT - length, LIMIT})
        if (at + length <= n) begins.push_back(at);
    for (uint64_t i = 0; int64_t(begins.size()) * length < 8192; i++)
        begins.push_back(int64_t((uint64_t(philox(7, i, 0).v[0]) << 32 | philox(7, i, 0).v[1]) % uint64_t(n - length)));
    return begins;
}

// Sampled rows of a matrix [N, C]: the first, the last, those around the 2³¹-th element, and random ones.
std::vector<int64_t> sampled_rows(int64_t N, int64_t C, int64_t count) {
    std::vector<int64_t> rows = {0, N - 1, LIMIT / C - 1, LIMIT / C, LIMIT / C + 1};
    for (uint64_t i = 0; int64_t(rows.size()) < count; i++) rows.push_back(int64_t(philox(8, i, 0).v[0] % uint64_t(N)));
    for (int64_t& row : rows) row = std::min(row, N - 1);
    return rows;
}

void append(std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
}

// Collects sampled rows and compares them together.
struct Compared {
    std::vector<double> got;
    reference::Values ref;
    void add(const std::vector<double>& values, const reference::Values& expected) {
        append(got, values);
        append(ref.value, expected.value);
        append(ref.mag, expected.mag);
    }
    void add(double value, reference::Value expected) {
        got.push_back(value);
        ref.value.push_back(expected.value);
        ref.mag.push_back(expected.mag);
    }
    void expect(const char* what, int64_t K, int64_t row_size, DType dtype, int roundings = 1) const {
        EXPECT_GE(got.size(), 4096u) << what;
        expect_close(what, got, ref.value, ref.mag, K, row_size, dtype, roundings);
    }
};

#define SKIP_WITHOUT_GIB(gib)                                        \
    if (device_memory_available() < (int64_t(gib) << 30))            \
    GTEST_SKIP() << "needs " << (gib) << " GiB of free GPU memory, " \
                 << double(device_memory_available()) / double(1 << 30) << " are free"

// Σ_k a[a_begin + k·a_stride]·b[b_begin + k·b_stride] in double: one sampled element of a matmul.
struct SampledDot {
    int64_t a_begin, b_begin;
};

template <typename T>
__global__ void dot_kernel(reference::Value* out, const T* a, int64_t a_stride, const T* b, int64_t b_stride,
                           const SampledDot* samples, int64_t K) {
    __shared__ reference::Value partial[256];
    const SampledDot s = samples[blockIdx.x];
    reference::Value sum;
    for (int64_t k = threadIdx.x; k < K; k += 256)
        sum.add(double(as_float(a[s.a_begin + k * a_stride])) * double(as_float(b[s.b_begin + k * b_stride])));
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < 256; i++) {
        sum.value += partial[i].value;
        sum.mag += partial[i].mag;
    }
    out[blockIdx.x] = sum;
}

template <typename T>
std::vector<T> to_host(const T* device, size_t n) {
    std::vector<T> host(n);
    copy_to_host(host.data(), device, n * sizeof(T), Stream{});
    return host;
}

// Checks out = op(a)·op(b) at sampled elements (rows as above, random columns) against dot products in double.
void check_product(const char* what, const LargeArray& out, const Tensor& a, const Tensor& b, bool transpose_a,
                   bool transpose_b, int64_t K) {
    const int64_t M = out.tensor().shape[0], N = out.tensor().shape[1];
    std::vector<SampledDot> samples;
    std::vector<int64_t> places;
    for (uint64_t i = 0; i < 4096; i++) {
        const Philox4 r = philox(11, i, 0);
        int64_t row = int64_t(r.v[0] % uint64_t(M)), column = int64_t(r.v[1] % uint64_t(N));
        if (i % 16 == 0) row = 0;
        if (i % 16 == 1) row = M - 1;
        if (i % 16 == 2) row = std::min(M - 1, LIMIT / N);
        if (i % 16 == 3) column = 0;
        if (i % 16 == 4) column = N - 1;
        places.push_back(row * N + column);
        samples.push_back({transpose_a ? row : row * a.stride[0], transpose_b ? column * b.stride[0] : column});
    }
    const TestArray device_samples = TestArray::bytes(samples.data(), int64_t(samples.size() * sizeof(SampledDot)));
    const TestArray sums = TestArray::scratch(int64_t(samples.size() * sizeof(reference::Value)));
    dot_kernel<<<unsigned(samples.size()), 256>>>(
        reinterpret_cast<reference::Value*>(sums.tensor().as<uint8_t>()), a.as<bf16>(), transpose_a ? a.stride[0] : 1,
        b.as<bf16>(), transpose_b ? 1 : b.stride[0],
        reinterpret_cast<const SampledDot*>(device_samples.tensor().as<uint8_t>()), K);
    check_launch("dot", Stream{});
    std::vector<reference::Value> expected(samples.size());
    sums.fetch_bytes(expected.data());
    Compared compared;
    for (size_t i = 0; i < places.size(); i++) compared.add(out.fetch(places[i], 1)[0], expected[i]);
    compared.expect(what, K, int64_t(places.size()), out.tensor().dtype);
}

}  // namespace

TEST(Large, Elementwise) {
    SKIP_WITHOUT_GIB(18);
    const int64_t C = 3072, N = LIMIT / C + 5, n = N * C;
    LargeArray inp(DType::BF16, {N, C}), dout(DType::BF16, {N, C}), out(DType::BF16, {N, C});
    inp.fill(1, 4);
    dout.fill(2, 1);
    activation_forward(Activation::GELU, out, inp, Stream{});
    Compared forward, backward;
    for (const int64_t begin : sampled_runs(n, 64)) {
        const std::vector<double> x = inp.filled(begin, 64);
        forward.add(out.fetch(begin, 64), reference::gelu_forward(x.data(), 64));
    }
    forward.expect("gelu_forward", 1, 64, DType::BF16);
    activation_backward(Activation::GELU, out, {}, dout, inp, Stream{});
    for (const int64_t begin : sampled_runs(n, 64)) {
        const std::vector<double> x = inp.filled(begin, 64), d = dout.filled(begin, 64);
        backward.add(out.fetch(begin, 64), reference::gelu_backward(d.data(), x.data(), 64));
    }
    backward.expect("gelu_backward", 1, 64, DType::BF16);
}

// Rows of two halves, so that the index is made of row and column.
TEST(Large, SwiGLU) {
    SKIP_WITHOUT_GIB(12);
    const int64_t I = 1536, N = LIMIT / (2 * I) + 5;
    LargeArray gate_up(DType::BF16, {N, 2 * I}), out(DType::BF16, {N, I}), dgate_up(DType::BF16, {N, 2 * I});
    gate_up.fill(1, 4);
    activation_forward(Activation::SwiGLU, out, gate_up, Stream{});
    Compared forward, backward;
    for (const int64_t row : sampled_rows(N, 2 * I, 8))
        forward.add(out.fetch(row * I, I), reference::swiglu_forward(gate_up.filled(row * 2 * I, 2 * I).data(), 1, I));
    forward.expect("swiglu_forward", 1, I, DType::BF16);
    out.fill(2, 1);  // serves as dout
    activation_backward(Activation::SwiGLU, dgate_up, {}, out, gate_up, Stream{});
    for (const int64_t row : sampled_rows(N, 2 * I, 8))
        backward.add(
            dgate_up.fetch(row * 2 * I, 2 * I),
            reference::swiglu_backward(out.filled(row * I, I).data(), gate_up.filled(row * 2 * I, 2 * I).data(), 1, I));
    backward.expect("swiglu_backward", 1, 2 * I, DType::BF16);
}

namespace {

constexpr int64_t NORM_CHUNK = 4096;  // rows of one block

// Σ_n dout·x̂ (with its mag) and Σ_n dout of a chunk of rows, thread c of block y: partial [chunks, 2, C].
__global__ void norm_sums_kernel(reference::Value* partial, const bf16* dout, const bf16* inp, const float* mean,
                                 const float* rstd, int64_t N, int64_t C) {
    const int64_t c = blockIdx.x * int64_t(blockDim.x) + threadIdx.x, first = blockIdx.y * NORM_CHUNK;
    if (c >= C) return;
    reference::Value dweight, dbias;
    for (int64_t n = first; n < first + NORM_CHUNK && n < N; n++) {
        const double d = as_float(dout[n * C + c]), x = as_float(inp[n * C + c]), m = mean[n], r = rstd[n];
        dweight.add(d * (x - m) * r, fabs(d) * (fabs(x) + fabs(m)) * r);
        dbias.add(d);
    }
    partial[(blockIdx.y * 2) * C + c] = dweight;
    partial[(blockIdx.y * 2 + 1) * C + c] = dbias;
}

}  // namespace

TEST(Large, LayerNorm) {
    SKIP_WITHOUT_GIB(18);
    const int64_t C = 768, N = LIMIT / C + 5;
    LargeArray inp(DType::BF16, {N, C}), dout(DType::BF16, {N, C}), out(DType::BF16, {N, C});
    LargeArray mean(DType::F32, {N}), rstd(DType::F32, {N});
    const TestArray weight = TestArray::random({C}, 3, 0.2, 1), bias = TestArray::random({C}, 4);
    inp.fill(1, 3);
    dout.fill(2, 1);
    layernorm_forward({.out = out, .mean = mean, .rstd = rstd, .inp = inp, .weight = weight, .bias = bias, .eps = EPS},
                      Stream{});
    Compared forward, backward;
    for (const int64_t row : sampled_rows(N, C, 16)) {
        const std::vector<double> x = inp.filled(row * C, C);
        forward.add(out.fetch(row * C, C),
                    reference::layernorm_forward(x.data(), nullptr, weight.data(), bias.data(), EPS, 1, C).out);
    }
    forward.expect("out", C, C, DType::BF16);

    const TestArray dweight = TestArray::poisoned({C}), dbias = TestArray::poisoned({C});
    const TestArray scratch = TestArray::scratch(layernorm_backward_scratch(N, C));
    layernorm_backward({.dinp = out,
                        .dweight = dweight,
                        .dbias = dbias,
                        .dout = dout,
                        .inp = inp,
                        .weight = weight,
                        .mean = mean,
                        .rstd = rstd,
                        .scratch = scratch},
                       Stream{});
    for (const int64_t row : sampled_rows(N, C, 16)) {
        const std::vector<double> x = inp.filled(row * C, C), d = dout.filled(row * C, C), m = mean.fetch(row, 1),
                                  r = rstd.fetch(row, 1);
        backward.add(out.fetch(row * C, C), reference::norm_backward(d.data(), nullptr, x.data(), weight.data(),
                                                                     m.data(), r.data(), nullptr, nullptr, 1, C)
                                                .dinp);
    }
    backward.expect("dinp", C, C, DType::BF16);

    const int64_t chunks = ceil_div(N, NORM_CHUNK);
    const TestArray partial = TestArray::scratch(chunks * 2 * C * int64_t(sizeof(reference::Value)));
    norm_sums_kernel<<<dim3(unsigned(ceil_div(C, 128)), unsigned(chunks)), 128>>>(
        reinterpret_cast<reference::Value*>(partial.tensor().as<uint8_t>()), dout.tensor().as<bf16>(),
        inp.tensor().as<bf16>(), mean.tensor().as<float>(), rstd.tensor().as<float>(), N, C);
    check_launch("norm_sums", Stream{});
    std::vector<reference::Value> sums(static_cast<size_t>(chunks * 2 * C));
    partial.fetch_bytes(sums.data());
    reference::Values ref[2] = {reference::Values(C), reference::Values(C)};
    for (size_t i = 0; i < sums.size(); i++) {
        reference::Values& r = ref[i / size_t(C) % 2];
        r.value[i % size_t(C)] += sums[i].value;
        r.mag[i % size_t(C)] += sums[i].mag;
    }
    expect_close("dweight", dweight.fetch(), ref[0].value, ref[0].mag, N, C);
    expect_close("dbias", dbias.fetch(), ref[1].value, ref[1].mag, N, C);
}

// The head without chunks: logits [tokens, vocabulary], their loss and gradient, and its matmuls.
TEST(Large, MatmulAndCrossEntropy) {
    SKIP_WITHOUT_GIB(8);
    const int64_t C = 768, V = 50257, Vp = 50304, N = LIMIT / Vp + 5;
    const float dloss = 0.01f;
    LargeArray inp(DType::BF16, {N, C}), weight(DType::BF16, {Vp, C}), logits(DType::BF16, {N, Vp});
    LargeArray dinp(DType::BF16, {N, C}), dweight(DType::F32, {Vp, C});
    inp.fill(1, 1);
    weight.fill(2, 0.1f);
    const Stream stream = create_blas_stream();
    matmul_forward(logits, inp, weight, Tensor{}, stream);
    synchronize(stream);
    check_product("logits", logits, inp, weight, false, true, C);

    std::vector<int32_t> target_ids;
    for (int64_t n = 0; n < N; n++) target_ids.push_back(int32_t(philox(9, uint64_t(n), 0).v[0] % uint64_t(V)));
    const TestArray targets = TestArray::ints(target_ids, {N});
    const LargeArray losses(DType::F32, {N});
    const std::vector<int64_t> rows = sampled_rows(N, Vp, 8);
    std::vector<std::vector<double>> before;
    for (const int64_t row : rows) before.push_back(logits.fetch(row * Vp, Vp));
    cross_entropy_forward_backward(losses, logits, targets, V, dloss, {}, stream);
    synchronize(stream);
    std::vector<double> loss;
    reference::Values loss_ref;
    Compared gradient;
    for (size_t i = 0; i < rows.size(); i++) {
        const reference::CrossEntropy r =
            reference::cross_entropy(before[i].data(), &target_ids[size_t(rows[i])], IGNORE_TARGET, dloss, 1, V, Vp);
        append(loss, losses.fetch(rows[i], 1));
        append(loss_ref.value, r.losses.value);
        append(loss_ref.mag, r.losses.mag);
        gradient.add(logits.fetch(rows[i] * Vp, Vp), r.dlogits);
    }
    expect_close("losses", loss, loss_ref.value, loss_ref.mag, V, 1);
    gradient.expect("dlogits", V, Vp, DType::BF16);

    // A random gradient: nearly all of dlogits have one sign and size, which would hide a wrong element.
    logits.fill(5, 0.1f);
    matmul_backward_input(dinp, logits, weight, false, stream);
    matmul_backward_weight(dweight, Tensor{}, logits, inp, false, stream);
    synchronize(stream);
    check_product("dinp", dinp, logits, weight, false, false, Vp);
    check_product("dweight", dweight, logits, inp, true, false, N);
    destroy_stream(stream);
}

// q, k and v are views of the packed rows of the QKV projection's output; so are their gradients.
TEST(Large, AttentionInPackedRows) {
    SKIP_WITHOUT_GIB(14);
    const int64_t T = 256, NH = 32, NKV = 32, HS = 128, row = (NH + 2 * NKV) * HS;
    const int64_t S = LIMIT / row / T + 2, N = S * T;
    const float scale = 0.08f;
    LargeArray qkv(DType::BF16, {N, row}), dqkv(DType::BF16, {N, row});
    LargeArray out(DType::BF16, {N, NH * HS}), dout(DType::BF16, {N, NH * HS});
    const LargeArray lse(DType::F32, {NH, N});
    qkv.fill(1, 2);
    dout.fill(2, 1);
    std::vector<int32_t> cum;
    for (int64_t s = 0; s <= S; s++) cum.push_back(int32_t(s * T));
    const TestArray device_cum = TestArray::ints(cum, {S + 1});
    const AttentionSequences sequences{device_cum, device_cum, T, T};
    const auto part = [&](const LargeArray& packed, int64_t first, int64_t heads) {
        return split_heads(packed.tensor().columns(first * HS, (first + heads) * HS), heads);
    };
    const Tensor q = part(qkv, 0, NH), k = part(qkv, NH, NKV), v = part(qkv, NH + NKV, NKV);
    const Tensor heads_out = split_heads(out, NH), heads_dout = split_heads(dout, NH);
    const TestArray scratch = TestArray::scratch(attention_backward_scratch(N, NH, HS));
    attention_forward(heads_out, lse, q, k, v, sequences, scale, scratch, Stream{});
    attention_backward(part(dqkv, 0, NH), part(dqkv, NH, NKV), part(dqkv, NH + NKV, NKV), heads_dout, q, k, v,
                       heads_out, lse, sequences, scale, scratch, Stream{});

    // The first and last head of the first and last sequence and of the one around 2³¹.
    Compared forward, dq, dk, dv;
    const std::vector<int32_t> one = {0, int32_t(T)};
    for (const int64_t s : {int64_t(0), LIMIT / row / T, S - 1}) {
        const std::vector<double> packed = qkv.filled(s * T * row, T * row),
                                  gradients = dqkv.fetch(s * T * row, T * row),
                                  all_out = out.fetch(s * T * NH * HS, T * NH * HS),
                                  all_dout = dout.filled(s * T * NH * HS, T * NH * HS);
        for (const int64_t head : {int64_t(0), NH - 1}) {
            const auto head_of = [&](const std::vector<double>& rows, int64_t index) {
                std::vector<double> values;
                for (auto at = rows.begin() + index * HS; at < rows.end(); at += int64_t(rows.size()) / T)
                    values.insert(values.end(), at, at + HS);
                return values;
            };
            const std::vector<double> hq = head_of(packed, head), hk = head_of(packed, NH + head),
                                      hv = head_of(packed, NH + NKV + head), hout = head_of(all_out, head),
                                      hdout = head_of(all_dout, head), hlse = lse.fetch(head * N + s * T, T);
            forward.add(hout,
                        reference::attention_forward(hq.data(), hk.data(), hv.data(), one, one, 1, 1, HS, scale).out);
            const reference::AttentionGradients g = reference::attention_backward(
                hdout.data(), hq.data(), hk.data(), hv.data(), hout.data(), hlse.data(), one, one, 1, 1, HS, scale);
            dq.add(head_of(gradients, head), g.dq);
            dk.add(head_of(gradients, NH + head), g.dk);
            dv.add(head_of(gradients, NH + NKV + head), g.dv);
        }
    }
    forward.expect("out", T, HS, DType::BF16, 2);
    dq.expect("dq", T, HS, DType::BF16, 2);
    dk.expect("dk", T, HS, DType::BF16, 2);
    dv.expect("dv", T, HS, DType::BF16, 2);
}

TEST(Large, AdamW) {
    SKIP_WITHOUT_GIB(38);
    const int64_t n = LIMIT + 5003;
    LargeArray params(DType::F32, {n}), m(DType::F32, {n}), v(DType::F32, {n}), grads(DType::F32, {n});
    const LargeArray params_T(DType::BF16, {n});
    params.fill(1, 0.02f);
    m.fill(2, 1e-3f);
    v.fill(3, 1e-5f, true);
    grads.fill(4, 1e-2f);
    const StepScalars s = {1e-3f, 1, 0, 0, 2, 3, 0.7f, 0, 10, 0, {}, {}};
    const TestArray scalars = TestArray::bytes(&s, sizeof(s));
    const AdamWOptions options;
    const ParamSegment segments[] = {{0, LIMIT - 300, 0.1f, 0}, {LIMIT - 300, n, 0, LIMIT - 300}};
    adamw_update(params, params_T, m, v, grads, segments, 2, options, scalars, Stream{});
    Compared p1, m1, v1;
    for (const int64_t begin : sampled_runs(n, 64)) {
        const std::vector<double> copy = params_T.fetch(begin, 64), master = params.fetch(begin, 64),
                                  mk = m.fetch(begin, 64), vk = v.fetch(begin, 64);
        for (int64_t k = 0; k < 64; k++) {
            const int64_t i = begin + k;
            const reference::AdamW r = reference::adamw(params.filled(i), m.filled(i), v.filled(i), grads.filled(i),
                                                        s.grad_scale, s.lr, options.beta1, options.beta2, options.eps,
                                                        segments[i >= LIMIT - 300].weight_decay, s.t);
            p1.add(master[size_t(k)], r.param);
            m1.add(mk[size_t(k)], r.m);
            v1.add(vk[size_t(k)], r.v);
            ASSERT_EQ(copy[size_t(k)], rounded(DType::BF16, master[size_t(k)])) << i;
        }
    }
    p1.expect("params", 1, 64, DType::F32);
    m1.expect("m", 1, 64, DType::F32);
    v1.expect("v", 1, 64, DType::F32);
}

TEST(Large, Muon) {
    SKIP_WITHOUT_GIB(38);
    const int64_t n = LIMIT + 5003;
    LargeArray params(DType::F32, {n}), m(DType::F32, {n}), grads(DType::F32, {n});
    const LargeArray params_T(DType::BF16, {n}), updates(DType::BF16, {n + 4});
    params.fill(1, 0.02f);
    m.fill(2, 1e-3f);
    grads.fill(4, 1e-2f);
    const StepScalars s = {1e-2f, 1, 0.95f, 0, 2, 3, 0.7f, 0, 10, 0, {}, {}};
    const TestArray scalars = TestArray::bytes(&s, sizeof(s));
    MuonSegment segment;
    segment.begin = 0;
    segment.end = n;
    segment.fp32_begin = 0;
    segment.update_begin = 4;
    segment.weight_decay = 0.1f;
    muon_momentum(updates, m, grads, &segment, 1, 0, scalars, Stream{});
    muon_update(params, params_T, updates, &segment, 1, 0, scalars, Stream{});
    Compared u1, m1, p1;
    for (const int64_t begin : sampled_runs(n, 64)) {
        const std::vector<double> copy = params_T.fetch(begin, 64), master = params.fetch(begin, 64),
                                  mk = m.fetch(begin, 64), uk = updates.fetch(begin + 4, 64);
        for (int64_t k = 0; k < 64; k++) {
            const int64_t i = begin + k;
            const reference::Muon r = reference::muon_momentum(m.filled(i), grads.filled(i), s.grad_scale, s.momentum);
            m1.add(mk[size_t(k)], r.m);
            u1.add(uk[size_t(k)], r.u);
            p1.add(master[size_t(k)],
                   reference::muon_update(params.filled(i), uk[size_t(k)], s.lr, 1, segment.weight_decay));
            ASSERT_EQ(copy[size_t(k)], rounded(DType::BF16, master[size_t(k)])) << i;
        }
    }
    m1.expect("m", 1, 64, DType::F32);
    u1.expect("updates", 1, 64, DType::BF16);
    p1.expect("params", 1, 64, DType::F32);
}

TEST(Large, Embedding) {
    SKIP_WITHOUT_GIB(12);
    const int64_t C = 768, V = 50304, P = 1024, N = LIMIT / C + 5;
    LargeArray wte(DType::BF16, {V, C}), wpe(DType::BF16, {P, C}), out(DType::BF16, {N, C});
    const LargeArray dwte(DType::F32, {V, C}), dwpe(DType::F32, {P, C});
    wte.fill(1, 1);
    wpe.fill(2, 1);
    std::vector<int32_t> token_ids, position_ids;
    for (int64_t n = 0; n < N; n++) {
        token_ids.push_back(int32_t(philox(3, uint64_t(n), 0).v[0] % uint64_t(V)));
        position_ids.push_back(int32_t(n % P));
    }
    token_ids.front() = 0;
    token_ids.back() = int32_t(V - 1);  // the checks below read these
    const TestArray tokens = TestArray::ints(token_ids, {N}), positions = TestArray::ints(position_ids, {N});
    embedding_forward(out, tokens, positions, wte, wpe, Stream{});
    Compared forward, d_tokens, d_positions;
    for (const int64_t row : sampled_rows(N, C, 16)) {
        const int32_t zero = 0;
        const std::vector<double> a = wte.filled(token_ids[size_t(row)] * C, C),
                                  b = wpe.filled(position_ids[size_t(row)] * C, C);
        forward.add(out.fetch(row * C, C), reference::embedding_forward(&zero, &zero, a.data(), b.data(), 1, C));
    }
    forward.expect("out", 1, C, DType::BF16);

    out.fill(4, 1);  // serves as dout
    const TestArray scratch = TestArray::scratch(embedding_backward_scratch(N, V, C));
    embedding_backward(dwte, dwpe, out, tokens, positions, scratch, false, false, Stream{});
    // The gradient of one row: the sum of dout over the tokens with this id.
    const auto row_gradient = [&](const std::vector<int32_t>& ids, int32_t id) {
        std::vector<double> d;
        std::vector<int32_t> zeros;
        for (int64_t n = 0; n < N; n++)
            if (ids[size_t(n)] == id) {
                append(d, out.filled(n * C, C));
                zeros.push_back(0);
            }
        return reference::embedding_backward(d.data(), zeros.data(), nullptr, int64_t(zeros.size()), C, 1);
    };
    for (const int64_t id :
         {int64_t(0), V - 1, int64_t(token_ids[size_t(LIMIT / C)]), int64_t(17), int64_t(4711), int64_t(50000)})
        d_tokens.add(dwte.fetch(id * C, C), row_gradient(token_ids, int32_t(id)));
    d_tokens.expect("dwte", N / V, C, DType::F32);
    for (const int64_t id : {int64_t(0), P - 1, LIMIT / C % P, int64_t(17), int64_t(100), int64_t(500)})
        d_positions.add(dwpe.fetch(id * C, C), row_gradient(position_ids, int32_t(id)));
    d_positions.expect("dwpe", N / P, C, DType::F32);
}

// Rows of odd length, which are read element by element, and their transpose.
TEST(Large, TensorOperations) {
    SKIP_WITHOUT_GIB(10);
    const int64_t C = 3001, N = LIMIT / C + 5, n = N * C;
    LargeArray x(DType::BF16, {N, C}), y(DType::BF16, {C}), out(DType::BF16, {N, C});
    x.fill(1, 4);
    y.fill(2, 1);
    Compared sums, copies, transposed, of_rows;
    tensor_zip(out, TensorFunction::Add, x, y, Stream{});
    for (const int64_t row : sampled_rows(N, C, 16))
        for (int64_t c = 0; c < C; c++)
            sums.add(out.fetch(row * C + c, 1)[0],
                     reference::tensor_function(TensorFunction::Add, x.filled(row * C + c), y.filled(c)));
    sums.expect("zip", 1, C, DType::BF16);
    LargeArray block(DType::BF16, {2, C});  // divides x, whose rows are even in number
    block.fill(3, 1);
    Compared differences;
    tensor_bin_bcast(out, TensorFunction::Sub, x, block, Stream{});
    for (const int64_t row : sampled_rows(N, C, 16)) {
        const std::vector<double> got = out.fetch(row * C, C), a = x.filled(row * C, C),
                                  b = block.filled(row % 2 * C, C);
        for (size_t c = 0; c < got.size(); c++)
            differences.add(got[c], reference::tensor_function(TensorFunction::Sub, a[c], b[c]));
    }
    differences.expect("bin_bcast", 1, C, DType::BF16);
    tensor_bin_bcast(out, TensorFunction::Mul, Tensor{}, block, Stream{});
    for (const int64_t row : sampled_rows(N, C, 16))
        EXPECT_EQ(out.fetch(row * C, C), block.filled(row % 2 * C, C)) << "row " << row << " of bin_bcast without x";
    tensor_map(out, TensorFunction::Neg, x, Stream{});
    for (const int64_t begin : sampled_runs(n, 512))
        for (int64_t i = begin; i < begin + 512; i++)
            copies.add(out.fetch(i, 1)[0], {-x.filled(i), std::fabs(x.filled(i))});
    copies.expect("map", 1, 512, DType::BF16);
    Tensor flipped = make_tensor(x.tensor().data, DType::BF16, x.tensor().device, {C, N});
    flipped.stride[0] = 1;
    flipped.stride[1] = C;
    tensor_map(make_tensor(out.tensor().data, DType::BF16, x.tensor().device, {C, N}), TensorFunction::Neg, flipped,
               Stream{});
    for (const int64_t begin : sampled_runs(n, 512))
        for (int64_t i = begin; i < begin + 512; i++) {
            const double value = x.filled(i % N * C + i / N);
            transposed.add(out.fetch(i, 1)[0], {-value, std::fabs(value)});
        }
    transposed.expect("map of a transpose", 1, 512, DType::BF16);

    LargeArray rows(DType::F32, {N, 1}), columns(DType::F32, {1, C}), all(DType::F32, {1});
    const auto reduce = [](const LargeArray& to, const Tensor& from, int axis) {
        const TestArray scratch = TestArray::scratch(tensor_reduce_scratch(to, from, axis));
        tensor_reduce(to, TensorFunction::Add, from, axis, 0, scratch, Stream{});
        synchronize(Stream{});
    };
    reduce(rows, x, 1);
    for (const int64_t row : sampled_rows(N, C, 4096))
        of_rows.add(rows.fetch(row, 1)[0],
                    reference::tensor_reduce(TensorFunction::Add, 0, x.filled(row * C, C).data(), 1, C));
    of_rows.expect("sums of rows", C, int64_t(of_rows.got.size()), DType::F32);
    reduce(columns, x, 0);
    reduce(all, make_tensor(x.tensor().data, DType::BF16, x.tensor().device, {n}), 0);
    const std::vector<double> sums_of_columns = columns.fetch(0, C);
    std::vector<double> got;
    reference::Values ref(5);
    for (const int64_t c : {int64_t(0), int64_t(1), C / 2, LIMIT % C, C - 1}) {
        reference::Value v;
        for (int64_t row = 0; row < N; row++) v.add(x.filled(row * C + c));
        ref.set(int64_t(got.size()), v);
        got.push_back(sums_of_columns[size_t(c)]);
    }
    expect_close("sums of columns", got, ref.value, ref.mag, N, 1);
    reference::Value total;
    for (const double sum : sums_of_columns) total.add(sum, 4.0 / 2 * double(N));  // the mean of |x| is 2
    expect_close("the sum of all", all.fetch(0, 1), {total.value}, {total.mag}, n, 1);
}

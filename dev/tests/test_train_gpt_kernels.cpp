// The C interface: error codes and messages, tensors of the host and of the device, memory that tensors share, and that
// each function hands its arguments on in the right order. dev/tests/test_train_gpt_kernels.py compares results with
// NumPy.
#include "tensor_library/train_gpt_kernels.h"

#include <thread>

#include "dev/oracle/reference.h"
#include "dev/tests/test_util.h"
#include "kernels/attention/attention.h"
#include "kernels/norm.h"

namespace {

class CInterface : public testing::Test {
  protected:
    void SetUp() override { ASSERT_EQ(tgk_create(&context), TGK_OK) << tgk_last_error(); }
    void TearDown() override { tgk_destroy(context); }

    void expect_refused(int status, const std::string& message) {
        EXPECT_EQ(status, TGK_INVALID_ARGUMENT);
        EXPECT_EQ(tgk_last_error(), message);
    }
    tgk_context* context = nullptr;
};

// Contiguous host memory.
tgk_tensor host(const void* data, int32_t dtype, std::initializer_list<int64_t> shape) {
    tgk_tensor t{};
    t.data = const_cast<void*>(data);
    t.dtype = dtype;
    t.device = TGK_CPU;
    t.rank = int32_t(shape.size());
    int64_t stride = 1;
    for (int d = t.rank - 1; d >= 0; d--) {
        t.shape[d] = shape.begin()[d];
        t.stride[d] = stride;
        stride *= t.shape[d];
    }
    return t;
}
tgk_tensor host(const std::vector<float>& data, std::initializer_list<int64_t> shape) {
    return host(data.data(), TGK_F32, shape);
}

std::vector<float> random(int64_t n, uint64_t seed) {
    std::vector<float> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) values[size_t(i)] = float(normal01(seed, 0, uint64_t(i)));
    return values;
}

std::vector<double> widened(const std::vector<float>& x) {
    return {x.begin(), x.end()};
}

int32_t function(const std::string& name) {
    for (int32_t f = 0; f < tgk_num_functions(); f++)
        if (name == tgk_function_name(f)) return f;
    return -1;
}

void expect_reference(const std::vector<float>& got, const reference::Values& ref, int64_t K) {
    expect_close("result", widened(got), ref.value, ref.mag, K, int64_t(got.size()));
}

}  // namespace

TEST_F(CInterface, ListsFunctionsAndDevice) {
    EXPECT_STREQ(tgk_backend(), backend_name());
    for (int32_t f = 0; f < tgk_num_functions(); f++) {
        EXPECT_EQ(function(tgk_function_name(f)), f);
        EXPECT_TRUE(tgk_function_arguments(f) == 1 || tgk_function_arguments(f) == 2);
    }
    EXPECT_EQ(tgk_function_name(-1), nullptr);
    EXPECT_EQ(tgk_function_name(tgk_num_functions()), nullptr);
    EXPECT_EQ(tgk_function_arguments(-1), 0);
    char text[256], cut[4];
    ASSERT_EQ(tgk_device_description(text, sizeof text), TGK_OK);
    EXPECT_EQ(text, device_description());
    ASSERT_EQ(tgk_device_description(cut, sizeof cut), TGK_OK);
    EXPECT_EQ(cut, device_description().substr(0, 3));
    expect_refused(tgk_device_description(nullptr, 9), "tgk_device_description: there is no room for text");
}

TEST_F(CInterface, ErrorsNameTheFault) {
    const std::vector<float> x = random(6, 1), out(6);
    const tgk_tensor inp = host(x, {2, 3}), good = host(out, {2, 3});
    expect_refused(tgk_map(nullptr, 0, &good, &inp), "tgk_map: the context is null");
    expect_refused(tgk_map(context, 99, &good, &inp), "tgk_map: 99 is not a function");
    expect_refused(tgk_map(context, function("add"), &good, &inp),
                   "tensor_map: add is a function of 2 arguments, expected one of 1");
    expect_refused(tgk_map(context, 0, &good, nullptr), "tensor_map: inp is missing");
    expect_refused(tgk_map(context, 0, &inp, &inp), "tgk_map: out overlaps inp; give it memory of its own");
    tgk_tensor bad = good;
    bad.rank = 9;
    expect_refused(tgk_map(context, 0, &bad, &inp), "tgk_map: a tensor has 9 dimensions, expected 0 to 8");
    bad = good;
    bad.dtype = 8;
    expect_refused(tgk_map(context, 0, &bad, &inp), "tgk_map: 8 is not a dtype");
    bad = good;
    bad.device = 2;
    expect_refused(tgk_map(context, 0, &bad, &inp), "tgk_map: 2 is not a device");
    bad = good;
    bad.shape[0] = -1;
    expect_refused(tgk_map(context, 0, &bad, &inp), "tensor dimension 0 is -1; it must not be negative");
    bad = good;
    bad.data = nullptr;
    expect_refused(tgk_map(context, 0, &bad, &inp), "tgk_map: a tensor [2, 3] has no data");
    bad = good;
    bad.stride[0] = INT64_MIN;
    expect_refused(tgk_map(context, 0, &bad, &inp), "tgk_map: the strides of a tensor [2, 3] overflow 64 bits");
    if (backend_device() == Device::CPU) {
        bad = good;
        bad.device = TGK_CUDA;
        expect_refused(tgk_map(context, 0, &bad, &inp),
                       "tgk_map: a tensor lies on a GPU, and this library was built for the CPU");
    }
    expect_refused(tgk_create(nullptr), "tgk_create: the pointer for the context is null");
    std::vector<float> params(6), m(6), v(6);
    const tgk_tensor p1 = host(params, {6}), m1 = host(m, {6}), v1 = host(v, {6}), g1 = host(out, {6});
    expect_refused(tgk_adamw_update(context, &p1, &m1, &v1, &g1, 0, 0, 0, 0, 0, 1, 0),
                   "tgk_adamw_update: t is 0, expected the number of this update, 1 or more");

    // Failures of another thread have their own message.
    std::thread([] { EXPECT_STREQ(tgk_last_error(), ""); }).join();
}

// Computations before the check of the tensors, such as the size of the scratch, tolerate missing tensors.
TEST_F(CInterface, EveryOperationRejectsMissingTensors) {
    tgk_context* c = context;
    const tgk_tensor* none = nullptr;
    const int32_t neg = function("neg"), add = function("add");
    expect_refused(tgk_map(c, neg, none, none), "tensor_map: out is missing");
    expect_refused(tgk_zip(c, add, none, none, none), "tensor_zip: out is missing");
    expect_refused(tgk_bin_bcast(c, add, none, none, none), "tensor_bin_bcast: out is missing");
    const int others[] = {
        tgk_reduce(c, add, none, none, 0, 0),
        tgk_tensor_matmul(c, none, none, none),
        tgk_matmul(c, none, none, none, 0, 0, 0),
        tgk_matmul_forward(c, none, none, none, none),
        tgk_matmul_backward_input(c, none, none, none, 0),
        tgk_matmul_backward_weight(c, none, none, none, none, 0),
        tgk_layernorm_forward(c, none, none, none, none, none, none, none, none, 1e-5f),
        tgk_layernorm_backward(c, none, none, none, none, none, none, none, none, none, none, 0),
        tgk_rmsnorm_forward(c, none, none, none, none, none, none, 1e-5f),
        tgk_rmsnorm_backward(c, none, none, none, none, none, none, none, none, 0),
        tgk_softmax_forward(c, none, none, none, 0, 1, 0),
        tgk_softmax_backward(c, none, none, none, 1),
        tgk_attention_forward(c, none, none, none, none, none, none, none, 0, 0, 1, 0, 1),
        tgk_attention_backward(c, none, none, none, none, none, none, none, none, none, none, none, 0, 0, 1, 0, 1),
        tgk_linear_attention_forward(c, none, none, none, none, none, none, none, none, none, none, none, 0, 1, 1),
        tgk_linear_attention_backward(c, none, none, none, none, none, none, none, none, none, none, none, none, none,
                                      none, none, none, none, none, 0, 1, 1),
        tgk_linear_attention_decode(c, none, none, none, none, none, none, none, 1, 1),
        tgk_decay_gate_forward(c, none, none, none, none),
        tgk_decay_gate_backward(c, none, none, none),
        tgk_rope_table(none, 1e4),
        tgk_rope(c, none, none, none, 0),
        tgk_gelu_forward(c, none, none),
        tgk_gelu_backward(c, none, none, none),
        tgk_swiglu_forward(c, none, none),
        tgk_swiglu_backward(c, none, none, none),
        tgk_adamw_update(c, none, none, none, none, 0, 0, 0, 0, 0, 1, 1),
        tgk_newton_schulz(c, none, 0, 0),
        tgk_muon_update(c, none, none, none, 0.1f, 0.95f, 0, 1, 1, 0, 0),
        tgk_top_k(c, none, none, none),
    };
    int at = 0;
    for (const int status : others) EXPECT_EQ(status, TGK_INVALID_ARGUMENT) << "operation " << at++;
}

TEST_F(CInterface, FailedAllocationIsADeviceError) {
    void* data = nullptr;
    const size_t bytes = backend_device() == Device::CPU ? SIZE_MAX - 10 : size_t(1) << 62;
    EXPECT_EQ(tgk_alloc(context, &data, bytes), TGK_DEVICE_ERROR);
    EXPECT_NE(std::string(tgk_last_error()).find("cannot allocate"), std::string::npos) << tgk_last_error();
}

TEST_F(CInterface, TensorsOfTheDeviceAreUsedInPlace) {
    const std::vector<float> x = random(1000, 1);
    void *inp = nullptr, *out = nullptr;
    ASSERT_EQ(tgk_alloc(context, &inp, 4000), TGK_OK);
    ASSERT_EQ(tgk_alloc(context, &out, 4000), TGK_OK);
    ASSERT_EQ(tgk_copy_to_device(context, inp, x.data(), 4000), TGK_OK);
    tgk_tensor from = host(inp, TGK_F32, {1000}), to = host(out, TGK_F32, {1000});
    from.device = to.device = int32_t(backend_device());
    ASSERT_EQ(tgk_map(context, function("neg"), &to, &from), TGK_OK) << tgk_last_error();
    ASSERT_EQ(tgk_synchronize(context), TGK_OK);
    ASSERT_EQ(tgk_wait_for_stream(context, 0), TGK_OK);
    std::vector<float> got(1000);
    ASSERT_EQ(tgk_copy_to_host(context, got.data(), out, 4000), TGK_OK);
    for (size_t i = 0; i < 1000; i++) ASSERT_EQ(got[i], -x[i]);
    EXPECT_EQ(tgk_free(context, inp), TGK_OK);
    EXPECT_EQ(tgk_free(context, out), TGK_OK);
}

// Rows of an array with gaps, one tensor between the elements of the other; and an operation in place.
TEST_F(CInterface, HostTensorsMayShareMemory) {
    std::vector<float> memory = random(80, 1);
    const std::vector<float> before = memory;
    tgk_tensor even = host(memory, {8, 5}), odd = even;
    even.stride[0] = odd.stride[0] = 10;
    even.stride[1] = odd.stride[1] = 2;
    odd.data = memory.data() + 1;
    ASSERT_EQ(tgk_map(context, function("neg"), &odd, &even), TGK_OK) << tgk_last_error();
    for (size_t i = 0; i < 80; i++) ASSERT_EQ(memory[i], i % 2 ? -before[i - 1] : before[i]);

    std::vector<float> x = random(64, 2);
    const reference::Values ref = reference::gelu_forward(widened(x).data(), 64);
    const tgk_tensor t = host(x, {4, 16});
    ASSERT_EQ(tgk_gelu_forward(context, &t, &t), TGK_OK) << tgk_last_error();
    expect_reference(x, ref, 1);
}

// A kernel writes some results before it has read all of its inputs, so shared memory would give wrong numbers.
TEST_F(CInterface, ResultsNeedMemoryOfTheirOwn) {
    std::vector<float> x = random(64, 1), y = random(64, 2), z(64);
    const std::vector<float> before = x;
    const tgk_tensor a = host(x, {8, 8}), b = host(y, {8, 8}), c = host(z, {8, 8});
    tgk_context* k = context;
    expect_refused(tgk_matmul(k, &a, &a, &b, 0, 0, 0), "tgk_matmul: out overlaps a; give it memory of its own");
    expect_refused(tgk_matmul(k, &b, &a, &b, 0, 0, 1), "tgk_matmul: out overlaps b; give it memory of its own");
    expect_refused(tgk_matmul_backward_input(k, &b, &a, &b, 0),
                   "tgk_matmul_backward_input: dinp overlaps weight; give it memory of its own");
    tgk_tensor row = a, shifted = a;
    row.rank = 1;
    row.stride[0] = 1;
    expect_refused(tgk_layernorm_forward(k, &c, &a, nullptr, nullptr, &b, nullptr, &row, nullptr, 1e-5f),
                   "tgk_layernorm_forward: sum overlaps weight; give it memory of its own");
    expect_refused(tgk_softmax_forward(k, &a, &a, nullptr, 8, 1, 0),
                   "tgk_softmax_forward: out overlaps inp; give it memory of its own");
    expect_refused(tgk_adamw_update(k, &row, &row, &row, &row, 0, 0, 0, 0, 0, 1, 1),
                   "tgk_adamw_update: params overlaps m; give it memory of its own");
    expect_refused(tgk_top_k(k, &a, &a, &b), "tgk_top_k: values overlaps ids; give it memory of its own");
    // Elementwise, but not element by element the same memory.
    shifted.data = x.data() + 1;
    shifted.shape[0] = 7;
    tgk_tensor fewer = a;
    fewer.shape[0] = 7;
    expect_refused(tgk_gelu_forward(k, &shifted, &fewer),
                   "tgk_gelu_forward: out overlaps inp; give it memory of its own");
    // One element twice in a result.
    tgk_tensor heads = host(x, {2, 4, 8});
    heads.stride[0] = 0;
    const std::vector<int32_t> ids = {0, 1};
    const tgk_tensor positions = host(ids.data(), TGK_I32, {2});
    expect_refused(tgk_rope(k, &heads, &positions, &c, 0),
                   "tgk_rope: x [2, 4, 8] has a stride of 0 in dimension 0: its elements overlap each other");
    EXPECT_EQ(x, before);
}

// The result may be an input where each element depends on the same elements alone.
TEST_F(CInterface, ElementwiseOperationsWorkInPlace) {
    const auto expect_in_place = [&](const char* name, int64_t columns, int operand, auto call) {
        std::vector<float> inputs[2] = {random(16 * columns, 1), random(16 * columns, 2)}, out(size_t(16 * columns));
        for (float& gate : inputs[1]) gate = -std::abs(gate);  // a decay gate is at most 0
        const tgk_tensor to = host(out, {16, columns});
        tgk_tensor from[2] = {host(inputs[0], {16, columns}), host(inputs[1], {16, columns})};
        ASSERT_EQ(call(&to, &from[0], &from[1]), TGK_OK) << name << ": " << tgk_last_error();
        ASSERT_EQ(call(&from[operand], &from[0], &from[1]), TGK_OK) << name << ": " << tgk_last_error();
        EXPECT_EQ(inputs[operand], out) << name;
    };
    tgk_context* k = context;
    using T = const tgk_tensor*;
    expect_in_place("gelu_forward", 40, 0, [&](T out, T x, T) { return tgk_gelu_forward(k, out, x); });
    for (const int operand : {0, 1}) {
        expect_in_place("gelu_backward", 40, operand, [&](T out, T d, T x) { return tgk_gelu_backward(k, out, d, x); });
        expect_in_place("decay_gate_backward", 40, operand,
                        [&](T out, T d, T g) { return tgk_decay_gate_backward(k, out, d, g); });
    }
    expect_in_place("swiglu_backward", 40, 1, [&](T out, T d, T x) {
        tgk_tensor half = *d;
        half.shape[1] = 20;
        half.stride[0] = 20;
        return tgk_swiglu_backward(k, out, &half, x);
    });
}

TEST_F(CInterface, EmptyTensorsNeedNoMemory) {
    tgk_tensor none = host(nullptr, TGK_F32, {0, 3});
    EXPECT_EQ(tgk_map(context, 0, &none, &none), TGK_OK) << tgk_last_error();
    std::vector<float> out(3, -1);
    const tgk_tensor sums = host(out, {1, 3});
    ASSERT_EQ(tgk_reduce(context, function("add"), &sums, &none, 0, 2.5f), TGK_OK) << tgk_last_error();
    for (const float sum : out) EXPECT_EQ(sum, 2.5f);
}

TEST_F(CInterface, TensorOperations) {
    const std::vector<float> x = random(60, 1), y = random(20, 2), z = random(20, 3);
    std::vector<float> out(60), sums(12), matmul_out(9);
    const tgk_tensor o = host(out, {3, 4, 5}), a = host(x, {3, 4, 5}), b = host(y, {4, 5});
    ASSERT_EQ(tgk_zip(context, function("sub"), &o, &a, &b), TGK_OK) << tgk_last_error();
    for (size_t i = 0; i < 60; i++) ASSERT_EQ(out[i], x[i] - y[i % 20]);
    const tgk_tensor half = host(y, {2, 5});
    ASSERT_EQ(tgk_bin_bcast(context, function("mul"), &o, &a, &half), TGK_OK) << tgk_last_error();
    for (size_t i = 0; i < 60; i++) ASSERT_EQ(out[i], x[i] * y[i % 10]);
    ASSERT_EQ(tgk_bin_bcast(context, function("add"), &o, nullptr, &half), TGK_OK) << tgk_last_error();
    for (size_t i = 0; i < 60; i++) ASSERT_EQ(out[i], y[i % 10]);
    const tgk_tensor s = host(sums, {3, 4, 1});
    ASSERT_EQ(tgk_reduce(context, function("max"), &s, &a, 2, -1e30f), TGK_OK) << tgk_last_error();
    for (size_t i = 0; i < 12; i++) ASSERT_EQ(sums[i], *std::max_element(&x[i * 5], &x[i * 5] + 5));
    const tgk_tensor left = host(y, {3, 4}), right = host(z, {4, 3}), p = host(matmul_out, {3, 3});
    const reference::Values ref =
        reference::matmul(widened(y).data(), widened(z).data(), false, false, nullptr, nullptr, 3, 3, 4);
    ASSERT_EQ(tgk_tensor_matmul(context, &p, &left, &right), TGK_OK) << tgk_last_error();
    expect_reference(matmul_out, ref, 4);
    ASSERT_EQ(tgk_matmul(context, &p, &left, &right, 0, 0, 0), TGK_OK) << tgk_last_error();
    expect_reference(matmul_out, ref, 4);
}

TEST_F(CInterface, LayerNormWithAndWithoutItsOptions) {
    const int64_t N = 5, C = 24;
    const std::vector<float> inp = random(N * C, 1), weight = random(C, 2), dout = random(N * C, 3);
    std::vector<float> out(N * C), mean(N), rstd(N), dinp(N * C), dweight(C);
    const auto rows = [&](const std::vector<float>& x) { return host(x, {N, C}); };
    const tgk_tensor o = rows(out), i = rows(inp), w = host(weight, {C}), m = host(mean, {N}), r = host(rstd, {N});
    ASSERT_EQ(tgk_layernorm_forward(context, &o, nullptr, &m, &r, &i, nullptr, &w, nullptr, 1e-5f), TGK_OK)
        << tgk_last_error();
    const reference::Norm ref =
        reference::layernorm_forward(widened(inp).data(), nullptr, widened(weight).data(), nullptr, 1e-5, N, C);
    expect_reference(out, ref.out, C);
    expect_reference(mean, ref.mean, C);
    expect_reference(rstd, ref.rstd, C);
    const tgk_tensor di = rows(dinp), dw = host(dweight, {C}), d = rows(dout);
    ASSERT_EQ(tgk_layernorm_backward(context, &di, &dw, nullptr, nullptr, &d, nullptr, &i, &w, &m, &r, 0), TGK_OK)
        << tgk_last_error();
    const reference::NormGradients grads =
        reference::norm_backward(widened(dout).data(), nullptr, widened(inp).data(), widened(weight).data(),
                                 widened(mean).data(), widened(rstd).data(), nullptr, nullptr, N, C);
    expect_reference(dinp, grads.dinp, C);
    expect_reference(dweight, grads.dweight, N);
    expect_refused(tgk_layernorm_backward(context, &di, &dw, nullptr, nullptr, &d, nullptr, nullptr, &w, &m, &r, 0),
                   "layernorm_backward: inp is missing");
}

TEST_F(CInterface, AttentionForwardAndBackward) {
    const int64_t T = 7, NH = 4, NKV = 2, HS = 16;
    const std::vector<int32_t> cum = {0, 3, 7};
    const std::vector<float> q = random(T * NH * HS, 1), k = random(T * NKV * HS, 2), v = random(T * NKV * HS, 3),
                             dout = random(T * NH * HS, 4);
    std::vector<float> out(q.size()), lse(size_t(NH * T)), dq(q.size()), dk(k.size()), dv(k.size());
    const auto queries = [&](const std::vector<float>& x) { return host(x, {T, NH, HS}); };
    const auto keys = [&](const std::vector<float>& x) { return host(x, {T, NKV, HS}); };
    const tgk_tensor to = queries(out), tl = host(lse, {NH, T}), tq = queries(q), tk = keys(k), tv = keys(v),
                     tc = host(cum.data(), TGK_I32, {3}), tdq = queries(dq), tdk = keys(dk), tdv = keys(dv),
                     td = queries(dout);
    ASSERT_EQ(tgk_attention_forward(context, &to, &tl, &tq, &tk, &tv, &tc, &tc, 4, 4, 1, 0, 0.25f), TGK_OK)
        << tgk_last_error();
    const reference::Attention ref = reference::attention_forward(widened(q).data(), widened(k).data(),
                                                                  widened(v).data(), cum, cum, NH, NKV, HS, 0.25);
    expect_reference(out, ref.out, T);
    ASSERT_EQ(
        tgk_attention_backward(context, &tdq, &tdk, &tdv, &td, &tq, &tk, &tv, &to, &tl, &tc, &tc, 4, 4, 1, 0, 0.25f),
        TGK_OK)
        << tgk_last_error();
    const reference::AttentionGradients grads =
        reference::attention_backward(widened(dout).data(), widened(q).data(), widened(k).data(), widened(v).data(),
                                      widened(out).data(), widened(lse).data(), cum, cum, NH, NKV, HS, 0.25);
    expect_reference(dq, grads.dq, T);
    expect_reference(dk, grads.dk, T);
    expect_reference(dv, grads.dv, T);
}

// Attention type linear: two sequences, the state handed on, and one more token.
TEST_F(CInterface, LinearAttentionForwardAndBackward) {
    const int64_t N = 7, S = 2, NH = 4, NKV = 2, E = 16, M = 8;
    const std::vector<int32_t> cum = {0, 3, 7};
    const std::vector<float> q = random(N * NH * E, 1), k = random(N * NKV * E, 2), v = random(N * NKV * M, 3),
                             dout = random(N * NH * M, 4);
    std::vector<float> out(size_t(N * NH * M)), norm(size_t(NH * N)), s(size_t(S * NKV * E * M)),
        z(size_t(S * NKV * E)), dq(q.size()), dk(k.size()), dv(v.size());
    const tgk_tensor to = host(out, {N, NH, M}), tn = host(norm, {NH, N}), ts = host(s, {S, NKV, E, M}),
                     tz = host(z, {S, NKV, E}), tq = host(q, {N, NH, E}), tk = host(k, {N, NKV, E}),
                     tv = host(v, {N, NKV, M}), tc = host(cum.data(), TGK_I32, {3}), tdq = host(dq, {N, NH, E}),
                     tdk = host(dk, {N, NKV, E}), tdv = host(dv, {N, NKV, M}), td = host(dout, {N, NH, M});
    ASSERT_EQ(tgk_linear_attention_forward(context, &to, &tn, &ts, &tz, &tq, &tk, &tv, nullptr, nullptr, nullptr, &tc,
                                           4, 1, 1),
              TGK_OK)
        << tgk_last_error();
    const std::vector<double> wq = widened(q), wk = widened(k), wv = widened(v);
    const reference::LinearAttentionInputs inputs{wq.data(), wk.data(), wv.data(), nullptr, nullptr, nullptr, cum,
                                                  NH,        NKV,       E,         M,       true,    true};
    const reference::LinearAttentionResult ref = reference::linear_attention_forward(inputs);
    expect_reference(out, ref.out, E);
    expect_reference(norm, ref.norm, E);
    expect_reference(s, ref.final, E);
    expect_reference(z, ref.final_z, E);
    ASSERT_EQ(tgk_linear_attention_backward(context, &tdq, &tdk, &tdv, nullptr, nullptr, nullptr, &td, nullptr, nullptr,
                                            &tq, &tk, &tv, nullptr, nullptr, nullptr, &to, &tn, &tc, 4, 1, 1),
              TGK_OK)
        << tgk_last_error();
    const reference::LinearAttentionGradients grads = reference::linear_attention_backward(
        inputs, widened(dout).data(), widened(out).data(), widened(norm).data(), nullptr, nullptr);
    expect_reference(dq, grads.dq, E);
    expect_reference(dk, grads.dk, E);
    expect_reference(dv, grads.dv, E);
    // One sequence of its first token and the state that is nothing: itself.
    std::vector<float> empty_s(size_t(NKV * E * M)), empty_z(size_t(NKV * E)), first(size_t(NH * M));
    const tgk_tensor es = host(empty_s, {1, NKV, E, M}), ez = host(empty_z, {1, NKV, E}), tf = host(first, {1, NH, M}),
                     q1 = host(q, {1, NH, E}), k1 = host(k, {1, NKV, E}), v1 = host(v, {1, NKV, M});
    ASSERT_EQ(tgk_linear_attention_decode(context, &tf, &es, &ez, &q1, &k1, &v1, nullptr, 1, 1), TGK_OK)
        << tgk_last_error();
    for (size_t i = 0; i < first.size(); i++) ASSERT_NEAR(first[i], out[i], 1e-5);
    expect_refused(tgk_linear_attention_decode(context, &tf, &es, &ez, &q1, &k1, &v1, nullptr, 2, 1),
                   "tgk_linear_attention_decode: features are 2, expected 0 (identity) or 1 (elu + 1)");
}

// Matrices of one element: O is where the coefficients take 1.
TEST_F(CInterface, Muon) {
    std::vector<float> params = {2, 3}, m = {0.5f, -1};
    const std::vector<float> grads = {1, 0};
    const tgk_tensor p = host(params, {2, 1, 1}), tm = host(m, {2, 1, 1}), g = host(grads, {2, 1, 1});
    ASSERT_EQ(tgk_muon_update(context, &p, &tm, &g, 0.1f, 0.5f, 0.5f, 4, 2, 2, 1), TGK_OK) << tgk_last_error();
    EXPECT_EQ(m, (std::vector<float>{1.25f, -0.5f}));  // u = 1.625, −0.25; O = ±1, as 2 − 1.5 + 0.5 = 1
    EXPECT_NEAR(params[0], 2 - 0.1 * (4 + 0.5 * 2), 1e-6);
    EXPECT_NEAR(params[1], 3 - 0.1 * (-4 + 0.5 * 3), 1e-6);
    std::vector<float> x = {3, 0, 0, 4};
    const tgk_tensor matrix = host(x, {1, 2, 2}), flat = host(x, {4});
    ASSERT_EQ(tgk_newton_schulz(context, &matrix, 2, 0), TGK_OK) << tgk_last_error();
    for (size_t i = 0; i < 4; i++) EXPECT_NEAR(x[i], i % 3 ? 0 : 1, 1e-5);
    expect_refused(tgk_newton_schulz(context, &flat, 0, 0),
                   backend_device() == Device::CPU
                       ? "newton_schulz: x is fp32 [4], expected fp32 [batch, rows, columns]"
                       : "newton_schulz: x is fp32 [4], expected fp32 or bf16 [batch, rows, columns]");
    expect_refused(tgk_newton_schulz(context, &matrix, 3, 0), "tgk_newton_schulz: coefficients are 3, expected 0 to 2");
    expect_refused(tgk_newton_schulz(context, &matrix, 0, -1),
                   "tgk_newton_schulz: iterations are -1, expected 0 (the default) or more");
    expect_refused(tgk_muon_update(context, &p, &tm, &matrix, 0, 0, 0, 0, 0, 0, 0),
                   "tgk_muon_update: params is fp32 [2, 1, 1], expected fp32 [1, 2, 2]");
}

TEST_F(CInterface, AdamWAndTopK) {
    const int64_t n = 100;
    std::vector<float> params = random(n, 1), m(n), v(n);
    const std::vector<float> before = params, grads = random(n, 2);
    const tgk_tensor p = host(params, {n}), tm = host(m, {n}), tv = host(v, {n}), g = host(grads, {n});
    ASSERT_EQ(tgk_adamw_update(context, &p, &tm, &tv, &g, 0.1f, 0.9f, 0.95f, 1e-8f, 0.5f, 0.5f, 1), TGK_OK)
        << tgk_last_error();
    for (size_t i = 0; i < size_t(n); i++) {
        const double half = 0.5 * double(grads[i]);
        ASSERT_NEAR(params[i], before[i] - 0.1 * (half / (std::fabs(half) + 1e-8) + 0.5 * before[i]), 1e-6);
        ASSERT_NEAR(m[i], 0.1 * half, 1e-6);
        ASSERT_NEAR(v[i], 0.05 * half * half, 1e-6);
    }

    const std::vector<float> logits = {1, 5, 3, 5, -1, 9};
    std::vector<float> values(3);
    std::vector<int32_t> ids(3);
    const tgk_tensor top = host(values, {1, 3}), id_tensor = host(ids.data(), TGK_I32, {1, 3}),
                     inp = host(logits, {1, 6});
    ASSERT_EQ(tgk_top_k(context, &top, &id_tensor, &inp), TGK_OK) << tgk_last_error();
    EXPECT_EQ(values, (std::vector<float>{9, 5, 5}));
    EXPECT_EQ(ids, (std::vector<int32_t>{5, 1, 3}));
}

#include "tensor_library/train_gpt_kernels.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/check.h"
#include "kernels/generation/topk.h"
#include "kernels/linear_attention/decay_gate.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/matmul.h"
#include "kernels/muon.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "kernels/softmax.h"
#include "tensor_library/c_interface.h"
#include "tensor_library/tensor_ops.h"

namespace {

using namespace c_interface;

constexpr Outputs ELEMENTWISE = {1, true};

// A size that a scratch depends on; 0 if the tensor has too few dimensions, which the kernel reports.
int64_t size(const Tensor& t, int dimension) {
    return dimension < t.rank ? t.shape[dimension] : 0;
}

LinearAttentionType linear_type(const char* op, int32_t features, int32_t normalise) {
    require(features == 0 || features == 1, op, ": features are ", features, ", expected 0 (identity) or 1 (elu + 1)");
    LinearAttentionType type;
    type.features = features ? FeatureMap::EluPlusOne : FeatureMap::Identity;
    type.normalise = normalise != 0;
    return type;
}

LinearAttentionSizes linear_sizes(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cum,
                                  int64_t max_length) {
    return {size(q, 0), std::max<int64_t>(size(cum, 0) - 1, 0), size(q, 1), size(k, 1), size(q, 2), size(v, 2),
            max_length};
}

NewtonSchulz newton_schulz_of(const char* op, int32_t coefficients, int32_t iterations) {
    const auto& names = newton_schulz_names();
    require(coefficients >= 0 && size_t(coefficients) < names.size(), op, ": coefficients are ", coefficients,
            ", expected 0 to ", names.size() - 1);
    require(iterations >= 0, op, ": iterations are ", iterations, ", expected 0 (the default) or more");
    return newton_schulz_coefficients(names[size_t(coefficients)], iterations);
}

// Scalars of a step on the device, in the first bytes of the scratch.
Tensor upload_scalars(const StepScalars& scalars, const Tensor& memory, Stream stream) {
    const Tensor on_device = memory.rows(0, int64_t(sizeof(StepScalars)));
    copy_to_device(on_device.data, &scalars, sizeof(StepScalars), stream);
    return on_device;
}

TensorFunction function_of(const char* op, int32_t function) {
    require(function >= 0 && function < NUM_TENSOR_FUNCTIONS, op, ": ", function, " is not a function");
    return TensorFunction(function);
}

}  // namespace

// A signal handler of the host program may run in the middle of a oneDNN matmul, while the stack pointer points into a
// buffer on the heap (runtime/signals.h). Python's handlers request an alternate stack (SA_ONSTACK). This provides one
// for the thread that loads the library: in practice the main thread, which the system prefers for signals.
[[gnu::constructor]] static void give_handlers_a_stack() {
    alignas(64) static char memory[1 << 16];
    stack_t before;
    if (sigaltstack(nullptr, &before) || !(before.ss_flags & SS_DISABLE)) return;
    const stack_t ours = {memory, 0, sizeof memory};
    sigaltstack(&ours, nullptr);
}

extern "C" {

int tgk_create(tgk_context** context) {
    return guarded([&] {
        require(context, "tgk_create: the pointer for the context is null");
        *context = new tgk_context;
    });
}

void tgk_destroy(tgk_context* context) {
    delete context;
}

int tgk_synchronize(tgk_context* context) {
    return guarded([&] { synchronize(checked(context, "tgk_synchronize").stream); });
}

int tgk_wait_for_stream(tgk_context* context, uintptr_t stream) {
    return guarded([&] {
        checked(context, "tgk_wait_for_stream");
        Stream other;
        other.handle = reinterpret_cast<void*>(stream);
        Event done;
        done.record(other);
        done.wait();
    });
}

const char* tgk_last_error(void) {
    return last_error.c_str();
}

const char* tgk_backend(void) {
    return backend_name();
}

int tgk_device_description(char* text, size_t size) {
    return guarded([&] {
        require(text && size > 0, "tgk_device_description: there is no room for text");
        const std::string description = device_description();
        const size_t length = std::min(size - 1, description.size());
        std::memcpy(text, description.data(), length);
        text[length] = 0;
    });
}

int tgk_alloc(tgk_context* context, void** data, size_t bytes) {
    return guarded([&] {
        checked(context, "tgk_alloc");
        require(data, "tgk_alloc: the pointer for the memory is null");
        *data = device_alloc(bytes);
    });
}

int tgk_free(tgk_context* context, void* data) {
    return guarded([&] {
        synchronize(checked(context, "tgk_free").stream);
        device_free(data);
    });
}

int tgk_copy_to_device(tgk_context* context, void* device, const void* host, size_t bytes) {
    return guarded([&] {
        tgk_context& c = checked(context, "tgk_copy_to_device");
        copy_to_device(device, host, bytes, c.stream);
        synchronize(c.stream);
    });
}

int tgk_copy_to_host(tgk_context* context, void* host, const void* device, size_t bytes) {
    return guarded([&] { copy_to_host(host, device, bytes, checked(context, "tgk_copy_to_host").stream); });
}

int32_t tgk_num_functions(void) {
    return NUM_TENSOR_FUNCTIONS;
}

const char* tgk_function_name(int32_t function) {
    return function >= 0 && function < NUM_TENSOR_FUNCTIONS ? TENSOR_FUNCTION_INFOS[function].name : nullptr;
}

int32_t tgk_function_arguments(int32_t function) {
    return function >= 0 && function < NUM_TENSOR_FUNCTIONS ? TENSOR_FUNCTION_INFOS[function].arguments : 0;
}

int tgk_map(tgk_context* context, int32_t function, const tgk_tensor* out, const tgk_tensor* inp) {
    return call("tgk_map", context, {1}, ARGUMENTS(out, inp), [&](Tensors& t, tgk_context& c) {
        tensor_map(t[0], function_of("tgk_map", function), t[1], c.stream);
    });
}

int tgk_zip(tgk_context* context, int32_t function, const tgk_tensor* out, const tgk_tensor* x, const tgk_tensor* y) {
    return call("tgk_zip", context, {1}, ARGUMENTS(out, x, y), [&](Tensors& t, tgk_context& c) {
        tensor_zip(t[0], function_of("tgk_zip", function), t[1], t[2], c.stream);
    });
}

int tgk_bin_bcast(tgk_context* context, int32_t function, const tgk_tensor* out, const tgk_tensor* x,
                  const tgk_tensor* y) {
    return call("tgk_bin_bcast", context, {1}, ARGUMENTS(out, x, y), [&](Tensors& t, tgk_context& c) {
        tensor_bin_bcast(t[0], function_of("tgk_bin_bcast", function), t[1], t[2], c.stream);
    });
}

int tgk_reduce(tgk_context* context, int32_t function, const tgk_tensor* out, const tgk_tensor* inp, int32_t axis,
               float start) {
    return call("tgk_reduce", context, {1}, ARGUMENTS(out, inp), [&](Tensors& t, tgk_context& c) {
        const TensorFunction f = function_of("tgk_reduce", function);
        tensor_reduce(t[0], f, t[1], axis, start, scratch(c, tensor_reduce_scratch(t[0], t[1], axis)), c.stream);
    });
}

int tgk_tensor_matmul(tgk_context* context, const tgk_tensor* out, const tgk_tensor* a, const tgk_tensor* b) {
    return call("tgk_tensor_matmul", context, {1}, ARGUMENTS(out, a, b),
                [&](Tensors& t, tgk_context& c) { tensor_matmul(t[0], t[1], t[2], c.stream); });
}

int tgk_matmul(tgk_context* context, const tgk_tensor* out, const tgk_tensor* a, const tgk_tensor* b,
               int32_t transpose_a, int32_t transpose_b, int32_t accumulate) {
    return call("tgk_matmul", context, {1}, ARGUMENTS(out, a, b), [&](Tensors& t, tgk_context& c) {
        matmul(t[0], t[1], t[2], transpose_a != 0, transpose_b != 0, accumulate != 0, c.stream);
    });
}

int tgk_matmul_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* inp, const tgk_tensor* weight,
                       const tgk_tensor* bias) {
    return call("tgk_matmul_forward", context, {1}, ARGUMENTS(out, inp, weight, bias),
                [&](Tensors& t, tgk_context& c) { matmul_forward(t[0], t[1], t[2], t[3], c.stream); });
}

int tgk_matmul_backward_input(tgk_context* context, const tgk_tensor* dinp, const tgk_tensor* dout,
                              const tgk_tensor* weight, int32_t accumulate) {
    return call(
        "tgk_matmul_backward_input", context, {1}, ARGUMENTS(dinp, dout, weight),
        [&](Tensors& t, tgk_context& c) { matmul_backward_input(t[0], t[1], t[2], accumulate != 0, c.stream); });
}

int tgk_matmul_backward_weight(tgk_context* context, const tgk_tensor* dweight, const tgk_tensor* dbias,
                               const tgk_tensor* dout, const tgk_tensor* inp, int32_t accumulate) {
    return call(
        "tgk_matmul_backward_weight", context, {2}, ARGUMENTS(dweight, dbias, dout, inp),
        [&](Tensors& t, tgk_context& c) { matmul_backward_weight(t[0], t[1], t[2], t[3], accumulate != 0, c.stream); });
}

int tgk_layernorm_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* sum, const tgk_tensor* mean,
                          const tgk_tensor* rstd, const tgk_tensor* inp, const tgk_tensor* residual,
                          const tgk_tensor* weight, const tgk_tensor* bias, float eps) {
    return call("tgk_layernorm_forward", context, {4}, ARGUMENTS(out, sum, mean, rstd, inp, residual, weight, bias),
                [&](Tensors& t, tgk_context& c) {
                    layernorm_forward({.out = t[0],
                                       .sum = t[1],
                                       .mean = t[2],
                                       .rstd = t[3],
                                       .inp = t[4],
                                       .residual = t[5],
                                       .weight = t[6],
                                       .bias = t[7],
                                       .eps = eps},
                                      c.stream);
                });
}

int tgk_layernorm_backward(tgk_context* context, const tgk_tensor* dinp, const tgk_tensor* dweight,
                           const tgk_tensor* dbias, const tgk_tensor* dsum, const tgk_tensor* dout,
                           const tgk_tensor* dresidual, const tgk_tensor* inp, const tgk_tensor* weight,
                           const tgk_tensor* mean, const tgk_tensor* rstd, int32_t accumulate) {
    return call("tgk_layernorm_backward", context, {4},
                ARGUMENTS(dinp, dweight, dbias, dsum, dout, dresidual, inp, weight, mean, rstd),
                [&](Tensors& t, tgk_context& c) {
                    const int64_t bytes = layernorm_backward_scratch(size(t[6], 0), size(t[6], 1));
                    layernorm_backward({.dinp = t[0],
                                        .dweight = t[1],
                                        .dbias = t[2],
                                        .dsum = t[3],
                                        .dout = t[4],
                                        .dresidual = t[5],
                                        .inp = t[6],
                                        .weight = t[7],
                                        .mean = t[8],
                                        .rstd = t[9],
                                        .scratch = scratch(c, bytes),
                                        .accumulate = accumulate != 0},
                                       c.stream);
                });
}

int tgk_rmsnorm_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* sum, const tgk_tensor* rstd,
                        const tgk_tensor* inp, const tgk_tensor* residual, const tgk_tensor* weight, float eps) {
    return call(
        "tgk_rmsnorm_forward", context, {3}, ARGUMENTS(out, sum, rstd, inp, residual, weight),
        [&](Tensors& t, tgk_context& c) {
            rmsnorm_forward(
                {.out = t[0], .sum = t[1], .rstd = t[2], .inp = t[3], .residual = t[4], .weight = t[5], .eps = eps},
                c.stream);
        });
}

int tgk_rmsnorm_backward(tgk_context* context, const tgk_tensor* dinp, const tgk_tensor* dweight,
                         const tgk_tensor* dsum, const tgk_tensor* dout, const tgk_tensor* dresidual,
                         const tgk_tensor* inp, const tgk_tensor* weight, const tgk_tensor* rstd, int32_t accumulate) {
    return call("tgk_rmsnorm_backward", context, {3},
                ARGUMENTS(dinp, dweight, dsum, dout, dresidual, inp, weight, rstd), [&](Tensors& t, tgk_context& c) {
                    const int64_t bytes = rmsnorm_backward_scratch(size(t[5], 0), size(t[5], 1));
                    rmsnorm_backward({.dinp = t[0],
                                      .dweight = t[1],
                                      .dsum = t[2],
                                      .dout = t[3],
                                      .dresidual = t[4],
                                      .inp = t[5],
                                      .weight = t[6],
                                      .rstd = t[7],
                                      .scratch = scratch(c, bytes),
                                      .accumulate = accumulate != 0},
                                     c.stream);
                });
}

int tgk_softmax_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* inp, const tgk_tensor* mask,
                        int64_t Q, float scale, int32_t causal) {
    return call("tgk_softmax_forward", context, {1}, ARGUMENTS(out, inp, mask), [&](Tensors& t, tgk_context& c) {
        softmax_forward(t[0], t[1], t[2], Q, scale, causal != 0, c.stream);
    });
}

int tgk_softmax_backward(tgk_context* context, const tgk_tensor* dinp, const tgk_tensor* dout, const tgk_tensor* out,
                         float scale) {
    return call("tgk_softmax_backward", context, {1}, ARGUMENTS(dinp, dout, out),
                [&](Tensors& t, tgk_context& c) { softmax_backward(t[0], t[1], t[2], scale, c.stream); });
}

int tgk_attention_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* lse, const tgk_tensor* q,
                          const tgk_tensor* k, const tgk_tensor* v, const tgk_tensor* cum_q, const tgk_tensor* cum_k,
                          int64_t max_q, int64_t max_k, int32_t causal, int64_t window, float scale) {
    return call("tgk_attention_forward", context, {2}, ARGUMENTS(out, lse, q, k, v, cum_q, cum_k),
                [&](Tensors& t, tgk_context& c) {
                    attention_forward(t[0], t[1], t[2], t[3], t[4], {t[5], t[6], max_q, max_k, causal != 0, window},
                                      scale, scratch(c, attention_forward_scratch()), c.stream);
                });
}

int tgk_attention_backward(tgk_context* context, const tgk_tensor* dq, const tgk_tensor* dk, const tgk_tensor* dv,
                           const tgk_tensor* dout, const tgk_tensor* q, const tgk_tensor* k, const tgk_tensor* v,
                           const tgk_tensor* out, const tgk_tensor* lse, const tgk_tensor* cum_q,
                           const tgk_tensor* cum_k, int64_t max_q, int64_t max_k, int32_t causal, int64_t window,
                           float scale) {
    return call("tgk_attention_backward", context, {3}, ARGUMENTS(dq, dk, dv, dout, q, k, v, out, lse, cum_q, cum_k),
                [&](Tensors& t, tgk_context& c) {
                    const Tensor& query = t[4];
                    const int64_t bytes = attention_backward_scratch(size(query, 0), size(query, 1), size(query, 2));
                    attention_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8],
                                       {t[9], t[10], max_q, max_k, causal != 0, window}, scale, scratch(c, bytes),
                                       c.stream);
                });
}

int tgk_linear_attention_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* norm,
                                 const tgk_tensor* final_s, const tgk_tensor* final_z, const tgk_tensor* q,
                                 const tgk_tensor* k, const tgk_tensor* v, const tgk_tensor* gate,
                                 const tgk_tensor* initial_s, const tgk_tensor* initial_z, const tgk_tensor* cum,
                                 int64_t max_length, int32_t features, int32_t normalise) {
    const char* op = "tgk_linear_attention_forward";
    return call(op, context, {4}, ARGUMENTS(out, norm, final_s, final_z, q, k, v, gate, initial_s, initial_z, cum),
                [&](Tensors& t, tgk_context& c) {
                    const int64_t bytes =
                        linear_attention_forward_scratch(linear_sizes(t[4], t[5], t[6], t[10], max_length));
                    linear_attention_forward(t[0], t[1], {t[2], t[3]}, t[4], t[5], t[6], t[7], {t[8], t[9]},
                                             {t[10], max_length}, linear_type(op, features, normalise),
                                             scratch(c, bytes), c.stream);
                });
}

int tgk_linear_attention_backward(tgk_context* context, const tgk_tensor* dq, const tgk_tensor* dk,
                                  const tgk_tensor* dv, const tgk_tensor* dgate, const tgk_tensor* dinitial_s,
                                  const tgk_tensor* dinitial_z, const tgk_tensor* dout, const tgk_tensor* dfinal_s,
                                  const tgk_tensor* dfinal_z, const tgk_tensor* q, const tgk_tensor* k,
                                  const tgk_tensor* v, const tgk_tensor* gate, const tgk_tensor* initial_s,
                                  const tgk_tensor* initial_z, const tgk_tensor* out, const tgk_tensor* norm,
                                  const tgk_tensor* cum, int64_t max_length, int32_t features, int32_t normalise) {
    const char* op = "tgk_linear_attention_backward";
    return call(op, context, {6},
                ARGUMENTS(dq, dk, dv, dgate, dinitial_s, dinitial_z, dout, dfinal_s, dfinal_z, q, k, v, gate, initial_s,
                          initial_z, out, norm, cum),
                [&](Tensors& t, tgk_context& c) {
                    const int64_t bytes =
                        linear_attention_backward_scratch(linear_sizes(t[9], t[10], t[11], t[17], max_length));
                    linear_attention_backward(t[0], t[1], t[2], t[3], {t[4], t[5]}, t[6], {t[7], t[8]}, t[9], t[10],
                                              t[11], t[12], {t[13], t[14]}, t[15], t[16], {t[17], max_length},
                                              linear_type(op, features, normalise), scratch(c, bytes), c.stream);
                });
}

int tgk_linear_attention_decode(tgk_context* context, const tgk_tensor* out, const tgk_tensor* s, const tgk_tensor* z,
                                const tgk_tensor* q, const tgk_tensor* k, const tgk_tensor* v, const tgk_tensor* gate,
                                int32_t features, int32_t normalise) {
    const char* op = "tgk_linear_attention_decode";
    return call(op, context, {3}, ARGUMENTS(out, s, z, q, k, v, gate), [&](Tensors& t, tgk_context& c) {
        linear_attention_decode(t[0], {t[1], t[2]}, t[3], t[4], t[5], t[6], linear_type(op, features, normalise),
                                c.stream);
    });
}

int tgk_decay_gate_forward(tgk_context* context, const tgk_tensor* gate, const tgk_tensor* inp,
                           const tgk_tensor* weight, const tgk_tensor* bias) {
    return call("tgk_decay_gate_forward", context, {1}, ARGUMENTS(gate, inp, weight, bias),
                [&](Tensors& t, tgk_context& c) { decay_gate_forward(t[0], t[1], t[2], t[3], c.stream); });
}

int tgk_decay_gate_backward(tgk_context* context, const tgk_tensor* dx, const tgk_tensor* dgate,
                            const tgk_tensor* gate) {
    return call("tgk_decay_gate_backward", context, ELEMENTWISE, ARGUMENTS(dx, dgate, gate),
                [&](Tensors& t, tgk_context& c) { decay_gate_backward(t[0], t[1], t[2], c.stream); });
}

int tgk_rope_table(const tgk_tensor* table, double theta) {
    return guarded([&] {
        const Tensor t = to_tensor("tgk_rope_table", table);
        require(!t || t.device == Device::CPU, "tgk_rope_table: table must be in host memory");
        rope_table(t, theta, RopeScaling{});
    });
}

int tgk_rope(tgk_context* context, const tgk_tensor* x, const tgk_tensor* positions, const tgk_tensor* table,
             int32_t backward) {
    return call("tgk_rope", context, {1}, ARGUMENTS(x, positions, table),
                [&](Tensors& t, tgk_context& c) { rope(t[0], t[1], t[2], backward != 0, c.stream); });
}

int tgk_gelu_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* inp) {
    return call("tgk_gelu_forward", context, ELEMENTWISE, ARGUMENTS(out, inp),
                [&](Tensors& t, tgk_context& c) { activation_forward(Activation::GELU, t[0], t[1], c.stream); });
}

int tgk_gelu_backward(tgk_context* context, const tgk_tensor* dinp, const tgk_tensor* dout, const tgk_tensor* inp) {
    return call("tgk_gelu_backward", context, ELEMENTWISE, ARGUMENTS(dinp, dout, inp), [&](Tensors& t, tgk_context& c) {
        activation_backward(Activation::GELU, t[0], {}, t[1], t[2], c.stream);
    });
}

int tgk_swiglu_forward(tgk_context* context, const tgk_tensor* out, const tgk_tensor* gate_up) {
    return call("tgk_swiglu_forward", context, {1}, ARGUMENTS(out, gate_up),
                [&](Tensors& t, tgk_context& c) { activation_forward(Activation::SwiGLU, t[0], t[1], c.stream); });
}

int tgk_swiglu_backward(tgk_context* context, const tgk_tensor* dgate_up, const tgk_tensor* dout,
                        const tgk_tensor* gate_up) {
    return call(
        "tgk_swiglu_backward", context, ELEMENTWISE, ARGUMENTS(dgate_up, dout, gate_up),
        [&](Tensors& t, tgk_context& c) { activation_backward(Activation::SwiGLU, t[0], {}, t[1], t[2], c.stream); });
}

int tgk_adamw_update(tgk_context* context, const tgk_tensor* params, const tgk_tensor* m, const tgk_tensor* v,
                     const tgk_tensor* grads, float lr, float beta1, float beta2, float eps, float weight_decay,
                     float grad_scale, int64_t t) {
    const char* op = "tgk_adamw_update";
    return call(op, context, {3}, ARGUMENTS(params, m, v, grads), [&](Tensors& tensors, tgk_context& c) {
        require(t >= 1, op, ": t is ", t, ", expected the number of this update, 1 or more");
        StepScalars scalars{};
        scalars.lr = lr;
        scalars.grad_scale = grad_scale;
        scalars.t = t;
        const Tensor on_device = upload_scalars(scalars, scratch(c, int64_t(sizeof(StepScalars))), c.stream);
        ParamSegment segment{};
        segment.end = size(tensors[3], 0);
        segment.weight_decay = weight_decay;
        segment.fp32_begin = 0;
        AdamWOptions options;
        options.beta1 = beta1;
        options.beta2 = beta2;
        options.eps = eps;
        adamw_update(tensors[0], Tensor{}, tensors[1], tensors[2], tensors[3], &segment, 1, options, on_device,
                     c.stream);
    });
}

int tgk_newton_schulz(tgk_context* context, const tgk_tensor* x, int32_t coefficients, int32_t iterations) {
    const char* op = "tgk_newton_schulz";
    return call(op, context, {1}, ARGUMENTS(x), [&](Tensors& t, tgk_context& c) {
        const int64_t bytes = newton_schulz_scratch(size(t[0], 0), size(t[0], 1), size(t[0], 2), t[0].dtype);
        newton_schulz(t[0], scratch(c, bytes), newton_schulz_of(op, coefficients, iterations), c.stream);
    });
}

int tgk_muon_update(tgk_context* context, const tgk_tensor* params, const tgk_tensor* m, const tgk_tensor* grads,
                    float lr, float momentum, float weight_decay, float shape_scale, float grad_scale,
                    int32_t coefficients, int32_t iterations) {
    const char* op = "tgk_muon_update";
    return call(op, context, {2}, ARGUMENTS(params, m, grads), [&](Tensors& tensors, tgk_context& c) {
        const NewtonSchulz schedule = newton_schulz_of(op, coefficients, iterations);
        const Tensor& g = tensors[2];
        const int64_t batch = size(g, 0), rows = size(g, 1), columns = size(g, 2), n = batch * rows * columns;
        Tensors flat;
        for (size_t i = 0; i < 3; i++) {
            const char* name = std::array{"params", "m", "grads"}[i];
            check_tensor(op, name, tensors[i], DType::F32, {batch, rows, columns});
            check_contiguous(op, name, tensors[i]);
            flat.push_back(make_tensor(tensors[i].data, DType::F32, g.device, {n}));
        }
        // In the scratch: the scalars, the updates, and what the iteration needs.
        constexpr int64_t SCALARS = (int64_t(sizeof(StepScalars)) + 255) / 256 * 256;
        const int64_t updates_end = SCALARS + (n * int64_t(sizeof(float)) + 255) / 256 * 256;
        const int64_t bytes = updates_end + newton_schulz_scratch(batch, rows, columns, DType::F32);
        const Tensor memory = scratch(c, bytes);
        const Tensor updates = make_tensor(memory.rows(SCALARS, bytes).data, DType::F32, g.device, {n});
        StepScalars scalars{};
        scalars.lr = lr;
        scalars.momentum = momentum;
        scalars.grad_scale = grad_scale;
        const Tensor on_device = upload_scalars(scalars, memory, c.stream);
        MuonSegment segment{};
        segment.end = n;
        segment.weight_decay = weight_decay;
        segment.fp32_begin = 0;
        segment.shape_scale = shape_scale;
        muon_momentum(updates, flat[1], flat[2], &segment, 1, 0, on_device, c.stream);
        newton_schulz(make_tensor(updates.data, DType::F32, g.device, {batch, rows, columns}),
                      memory.rows(updates_end, bytes), schedule, c.stream);
        muon_update(flat[0], Tensor{}, updates, &segment, 1, 0, on_device, c.stream);
    });
}

int tgk_top_k(tgk_context* context, const tgk_tensor* values, const tgk_tensor* ids, const tgk_tensor* inp) {
    return call("tgk_top_k", context, {2}, ARGUMENTS(values, ids, inp), [&](Tensors& t, tgk_context& c) {
        const int64_t bytes = top_k_scratch(size(t[2], 0), size(t[2], 1), size(t[0], 1));
        top_k(t[0], t[1], t[2], scratch(c, bytes), c.stream);
    });
}

}  // extern "C"

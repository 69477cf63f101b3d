/* The project's kernels as a library for C and languages that can call C: libtrain_gpt_kernels.so, built by `make lib`
 * for the CPU or for CUDA. scripts/train_gpt_kernels.py binds it for Python.
 *
 * The header of an operation states what it computes and the shapes and dtypes of its tensors (norm.h for
 * tgk_layernorm_forward, tensor_ops.h for the first group below); shapes are repeated here. Outputs come before inputs.
 * Tensors have dtype T unless another one is named. T is fp32, in the CUDA library also bf16 and fp16, one for all
 * tensors of a call.
 *
 * Every call returns a tgk_status, and tgk_last_error() gives the message. Nothing is computed if an argument is wrong.
 * A tensor marked "or null" is optional and may be a null pointer. A tensor that is written must not share memory with
 * another tensor of the call, nor its elements with each other. Exceptions are gelu, swiglu_backward and
 * decay_gate_backward: their result may be an input itself, with the same shape and strides.
 *
 * Tensors are in host memory or on the GPU. Tensors on the GPU are used in place, and the call returns when the work is
 * queued (tgk_synchronize waits). The CPU library uses host tensors in place, and its calls return when the work is
 * done. The CUDA library copies host tensors to the GPU and the results back before it returns; memory that several
 * tensors of a call share stays shared.
 */
#ifndef TRAIN_GPT_KERNELS_H
#define TRAIN_GPT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TGK_API __attribute__((visibility("default")))
#define TGK_MAX_DIMS 8

enum tgk_status {
    TGK_OK = 0,
    TGK_INVALID_ARGUMENT = 1, /* an invalid tensor or number; nothing was computed */
    TGK_DEVICE_ERROR = 2      /* out of memory, no GPU, or a failure of the GPU */
};

enum tgk_dtype { TGK_F32, TGK_F64, TGK_BF16, TGK_F16, TGK_I32, TGK_I64, TGK_U16, TGK_U8 };
enum tgk_device { TGK_CPU, TGK_CUDA };

typedef struct tgk_tensor {
    void* data;
    int64_t shape[TGK_MAX_DIMS];
    int64_t stride[TGK_MAX_DIMS]; /* in elements; zero or negative only where the operation takes any strides */
    int32_t rank;                 /* 0 to 8 */
    int32_t dtype;                /* tgk_dtype */
    int32_t device;               /* tgk_device: where data points to */
} tgk_tensor;

/* A stream with the scratch memory of operations. One thread at a time may use it; calls of different contexts may run
 * concurrently. Its GPU is the current one of the thread that creates it. */
typedef struct tgk_context tgk_context;

TGK_API int tgk_create(tgk_context** context);
TGK_API void tgk_destroy(tgk_context* context); /* waits for its work; null is ignored */
TGK_API int tgk_synchronize(tgk_context* context);
/* Waits until the work queued so far on this cudaStream_t is done. Call it before using that work's results. */
TGK_API int tgk_wait_for_stream(tgk_context* context, uintptr_t stream);

TGK_API const char* tgk_last_error(void); /* of the latest failed call of this thread; "" if none */
TGK_API const char* tgk_backend(void);    /* "cpu" or "cuda" */
/* Writes a description of the device to text, truncated to size bytes: "NVIDIA H100 80GB HBM3, 132 SMs, sm_90, 79 GiB".
 */
TGK_API int tgk_device_description(char* text, size_t size);

/* Memory of the library's device. Copies are complete when the call returns. */
TGK_API int tgk_alloc(tgk_context* context, void** data, size_t bytes);
TGK_API int tgk_free(tgk_context* context, void* data);
TGK_API int tgk_copy_to_device(tgk_context* context, void* device, const void* host, size_t bytes);
TGK_API int tgk_copy_to_host(tgk_context* context, void* host, const void* device, size_t bytes);

/* --- tensors of any strides (tensor_ops.h): fp32, bf16 and fp16 in any mixture, on both backends */

/* Functions are numbered from 0: id, neg, inv, … add, …. An invalid number gives null and 0. */
TGK_API int32_t tgk_num_functions(void);
TGK_API const char* tgk_function_name(int32_t function);
TGK_API int32_t tgk_function_arguments(int32_t function);

TGK_API int tgk_map(tgk_context*, int32_t function, const tgk_tensor* out, const tgk_tensor* inp);
TGK_API int tgk_zip(tgk_context*, int32_t function, const tgk_tensor* out, const tgk_tensor* x, const tgk_tensor* y);
/* x or null */
TGK_API int tgk_bin_bcast(tgk_context*, int32_t function, const tgk_tensor* out, const tgk_tensor* x,
                          const tgk_tensor* y);
TGK_API int tgk_reduce(tgk_context*, int32_t function, const tgk_tensor* out, const tgk_tensor* inp, int32_t axis,
                       float start);
/* out [batch…, m, p]; a [batch…, m, n]; b [batch…, n, p]; fp32 */
TGK_API int tgk_tensor_matmul(tgk_context*, const tgk_tensor* out, const tgk_tensor* a, const tgk_tensor* b);

/* --- linear layers (matmul.h). Row strides may exceed the number of columns. */

/* out [M, N] T or fp32 = op(a)·op(b), added to out if accumulate; op(x) is x or, if transpose_x, its transpose */
TGK_API int tgk_matmul(tgk_context*, const tgk_tensor* out, const tgk_tensor* a, const tgk_tensor* b,
                       int32_t transpose_a, int32_t transpose_b, int32_t accumulate);
/* out [N, OC]; inp [N, C]; weight [OC, C]; bias [OC] or null */
TGK_API int tgk_matmul_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* inp, const tgk_tensor* weight,
                               const tgk_tensor* bias);
/* dinp [N, C]; dout [N, OC]; weight [OC, C] */
TGK_API int tgk_matmul_backward_input(tgk_context*, const tgk_tensor* dinp, const tgk_tensor* dout,
                                      const tgk_tensor* weight, int32_t accumulate);
/* dweight [OC, C] fp32; dbias [OC] fp32 or null; dout [N, OC]; inp [N, C] */
TGK_API int tgk_matmul_backward_weight(tgk_context*, const tgk_tensor* dweight, const tgk_tensor* dbias,
                                       const tgk_tensor* dout, const tgk_tensor* inp, int32_t accumulate);

/* --- norms (norm.h): rows of C channels; weights, statistics and their gradients fp32 */

/* out [N, C]; sum [N, C] or null; mean, rstd [N] or null; inp [N, C]; residual [N, C] or null; weight [C];
 * bias [C] or null */
TGK_API int tgk_layernorm_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* sum, const tgk_tensor* mean,
                                  const tgk_tensor* rstd, const tgk_tensor* inp, const tgk_tensor* residual,
                                  const tgk_tensor* weight, const tgk_tensor* bias, float eps);
/* dinp [N, C]; dweight, dbias, dsum [C] or null; dout [N, C]; dresidual [N, C] or null; inp [N, C]; weight [C];
 * mean, rstd [N] */
TGK_API int tgk_layernorm_backward(tgk_context*, const tgk_tensor* dinp, const tgk_tensor* dweight,
                                   const tgk_tensor* dbias, const tgk_tensor* dsum, const tgk_tensor* dout,
                                   const tgk_tensor* dresidual, const tgk_tensor* inp, const tgk_tensor* weight,
                                   const tgk_tensor* mean, const tgk_tensor* rstd, int32_t accumulate);
/* out [N, C]; sum [N, C] or null; rstd [N] or null; inp [N, C]; residual [N, C] or null; weight [C] */
TGK_API int tgk_rmsnorm_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* sum, const tgk_tensor* rstd,
                                const tgk_tensor* inp, const tgk_tensor* residual, const tgk_tensor* weight, float eps);
/* dinp [N, C]; dweight, dsum [C] or null; dout [N, C]; dresidual [N, C] or null; inp [N, C]; weight [C]; rstd [N] */
TGK_API int tgk_rmsnorm_backward(tgk_context*, const tgk_tensor* dinp, const tgk_tensor* dweight,
                                 const tgk_tensor* dsum, const tgk_tensor* dout, const tgk_tensor* dresidual,
                                 const tgk_tensor* inp, const tgk_tensor* weight, const tgk_tensor* rstd,
                                 int32_t accumulate);

/* --- softmax (softmax.h) and attention (attention.h) */

/* out [R, K]; inp [R, K]; mask [Q, K] uint8 or null; Q divides R */
TGK_API int tgk_softmax_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* inp, const tgk_tensor* mask,
                                int64_t Q, float scale, int32_t causal);
/* dinp [R, K]; dout, out [R, K] */
TGK_API int tgk_softmax_backward(tgk_context*, const tgk_tensor* dinp, const tgk_tensor* dout, const tgk_tensor* out,
                                 float scale);
/* out [Nq, NH, HS]; lse [NH, Nq] fp32 or null; q [Nq, NH, HS]; k, v [Nk, NKV, HS]; cum_q, cum_k [S + 1] int32;
 * max_q, max_k: the longest sequence; window: number of keys that a query sees on either side, including its own; 0:
 * all */
TGK_API int tgk_attention_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* lse, const tgk_tensor* q,
                                  const tgk_tensor* k, const tgk_tensor* v, const tgk_tensor* cum_q,
                                  const tgk_tensor* cum_k, int64_t max_q, int64_t max_k, int32_t causal, int64_t window,
                                  float scale);
/* dq [Nq, NH, HS]; dk, dv [Nk, NKV, HS]; dout, q, out [Nq, NH, HS]; k, v [Nk, NKV, HS]; lse [NH, Nq] */
TGK_API int tgk_attention_backward(tgk_context*, const tgk_tensor* dq, const tgk_tensor* dk, const tgk_tensor* dv,
                                   const tgk_tensor* dout, const tgk_tensor* q, const tgk_tensor* k,
                                   const tgk_tensor* v, const tgk_tensor* out, const tgk_tensor* lse,
                                   const tgk_tensor* cum_q, const tgk_tensor* cum_k, int64_t max_q, int64_t max_k,
                                   int32_t causal, int64_t window, float scale);

/* --- causal linear attention (linear_attention.h) and its decay gate (decay_gate.h); fp32, on CUDA also bf16 */

/* features: 0 identity, 1 elu + 1, which normalise requires. A state, and the gradient of a state, is s and z; z only
 * if normalised. Each state may be null. out [N, NH, M]; norm [NH, N] fp32 or null; final_s [S, NKV, E, M], final_z [S,
 * NKV, E] fp32 or null; q [N, NH, E]; k [N, NKV, E]; v [N, NKV, M]; gate [N, NKV] fp32 or null; initial_s, initial_z
 * like the final ones or null; cum [S + 1] int32; max_length: the longest sequence */
TGK_API int tgk_linear_attention_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* norm,
                                         const tgk_tensor* final_s, const tgk_tensor* final_z, const tgk_tensor* q,
                                         const tgk_tensor* k, const tgk_tensor* v, const tgk_tensor* gate,
                                         const tgk_tensor* initial_s, const tgk_tensor* initial_z,
                                         const tgk_tensor* cum, int64_t max_length, int32_t features,
                                         int32_t normalise);
/* dq, dk, dv like q, k, v; dgate [N, NKV] if there is a gate; dinitial_s, dinitial_z or null; dout, out [N, NH, M];
 * dfinal_s, dfinal_z or null; out and norm may be null if not normalised */
TGK_API int tgk_linear_attention_backward(tgk_context*, const tgk_tensor* dq, const tgk_tensor* dk,
                                          const tgk_tensor* dv, const tgk_tensor* dgate, const tgk_tensor* dinitial_s,
                                          const tgk_tensor* dinitial_z, const tgk_tensor* dout,
                                          const tgk_tensor* dfinal_s, const tgk_tensor* dfinal_z, const tgk_tensor* q,
                                          const tgk_tensor* k, const tgk_tensor* v, const tgk_tensor* gate,
                                          const tgk_tensor* initial_s, const tgk_tensor* initial_z,
                                          const tgk_tensor* out, const tgk_tensor* norm, const tgk_tensor* cum,
                                          int64_t max_length, int32_t features, int32_t normalise);
/* One token for each of S sequences; updates their states s [S, NKV, E, M], z [S, NKV, E] or null:
 * out [S, NH, M]; q [S, NH, E]; k [S, NKV, E]; v [S, NKV, M]; gate [S, NKV] fp32 or null */
TGK_API int tgk_linear_attention_decode(tgk_context*, const tgk_tensor* out, const tgk_tensor* s, const tgk_tensor* z,
                                        const tgk_tensor* q, const tgk_tensor* k, const tgk_tensor* v,
                                        const tgk_tensor* gate, int32_t features, int32_t normalise);
/* gate [N, H] fp32; inp [N, C]; weight [H, C]; bias [H] fp32 */
TGK_API int tgk_decay_gate_forward(tgk_context*, const tgk_tensor* gate, const tgk_tensor* inp,
                                   const tgk_tensor* weight, const tgk_tensor* bias);
/* dx [N, H]; dgate, gate [N, H] fp32 */
TGK_API int tgk_decay_gate_backward(tgk_context*, const tgk_tensor* dx, const tgk_tensor* dgate,
                                    const tgk_tensor* gate);

/* --- RoPE (rope.h), activations (activation.h) */

/* table [positions, R/2, 2] fp32 in host memory: cos and sin, without scaling */
TGK_API int tgk_rope_table(const tgk_tensor* table, double theta);
/* x [N, H, HS], rotated in place; positions [N] int32; table [positions, R/2, 2] fp32 */
TGK_API int tgk_rope(tgk_context*, const tgk_tensor* x, const tgk_tensor* positions, const tgk_tensor* table,
                     int32_t backward);
/* out, inp [N, C] */
TGK_API int tgk_gelu_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* inp);
/* dinp, dout, inp [N, C] */
TGK_API int tgk_gelu_backward(tgk_context*, const tgk_tensor* dinp, const tgk_tensor* dout, const tgk_tensor* inp);
/* out [N, I]; gate_up [N, 2·I] */
TGK_API int tgk_swiglu_forward(tgk_context*, const tgk_tensor* out, const tgk_tensor* gate_up);
/* dgate_up, gate_up [N, 2·I]; dout [N, I] */
TGK_API int tgk_swiglu_backward(tgk_context*, const tgk_tensor* dgate_up, const tgk_tensor* dout,
                                const tgk_tensor* gate_up);

/* --- AdamW (adamw.h), Muon (muon.h), top-k (topk.h) */

/* params, m, v, grads [n] fp32, the first three updated; t: the number of this update, from 1 */
TGK_API int tgk_adamw_update(tgk_context*, const tgk_tensor* params, const tgk_tensor* m, const tgk_tensor* v,
                             const tgk_tensor* grads, float lr, float beta1, float beta2, float eps, float weight_decay,
                             float grad_scale, int64_t t);
/* x [batch, rows, columns] fp32 or bf16, orthogonalised in place; coefficients: 0 "quintic", 1 "polar-express", 2
 * "simple"; iterations: 0 for the default of the coefficients */
TGK_API int tgk_newton_schulz(tgk_context*, const tgk_tensor* x, int32_t coefficients, int32_t iterations);
/* One step of a batch of matrices: params, m, grads [batch, rows, columns] fp32, contiguous, the first two updated */
TGK_API int tgk_muon_update(tgk_context*, const tgk_tensor* params, const tgk_tensor* m, const tgk_tensor* grads,
                            float lr, float momentum, float weight_decay, float shape_scale, float grad_scale,
                            int32_t coefficients, int32_t iterations);
/* values [B, k] T; ids [B, k] int32; inp [B, V] T */
TGK_API int tgk_top_k(tgk_context*, const tgk_tensor* values, const tgk_tensor* ids, const tgk_tensor* inp);

#ifdef __cplusplus
}
#endif

#endif

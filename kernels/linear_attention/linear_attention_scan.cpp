// The recurrent form of linear attention on a CPU.
#include "kernels/linear_attention/linear_attention_cpu.h"

namespace linear_attention {

namespace {

// The two steps of a token: state [E, n] = decay·state + b cᵀ, and out [n] = aᵀ·(state + recent). n is a multiple
// of 16.
MULTIARCH void scan_update(float* state, float decay, const float* b, const float* c, int64_t E, int64_t n) {
    for (int64_t e = 0; e < E; e++)
        for (int64_t i = 0; i < n; i += LANES)
            vec_store(state + e * n + i, vec_load(state + e * n + i) * decay + vec_load(c + i) * b[e]);
}
MULTIARCH void scan_read(float* out, const float* a, const float* state, const float* recent, int64_t E, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vec16 total = {};
        for (int64_t begin = 0; begin < E; begin += BLOCK) {
            vec16 sum = {};
            for (int64_t e = begin; e < std::min(begin + BLOCK, E); e++)
                sum += (vec_load(state + e * n + i) + vec_load(recent + e * n + i)) * a[e];
            total += sum;
        }
        vec_store(out + i, total);
    }
}

}  // namespace

void HeadPass::recurrent() {
    alignas(64) float a[MAX_SIZE], b[MAX_SIZE], c[MAX_SIZE], o[MAX_SIZE];
    // The contribution of up to BLOCK recent tokens to the state, summed apart from it.
    alignas(64) float recent[MAX_SIZE * MAX_SIZE], recent_vector[MAX_SIZE];
    const int64_t n = state.width, E = round_up(x.E), vector = round_up(state.vector_size);
    std::fill(recent, recent + x.E * n, 0.0f);
    std::fill(recent_vector, recent_vector + vector, 0.0f);
    const auto merge = [&] {
        add_row(state.rows, 1, recent, x.E * n);
        add_row(state.vector, 1, recent_vector, vector);
        std::fill(recent, recent + x.E * n, 0.0f);
        std::fill(recent_vector, recent_vector + vector, 0.0f);
    };
    float before = 0;  // reversed: the gate between this token and the next one
    for (int64_t step = 0; step < length; step++) {
        const int64_t t = x.reversed ? length - 1 - step : step;
        const float decay = std::exp(x.reversed ? before : gate(t));
        before = gate(t);
        if (step % BLOCK == 0) merge();
        load_rows(a, E, p, x.a, token0 + t, 1, row_head);
        if (result == Result::DQ && vector) set_delta(a, E, t, 1);
        if (p.gate) {
            scale_row(state.rows, decay, x.E * n);
            scale_row(state.vector, decay, vector);
            scale_row(recent_vector, decay, vector);
        }
        for (int64_t h = first_head; h < first_head + heads; h++) {
            load_rows(b, E, p, x.b, token0 + t, 1, h);
            load_rows(c, n, p, x.c, token0 + t, 1, h);
            scan_update(recent, h == first_head ? decay : 1.0f, b, c, x.E, n);
            if (!vector) continue;
            if (result == Result::Out)
                add_row(recent_vector, 1, b, E);
            else
                add_row(recent_vector, result == Result::DK ? *delta(h, t) : 1.0f, c, n);
        }
        scan_read(o, a, state.rows, recent, x.E, n);
        float norm = 0;
        if (vector) {
            if (result == Result::Out)
                norm = dot(a, state.vector, x.E) + dot(a, recent_vector, x.E) + LINEAR_ATTENTION_EPS;
            else
                for (const float* sums : {state.vector, recent_vector})
                    add_row(o, result == Result::DQ ? *delta(row_head, t) : 1.0f, sums, n);
        }
        store(o, t, norm);
    }
    merge();
    if (x.reversed) {
        const float decay = std::exp(before);
        scale_row(state.rows, decay, x.E * n);
        scale_row(state.vector, decay, vector);
    }
}

}  // namespace linear_attention

// Linear attention in chunks on a CPU.
#include "kernels/linear_attention/linear_attention_cpu.h"

namespace linear_attention {

namespace {

constexpr int64_t CHUNK = 32;

// c [M, n] = a [M, K]·b [K, n], or += if `accumulate`; sums of BLOCK terms are added to c. Rows of a, b and c are lda,
// ldb and ldc apart.
void matmul(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t M, int64_t n,
            int64_t K, bool accumulate) {
    for (int64_t k = 0; k < K; k += BLOCK)
        tile_AB(c, ldc, a + k, lda, b + k * ldb, ldb, M, n / LANES, std::min(BLOCK, K - k),
                k > 0 || accumulate ? Into::Added : Into::Overwritten);
}

// Scores of row i and keys [begin, end): (score + α + β_j)·exp(±(Γ_i − Γ_j)), 0 where masked: keys after i or,
// reversed, before it. Returns their sum.
MULTIARCH float finish_scores(float* score, int64_t begin, int64_t end, int64_t i, bool reversed, float alpha,
                              const float* beta, const double* gamma) {
    vec16 sum = {};
    for (int64_t j = begin; j < end; j += LANES) {
        vec16 x = vec_load(score + j) + alpha;
        if (beta) x += vec_load(beta + j);
        if (gamma) {
            vec16 between;
            for (int64_t l = 0; l < LANES; l++)
                between[l] = float(reversed ? gamma[j + l] - gamma[i] : gamma[i] - gamma[j + l]);
            x *= vec_exp(between);
        }
        for (int64_t l = 0; l < LANES; l++)
            if (reversed ? j + l < i : j + l > i) x[l] = 0;
        vec_store(score + j, x);
        sum += x;
    }
    return vec_sum(sum);
}

}  // namespace

void HeadPass::chunked() {
    alignas(64) float a[CHUNK * MAX_CHUNKED], b[CHUNK * MAX_CHUNKED], bt[CHUNK * MAX_CHUNKED], c[CHUNK * MAX_CHUNKED],
        o[CHUNK * MAX_CHUNKED], score[CHUNK * CHUNK], beta[CHUNK], read_decay[CHUNK], write_decay[CHUNK],
        added[MAX_CHUNKED], norm[CHUNK] = {};
    double gamma[CHUNK];  // sums of the gates from the chunk's first token on; in double, because only differences are
                          // used
    const int64_t width = state.width, E = round_up(x.E), chunks = ceil_div(length, CHUNK);
    for (int64_t step = 0; step < chunks; step++) {
        const int64_t t = (x.reversed ? chunks - 1 - step : step) * CHUNK, n = std::min(CHUNK, length - t);
        const int64_t padded = round_up(n);
        // Decay of the state until row i reads it (read_decay), and of row j until the end of the chunk (write_decay).
        float chunk_decay = 1;
        if (p.gate) {
            double sum = 0;
            for (int64_t i = 0; i < n; i++) gamma[i] = sum += double(gate(t + i));
            std::fill(gamma + n, gamma + padded, sum);
            for (int64_t i = 0; i < n; i++) {
                const float from_start = float(std::exp(gamma[i])), to_end = float(std::exp(sum - gamma[i]));
                read_decay[i] = x.reversed ? to_end : from_start;
                write_decay[i] = x.reversed ? from_start : to_end;
            }
            chunk_decay = float(std::exp(sum));
        }
        load_rows(a, E, p, x.a, token0 + t, n, row_head);
        const bool vector = state.vector_size > 0;
        if (result == Result::DQ && vector) set_delta(a, E, t, n);

        matmul(o, width, a, E, state.rows, width, n, width, x.E, false);
        for (int64_t i = 0; i < n && vector; i++) {
            if (result == Result::Out)
                norm[i] = dot(a + i * E, state.vector, x.E);
            else
                add_row(o + i * width, result == Result::DQ ? delta(row_head, t)[i] : 1.0f, state.vector, width);
        }
        if (p.gate) {
            for (int64_t i = 0; i < n; i++) {
                scale_row(o + i * width, read_decay[i], width);
                if (vector) norm[i] *= read_decay[i];
            }
            scale_row(state.rows, chunk_decay, x.E * width);
            scale_row(state.vector, chunk_decay, round_up(state.vector_size));
        }

        for (int64_t h = first_head; h < first_head + heads; h++) {
            load_rows(b, E, p, x.b, token0 + t, n, h);
            load_rows(c, width, p, x.c, token0 + t, n, h);
            pack_lanes(bt, CHUNK, b, E, n, x.E, 1);
            if (result == Result::DK && vector) {
                std::copy_n(delta(h, t), n, beta);
                std::fill(beta + n, beta + padded, 0.0f);
            }
            for (int64_t i = 0; i < n; i += LANES) {  // 16 rows and the keys that any of them sees
                const int64_t rows = std::min(LANES, n - i), begin = x.reversed ? i : 0,
                              end = x.reversed ? padded : i + LANES;
                matmul(score + i * CHUNK + begin, CHUNK, a + i * E, E, bt + begin, CHUNK, rows, end - begin, x.E,
                       false);
                for (int64_t r = i; r < i + rows; r++) {
                    const float sum =
                        finish_scores(score + r * CHUNK, begin, end, r, x.reversed,
                                      result == Result::DQ && vector ? delta(row_head, t)[r] : 0.0f,
                                      result == Result::DK && vector ? beta : nullptr, p.gate ? gamma : nullptr);
                    if (result == Result::Out && vector) norm[r] += sum;
                }
                matmul(o + i * width, width, score + i * CHUNK + begin, CHUNK, c + begin * width, width, rows, width,
                       std::min(end, n) - begin, true);
            }
            for (int64_t j = 0; j < n && p.gate; j++) scale_row(b + j * E, write_decay[j], E);
            // The chunk's sum is computed apart and then added to the state.
            tile_AtB(state.rows, width, b, E, c, width, x.E, width / LANES, n, Into::Added);
            if (!vector) continue;
            const int64_t columns = result == Result::Out ? E : width;
            std::fill(added, added + columns, 0.0f);
            for (int64_t j = 0; j < n; j++) {
                if (result == Result::Out)
                    add_row(added, 1, b + j * E, columns);
                else
                    add_row(added, (result == Result::DK ? beta[j] : 1.0f) * (p.gate ? write_decay[j] : 1.0f),
                            c + j * width, columns);
            }
            add_row(state.vector, 1, added, columns);
        }
        for (int64_t i = 0; i < n; i++)
            store(o + i * width, t + i, result == Result::Out && vector ? norm[i] + LINEAR_ATTENTION_EPS : 0.0f);
    }
}

}  // namespace linear_attention

// The grid-wide exchange of the fused decode step: how a block passes what it has computed to all others without a
// barrier.
//
// Values go to global memory in words of 64 bits: a pair of 16-bit numbers or one fp32 number in the low half, the
// epoch of the exchange in the high half. A reader polls until the epoch is right. One load returns both halves, so
// that no fence is needed. The epoch counts layers over all steps.
//
// A word is written again one layer later. By then its writer has received every word of a later x, the residual
// after PROJ or FCPROJ. A block sends its words of that x only after a barrier at which all its warps have finished
// reading the word that is written again. That requires every block to compute a part of x: there may be no more blocks
// than C / 2.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

namespace fused_decode {

// Elements of T in a word, and in the two words that are read at once.
template <typename T>
constexpr int PER_WORD = 4 / int(sizeof(T));
template <typename T>
constexpr int QUAD = 2 * PER_WORD<T>;

// If a block never sends its words, the kernel must not occupy the GPU for ever: it traps after some seconds.
constexpr unsigned MAX_POLLS = 1u << 23;

__device__ __forceinline__ uint64_t exchange_word(uint32_t payload, uint32_t epoch) {
    return uint64_t(epoch) << 32 | payload;
}

__device__ __forceinline__ ulonglong2 load_two(const uint64_t* from) {
    ulonglong2 w;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(w.x), "=l"(w.y) : "l"(from) : "memory");
    return w;
}
__device__ __forceinline__ void store_one(uint64_t* to, uint64_t word) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ void store_two(uint64_t* to, uint64_t a, uint64_t b) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ bool has_arrived(const ulonglong2& w, uint32_t epoch) {
    return uint32_t(w.x >> 32) == epoch && uint32_t(w.y >> 32) == epoch;
}

struct AsSent {
    __device__ __forceinline__ uint2 operator()(uint2 pair) const { return pair; }
};

// Copies pairs of words to the same offsets in shared memory as they arrive; called by one warp. Each of `sequences`
// rows has `count` pairs for this warp, and rows are `row` pairs apart. A lane has BATCH loads in flight and repeats
// those that were too early. arrange(pair) is stored.
template <int BATCH, typename F = AsSent>
__device__ __forceinline__ void receive(uint2* to, const uint64_t* words, uint32_t epoch, int sequences, int row,
                                        int count, F arrange = {}) {
    const int lane = int(threadIdx.x) % WARP;
    int n = 0, q = lane;
#pragma unroll 1
    while (n < sequences) {
        int at[BATCH];  // offset of a pair; -1: none, or arrived
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            at[b] = n < sequences && q < count ? n * row + q : -1;
            q += WARP;
            if (q - lane >= count) {
                q = lane;
                n++;
            }
        }
        bool pending = true;
        for (unsigned polls = 0; pending; polls++) {
            if (polls > MAX_POLLS) __trap();
            ulonglong2 w[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (at[b] >= 0) w[b] = load_two(words + 2 * at[b]);
            pending = false;
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if (at[b] < 0) continue;
                if (has_arrived(w[b], epoch)) {
                    to[at[b]] = arrange(make_uint2(uint32_t(w[b].x), uint32_t(w[b].y)));
                    at[b] = -1;
                } else {
                    pending = true;
                }
            }
        }
    }
}

// Sends elements 2i and 2i + 1 of a row.
template <typename T>
__device__ __forceinline__ void send(uint64_t* row, int i, float a, float b, uint32_t epoch) {
    if constexpr (sizeof(T) == 2) {
        const Pack<T, 2> pair = as_pack<T>(Floats<2>{{a, b}});
        store_one(row + i, exchange_word(pair.word[0], epoch));
    } else {
        store_two(row + 2 * i, exchange_word(__float_as_uint(a), epoch), exchange_word(__float_as_uint(b), epoch));
    }
}

}  // namespace fused_decode

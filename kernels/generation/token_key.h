// Unsigned integers that order as logits and tokens do: the kernels select the largest of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/rng.h"

// The larger the float, the larger the key; −0 and 0 share one. x is not NaN.
HOST_DEVICE inline uint32_t number_key(float x) {
    x += 0.0f;  // −0 becomes 0
    uint32_t bits = 0;
    memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// NaN has the largest key, so that it can't hide.
HOST_DEVICE inline uint32_t logit_key(float x) {
    const uint32_t key = number_key(x);
    return x == x ? key : 0xffffffffu;
}

// The float of a key; NaN for key 0, which no float has.
HOST_DEVICE inline float logit_of_key(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x = 0;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// A token's key grows with its logit; among equal logits the lower id has the larger key. It is never 0.
HOST_DEVICE inline uint64_t token_key(float logit, int64_t id) {
    return uint64_t(logit_key(logit)) << 32 | uint32_t(~uint32_t(id));
}
HOST_DEVICE inline int32_t token_id(uint64_t key) {
    return int32_t(~uint32_t(key));
}
HOST_DEVICE inline float token_logit(uint64_t key) {
    return logit_of_key(uint32_t(key >> 32));
}

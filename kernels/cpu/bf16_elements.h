// Moments and gradients in bf16 on the CPU: read as fp32 and rounded stochastically (kernels/stochastic_rounding.h).
// Not for .cu files.
#pragma once

#include "kernels/param_update.h"
#include "kernels/stochastic_rounding.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/device/tensor.h"

// Elements of the arena that are converted at a time, so that they stay in the first-level cache.
constexpr int64_t ROUNDING_CHUNK = 1024;

// Rounds n values to elements of the segment from index i of the arena on.
inline void round_stochastically(bf16* out, const float* values, int64_t n, uint64_t seed, uint64_t t,
                                 const ParamSegment& segment, int64_t i, Rounded what) {
    const int64_t first = i - segment.begin + segment.first_element;
    Philox4 noise{};
    for (int64_t k = 0; k < n; k++) {
        const int64_t element = first + k;
        if (k == 0 || element % 4 == 0) noise = rounding_noise(seed, t, segment.key, element, what);
        uint32_t bits;
        std::memcpy(&bits, values + k, sizeof bits);
        const bool nan = values[k] != values[k];  // its payload could carry into the sign
        out[k] = nan ? to_bf16(values[k]) : bf16{rounded_bits(bits, noise.v[element % 4])};
    }
}

// Elements [at, at + n) of a moment or a gradient as fp32 values while an update uses them: those of a bf16 tensor in a
// buffer, from which store() rounds a moment that the update changed. It belongs to a segment; i is the index of its
// first element in the arena.
class FloatValues {
  public:
    FloatValues(const Tensor& tensor, int64_t at, int64_t n, float* buffer) : size(n) {
        if (tensor.dtype == DType::F32) {
            data = tensor.as<float>() + at;
            return;
        }
        stored = tensor.as<bf16>() + at;
        data = buffer;
        for (int64_t k = 0; k < n; k++) buffer[k] = to_float(stored[k]);
    }
    float* values() const { return data; }
    void store(uint64_t seed, uint64_t t, const ParamSegment& segment, int64_t i, Rounded what) const {
        if (stored) round_stochastically(stored, data, size, seed, t, segment, i, what);
    }

  private:
    int64_t size;
    float* data;
    bf16* stored = nullptr;
};

// Calls body(begin, end) for the parts of [begin, end) whose values fit into buffers; fp32 moments and gradients need
// none.
template <typename Body>
void for_rounding_chunks(const Tensor& m, const Tensor& grads, int64_t begin, int64_t end, Body body) {
    const bool fp32 = m.dtype == DType::F32 && grads.dtype == DType::F32;
    const int64_t chunk = fp32 ? end - begin : ROUNDING_CHUNK;
    for (; begin < end; begin += chunk) body(begin, std::min(begin + chunk, end));
}

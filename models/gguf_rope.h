// LLaMA 3.1's RoPE scaling as GGUF files carry it: by how much the wavelength of each pair of channels grows.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model/rope_scaling.h"

// [head_size/2]: wavelengths below original/high stay, those above original/low grow `factor` times, in between
// smoothly.
std::vector<double> llama3_rope_factors(const RopeScaling& scaling, double theta, int64_t head_size);

// The scaling that has these factors, with LLaMA 3.1's low and high frequency factors (1 and 4) and length (8192).
// Returns false if there is none.
bool llama3_scaling(const std::vector<float>& factors, double theta, int64_t head_size, RopeScaling& scaling);

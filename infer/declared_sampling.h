// What a model's generation_config.json says about sampling.
#pragma once

#include <functional>
#include <string>

#include "kernels/generation/sampling.h"
#include "runtime/files/json_keys.h"

// Sets the options that the file declares and is_given ("--top-p") denies. Returns a line for the user about what it
// set and which keys have no option here; "" if there are neither. Throws Error for a value that an option cannot have.
std::string take_declared_sampling(const JsonKeys& file, const std::function<bool(const std::string&)>& is_given,
                                   SamplingOptions& options);

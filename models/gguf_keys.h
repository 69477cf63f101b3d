// What is made of each key of a GGUF file: it is used, or must have a value that changes nothing, or is ignored for a
// reason.
#pragma once

#include <string>
#include <vector>

#include "runtime/files/gguf_file.h"

// The sampling that a file declares: the key behind "general.sampling.", and that of generation_config.json.
struct GgufSamplingKey {
    const char *theirs, *ours;
};
constexpr GgufSamplingKey GGUF_SAMPLING[] = {{"temp", "temperature"},
                                             {"top_k", "top_k"},
                                             {"top_p", "top_p"},
                                             {"min_p", "min_p"},
                                             {"penalty_repeat", "repetition_penalty"}};

// Throws Error for a key that would change tokens or logits and is not supported, and for one that is used and has
// another type. Returns the unknown keys.
std::vector<std::string> check_gguf_keys(const GgufFile& file);

// How much random tests do: FUZZ_ROUNDS=n in the environment makes n times as much.
#pragma once

#include <algorithm>
#include <cstdlib>

inline int fuzz_rounds() {
    const char* const rounds = std::getenv("FUZZ_ROUNDS");
    return rounds ? std::max(1, std::atoi(rounds)) : 1;
}

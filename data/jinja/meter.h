// The limits of a render. A template is a program that somebody else wrote: it must not run for ever or fill the
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/error.h"

namespace jinja {

constexpr int64_t MAX_STEPS = 20'000'000;         // evaluated expressions and statements, and 64 bytes of text each
constexpr int64_t MAX_BYTES = int64_t(64) << 20;  // of text and lists that a render makes …
constexpr int64_t MAX_BYTES_PER_INPUT = 64;       // … and so many for each byte of its input
constexpr int MAX_NESTING = 500;                  // evaluations inside each other, through macros that call macros
constexpr int MAX_DEPTH = 100;          // lists inside lists; blocks or operators inside each other in a template
constexpr int64_t MAX_RANGE = 100'000;  // numbers of range(), as in jinja2's sandbox

// Counts work and memory. Throws Error when a render exceeds a limit.
class Meter {
  public:
    explicit Meter(int64_t input_bytes) : bytes_left(MAX_BYTES + MAX_BYTES_PER_INPUT * input_bytes) {}

    void work(size_t bytes = 0) {
        steps_left -= 1 + int64_t(bytes / 64);
        require(steps_left >= 0, "the template takes more than ", MAX_STEPS,
                " steps; it repeats too much for so long a conversation");
    }
    // Memory for a new value. It is not given back: what a render makes in all is bounded.
    void make(size_t bytes) {
        bytes_left -= int64_t(bytes);
        require(bytes_left >= 0, "the template makes more than ", MAX_BYTES, " bytes and ", MAX_BYTES_PER_INPUT,
                " per byte of the conversation; it copies too much");
        work(bytes);
    }

  private:
    int64_t steps_left = MAX_STEPS, bytes_left;
};

}  // namespace jinja

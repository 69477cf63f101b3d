// The limits of a render. A template is a program that somebody else wrote: it must not run for ever or fill the
// memory. What a limit counts is charged before it is done or allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/error.h"

namespace jinja {

constexpr size_t MAX_SOURCE = size_t(512) << 10;  // bytes of a template: its tree takes up to 100 times as much
constexpr int64_t MAX_STEPS = 20'000'000;         // evaluated expressions and statements, and 64 bytes of text each
constexpr int64_t MAX_BYTES = int64_t(80)
                              << 20;    // of values that a render holds; buffers that grow take up to 2.5 times
constexpr int MAX_NESTING = 500;        // evaluations inside each other, through macros that call macros
constexpr int MAX_DEPTH = 100;          // lists inside lists; blocks or operators inside each other in a template
constexpr int64_t MAX_RANGE = 100'000;  // numbers of range(), as in jinja2's sandbox

// Where a render reaches each element of one list of its input, and whether it could tell how many more there are. It
// could not: then the same render of the first n elements writes the same up to there, and the same after the loop.
struct Growth {
    std::vector<size_t> starts;  // bytes written where a loop reached each element
    size_t end = 0;              // and where it ended
    bool appends = true;
    bool ended = false;

    bool began() const { return !starts.empty(); }
    void depends() { appends = false; }
    // Element i is read. Before the loop and after it every conversation has the first element, others may be missing.
    void read(size_t i) { appends = appends && i < (began() && !ended ? starts.size() : 1); }
    // Something that later elements, or what follows the loop, may see.
    void changes() { appends = appends && !began(); }
};

// Counts work and memory. Throws Error when a render exceeds a limit. It outlives the values that it paid for.
class Meter {
  public:
    Meter() = default;
    Meter(const Meter&) = delete;
    Meter& operator=(const Meter&) = delete;
    ~Meter() {
        for (const auto& undo : at_end) undo();
    }

    // A step, and the bytes that it copies or compares.
    void work(size_t bytes = 0) {
        steps_left -= 1 + int64_t(bytes / 64);
        require(steps_left >= 0, "the template takes more than ", MAX_STEPS,
                " steps; it repeats too much for so long a conversation");
    }
    // Bytes that are looked at one by one, or searched.
    void scan(size_t bytes) { work(4 * bytes); }
    // Memory for a new value, until give_back().
    void make(size_t bytes) {
        require(bytes <= size_t(bytes_left), "the template makes more than ", MAX_BYTES >> 20,
                " MB of text and lists; it copies too much");
        bytes_left -= int64_t(bytes);
        work(bytes);
    }
    void give_back(size_t bytes) { bytes_left += int64_t(bytes); }

    Growth* growth = nullptr;

    // Runs when the render ends. A method that changes a list empties it then: lists may hold each other.
    void when_done(std::function<void()> undo) { at_end.push_back(std::move(undo)); }

    // A value inside a value: a list that methods changed may be deeper than its construction allows.
    class Level {
      public:
        explicit Level(Meter& m) : meter(m) {
            require(meter.levels <= MAX_DEPTH, "lists nested more than ", MAX_DEPTH, " deep");
            meter.levels++;
        }
        ~Level() { meter.levels--; }
        Level(const Level&) = delete;
        Level& operator=(const Level&) = delete;

      private:
        Meter& meter;
    };

  private:
    int64_t steps_left = MAX_STEPS, bytes_left = MAX_BYTES;
    int levels = 0;
    std::vector<std::function<void()>> at_end;
};

}  // namespace jinja

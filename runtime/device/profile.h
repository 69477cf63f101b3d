// Measures the parts of a training step. The driver marks them with ranges:
//
//     Range range(ctx.profiler, "attention_forward");   // until the end of the block
//
// In a CUDA build each range is an NVTX range, so Nsight Systems and Nsight Compute show its name. Between start() and
// stop() ranges are also timed, with events in the stream (with the clock on the CPU), and report() prints a table.
// start() and stop() call profiler_start() and profiler_stop() too (runtime/device/device.h).
//
// A range on another stream is marked the same way; report() lists when its work ran:
//
//     Range range(ctx.profiler, "all_reduce", ctx.side);
//
// Without timing a range allocates nothing and costs a few nanoseconds. While timing, events come from a pool that
// start() fills; each costs the device about a microsecond, which the table includes. A replayed Graph executes no
// ranges, so a profiled step runs without graphs. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/device/device.h"

class Profiler {
  public:
    static constexpr int64_t MAX_RANGES = 16384;

    // Starts timing in this stream. Ranges beyond max_ranges are not timed; report() gives their number.
    void start(Stream stream, int64_t max_ranges = MAX_RANGES);
    // Waits for the stream. Throws Error inside a range or without start().
    void stop();
    bool on() const { return timing; }

    // A table of the ranges between the last start() and stop(): name, calls, ms and share of the total, slowest first.
    // Nested ranges are indented below their parent; "(rest)" is the time that no nested range covers. If other streams
    // had ranges, a second table lists when each began and ended, with the outermost ranges of the main stream.
    std::string report() const;

  private:
    friend class Range;
    struct Record {
        const char* name;
        int64_t parent;  // index of the enclosing record, -1: none
        bool other_stream;
        Stream stream;
    };
    int64_t open(const char* name, const Stream* other = nullptr);  // the index of its record, or -1
    void close(int64_t record);
    const Event& begin(int64_t record) const { return events[static_cast<size_t>(2 * record)]; }
    const Event& end(int64_t record) const { return events[static_cast<size_t>(2 * record + 1)]; }
    std::string timeline() const;  // empty without ranges on other streams

    bool timing = false;
    Stream stream;
    int64_t max_records = 0, dropped = 0;
    int64_t current = -1;         // the innermost open range
    std::vector<Record> records;  // record 0 is the whole step
    std::vector<Event> events;    // begin and end of record i: 2i and 2i + 1
};

// Marks work from its construction to its destruction. name must live as long as the profiler (a literal).
class Range {
  public:
    Range(Profiler& profiler, const char* name);
    Range(Profiler& profiler, const char* name, Stream other);
    ~Range();
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

  private:
    Range(Profiler& profiler, const char* name, const Stream* other);
    Profiler& profiler;
    int64_t record;
};

// Where a step's time goes. The driver names its parts:
//
//     Range range(ctx.profiler, "attention_forward");   // until the end of the block
//
// Each range is an NVTX range in a CUDA build, so that Nsight Systems and Nsight Compute show these names whenever they
// watch. Between start() and stop() ranges are timed as well, by events in the stream (on the CPU by the clock), and
// report() prints them as a table. start() and stop() also give the sign to profilers that wait for it
// (runtime/device/device.h).
//
// Work on another stream is named likewise, and report() tells when it was done:
//
//     Range range(ctx.profiler, "all_reduce", ctx.side);
//
// While nothing is timed a range allocates nothing and costs a few nanoseconds. While timing, events come from a pool
// that start() fills; they cost the device about a microsecond each, which the table includes. Work that is replayed
// from a Graph passes through no range: a profiled step runs without. One thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/device/device.h"

class Profiler {
  public:
    static constexpr int64_t MAX_RANGES = 16384;

    // Begins to time, in this stream. Further ranges than max_ranges are not timed; report() says how many.
    void start(Stream stream, int64_t max_ranges = MAX_RANGES);
    // Waits for the stream. Throws Error inside a range or without a start().
    void stop();
    bool on() const { return timing; }

    // What lay between the last start() and stop(): name, calls, ms and share of the whole, the slowest first; ranges
    // within ranges are indented below them, "(rest)" being what none of those covers. Where work was timed on other
    // streams, a second table: from when to when that was, and the outermost ranges beside it.
    std::string report() const;

  private:
    friend class Range;
    struct Record {
        const char* name;
        int64_t parent;  // record, -1: outermost
        bool beside;     // on another stream
        Stream stream;
    };
    int64_t open(const char* name, const Stream* other = nullptr);  // its record, or -1
    void close(int64_t record);
    const Event& begin(int64_t record) const { return events[static_cast<size_t>(2 * record)]; }
    const Event& end(int64_t record) const { return events[static_cast<size_t>(2 * record + 1)]; }
    std::string timeline() const;  // empty where nothing was beside

    bool timing = false;
    Stream stream;
    int64_t max_records = 0, dropped = 0;
    int64_t current = -1;         // the innermost open range
    std::vector<Record> records;  // record 0 is the whole
    std::vector<Event> events;    // begin and end of record i: 2i and 2i + 1
};

// name: a literal, or text that lives as long as the profiler.
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

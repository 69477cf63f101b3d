// runtime/device/profile.h: times, nesting and the report. The CPU uses the clock, a GPU events.
#include "runtime/device/profile.h"

#include <gtest/gtest.h>

#include <chrono>
#include <sstream>
#include <thread>

#include "dev/test_util.h"

namespace {

struct Line {
    int indent;
    std::string name;
    int64_t calls;  // 0: none printed
    double ms, share;
};

std::vector<Line> lines_of(const std::string& report) {
    std::vector<Line> lines;
    std::istringstream text(report);
    std::string line;
    std::getline(text, line);
    EXPECT_EQ(line, "range                                          calls          ms   share");
    while (std::getline(text, line)) {
        if (line.back() != '%') continue;
        Line parsed{int(line.find_first_not_of(' ')), "", 0, 0, 0};
        const std::string name = line.substr(size_t(parsed.indent), 44 - size_t(parsed.indent));
        parsed.name = name.substr(0, name.find_last_not_of(' ') + 1);
        const std::string calls = line.substr(44, 8);
        if (calls.find_first_not_of(' ') != std::string::npos) parsed.calls = std::stoll(calls);
        parsed.ms = std::stod(line.substr(52, 12));
        parsed.share = std::stod(line.substr(64));
        lines.push_back(parsed);
    }
    return lines;
}

// Takes at least this many ms of device time: sleeps on the CPU, fills memory on a GPU.
class Work {
  public:
    void operator()(double ms) const {
        if (backend_device() == Device::CPU)
            std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
        else  // at most 4 TB/s
            for (double done = 0; done < ms; done += double(BYTES) / 4e9)
                device_fill(memory.tensor().data, 0, BYTES, Stream{});
    }

  private:
    static constexpr size_t BYTES = size_t(1) << 28;
    TestArray memory = TestArray::scratch(backend_device() == Device::CPU ? 1 : int64_t(BYTES));
};

}  // namespace

TEST(Profile, TimesAndNesting) {
    Profiler profiler;
    const Work work;
    const auto run = [&] {
        for (int layer = 0; layer < 3; layer++) {
            const Range forward(profiler, "forward");
            {
                const Range range(profiler, "norm");
                work(1);
            }
            {
                const Range range(profiler, "attention");
                work(4);
            }
            work(2);
        }
        const Range backward(profiler, "backward");
        const Range range(profiler, "norm");  // another "norm" than forward's
        work(30);
    };
    run();  // not timed
    work(20);
    profiler.start(Stream{});
    EXPECT_TRUE(profiler.on());
    run();
    profiler.stop();
    EXPECT_FALSE(profiler.on());
    run();  // not timed either

    const std::vector<Line> lines = lines_of(profiler.report());
    const std::vector<std::pair<int, std::string>> expected = {{0, "backward"}, {2, "norm"},      {2, "(rest)"},
                                                               {0, "forward"},  {2, "attention"}, {2, "norm"},
                                                               {2, "(rest)"},   {0, "(rest)"},    {0, "total"}};
    ASSERT_EQ(lines.size(), expected.size()) << profiler.report();
    for (size_t i = 0; i < lines.size(); i++) {
        EXPECT_EQ(lines[i].indent, expected[i].first) << profiler.report();
        EXPECT_EQ(lines[i].name, expected[i].second) << profiler.report();
    }
    const std::vector<int64_t> calls = {1, 1, 0, 3, 3, 3, 0, 0, 1};
    for (size_t i = 0; i < lines.size(); i++) EXPECT_EQ(lines[i].calls, calls[i]) << lines[i].name;

    // Longer work has longer times, and the ranges add up to their parent within the three printed digits.
    const double round = 0.0005 * 5;
    EXPECT_NEAR(lines[0].ms, lines[1].ms + lines[2].ms, round);
    EXPECT_NEAR(lines[3].ms, lines[4].ms + lines[5].ms + lines[6].ms, round);
    EXPECT_NEAR(lines[8].ms, lines[0].ms + lines[3].ms + lines[7].ms, round);
    EXPECT_GT(lines[1].ms, lines[3].ms);
    EXPECT_GT(lines[4].ms, lines[5].ms);
    EXPECT_GT(lines[6].ms, 0);  // between the ranges within "forward"
    if (backend_device() == Device::CPU) {
        EXPECT_GE(lines[1].ms, 30);
        EXPECT_GE(lines[4].ms, 12);
        EXPECT_GE(lines[5].ms, 3);
    }
    for (const Line& line : lines) EXPECT_NEAR(line.share, 100 * line.ms / lines[8].ms, 0.06) << line.name;
    EXPECT_LT(lines[7].share, 50);  // the 20 ms before start() are not counted
}

// On the CPU the streams run one after the other; on a GPU the side stream waits for an event.
TEST(Profile, SideStreamRangesAreTimedOnTheirStream) {
    Profiler profiler;
    const Work work;
    const Stream stream = create_stream(), side = create_stream();
    profiler.start(stream);
    for (int i = 0; i < 2; i++) {
        const Range backward(profiler, "backward");
        const Range layer(profiler, "layer");
        Event complete;
        complete.record(stream);
        complete.make_wait(side);
        const Range sum(profiler, "sum", side);
        work(2);
    }
    profiler.stop();
    const std::string report = profiler.report();
    for (const Line& line : lines_of(report))
        EXPECT_NE(line.name, "sum") << report;  // not part of the main stream's time

    std::istringstream text(report.substr(report.find("\ntimeline") + 1));
    std::string line;
    std::getline(text, line);
    EXPECT_EQ(line, "timeline (| on another stream)                               from ms       to ms          ms");
    double before = 0;
    for (const char* name : {"backward", "  | sum", "backward", "  | sum"}) {
        ASSERT_TRUE(std::getline(text, line)) << report;
        EXPECT_EQ(line.substr(0, line.find_last_not_of(' ', 55) + 1), name) << report;
        const double from = std::stod(line.substr(56, 12)), to = std::stod(line.substr(68, 12));
        EXPECT_GE(from, before) << report;  // sorted by start
        EXPECT_NEAR(std::stod(line.substr(80)), to - from, 0.0011) << report;
        EXPECT_GE(to - from, backend_device() == Device::CPU ? 2 : 0) << report;
        before = from;
    }
    EXPECT_FALSE(std::getline(text, line)) << report;
    destroy_stream(side);
    destroy_stream(stream);
}

TEST(Profile, StartDiscardsEarlierRanges) {
    Profiler profiler;
    for (const char* name : {"first", "second"}) {
        profiler.start(Stream{});
        { const Range range(profiler, name); }
        profiler.stop();
        const std::vector<Line> lines = lines_of(profiler.report());
        ASSERT_EQ(lines.size(), 3u);
        EXPECT_EQ(lines[0].name, name);
        EXPECT_EQ(lines[0].calls, 1);
    }
}

TEST(Profile, RangesBeyondTheLimitAreCounted) {
    Profiler profiler;
    profiler.start(Stream{}, 3);
    for (int i = 0; i < 5; i++) {
        const Range outer(profiler, "outer");
        const Range inner(profiler, "inner");
    }
    profiler.stop();
    const std::vector<Line> lines = lines_of(profiler.report());
    ASSERT_EQ(lines.size(), 5u);
    EXPECT_EQ(lines[0].name, "outer");
    EXPECT_EQ(lines[0].calls, 2);
    EXPECT_EQ(lines[1].name, "inner");
    EXPECT_EQ(lines[1].calls, 1);
    EXPECT_NE(profiler.report().find("7 more ranges were not timed (the limit is 3)"), std::string::npos);
}

// A range that began before start() does not end a timed one.
TEST(Profile, OpenRangesAtStartAreNotTimed) {
    Profiler profiler;
    {
        const Range range(profiler, "untimed");
        profiler.start(Stream{});
    }
    { const Range range(profiler, "timed"); }
    profiler.stop();
    const std::vector<Line> lines = lines_of(profiler.report());
    ASSERT_EQ(lines.size(), 3u);
    EXPECT_EQ(lines[0].name, "timed");
}

TEST(Profile, MisuseIsAnError) {
    Profiler profiler;
    expect_error([&] { profiler.report(); }, "Profiler::report: nothing was profiled");
    expect_error([&] { profiler.stop(); }, "Profiler::stop: not started");
    profiler.start(Stream{});
    expect_error([&] { profiler.start(Stream{}); }, "Profiler::start: already started");
    expect_error([&] { profiler.report(); }, "Profiler::report: nothing was profiled");
    {
        const Range range(profiler, "half");
        expect_error([&] { profiler.stop(); }, "Profiler::stop: range half is still open");
    }
    profiler.stop();
}

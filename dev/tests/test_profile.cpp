// runtime/device/profile.h: times, nesting and the report. The CPU uses the clock, a GPU events.
#include "runtime/device/profile.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <sstream>
#include <thread>

#include "dev/tests/test_util.h"

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
    const auto begin = std::chrono::steady_clock::now();
    profiler.start(Stream{});
    EXPECT_TRUE(profiler.on());
    run();
    profiler.stop();
    const std::chrono::duration<double, std::milli> timed = std::chrono::steady_clock::now() - begin;
    EXPECT_FALSE(profiler.on());
    run();  // not timed either

    // The lines by their place in the nesting. Siblings are sorted by time, and under load a sleep can take so long
    // that any of them is first.
    const std::string report = profiler.report();
    std::map<std::string, Line> at;
    std::map<std::string, double> previous_sibling;
    std::string parent;
    for (const Line& line : lines_of(report)) {
        if (line.indent == 0) parent = line.name;
        const std::string outer = line.indent == 0 ? "" : parent + "/";
        at[outer + line.name] = line;
        if (line.name == "(rest)" || line.name == "total") continue;
        if (previous_sibling.count(outer)) {
            EXPECT_LE(line.ms, previous_sibling[outer]) << report;
        }
        previous_sibling[outer] = line.ms;
    }
    const std::map<std::string, int64_t> calls = {
        {"backward", 1},     {"backward/norm", 1},  {"backward/(rest)", 0}, {"forward", 3}, {"forward/attention", 3},
        {"forward/norm", 3}, {"forward/(rest)", 0}, {"(rest)", 0},          {"total", 1}};
    EXPECT_EQ(at.size(), calls.size()) << report;
    for (const auto& [name, n] : calls) {
        ASSERT_TRUE(at.count(name)) << name << " is missing in\n" << report;
        EXPECT_EQ(at[name].calls, n) << name;
    }

    // Longer work has longer times, and the ranges add up to their parent within the three printed digits.
    const double round = 0.0005 * 5;
    const auto ms = [&](const char* name) { return at[name].ms; };
    EXPECT_NEAR(ms("backward"), ms("backward/norm") + ms("backward/(rest)"), round);
    EXPECT_NEAR(ms("forward"), ms("forward/attention") + ms("forward/norm") + ms("forward/(rest)"), round);
    EXPECT_NEAR(ms("total"), ms("backward") + ms("forward") + ms("(rest)"), round);
    EXPECT_GT(ms("forward/(rest)"), 0);
    if (backend_device() == Device::CPU) {
        EXPECT_GE(ms("backward/norm"), 30);
        EXPECT_GE(ms("forward/attention"), 12);
        EXPECT_GE(ms("forward/norm"), 3);
        EXPECT_GE(ms("forward/(rest)"), 6);
        EXPECT_LE(ms("total"), timed.count());
    } else {  // a GPU's times don't depend on the host's load
        EXPECT_GT(ms("backward/norm"), ms("forward"));
        EXPECT_GT(ms("forward/attention"), ms("forward/norm"));
        EXPECT_LT(ms("(rest)"), 20);  // the 20 ms before start() are not counted
    }
    for (const auto& [name, line] : at) EXPECT_NEAR(line.share, 100 * line.ms / ms("total"), 0.06) << name;
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

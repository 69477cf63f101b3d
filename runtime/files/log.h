// The output of a run: log.jsonl in its directory, and progress on stderr.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

// Appends one JSON object per line. Each line is written at once and whole, so a killed run loses none. A log that is
// deleted or moved away during the run is written again with all its lines; if another file takes its place, the log
// continues there. What cannot be written (a full disk) is kept and written before the next line.
class RunLog {
  public:
    // Opens path for appending and removes lines whose "step" is > last_step, and an incomplete last line. With an
    // empty path nothing is written. note: told once if the file disappears, and when lines cannot be written and can
    // be again.
    RunLog(const std::string& path, int64_t last_step, std::function<void(const std::string&)> note = {});
    ~RunLog();
    RunLog(const RunLog&) = delete;
    RunLog& operator=(const RunLog&) = delete;
    void write(const nlohmann::ordered_json& line);
    void retry();  // writes what could not be written before
    // The first error since the log was whole; empty: it is whole.
    const std::string& error() const { return failure; }

  private:
    int open() const;
    void append();
    void follow_path();  // opens the file again if path no longer names the one that is open
    void tell(const std::string& line) const;
    const std::string path;
    const std::function<void(const std::string&)> note;
    bool told_of_path = false;
    int fd = -1;
    std::string pending, failure;  // what is not written yet, and why
};

// Progress on stderr. On a terminal one line that is redrawn; piped, plain lines, at most one a second.
class Progress {
  public:
    // shown: false on the ranks other than 0, which would print the same.
    Progress(int64_t total_steps, int64_t first_step, bool shown = true);
    ~Progress() { finish(); }  // so that an error message gets a line of its own
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    // text: the step's numbers; the rate and the remaining time are appended.
    void step(int64_t step, const std::string& text);
    // A line of its own, above the progress line.
    void note(const std::string& line);
    void finish();

  private:
    void clear();
    const int64_t total_steps, first_step;
    const bool shown, terminal;
    bool line_drawn = false;
    std::chrono::steady_clock::time_point start, last_print;
};

std::string human_bytes(int64_t bytes);   // "1.94 GiB"
std::string human_time(double seconds);   // "1:02:03", "2:03"
std::string with_commas(int64_t number);  // "12,345"

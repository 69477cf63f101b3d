// What a run tells: log.jsonl in its directory, and progress on stderr.
#pragma once

#include <chrono>
#include <cstdio>
#include <nlohmann/json_fwd.hpp>
#include <string>

// Appends one JSON object a line; each line is handed to the system at once, so that a killed run loses none.
class RunLog {
  public:
    // An empty path: nothing is written. Opens path for appending, after cutting it back to the lines whose "step" is ≤
    // last_step (and a torn last line).
    RunLog(const std::string& path, int64_t last_step);
    ~RunLog();
    RunLog(const RunLog&) = delete;
    RunLog& operator=(const RunLog&) = delete;
    void write(const nlohmann::ordered_json& line);

  private:
    std::string path;
    FILE* file;
};

// Progress on stderr. On a terminal one line that is redrawn; piped, plain lines, at most one a second.
class Progress {
  public:
    // shown: false where another process tells the same.
    Progress(int64_t total_steps, int64_t first_step, bool shown = true);
    ~Progress() { finish(); }  // so that an error's line stands by itself
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    // text: what is known of this step; rate and time to go are added.
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

#include "runtime/files/log.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/console.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

RunLog::RunLog(const std::string& log_path, int64_t last_step) : path(log_path), file(nullptr) {
    if (path.empty()) return;
    if (path_exists(path)) {
        const std::string old = read_file(path);
        std::string kept;
        for (size_t begin = 0, end; (end = old.find('\n', begin)) != std::string::npos; begin = end + 1) {
            const auto line = nlohmann::json::parse(old.begin() + begin, old.begin() + end, nullptr, false);
            const bool whole = line.is_object() && line.contains("step") && line["step"].is_number_integer();
            if (whole && line["step"].get<int64_t>() <= last_step) kept.append(old, begin, end - begin + 1);
        }
        if (kept.size() != old.size()) write_file(path, kept);
    }
    file = std::fopen(path.c_str(), "a");
    require(file != nullptr, path, ": cannot open for writing: ", std::strerror(errno));
}

RunLog::~RunLog() {
    if (file) std::fclose(file);
}

void RunLog::write(const nlohmann::ordered_json& line) {
    if (!file) return;
    const std::string text = line.dump() + "\n";
    const bool ok = std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0;
    require(ok, path, ": cannot write: ", std::strerror(errno), "; make room, then go on with --resume");
}

Progress::Progress(int64_t total, int64_t first, bool is_shown)
    : total_steps(total),
      first_step(first),
      shown(is_shown),
      terminal(isatty(STDERR_FILENO)),
      start(std::chrono::steady_clock::now()) {}

void Progress::clear() {
    if (line_drawn) std::fputs("\r\033[K", stderr);
    line_drawn = false;
}

void Progress::step(int64_t step, const std::string& text) {
    if (!shown) return;
    using seconds = std::chrono::duration<double>;
    const auto now = std::chrono::steady_clock::now();
    const bool last = step == total_steps;
    const double interval = terminal ? 0.1 : 1.0;
    if (!last && seconds(now - last_print).count() < interval) return;
    last_print = now;
    const double elapsed = seconds(now - start).count();
    const double to_go = elapsed / double(step - first_step) * double(total_steps - step);
    const std::string line = str("step ", step, "/", total_steps, "  ", text, "  ETA ", human_time(to_go));
    clear();
    std::fputs(line.c_str(), stderr);
    if (terminal)
        line_drawn = true;
    else
        std::fputc('\n', stderr);
    std::fflush(stderr);
}

void Progress::note(const std::string& line) {
    if (!shown) return;
    clear();
    std::fprintf(stderr, "%s\n", for_output(STDERR_FILENO, line).c_str());
}

void Progress::finish() {
    if (line_drawn) std::fputc('\n', stderr);
    line_drawn = false;
}

std::string human_bytes(int64_t bytes) {
    const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double x = double(bytes);
    int u = 0;
    for (; x >= 1024 && u < 6; u++) x /= 1024;
    char text[32];
    std::snprintf(text, sizeof text, u ? "%.2f %s" : "%.0f %s", x, units[u]);
    return text;
}

std::string human_time(double seconds) {
    const int64_t s = std::llround(seconds);
    char text[48];
    if (s >= 3600)
        std::snprintf(text, sizeof text, "%lld:%02d:%02d", (long long)(s / 3600), int(s / 60 % 60), int(s % 60));
    else
        std::snprintf(text, sizeof text, "%d:%02d", int(s / 60), int(s % 60));
    return text;
}

std::string with_commas(int64_t number) {
    std::string s = std::to_string(number);
    for (int64_t i = int64_t(s.size()) - 3; i > (number < 0); i -= 3) s.insert(static_cast<size_t>(i), ",");
    return s;
}

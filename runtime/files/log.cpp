#include "runtime/files/log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/console.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

RunLog::RunLog(const std::string& log_path, int64_t last_step, std::function<void(const std::string&)> tell_user)
    : path(log_path), note(std::move(tell_user)) {
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
    fd = open();
}

RunLog::~RunLog() {
    retry();
    if (fd >= 0) ::close(fd);
}

int RunLog::open() const {
    const int opened = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (opened < 0) throw_system_error(path, "open", errno);
    return opened;
}

void RunLog::tell(const std::string& line) const {
    if (note) note(line);
}

void RunLog::follow_path() {
    struct stat ours, named;
    const bool exists = ::stat(path.c_str(), &named) == 0;
    if (!exists && errno != ENOENT) throw_system_error(path, "look up", errno);  // it may be there
    if (::fstat(fd, &ours) != 0) throw_system_error(path, "read", errno);
    if (exists && ours.st_ino == named.st_ino && ours.st_dev == named.st_dev) return;
    // The lines so far are still in the open file. The new one gets them when it is open, so that they are not lost if
    // it is removed at once, too.
    const std::string lines = exists ? "" : read_file(str("/proc/self/fd/", fd));
    ::close(std::exchange(fd, open()));
    pending.insert(0, lines);
    if (!std::exchange(told_of_path, true))
        tell(path + (exists ? " was replaced; the log continues in the new file" : " was gone; it is written again"));
}

void RunLog::write(const nlohmann::ordered_json& line) {
    if (path.empty()) return;
    // A sample may hold bytes that are not UTF-8.
    pending += line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    retry();
}

void RunLog::retry() {
    if (pending.empty()) return;
    try {
        follow_path();
        append();
        if (!failure.empty()) tell(path + " is written again; no line is lost");
        failure.clear();
    } catch (const Error& e) {
        if (!failure.empty()) return;
        failure = e.what();
        tell(failure + "; the lines are kept and written when that is possible");
    }
}

void RunLog::append() {
    const off_t end = ::lseek(fd, 0, SEEK_END);
    for (size_t done = 0; done < pending.size();) {
        const ssize_t n = ::write(fd, pending.data() + done, pending.size() - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            const int error = errno;
            if (::ftruncate(fd, end) != 0)
                pending.erase(0, done);  // else no half line is left, and all is written again
            throw_system_error(path, "write", error);
        }
        done += size_t(n);
    }
    pending.clear();
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
    std::fprintf(stderr, "%s\n", for_stderr(line).c_str());
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
    for (int64_t i = int64_t(s.size()) - 3; i > (number < 0); i -= 3) s.insert(static_cast<size_t>(i), 1, ',');
    return s;
}

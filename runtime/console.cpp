#include "runtime/console.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

std::string ControlEscaper::operator()(std::string_view part) {
    std::string shown;
    const auto escape = [&](unsigned char c) {
        char text[8];
        std::snprintf(text, sizeof text, "\\x%02x", c);
        shown += text;
    };
    for (const char byte : part) {
        const auto c = static_cast<unsigned char>(byte);
        const bool continues = continuation > 0 && c >= 0x80 && c < 0xC0;
        if (c2_held && !(continues && c < 0xA0)) shown += '\xC2';
        if (continues) {
            continuation--;
            if (c2_held && c < 0xA0)
                escape(c);  // C2 9B is the character U+009B, a C1 control
            else
                shown += byte;
            c2_held = false;
            continue;
        }
        c2_held = c == 0xC2;
        continuation = c >= 0xC2 && c < 0xE0 ? 1 : c >= 0xE0 && c < 0xF0 ? 2 : c >= 0xF0 && c < 0xF5 ? 3 : 0;
        const bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F || (c >= 0x80 && !continuation);
        if (control)
            escape(c);
        else if (!c2_held)
            shown += byte;
    }
    return shown;
}

std::string for_stderr(std::string_view text) {
    return ControlEscaper()(text);
}

void set_terminal_style(const char* sgr) {
    if (!isatty(STDOUT_FILENO)) return;
    std::cout.flush();  // what was written before keeps its style
    std::printf("\033[%sm", sgr);
    std::fflush(stdout);
}

// Stands before the stream's own buffer.
class Console::Buffer : public std::streambuf {
  public:
    Buffer(std::ostream& its_stream, bool escapes_controls)
        : stream(its_stream), target(its_stream.rdbuf()), escapes(escapes_controls) {
        stream.rdbuf(this);
    }
    ~Buffer() override { stream.rdbuf(target); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    bool in_line() const { return last != '\n'; }

  protected:
    std::streamsize xsputn(const char* text, std::streamsize n) override {
        if (n == 0) return 0;
        last = text[n - 1];
        const std::string_view given(text, static_cast<size_t>(n));
        if (!escapes) return target->sputn(text, n);
        const std::string shown = escape(given);
        const auto length = static_cast<std::streamsize>(shown.size());
        return target->sputn(shown.data(), length) == length ? n : 0;
    }
    int_type overflow(int_type c) override {
        if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
        const char byte = traits_type::to_char_type(c);
        return xsputn(&byte, 1) == 1 ? c : traits_type::eof();
    }
    int sync() override { return target->pubsync(); }

  private:
    std::ostream& stream;
    std::streambuf* const target;
    const bool escapes;
    ControlEscaper escape;
    char last = '\n';
};

namespace {

void open_missing_streams() {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (fcntl(fd, F_GETFD) >= 0) continue;
        // The lowest free descriptor is this one. The wrong direction makes its use fail.
        (void)!open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    }
}

}  // namespace

Console::Console() {
    open_missing_streams();
    out = std::make_unique<Buffer>(std::cout, isatty(STDOUT_FILENO));
    err = std::make_unique<Buffer>(std::cerr, true);
    std::cout.exceptions(std::ios::badbit);
}

Console::~Console() {
    std::cout.exceptions(std::ios::goodbit);
}

void Console::end_line() {
    std::cout.exceptions(std::ios::goodbit);
    if (out->in_line()) std::cout << "\n";
    std::cout.flush();
}

bool Console::reader_gone() {
    pollfd p{STDOUT_FILENO, 0, 0};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLERR | POLLHUP)) != 0;
}

// Failures are exceptions with a message of one line. main() prints the line to stderr and exits with status 1 (Error)
// or 2 (UsageError). No other code calls exit().
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

// The message names what failed, the value found and the remedy: "runs/a/config.json: key 'n_head' is 0; it must be
// positive".
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A failure that no argument caused: out of memory, no GPU, a GPU that failed.
struct DeviceError : Error {
    using Error::Error;
};

// A wrong option or value on the command line.
struct UsageError : Error {
    using Error::Error;
};

// Concatenates anything printable: str("step ", 3, " of ", 10).
template <typename... Parts>
std::string str(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

// require(fd >= 0, path, ": cannot open: ", strerror(errno)). The message is formatted only on failure.
template <typename... Parts>
void require(bool ok, const Parts&... parts) {
    if (!ok) throw Error(str(parts...));
}

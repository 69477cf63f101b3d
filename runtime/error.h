// How everything below main() reports failure: one exception type with one clear line of text.
// main() prints the line to stderr and exits: Error -> 1, UsageError -> 2. Nothing below main() calls exit().
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

// The line names the thing that is wrong and the remedy: "runs/a/config.json: key 'n_head' is 0; it must be positive".
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What no argument is to blame for: no memory, no GPU, a GPU that failed.
struct DeviceError : Error {
    using Error::Error;
};

// A wrong flag or value on the command line.
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

// require(fd >= 0, path, ": cannot open: ", strerror(errno)). The message parts are only formatted on failure.
template <typename... Parts>
void require(bool ok, const Parts&... parts) {
    if (!ok) throw Error(str(parts...));
}

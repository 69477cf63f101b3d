// For tests that run their own binary again with a library of dev/ preloaded (crash_shim.c, alloc_shim.c).
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "runtime/error.h"

// The path of <name>.so, which the Makefile writes to the directory of the test.
inline std::string preload_path(const std::string& name) {
    const std::filesystem::path directory = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    const std::filesystem::path path = directory / (name + ".so");
    if (std::filesystem::exists(path)) return path.string();
    throw Error(str(name, ".so is missing; build it: make test-binaries"));
}

// For GTEST_SKIP(): why no library can be preloaded into this build, or null.
inline const char* why_no_preload() {
#if defined(__SANITIZE_ADDRESS__)
    return "AddressSanitizer must be the first library, so no other can be preloaded";
#else
    return nullptr;
#endif
}

// Runs this binary with these arguments and additional environment variables (such as LD_PRELOAD). stdout and stderr
// go into a file. Returns waitpid's status.
inline int run_self(std::vector<std::string> arguments,
                    const std::vector<std::pair<std::string, std::string>>& variables, const std::string& output_path) {
    // All memory is allocated before fork: the child of a process with threads may only call async-signal-safe
    // functions.
    std::vector<std::string> environment;
    for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
    for (char** entry = environ; *entry; entry++) environment.push_back(*entry);
    arguments.insert(arguments.begin(), "test");
    std::vector<char*> argv, envp;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    for (std::string& entry : environment) envp.push_back(entry.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
        const int output = ::open(output_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
        if (output < 0 || ::dup2(output, 1) < 0 || ::dup2(output, 2) < 0) ::_exit(3);
        ::execve("/proc/self/exe", argv.data(), envp.data());
        ::_exit(3);
    }
    int status = 0;
    require(child > 0 && ::waitpid(child, &status, 0) == child, "run_self: fork or waitpid failed");
    return status;
}

inline bool exited(int status, int code) {
    return WIFEXITED(status) && WEXITSTATUS(status) == code;
}

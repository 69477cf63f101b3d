// Shared by the tests of files: a directory that is removed after the test, and a check of error messages.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/error.h"

class TempDir {
  public:
    TempDir() {
        // In memory if possible: tests flush thousands of small files.
        std::string pattern = "/dev/shm/train_gpt_test_XXXXXX";
        if (!mkdtemp(&pattern[0])) {
            pattern = (std::filesystem::temp_directory_path() / "train_gpt_test_XXXXXX").string();
            if (!mkdtemp(&pattern[0])) throw Error(pattern + ": cannot create a temporary directory");
        }
        directory = std::filesystem::canonical(pattern).string();
    }
    ~TempDir() {
        std::error_code ignored;
        std::filesystem::remove_all(directory, ignored);
    }
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;

    const std::string& path() const { return directory; }
    std::string file(const std::string& name) const { return directory + "/" + name; }

  private:
    std::string directory;
};

// Writes a file without write_file's flush to disk, for tests that damage a file many times.
inline void put_file(const std::string& path, std::string_view bytes) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), std::streamsize(bytes.size()));
    if (!out.flush()) throw Error(path + ": cannot write");
}

// Runs action, which must throw Error with one line that contains every one of parts.
template <typename Action>
void expect_error(Action action, const std::vector<std::string>& parts) {
    try {
        action();
    } catch (const Error& e) {
        const std::string message = e.what();
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
        for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
        return;
    }
    ADD_FAILURE() << "no Error; expected one about " << (parts.empty() ? "it" : parts[0]);
}

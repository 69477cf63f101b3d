// RunLog of runtime/files/log.h: whole lines, also when the file is deleted, moved or replaced, or cannot grow.
#include "runtime/files/log.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <nlohmann/json.hpp>
#include <thread>

#include "dev/tests/temp_dir.h"
#include "runtime/files/files.h"

namespace {

std::string lines(int first, int last) {
    std::string text;
    for (int step = first; step <= last; step++) text += str("{\"step\":", step, "}\n");
    return text;
}

struct LogTest : testing::Test {
    TempDir dir;
    const std::string path = dir.file("log.jsonl");
    std::vector<std::string> notes;
    RunLog log{path, 0, [this](const std::string& note) { notes.push_back(note); }};

    void write(int first, int last) {
        for (int step = first; step <= last; step++) log.write({{"step", step}});
    }
};

TEST_F(LogTest, DeletedIsWrittenAgain) {
    write(1, 3);
    EXPECT_EQ(read_file(path), lines(1, 3));
    for (int round = 1; round <= 2; round++) {
        ASSERT_EQ(::unlink(path.c_str()), 0);
        write(4 * round, 4 * round + 3);
        EXPECT_EQ(read_file(path), lines(1, 3) + lines(4, 4 * round + 3));
    }
    EXPECT_EQ(notes, std::vector<std::string>{path + " was gone; it is written again"});  // said once
}

// Whenever the file goes away, also while it is written again, the next line brings all back.
TEST_F(LogTest, DeletedAgainAndAgain) {
    std::atomic<bool> stop = false;
    std::thread remover([&] {
        while (!stop) ::unlink(path.c_str());
    });
    write(1, 2000);
    stop = true;
    remover.join();
    write(2001, 2001);
    EXPECT_EQ(read_file(path), lines(1, 2001));
}

TEST_F(LogTest, MovedAwayIsWrittenAgain) {
    write(1, 3);
    ASSERT_EQ(::rename(path.c_str(), dir.file("old").c_str()), 0);
    write(4, 5);
    EXPECT_EQ(read_file(path), lines(1, 5));
    EXPECT_EQ(read_file(dir.file("old")), lines(1, 3));
    EXPECT_EQ(notes.size(), 1u);
}

TEST_F(LogTest, ContinuesInAFileThatReplacesIt) {
    write(1, 3);
    write_file(path, lines(2, 3));
    write(4, 5);
    EXPECT_EQ(read_file(path), lines(2, 5));
    EXPECT_EQ(notes, std::vector<std::string>{path + " was replaced; the log continues in the new file"});
}

// A file size limit is a disk that is full for a while.
TEST_F(LogTest, WritesWhatAFullDiskRefused) {
    write(1, 3);
    const auto size = rlim_t(lines(1, 3).size());
    rlimit before;
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
    const rlimit low = {size + 5, before.rlim_max};
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);  // as main() does
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
    write(4, 6);
    EXPECT_NE(log.error().find("File too large; raise the limit on file sizes (ulimit -f)"), std::string::npos);
    EXPECT_EQ(notes, std::vector<std::string>{log.error() + "; the lines are kept and written when that is possible"});
    EXPECT_EQ(read_file(path), lines(1, 3));  // no half line
    ::setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    write(7, 7);
    EXPECT_EQ(read_file(path), lines(1, 7));
    EXPECT_EQ(log.error(), "");
    EXPECT_EQ(notes.back(), path + " is written again; no line is lost");
}

TEST_F(LogTest, AnUnwritablePathIsToldAndTriedAgain) {
    write(1, 1);
    std::filesystem::rename(dir.path(), dir.path() + ".away");
    write(2, 3);
    EXPECT_NE(log.error().find(path + ": cannot open: No such file"), std::string::npos) << log.error();
    std::filesystem::rename(dir.path() + ".away", dir.path());
    log.retry();
    EXPECT_EQ(read_file(path), lines(1, 3));
    EXPECT_EQ(log.error(), "");
    EXPECT_EQ(notes.size(), 2u);
}

}  // namespace

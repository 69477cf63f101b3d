// runtime/files/lock.h: one holder at a time, its name in the error, files that dead holders left.
#include "runtime/files/lock.h"

#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "dev/tests/temp_dir.h"
#include "runtime/files/files.h"

namespace {

std::function<void()> before_flock;  // happens once, before the next flock()

}  // namespace

// Instead of the C library's, so that a test can do something between open() and flock().
extern "C" int flock(int fd, int operation) noexcept {
    if (before_flock) std::exchange(before_flock, nullptr)();
    return int(::syscall(SYS_flock, fd, operation));
}

namespace {

TEST(Lock, OneHolderAtATime) {
    const TempDir dir;
    auto lock = std::make_unique<DirectoryLock>(dir.path(), "--out");
    EXPECT_TRUE(lock->locked());
    char host[256] = "";
    ::gethostname(host, sizeof host - 1);
    const std::string holder = str("process ", ::getpid(), " on ", host);
    for (int i = 0; i < 2; i++)
        expect_error([&] { DirectoryLock(dir.path(), "--out"); }, {"--out " + dir.path(), "in use by " + holder + ";"});
    const TempDir other;
    EXPECT_NO_THROW(DirectoryLock(other.path(), "--out"));
    lock.reset();
    EXPECT_TRUE(list_directory(dir.path()).empty());
    EXPECT_NO_THROW(DirectoryLock(dir.path(), "--out"));
    expect_error([&] { DirectoryLock(dir.file("none"), "--out"); }, {dir.file("none"), "No such file"});
}

// The file of a killed process stays, its lock does not.
TEST(Lock, OfADeadProcessDoesNotBlock) {
    const TempDir dir;
    const pid_t child = ::fork();
    if (child == 0) {
        new DirectoryLock(dir.path(), "--out");
        ::kill(::getpid(), SIGKILL);
    }
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{".lock"});
    EXPECT_EQ(read_file(dir.file(".lock")).find("process " + std::to_string(child) + " on "), 0u);
    const DirectoryLock lock(dir.path(), "--out");
    EXPECT_EQ(read_file(dir.file(".lock")).find("process " + std::to_string(::getpid()) + " on "), 0u);
}

// The holder removes its file after another process has opened it, and before that process locks it.
TEST(Lock, OfARemovedFileIsNone) {
    const TempDir dir;
    auto first = std::make_unique<DirectoryLock>(dir.path(), "--out");
    before_flock = [&] { first.reset(); };
    const DirectoryLock second(dir.path(), "--out");
    EXPECT_FALSE(first);
    EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{".lock"});
    expect_error([&] { DirectoryLock(dir.path(), "--out"); }, {"in use by"});
}

// The holder removes the file while others try to lock it: never do two hold the directory.
TEST(Lock, NeverTwoHolders) {
    const TempDir dir;
    std::atomic<int> holders{0}, times{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) {
        threads.emplace_back([&] {
            for (int round = 0; round < 3000; round++) {
                try {
                    const DirectoryLock lock(dir.path(), "--out");
                    EXPECT_EQ(++holders, 1);
                    times++;
                    holders--;
                } catch (const Error&) {  // in use
                }
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GT(times, 0);
}

}  // namespace

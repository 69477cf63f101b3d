// runtime/watchdog.h: a state that takes too long ends the process; shorter ones do not.
#include "runtime/watchdog.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace {

void pause_ms(int ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

TEST(WatchdogDeathTest, NamesTheStateThatHangs) {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    EXPECT_EXIT(
        {
            Watchdog watchdog(0.2, "rank 2: ", "; remedy");
            watchdog.state("reading data", 11);
            watchdog.state("waiting for the device", 12);
            pause_ms(20000);
        },
        testing::ExitedWithCode(1),
        "^rank 2: no progress for 0.2 s in step 12 \\(waiting for the device\\); remedy\n$");
}

TEST(Watchdog, ProgressKeepsTheProcess) {
    Watchdog watchdog(0.5, "", "");
    pause_ms(700);  // nothing is watched before the first state
    for (int i = 0; i < 8; i++) {
        watchdog.state("a state", i);
        pause_ms(100);
    }
}

TEST(Watchdog, StoppedTimeDoesNotCount) {
    const pid_t child = fork();
    if (child == 0) {
        Watchdog watchdog(0.5, "", "");
        watchdog.state("a state", 1);
        pause_ms(100);
        raise(SIGSTOP);
        pause_ms(200);
        _exit(7);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
    ASSERT_TRUE(WIFSTOPPED(status));
    pause_ms(1000);
    kill(child, SIGCONT);
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

TEST(Watchdog, ZeroIsOff) {
    Watchdog watchdog(0, "", "");
    watchdog.state("a state", 1);
    pause_ms(50);
}

}  // namespace

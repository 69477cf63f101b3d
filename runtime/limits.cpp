#include "runtime/limits.h"

#include <omp.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <latch>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/error.h"

namespace {

constexpr size_t STACK = 8 << 20;

struct Work {
    const std::function<int()>& run;
    int result;
};

void* run(void* work) {
    static_cast<Work*>(work)->result = static_cast<Work*>(work)->run();
    return nullptr;
}

}  // namespace

void bound_threads() {
    const int most = std::max(64, 4 * omp_get_num_procs());
    if (omp_get_max_threads() > most) omp_set_num_threads(most);
}

void check_threads() {
    const int threads = omp_get_max_threads();
    std::latch all_started(1);
    std::vector<std::thread> others;
    std::string failure;
    try {
        while (int(others.size()) < threads - 1) others.emplace_back([&] { all_started.wait(); });
    } catch (const std::system_error& e) {
        failure = e.code().message();
    }
    all_started.count_down();
    for (std::thread& other : others) other.join();
    require(failure.empty(), "cannot start ", threads, " threads: ", failure,
            "; raise the limit on processes (ulimit -u), or set OMP_NUM_THREADS");
}

int with_enough_stack(const std::function<int()>& work) {
    rlimit limit{};
    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= STACK) return work();
    const rlimit raised{std::min<rlim_t>(STACK, limit.rlim_max), limit.rlim_max};
    setrlimit(RLIMIT_STACK, &raised);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_setattr_default_np(&attributes);  // of the threads that OpenMP starts
    if (raised.rlim_cur >= STACK) {
        pthread_attr_destroy(&attributes);
        return work();
    }
    Work in_thread{work, 1};
    pthread_t thread;
    const int error = pthread_create(&thread, &attributes, run, &in_thread);
    pthread_attr_destroy(&attributes);
    if (error) throw std::system_error(error, std::generic_category());
    pthread_join(thread, nullptr);
    return in_thread.result;
}

namespace {

// The number that follows a word in a small system file ("MemAvailable:" in /proc/meminfo), or the number that the
// whole file holds if the word is empty; -1 if there is none ("max").
int64_t system_number(const std::string& path, const std::string& word) {
    std::ifstream file(path);
    for (std::string token; file >> token;) {
        if (word.empty()) return token.find_first_not_of("0123456789") == std::string::npos ? std::stoll(token) : -1;
        int64_t number;
        if (token == word && file >> number) return number;
    }
    return -1;
}

}  // namespace

int64_t host_memory_available() {
    int64_t available = INT64_MAX;
    auto limit = [&](int64_t bytes) {
        if (bytes >= 0) available = std::min(available, bytes);
    };
    const int64_t free_kib = system_number("/proc/meminfo", "MemAvailable:");
    if (free_kib >= 0) limit(free_kib * 1024);
    const int64_t group_max = system_number("/sys/fs/cgroup/memory.max", "");
    const int64_t group_used = system_number("/sys/fs/cgroup/memory.current", "");
    // The group's page cache counts as used, although the system reclaims it on demand.
    const int64_t group_cache = std::max<int64_t>(system_number("/sys/fs/cgroup/memory.stat", "file"), 0);
    if (group_max >= 0 && group_used >= 0)
        limit(std::max<int64_t>(group_max - std::max<int64_t>(group_used - group_cache, 0), 0));
    rlimit address_space{};
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY)
        limit(int64_t(address_space.rlim_cur));
    return available;
}

void lower_thread_priority() {
    constexpr int LOWEST = 19;
    setpriority(PRIO_PROCESS, id_t(syscall(SYS_gettid)), LOWEST);  // a failure changes no result
    omp_set_num_threads(1);
}

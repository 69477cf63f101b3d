#include "runtime/limits.h"

#include <omp.h>
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <system_error>

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
    if (error) throw std::system_error(error, std::generic_category(), "cannot start a thread");
    pthread_join(thread, nullptr);
    return in_thread.result;
}

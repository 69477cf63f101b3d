// A library that is preloaded into a process to interrupt its file operations. It counts the calls of write, fsync and
// rename on files under one directory, or on one file, and fails at the n-th call:
//
//   CRASH_SHIM_MODE=kill     a write writes its first half; then SIGKILL ends the process
//   CRASH_SHIM_MODE=enospc   the call fails with "No space left on device"; a write writes its first half first
//   CRASH_SHIM_MODE=hang     the call does not return, as on a file system whose server has gone
//
//   CRASH_SHIM_MODE=eio      a read or stat fails with "Input/output error"; these are counted instead of the others
//
//   CRASH_SHIM_DIR   the directory or file, an absolute path without links, or with * at its end all paths that begin
//                    so; without it nothing is counted
//   CRASH_SHIM_AT    n, from 1; with 0, or an n that is never reached, the process runs as usual
//   CRASH_SHIM_FOR   how many calls fail from the n-th on; 1 if not set
//   CRASH_SHIM_THREADS   so many threads can run beside the first one; no limit if not set
//   CRASH_SHIM_MEMORY    a file: once it exists, the next malloc of 1 MiB or more fails, in whatever mode, but none of
//                        CUDA's, which would take that for a broken GPU
//
// Data that was written before the failure stays. The loss of the page cache in a power cut is not simulated.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static long calls;  // counted so far, by all threads

static int inside(const char* path) {
    const char* directory = getenv("CRASH_SHIM_DIR");
    const size_t n = directory ? strlen(directory) : 0;
    if (n == 0) return 0;
    if (directory[n - 1] == '*') return strncmp(path, directory, n - 1) == 0;
    return strncmp(path, directory, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

static int fd_inside(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof(path) - 1);
    if (n <= 0) return 0;
    path[n] = '\0';
    return inside(path);
}

static int path_inside(const char* path) {
    char resolved[PATH_MAX];
    return realpath(path, resolved) && inside(resolved);
}

static long number(const char* name, long otherwise) {
    const char* value = getenv(name);
    return value ? atol(value) : otherwise;
}

static int reads_fail(void) {
    const char* mode = getenv("CRASH_SHIM_MODE");
    return mode && strcmp(mode, "eio") == 0;
}

// Counts a call and returns whether it is the n-th, or one of those after it that fail too.
static int is_due(void) {
    const long at = number("CRASH_SHIM_AT", 0), call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    return at > 0 && call >= at && call - at < number("CRASH_SHIM_FOR", 1);
}

// Kills the process or hangs, or sets errno and returns -1 as the failing call does.
static int fail(void) {
    const char* mode = getenv("CRASH_SHIM_MODE");
    if (mode && strcmp(mode, "enospc") == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (!mode || strcmp(mode, "hang") != 0) kill(getpid(), SIGKILL);
    for (;;) pause();
}

ssize_t write(int fd, const void* data, size_t bytes) {
    static ssize_t (*real)(int, const void*, size_t);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "write");
    if (reads_fail() || !fd_inside(fd) || !is_due()) return real(fd, data, bytes);
    if (bytes > 1) (void)!real(fd, data, bytes / 2);
    return fail();
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "fsync");
    return !reads_fail() && fd_inside(fd) && is_due() ? fail() : real(fd);
}

int rename(const char* from, const char* to) {
    static int (*real)(const char*, const char*);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "rename");
    return !reads_fail() && path_inside(from) && is_due() ? fail() : real(from, to);
}

ssize_t read(int fd, void* data, size_t bytes) {
    static ssize_t (*real)(int, void*, size_t);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "read");
    if (!reads_fail() || !fd_inside(fd) || !is_due()) return real(fd, data, bytes);
    errno = EIO;
    return -1;
}

int stat(const char* path, struct stat* info) {
    static int (*real)(const char*, struct stat*);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "stat");
    if (!reads_fail() || !path_inside(path) || !is_due()) return real(path, info);
    errno = EIO;
    return -1;
}

ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
    static ssize_t (*real)(int, void*, size_t, off_t);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "pread");
    if (!reads_fail() || !fd_inside(fd) || !is_due()) return real(fd, data, bytes, offset);
    errno = EIO;
    return -1;
}

static long threads;  // that this process has started and that have not ended

struct thread {
    void* (*run)(void*);
    void* argument;
};

static void* run_counted(void* start) {
    const struct thread thread = *(struct thread*)start;
    free(start);
    void* const result = thread.run(thread.argument);
    __atomic_sub_fetch(&threads, 1, __ATOMIC_SEQ_CST);
    return result;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
    static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "pthread_create");
    const long most = number("CRASH_SHIM_THREADS", -1);
    struct thread* const start = malloc(sizeof *start);
    if (!start) return EAGAIN;
    *start = (struct thread){run, argument};
    const int full = __atomic_add_fetch(&threads, 1, __ATOMIC_SEQ_CST) > most && most >= 0;
    const int error = full ? EAGAIN : real(thread, attributes, run_counted, start);
    if (!error) return 0;
    __atomic_sub_fetch(&threads, 1, __ATOMIC_SEQ_CST);
    free(start);
    return error;
}

extern void* __libc_malloc(size_t bytes);  // glibc's own, because dlsym may allocate

static int is_of_cuda(const void* code) {
    Dl_info at;
    return dladdr(code, &at) && (strstr(at.dli_fname, "libcu") || strstr(at.dli_fname, "libnv"));
}

void* malloc(size_t bytes) {
    static int failed;
    const char* file = bytes >= 1 << 20 ? getenv("CRASH_SHIM_MEMORY") : NULL;
    if (!file || access(file, F_OK) != 0 || is_of_cuda(__builtin_return_address(0)) ||
        __atomic_exchange_n(&failed, 1, __ATOMIC_SEQ_CST))
        return __libc_malloc(bytes);
    errno = ENOMEM;
    return NULL;
}

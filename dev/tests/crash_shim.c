// A library that is preloaded into a process to interrupt its file operations. It counts the calls of write, fsync and
// rename on files under one directory and fails at the n-th call:
//
//   CRASH_SHIM_MODE=kill     a write writes its first half; then SIGKILL ends the process
//   CRASH_SHIM_MODE=enospc   the call fails with "No space left on device"; a write writes its first half first
//   CRASH_SHIM_MODE=hang     the call does not return, as on a file system whose server has gone
//
//   CRASH_SHIM_DIR   the directory, an absolute path without links; without it nothing is counted
//   CRASH_SHIM_AT    n, from 1; with 0, or an n that is never reached, the process runs as usual
//
// Data that was written before the failure stays. The loss of the page cache in a power cut is not simulated.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long calls;  // counted so far, by all threads

static int inside(const char* path) {
    const char* directory = getenv("CRASH_SHIM_DIR");
    const size_t n = directory ? strlen(directory) : 0;
    return n > 0 && strncmp(path, directory, n) == 0 && (path[n] == '/' || path[n] == '\0');
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

// Counts a call and returns whether it is the n-th.
static int is_due(void) {
    const char* at = getenv("CRASH_SHIM_AT");
    return __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) == (at ? atol(at) : 0);
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
    if (!fd_inside(fd) || !is_due()) return real(fd, data, bytes);
    if (bytes > 1) (void)!real(fd, data, bytes / 2);
    return fail();
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "fsync");
    return fd_inside(fd) && is_due() ? fail() : real(fd);
}

int rename(const char* from, const char* to) {
    static int (*real)(const char*, const char*);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "rename");
    return path_inside(from) && is_due() ? fail() : real(from, to);
}

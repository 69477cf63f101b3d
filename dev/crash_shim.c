// Preloaded into a process to break it in the middle of its file operations. It counts the calls of write, fsync and
// rename that touch files under one directory, and at the n-th of them
//
//   CRASH_SHIM_MODE=kill     a write writes its first half; then the process is gone, as by SIGKILL or a power cut
//   CRASH_SHIM_MODE=enospc   the call fails with "No space left on device"; a write has written its first half before
//
//   CRASH_SHIM_DIR   the directory, as realpath gives it; without it nothing is counted
//   CRASH_SHIM_AT    n, from 1; with 0, or an n that is never reached, the process runs as usual
//
// All on the machine's word: what the kernel was given by then stays, so lost caches are not simulated.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long calls;  // counted so far; savers write from one thread

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

// Whether this call is the n-th.
static int is_due(void) {
    const char* at = getenv("CRASH_SHIM_AT");
    return ++calls == (at ? atol(at) : 0);
}

// Kills the process, or returns -1 with errno set as the call's failure.
static int strike(void) {
    const char* mode = getenv("CRASH_SHIM_MODE");
    if (mode && strcmp(mode, "enospc") == 0) {
        errno = ENOSPC;
        return -1;
    }
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

ssize_t write(int fd, const void* data, size_t bytes) {
    static ssize_t (*real)(int, const void*, size_t);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "write");
    if (!fd_inside(fd) || !is_due()) return real(fd, data, bytes);
    if (bytes > 1) (void)!real(fd, data, bytes / 2);
    return strike();
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "fsync");
    return fd_inside(fd) && is_due() ? strike() : real(fd);
}

int rename(const char* from, const char* to) {
    static int (*real)(const char*, const char*);
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "rename");
    return path_inside(from) && is_due() ? strike() : real(from, to);
}

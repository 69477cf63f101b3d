#include "runtime/files/lock.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/files/files.h"

namespace {

std::string this_process() {
    char host[HOST_NAME_MAX + 1] = "";
    if (::gethostname(host, sizeof host - 1) != 0) std::strcpy(host, "an unknown host");
    return str("process ", ::getpid(), " on ", host);
}

std::string read_holder(int fd) {
    char text[512];
    const ssize_t n = ::pread(fd, text, sizeof text, 0);
    return n > 0 ? std::string(text, size_t(n)) : "another process";  // the holder has not written its name yet
}

// Whether path still names the open file: a previous holder may have removed it between open() and flock().
bool is_named(int fd, const std::string& path) {
    struct stat open_file, named;
    return ::fstat(fd, &open_file) == 0 && ::stat(path.c_str(), &named) == 0 && open_file.st_ino == named.st_ino &&
           open_file.st_dev == named.st_dev;
}

}  // namespace

DirectoryLock::DirectoryLock(const std::string& directory, const std::string& shown_as)
    : path(join_path(directory, ".lock")) {
    for (;;) {
        fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0) throw_system_error(path, "create", errno);
        if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
            const int error = errno;
            const std::string holder = read_holder(fd);
            if (error == EINTR || error == EWOULDBLOCK) ::close(std::exchange(fd, -1));
            if (error == EINTR) continue;
            require(error != EWOULDBLOCK, shown_as, " ", directory, " is in use by ", holder,
                    "; wait until it ends, or name another directory");
            return;  // no locks here
        }
        if (is_named(fd, path)) break;
        ::close(std::exchange(fd, -1));
    }
    holds_lock = true;
    const std::string holder = this_process();
    const bool written = ::ftruncate(fd, 0) == 0 && ::write(fd, holder.data(), holder.size()) == ssize_t(holder.size());
    const int error = errno;
    if (written) return;
    ::unlink(path.c_str());
    ::close(fd);
    throw_system_error(path, "write", error);
}

DirectoryLock::~DirectoryLock() {
    if (holds_lock) ::unlink(path.c_str());  // before the lock is released: afterwards it may be another's
    if (fd >= 0) ::close(fd);
}

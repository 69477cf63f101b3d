// A lock on a directory, so that two runs never write into it at once.
#pragma once

#include <string>

// Holds flock() on the file ".lock" in the directory, which names the holder. The system releases it when the process
// ends, however it ends. The destructor removes the file.
class DirectoryLock {
  public:
    // shown_as: the option that named the directory. Throws Error with the holder's process id and host if another
    // process holds the lock; it does not wait.
    explicit DirectoryLock(const std::string& directory, const std::string& shown_as);
    ~DirectoryLock();
    DirectoryLock(const DirectoryLock&) = delete;
    DirectoryLock& operator=(const DirectoryLock&) = delete;
    // False: the file system has no locks, so nothing keeps another run away.
    bool locked() const { return holds_lock; }

  private:
    std::string path;
    int fd = -1;
    bool holds_lock = false;
};

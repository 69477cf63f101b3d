// A file descriptor that is closed by the destructor.
#pragma once

#include <unistd.h>

#include <utility>

class Descriptor {
  public:
    explicit Descriptor(int number = -1) : fd(number) {}
    Descriptor(Descriptor&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd, other.fd);
        return *this;
    }
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
    operator int() const { return fd; }

  private:
    int fd;
};

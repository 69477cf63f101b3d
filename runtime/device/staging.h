// Staging buffers for the inputs of each step: a ring of buffers in pinned memory, so that copies to the device are
// asynchronous. A buffer is reused after the device has read it.
#pragma once

#include <vector>

#include "runtime/device/device.h"

class Staging {
  public:
    // buffer_bytes: the maximum of bytes put between two calls of next(). Throws Error if the allocation fails.
    Staging(int64_t buffer_bytes, int buffers);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    // Advances to the next buffer and waits until the device has read its previous contents.
    void next();
    // Copies host memory to the buffer and queues the copy to the device. The host memory may be reused at once.
    void put(void* device, const void* host, int64_t bytes, Stream stream);

  private:
    const int64_t buffer_bytes;
    HostMemory memory;
    std::vector<Event> read;  // by buffer: recorded after its last copy
    size_t buffer = 0;
    int64_t used = 0;
    Stream stream;  // the stream of the buffer's copies
};

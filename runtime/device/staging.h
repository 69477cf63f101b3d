// Staging buffers for the inputs of each step: a ring of slots in pinned memory, so that copies to the device are
// asynchronous. A slot is reused after the device has read it.
#pragma once

#include <vector>

#include "runtime/device/device.h"

class Staging {
  public:
    // slot_bytes: the maximum of bytes put between two calls of next(). Throws Error if the allocation fails.
    Staging(int64_t slot_bytes, int slots);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    // Advances to the next slot and waits until the device has read its previous contents.
    void next();
    // Copies host memory to the slot and queues the copy to the device. The host memory may be reused at once.
    void put(void* device, const void* host, int64_t bytes, Stream stream);

  private:
    const int64_t slot_bytes;
    HostMemory memory;
    std::vector<Event> read;  // by slot: recorded after its last copy
    size_t slot = 0;
    int64_t used = 0;
    Stream stream;  // the stream of the slot's copies
};

// What travels to the device in every step passes through here, so that the host need not wait: a ring of slots in
// pinned memory, each reused when the device has read it.
#pragma once

#include <vector>

#include "runtime/device/device.h"

class Staging {
  public:
    // slot_bytes: the most that is put between two calls of next(). Throws Error when the memory can't be had.
    Staging(int64_t slot_bytes, int slots);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    // Takes the next slot; waits until the device has read what was put there a round ago.
    void next();
    // Copies host to the slot and lets the stream copy it to the device. host may be reused at once.
    void put(void* device, const void* host, int64_t bytes, Stream stream);

  private:
    const int64_t slot_bytes;
    HostMemory memory;
    std::vector<Event> read;  // by slot: after its last copy
    size_t slot = 0;
    int64_t used = 0;
    Stream stream;  // of the slot's copies
};

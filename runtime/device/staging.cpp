#include "runtime/device/staging.h"

#include <cstring>

Staging::Staging(int64_t bytes, int buffers)
    : buffer_bytes(bytes), memory(host_alloc(size_t(bytes) * size_t(buffers)), host_free), read(size_t(buffers)) {}

// The device may still be reading: wait for it before the memory is freed.
Staging::~Staging() {
    try {
        if (used) synchronize(stream);
        for (const Event& event : read) event.wait();
    } catch (const Error&) {  // a destructor cannot report it
    }
}

void Staging::next() {
    if (used) read[buffer].record(stream);
    buffer = (buffer + 1) % read.size();
    used = 0;
    read[buffer].wait();
}

void Staging::put(void* device, const void* host, int64_t bytes, Stream to) {
    require(bytes <= buffer_bytes - used, "staging: a buffer of ", buffer_bytes, " bytes holds ", used,
            " and is given ", bytes, " more");
    if (bytes == 0) return;  // memcpy() takes no null, which a rank without a part of a tensor has
    char* const pinned = static_cast<char*>(memory.get()) + int64_t(buffer) * buffer_bytes + used;
    std::memcpy(pinned, host, size_t(bytes));
    copy_to_device(device, pinned, size_t(bytes), to);
    stream = to;
    used += bytes;
}

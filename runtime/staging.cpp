#include "runtime/staging.h"

#include <cstring>

Staging::Staging(int64_t bytes, int slots)
    : slot_bytes(bytes), memory(static_cast<char*>(host_alloc(size_t(bytes) * size_t(slots)))) {
    try {
        read = std::vector<Event>(size_t(slots));
    } catch (...) {
        host_free(memory);
        throw;
    }
}

// The device may still be reading.
Staging::~Staging() {
    for (const Event& event : read) {
        try {
            event.wait();
        } catch (const Error&) {  // a destructor has nobody to tell
        }
    }
    host_free(memory);
}

void Staging::next() {
    slot = (slot + 1) % read.size();
    used = 0;
    read[slot].wait();
}

void Staging::put(void* device, const void* host, int64_t bytes, Stream stream) {
    require(bytes <= slot_bytes - used, "staging: a slot of ", slot_bytes, " bytes holds ", used, " and is given ",
            bytes, " more");
    char* const place = memory + int64_t(slot) * slot_bytes + used;
    std::memcpy(place, host, size_t(bytes));
    copy_to_device(device, place, size_t(bytes), stream);
    read[slot].record(stream);
    used += bytes;
}

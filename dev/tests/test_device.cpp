// Host memory that the device copies to and from.
#include "runtime/device/device.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

namespace {

// Small blocks and large ones are allocated in different ways. Every byte can be written, and arrives through copies in
// both directions.
TEST(HostMemory, OfAnySizeCopiesToTheDeviceAndBack) {
    for (const size_t bytes :
         {size_t(1), size_t(4097), (size_t(64) << 20) - 1, size_t(64) << 20, (size_t(96) << 20) + 5}) {
        SCOPED_TRACE(bytes);
        const HostMemory from(host_alloc(bytes), host_free), to(host_alloc(bytes), host_free);
        ASSERT_TRUE(from && to);
        char* const source = static_cast<char*>(from.get());
        for (size_t i = 0; i < bytes; i++) source[i] = char(i * 31 + (i >> 12));
        std::memset(to.get(), 0, bytes);
        void* const device = device_alloc(bytes);
        copy_to_device(device, source, bytes, Stream{});
        copy_to_host_async(to.get(), device, bytes, Stream{});
        synchronize(Stream{});
        device_free(device);
        EXPECT_EQ(std::memcmp(source, to.get(), bytes), 0);
    }
    host_free(nullptr);
}

int64_t resident_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        int64_t kilobytes = 0;
        if (word == "VmRSS:" && status >> kilobytes) return kilobytes * 1024;
    }
    return -1;
}

TEST(HostMemory, IsGivenBack) {
    constexpr int64_t BYTES = int64_t(256) << 20;
    const int64_t before = resident_bytes();
    ASSERT_GT(before, 0);
    for (int turn = 0; turn < 8; turn++) {
        const HostMemory memory(host_alloc(size_t(BYTES)), host_free);
        std::memset(memory.get(), turn, size_t(BYTES));
        EXPECT_GE(resident_bytes(), BYTES);
    }
    EXPECT_LT(resident_bytes() - before, 3 * BYTES);  // an address sanitizer keeps freed blocks for a while
}

}  // namespace

// Counts the allocations of a function (dev/tests/alloc_shim.c).
#pragma once

#include <gtest/gtest.h>

#include <dlfcn.h>

#include <functional>
#include <string>

#include "dev/tests/preload.h"
#include "dev/tests/temp_dir.h"
#include "runtime/device/device.h"
#include "runtime/files/files.h"

// The number of allocations so far, on the host and on the device. A preloaded library counts them
// (dev/tests/alloc_shim.c). The constructor runs the test again in a child process with that library. `counting` is
// true only there.
struct Allocations {
    using Counter = long (*)();
    const Counter host = reinterpret_cast<Counter>(dlsym(RTLD_DEFAULT, "alloc_shim_host")),
                  device = reinterpret_cast<Counter>(dlsym(RTLD_DEFAULT, "alloc_shim_device"));
    using Name = const char* (*)();
    const Name last = reinterpret_cast<Name>(dlsym(RTLD_DEFAULT, "alloc_shim_last"));
    const bool counting = host;

    explicit Allocations(const std::string& test) {
        if (counting) return;
        if (std::getenv("ALLOC_SHIM_EXPECTED")) throw Error("alloc_shim.so was not preloaded");
        const TempDir dir;
        const int status =
            run_self({"--gtest_filter=" + test},
                     {{"LD_PRELOAD", preload_path("alloc_shim")}, {"ALLOC_SHIM_EXPECTED", "1"}}, dir.file("output"));
        EXPECT_TRUE(exited(status, 0)) << read_file(dir.file("output"));
    }
    void expect_none(const std::string& what, const std::function<void()>& f) const {
        const long host_before = host(), device_before = device();
        EXPECT_GT(host_before, 0);
        EXPECT_EQ(device_before > 0, backend_device() != Device::CPU);
        f();
        const long host_after = host();
        const char* const caller = last();
        EXPECT_EQ(host_after, host_before) << what << "; the last call came from " << caller;
        EXPECT_EQ(device(), device_before) << what;
    }
};

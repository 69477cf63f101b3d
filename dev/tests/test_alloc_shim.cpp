// dev/tests/alloc_shim.c: counts exactly the documented calls. This binary runs itself again with the library
// preloaded.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <thread>

#include "dev/tests/preload.h"
#include "dev/tests/temp_dir.h"
#include "runtime/device/blas_stream.h"
#include "runtime/device/device.h"
#include "runtime/files/files.h"

namespace {

using Counter = long (*)();

Counter counter(const char* name) {
    Counter function = nullptr;
    *reinterpret_cast<void**>(&function) = dlsym(RTLD_DEFAULT, name);
    return function;
}

// Keeps the compiler from removing an allocation.
template <typename T>
T* seen(T* pointer) {
    asm volatile("" : : "g"(pointer) : "memory");
    return pointer;
}

template <typename F>
long counted(const char* name, F f) {
    const Counter count = counter(name);
    const long before = count();
    f();
    return count() - before;
}

constexpr const char* INSIDE_VARIABLE = "TEST_ALLOC_SHIM_INSIDE";

// The tests of this suite run only in the process that the test at the end starts (see main).
class Inside : public testing::Test {
  protected:
    void SetUp() override { ASSERT_TRUE(counter("alloc_shim_host")) << "alloc_shim.so is not preloaded"; }
    template <typename F>
    static long host(F f) {
        return counted("alloc_shim_host", f);
    }
    template <typename F>
    static long device(F f) {
        return counted("alloc_shim_device", f);
    }
};

TEST_F(Inside, CountsEveryHostAllocation) {
    EXPECT_EQ(host([] {}), 0);
    EXPECT_EQ(host([] { free(seen(malloc(10))); }), 1);
    EXPECT_EQ(host([] { free(seen(calloc(3, 5))); }), 1);
    EXPECT_EQ(host([] { free(seen(realloc(seen(malloc(10)), 100000))); }), 2);
    EXPECT_EQ(host([] { free(seen(aligned_alloc(64, 128))); }), 1);
    EXPECT_EQ(host([] {
                  void* data = nullptr;
                  EXPECT_EQ(posix_memalign(&data, 64, 100), 0);
                  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
                  free(seen(data));
              }),
              1);
    EXPECT_EQ(host([] { delete seen(new int(3)); }), 1);
    EXPECT_EQ(host([] { std::string(1000, 'x'); }), 1);
    EXPECT_EQ(host([] {
                  void* data = nullptr;
                  EXPECT_EQ(posix_memalign(&data, 3, 100), EINVAL);
              }),
              0);
}

TEST_F(Inside, NamesTheLastCaller) {
    using Name = const char* (*)();
    const Name last = reinterpret_cast<Name>(dlsym(RTLD_DEFAULT, "alloc_shim_last"));
    ASSERT_TRUE(last);
    free(seen(malloc(10)));
    const char* const name = last();  // before anything else allocates
    EXPECT_STREQ(name, program_invocation_name);
}

TEST_F(Inside, CountsAllThreads) {
    const long total = host([] {
        std::thread threads[4];
        for (std::thread& thread : threads)
            thread = std::thread([] {
                for (int i = 0; i < 1000; i++) free(seen(malloc(10)));
            });
        for (std::thread& thread : threads) thread.join();
    });
    EXPECT_GE(total, 4000);
    EXPECT_LE(total, 4100);  // plus the allocations of starting a thread
}

TEST_F(Inside, CountsDeviceAllocations) {
    const bool cuda = backend_device() == Device::CUDA;
    device_free(device_alloc(100));  // the context
    void* data = nullptr;
    EXPECT_EQ(device([&] { data = device_alloc(1 << 20); }), cuda ? 1 : 0);
    EXPECT_EQ(device([&] {
                  device_fill(data, 1, 1 << 20, Stream{});
                  synchronize(Stream{});
                  device_free(data);
              }),
              0);
    // cuBLAS with its own runtime: its handle allocates device memory.
    Stream stream;
    const long handle = device([&] { stream = create_blas_stream(); });
    EXPECT_TRUE(cuda ? handle >= 1 : handle == 0) << handle;
    destroy_stream(stream);
}

}  // namespace

TEST(AllocShim, CountsInASeparateProcess) {
    if (const char* reason = why_no_preload()) GTEST_SKIP() << reason;
    const TempDir dir;
    const int status =
        run_self({}, {{"LD_PRELOAD", preload_path("alloc_shim")}, {INSIDE_VARIABLE, "1"}}, dir.file("output"));
    const std::string output = read_file(dir.file("output"));
    EXPECT_TRUE(exited(status, 0)) << output;
    EXPECT_NE(output.find("[  PASSED  ] 4 tests."), std::string::npos) << output;
}

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    if (std::getenv(INSIDE_VARIABLE))
        testing::GTEST_FLAG(filter) = "Inside.*";
    else
        testing::GTEST_FLAG(filter) +=
            testing::GTEST_FLAG(filter).find('-') == std::string::npos ? "-Inside.*" : ":Inside.*";
    return RUN_ALL_TESTS();
}

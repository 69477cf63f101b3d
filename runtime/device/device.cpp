#include "runtime/device/device.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "runtime/device/target.h"
#include "runtime/limits.h"

namespace {

std::atomic<int64_t> allocations;

}  // namespace

Device backend_device() {
    return Device::CPU;
}

const char* backend_name() {
    return "cpu";
}

std::string device_name() {
    return "";
}

std::string device_description() {
    const int threads = omp_get_max_threads();
    std::string text = str(threads, threads == 1 ? " thread" : " threads");
#if defined(__x86_64__)
    text += __builtin_cpu_supports("avx512f") ? ", AVX-512" : ", AVX2";
    if (__builtin_cpu_supports("amx-tile")) text += ", AMX";
#endif
    return text;
}

int64_t device_count() {
    return 1;
}

void use_device(int64_t) {}

int64_t device_in_use() {
    return 0;
}

Stream create_stream() {
    return {};
}

void destroy_stream(Stream) {}

int64_t device_memory_available() {
    return host_memory_available();
}

Target this_target() {
    return {};
}

int64_t device_overhead_bytes() {
    return this_target().overhead_bytes();
}

int64_t device_bytes_in_use() {
    return 0;
}

int64_t device_chunk_bytes() {
    return this_target().chunk_bytes();
}

int64_t device_allocations() {
    return allocations;
}

void* device_alloc(size_t bytes) {
    allocations++;
    // Arenas are read and written sequentially: huge pages avoid most page faults and TLB misses.
    constexpr size_t HUGE_PAGE = size_t(2) << 20;
    const size_t alignment = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : 64;
    // aligned_alloc needs a multiple of the alignment. 0 bytes also get a distinct address.
    const size_t rounded = bytes == 0 ? alignment : (bytes + alignment - 1) / alignment * alignment;
    void* data = rounded < bytes ? nullptr : std::aligned_alloc(alignment, rounded);
    if (!data)
        throw DeviceError(
            str("device_alloc: cannot allocate ", bytes, " bytes of memory; use a smaller model, batch or context"));
    if (alignment == HUGE_PAGE)
        madvise(data, rounded, MADV_HUGEPAGE);  // advice only: a failure has no effect on results
    return data;
}

void device_free(void* data) {
    std::free(data);
}

void* host_alloc(size_t bytes) {
    return device_alloc(bytes);
}

void host_free(void* data) {
    device_free(data);
}

void copy_to_device(void* device, const void* host, size_t bytes, Stream) {
    if (bytes) std::memcpy(device, host, bytes);
}

void copy_to_host(void* host, const void* device, size_t bytes, Stream) {
    constexpr size_t CHUNK = size_t(1) << 20;  // smaller copies are not worth waking threads
    const int64_t chunks = int64_t((bytes + CHUNK - 1) / CHUNK);
#pragma omp parallel for schedule(static) if (chunks > 1)
    for (int64_t i = 0; i < chunks; i++) {
        const size_t begin = size_t(i) * CHUNK;
        std::memcpy(static_cast<char*>(host) + begin, static_cast<const char*>(device) + begin,
                    std::min(CHUNK, bytes - begin));
    }
}

void copy_to_host_async(void* host, const void* device, size_t bytes, Stream stream) {
    copy_to_host(host, device, bytes, stream);
}

void device_copy(void* to, const void* from, size_t bytes, Stream) {
    if (bytes) std::memcpy(to, from, bytes);
}

void device_fill(void* device, int byte, size_t bytes, Stream) {
    if (bytes) std::memset(device, byte, bytes);
}

void synchronize(Stream) {}

Event::Event() = default;
Event::~Event() = default;

void Event::record(Stream) {
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool Event::reached() const {
    return true;
}

void Event::wait() const {}

void Event::make_wait(Stream) const {}

void Event::make_wait_in_graph(Stream) const {}

double elapsed_ms(const Event& from, const Event& to) {
    return (to.seconds - from.seconds) * 1e3;
}

Graph::~Graph() = default;

bool Graph::begin(Stream) {
    return false;
}

void Graph::end(Stream) {}
void Graph::abandon(Stream) {}
void Graph::launch(Stream) {}

bool graphs_replay() {
    return false;
}

void profiler_start() {}
void profiler_stop() {}

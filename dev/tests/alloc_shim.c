// A library that is preloaded into a process to count its allocations (dev/tests/preload.h), including those of
// libraries:
//
//   long alloc_shim_host(void)     calls of malloc, calloc, realloc, aligned_alloc, posix_memalign and memalign
//   (operator
//                                  new calls malloc). After its first call, those of the CUDA driver are left out,
//                                  because they depend on other processes
//   long alloc_shim_device(void)   calls that allocate device memory or page-locked host memory
//   const char* alloc_shim_last(void)   the library of the last call that alloc_shim_host counted
//
// A test finds these functions by dlsym(RTLD_DEFAULT, …) and calls them before and after the code that must not
// allocate. They count all threads of the process since its start.
//
// Calls of the shared CUDA runtime reach the definitions in this file. Libraries such as cuBLAS contain a static
// runtime, which gets the driver's functions from dlsym and cuGetProcAddress. So these two are interposed as well and
// return counting functions. A call of the runtime counts once, although it calls the driver. Memory that the driver
// allocates by itself (for code that is loaded late, for a larger stack) is visible in cudaMemGetInfo and not here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static atomic_long host_calls, device_calls;

static void count(atomic_long* calls) {
    atomic_fetch_add_explicit(calls, 1, memory_order_relaxed);
}

long alloc_shim_device(void) {
    return atomic_load(&device_calls);
}

// --- the host. Calls glibc's internal names, because dlsym would allocate and so call these functions again.

extern void* __libc_malloc(size_t bytes);
extern void* __libc_calloc(size_t number, size_t bytes);
extern void* __libc_realloc(void* data, size_t bytes);
extern void* __libc_memalign(size_t alignment, size_t bytes);

static void* volatile last_caller;
static volatile uintptr_t driver_begin, driver_bytes;  // the address range of libcuda

#define COUNT_HOST()                                                \
    do {                                                            \
        void* const caller = __builtin_return_address(0);           \
        if ((uintptr_t)caller - driver_begin < driver_bytes) break; \
        last_caller = caller;                                       \
        count(&host_calls);                                         \
    } while (0)

static int find_driver(struct dl_phdr_info* info, size_t size, void* unused) {
    (void)size;
    (void)unused;
    if (!strstr(info->dlpi_name, "/libcuda.so")) return 0;
    uintptr_t end = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)* const part = info->dlpi_phdr + i;
        if (part->p_type == PT_LOAD && part->p_vaddr + part->p_memsz > end) end = part->p_vaddr + part->p_memsz;
    }
    driver_begin = info->dlpi_addr;
    driver_bytes = end;
    return 1;
}

long alloc_shim_host(void) {
    if (!driver_bytes) dl_iterate_phdr(find_driver, NULL);
    return atomic_load(&host_calls);
}

const char* alloc_shim_last(void) {
    Dl_info from;
    return last_caller && dladdr(last_caller, &from) && from.dli_fname ? from.dli_fname : "unknown";
}

void* malloc(size_t bytes) {
    COUNT_HOST();
    return __libc_malloc(bytes);
}

void* calloc(size_t number, size_t bytes) {
    COUNT_HOST();
    return __libc_calloc(number, bytes);
}

void* realloc(void* data, size_t bytes) {
    COUNT_HOST();
    return __libc_realloc(data, bytes);
}

void* memalign(size_t alignment, size_t bytes) {
    COUNT_HOST();
    return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
    COUNT_HOST();
    return __libc_memalign(alignment, bytes);
}

int posix_memalign(void** data, size_t alignment, size_t bytes) {
    if (alignment % sizeof(void*) != 0 || alignment == 0 || (alignment & (alignment - 1)) != 0) return EINVAL;
    COUNT_HOST();
    void* const p = __libc_memalign(alignment, bytes);
    if (!p) return ENOMEM;
    *data = p;
    return 0;
}

// --- the device. cudaError_t and CUresult are ints and handles are pointers, so no CUDA header is needed.

enum { NOT_FOUND = 500 };  // cudaErrorSymbolNotFound, CUDA_ERROR_NOT_FOUND

static _Thread_local int inside;  // > 0 within a call that is already counted

static void* real_dlsym(void* handle, const char* name) {
    static void* (*volatile found)(void*, const char*);
    if (!found) {
        // Symbol versions: glibc 2.34 and later, older x86-64, older aarch64.
        const char* const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
        for (int i = 0; i < 3 && !found; i++) *(void* volatile*)&found = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    }
    return found ? found(handle, name) : NULL;
}

// A counting function and the real one: from dlsym or cuGetProcAddress, else from the next library.
#define COUNTED(name, parameters, arguments)                          \
    static void* volatile name##_real;                                \
    int name parameters {                                             \
        if (!name##_real) name##_real = real_dlsym(RTLD_NEXT, #name); \
        if (!name##_real) return NOT_FOUND;                           \
        if (!inside) count(&device_calls);                            \
        inside++;                                                     \
        const int status = ((int(*) parameters)name##_real)arguments; \
        inside--;                                                     \
        return status;                                                \
    }

COUNTED(cudaMalloc, (void** data, size_t bytes), (data, bytes))
COUNTED(cudaMallocAsync, (void** data, size_t bytes, void* stream), (data, bytes, stream))
COUNTED(cudaMallocManaged, (void** data, size_t bytes, unsigned flags), (data, bytes, flags))
COUNTED(cudaMallocHost, (void** data, size_t bytes), (data, bytes))
COUNTED(cudaHostAlloc, (void** data, size_t bytes, unsigned flags), (data, bytes, flags))

COUNTED(cuMemAlloc_v2, (uint64_t * data, size_t bytes), (data, bytes))
COUNTED(cuMemAllocAsync, (uint64_t * data, size_t bytes, void* stream), (data, bytes, stream))
COUNTED(cuMemAllocFromPoolAsync, (uint64_t * data, size_t bytes, void* pool, void* stream), (data, bytes, pool, stream))
COUNTED(cuMemAllocManaged, (uint64_t * data, size_t bytes, unsigned flags), (data, bytes, flags))
COUNTED(cuMemAllocHost_v2, (void** data, size_t bytes), (data, bytes))
COUNTED(cuMemHostAlloc, (void** data, size_t bytes, unsigned flags), (data, bytes, flags))
COUNTED(cuMemCreate, (uint64_t * handle, size_t bytes, const void* properties, uint64_t flags),
        (handle, bytes, properties, flags))

// The driver's functions by the names passed to dlsym and cuGetProcAddress.
#define DRIVER(name, symbol) \
    { name, #symbol, (void*)symbol, &symbol##_real }
static const struct {
    const char *name, *symbol;
    void* counted;
    void* volatile* real;
} driver[] = {
    DRIVER("cuMemAlloc", cuMemAlloc_v2),
    DRIVER("cuMemAllocAsync", cuMemAllocAsync),
    DRIVER("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync),
    DRIVER("cuMemAllocManaged", cuMemAllocManaged),
    DRIVER("cuMemAllocHost", cuMemAllocHost_v2),
    DRIVER("cuMemHostAlloc", cuMemHostAlloc),
    DRIVER("cuMemCreate", cuMemCreate),
};

// The counting function for a driver function of this name. Other functions are returned unchanged.
static void* counted(const char* name, void* found) {
    for (size_t i = 0; found && i < sizeof(driver) / sizeof(driver[0]); i++) {
        if (strcmp(name, driver[i].name) != 0 && strcmp(name, driver[i].symbol) != 0) continue;
        if (found != driver[i].counted) *driver[i].real = found;
        return driver[i].counted;
    }
    return found;
}

static void* volatile get_address_real;  // cuGetProcAddress_v2, since CUDA 12

static int get_address(const char* name, void** function, int version, uint64_t flags, void* result);

// Within this library RTLD_NEXT is the library after this one, whichever library called. That is wrong only for other
// interposers.
void* dlsym(void* handle, const char* name) {
    void* const found = real_dlsym(handle, name);
    if (!found || strncmp(name, "cu", 2) != 0) return found;
    if (strcmp(name, "cuGetProcAddress_v2") == 0) {
        get_address_real = found;
        return (void*)get_address;
    }
    return counted(name, found);
}

static int get_address(const char* name, void** function, int version, uint64_t flags, void* result) {
    const int status =
        ((int (*)(const char*, void**, int, uint64_t, void*))get_address_real)(name, function, version, flags, result);
    if (status != 0 || !function || !*function) return status;
    // The runtime also looks up cuGetProcAddress itself.
    if (strcmp(name, "cuGetProcAddress") == 0 && version >= 12000) {
        get_address_real = *function;
        *function = (void*)get_address;
    } else if (strcmp(name, "cuGetProcAddress_v2") == 0) {
        get_address_real = *function;
        *function = (void*)get_address;
    } else {
        *function = counted(name, *function);
    }
    return status;
}

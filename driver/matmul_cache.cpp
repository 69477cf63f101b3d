#include "driver/matmul_cache.h"

#include <cstdlib>

#include "kernels/matmul.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

// The XDG base directory specification: a relative XDG_CACHE_HOME is ignored.
std::string matmul_cache_path() {
    if (backend_device() == Device::CPU) return "";
    const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
    std::string folder;
    if (cache && cache[0] == '/')
        folder = cache;
    else if (home && home[0])
        folder = std::string(home) + "/.cache";
    else
        return "";
    std::string name = device_name() + " " + matmul_library();
    for (char& c : name)
        if (c == ' ' || c == '/') c = '-';
    return folder + "/train_gpt/gemm/" + name + ".txt";
}

void load_matmul_cache(Stream stream) {
    const std::string path = matmul_cache_path();
    try {
        if (!path.empty() && path_exists(path)) matmul_use_choices(read_file(path, int64_t(1) << 24), stream);
    } catch (const Error&) {
    }
}

void store_matmul_cache(Stream stream) {
    const std::string path = matmul_cache_path();
    if (path.empty()) return;
    const std::string used = matmul_choices(stream, true);
    load_matmul_cache(stream);  // what other runs have written since
    matmul_use_choices(used, stream, true);
    try {
        make_directories(path.substr(0, path.find_last_of('/')));
        write_file(path, matmul_choices(stream));
    } catch (const Error&) {
    }
}

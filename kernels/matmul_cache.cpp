#include "kernels/matmul.h"
#include "runtime/error.h"
#include "runtime/files/files.h"

void load_matmul_cache(Stream stream) {
    const std::string path = matmul_cache_path(stream);
    try {
        if (!path.empty() && path_exists(path)) matmul_use_choices(read_file(path), stream);
    } catch (const Error&) {
    }
}

void store_matmul_cache(Stream stream) {
    const std::string path = matmul_cache_path(stream);
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

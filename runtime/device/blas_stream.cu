#include "runtime/device/blas_stream.h"

#include <memory>

#include "runtime/device/blas.h"

Stream create_blas_stream() {
    auto blas = std::make_unique<Blas>();
    Stream stream = create_stream();
    stream.library = blas.release();
    return stream;
}

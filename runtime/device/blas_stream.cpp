#include "runtime/device/blas_stream.h"

Stream create_blas_stream() {
    return create_stream();
}

#include "runtime/peaks.h"
double dense_peak_flops(const std::string&, DType) {
    return 0;
}

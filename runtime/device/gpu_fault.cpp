#include "runtime/device/gpu_fault.h"

#include <iterator>

#include "runtime/error.h"

namespace {

struct Fault {
    int error;
    const char* meaning;
};

// cudaError_t of driver_types.h; cuda_check.h compares the numbers.
constexpr Fault FAULTS[] = {
    {214, "uncorrectable ECC error in its memory"},            // cudaErrorECCUncorrectable
    {220, "uncorrectable error of an NVLink"},                 // cudaErrorNvlinkUncorrectable
    {226, "memory error that was contained to this process"},  // cudaErrorContained
    {714, "hardware error in a kernel's stack"},               // cudaErrorHardwareStackError
    {802, "its system is not ready (NVLink fabric manager)"},  // cudaErrorSystemNotReady
    {911, "error of an external device"},                      // cudaErrorExternalDevice
    {999, "the driver lost it, or reports an unknown error"},  // cudaErrorUnknown
};

std::string& noted_gpu() {
    static std::string& name = *new std::string("the GPU");  // never destroyed: errors may come at exit
    return name;
}

}  // namespace

void note_gpu(const std::string& name) {
    noted_gpu() = name;
}

std::string gpu_fault(int error) {
    for (const Fault& fault : FAULTS)
        if (fault.error == error)
            return str(noted_gpu(), ": ", fault.meaning,
                       "; look for Xid lines in dmesg, reset or replace it, or leave it out with CUDA_VISIBLE_DEVICES; "
                       "--resume continues a run");
    return "";
}

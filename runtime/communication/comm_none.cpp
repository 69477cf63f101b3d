// Comm's transport in a build without NCCL or MPI: there is none, and a world of one needs none.
#include "runtime/communication/comm.h"
#include "runtime/communication/transport.h"

std::string comm_library() {
    return "none";
}

std::unique_ptr<Transport> connect(const World& world) {
    throw Error(
        str(world.launcher, " started ", world.size, " ranks, but this build has no library to connect them; ",
            backend_device() == Device::CPU
                ? "install Open MPI (libopenmpi-dev, openmpi-bin) and build again"
                : "install NCCL, or set NCCL_HOME to it, and build again (`make cuda-info` shows what is found)"));
}

#include "runtime/communication/comm.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>

#include "runtime/communication/transport.h"

Comm::Comm(const World& world) : own_rank(world.rank), world_size(world.size), exceptions(std::uncaught_exceptions()) {
    require(0 <= world.rank && world.rank < world.size, "Comm: rank ", world.rank, " is outside a world of ",
            world.size);
    if (world.size > 1) transport = connect(world);
}

Comm::~Comm() {
    if (!transport || std::uncaught_exceptions() > exceptions) return;
    try {
        transport->finish();
    } catch (const Error&) {  // a destructor cannot report an error; the work itself is done
    }
}

void Comm::abort() {
    if (transport) transport->abort();
}

// The beginning of an error message: "rank 1: all_reduce"; without the rank in a world of one.
std::string Comm::named(const char* op) const {
    return transport ? str("rank ", own_rank, ": ", op) : op;
}

// These checks run in every step, so they format text only on failure.
void Comm::check_tensor(const char* op, const char* argument, const Tensor& t, bool sums) const {
    const auto fail = [&](const auto&... what) { throw Error(str(named(op), ": ", argument, " ", what...)); };
    if (!t && t.numel() != 0) fail("is not given");
    if (t.device != backend_device()) fail("is not in the memory of the ", backend_name(), " backend");
    if (!t.contiguous()) fail(shape_string(t), " is not contiguous");
    if (sums && (t.dtype == DType::U8 || t.dtype == DType::U16))
        fail("holds ", dtype_name(t.dtype), ", which is not summed");
}

// A rank's part must have the dtype of the whole and 1/size of its elements. It may overlap the whole only at this
// rank's own offset.
void Comm::check_part(const char* op, const char* part_name, const Tensor& part, const char* whole_name,
                      const Tensor& whole) const {
    const auto fail = [&](const auto&... what) { throw Error(str(named(op), ": ", part_name, " ", what...)); };
    if (part.dtype != whole.dtype || part.numel() * world_size != whole.numel())
        fail(shape_string(part), " of ", dtype_name(part.dtype), " is not 1/", world_size, " of ", whole_name, " ",
             shape_string(whole), " of ", dtype_name(whole.dtype));
    const char* const begin = static_cast<const char*>(whole.data);
    const char* const own = static_cast<const char*>(part.data);
    const bool apart = own + part.bytes() <= begin || begin + whole.bytes() <= own;
    if (!apart && own != begin + own_rank * part.bytes())
        fail("overlaps ", whole_name, " elsewhere than at rank ", own_rank, "'s part");
}

// One block for each rank, which together are the tensor.
void Comm::check_blocks(const char* op, const char* argument, const Tensor& t,
                        const std::vector<int64_t>& blocks) const {
    const bool valid = std::all_of(blocks.begin(), blocks.end(), [](int64_t n) { return n >= 0; });
    const int64_t sum = std::accumulate(blocks.begin(), blocks.end(), int64_t(0));
    if (int64_t(blocks.size()) == world_size && valid && sum == t.numel()) return;
    throw Error(str(named(op), ": ", argument, " ", shape_string(t), " is not made of the ", blocks.size(),
                    " given blocks, ", sum, " elements for ", world_size, " ranks"));
}

void Comm::check_root(const char* op, int64_t root) const {
    require(0 <= root && root < world_size, named(op), ": root ", root, " is outside a world of ", world_size);
}

namespace {

// The collective in a world of one.
void copy_part(const Tensor& out, const Tensor& inp, Stream stream) {
    if (out.data != inp.data) device_copy(out.data, inp.data, size_t(inp.bytes()), stream);
}

}  // namespace

void Comm::all_reduce(Tensor x, Stream stream) {
    check_tensor("all_reduce", "x", x, true);
    if (transport && x.numel() > 0) transport->all_reduce(x.data, x.numel(), x.dtype, stream);
}

void Comm::reduce_scatter(Tensor out, Tensor inp, Stream stream) {
    check_tensor("reduce_scatter", "out", out, true);
    check_tensor("reduce_scatter", "inp", inp, true);
    check_part("reduce_scatter", "out", out, "inp", inp);
    if (!transport) return copy_part(out, inp, stream);
    if (out.numel() > 0) transport->reduce_scatter(out.data, inp.data, out.numel(), out.dtype, stream);
}

void Comm::all_gather(Tensor out, Tensor inp, Stream stream) {
    check_tensor("all_gather", "out", out, false);
    check_tensor("all_gather", "inp", inp, false);
    check_part("all_gather", "inp", inp, "out", out);
    if (!transport) return copy_part(out, inp, stream);
    if (inp.numel() > 0) transport->all_gather(out.data, inp.data, inp.numel(), inp.dtype, stream);
}

void Comm::all_to_all(Tensor out, Tensor inp, const std::vector<int64_t>& receive, const std::vector<int64_t>& send,
                      Stream stream) {
    const char* op = "all_to_all";
    check_tensor(op, "out", out, false);
    check_tensor(op, "inp", inp, false);
    check_blocks(op, "out", out, receive);
    check_blocks(op, "inp", inp, send);
    const size_t own = size_t(own_rank);
    if (out.dtype != inp.dtype || receive[own] != send[own])
        throw Error(str(named(op), ": inp sends itself ", send[own], " ", dtype_name(inp.dtype), ", but out receives ",
                        receive[own], " ", dtype_name(out.dtype)));
    const char *const to = static_cast<const char*>(out.data), *const from = static_cast<const char*>(inp.data);
    const bool apart = to + out.bytes() <= from || from + inp.bytes() <= to;
    if (!apart) throw Error(str(named(op), ": out overlaps inp"));
    if (!transport) return copy_part(out, inp, stream);
    if (out.numel() + inp.numel() > 0)
        transport->all_to_all(out.data, inp.data, receive.data(), send.data(), inp.dtype, stream);
}

void Comm::broadcast(Tensor x, int64_t root, Stream stream) {
    check_tensor("broadcast", "x", x, false);
    check_root("broadcast", root);
    if (transport && x.numel() > 0) transport->broadcast(x.data, x.numel(), x.dtype, root, stream);
}

void Comm::group_start() {
    if (transport) transport->group_start();
}

void Comm::group_end() {
    if (transport) transport->group_end();
}

void Comm::barrier() {
    if (transport) transport->barrier();
}

void Comm::broadcast_host(void* bytes, size_t n, int64_t root) {
    check_root("broadcast_host", root);
    if (transport) transport->broadcast_host(bytes, n, root);
}

void Comm::all_gather_host(void* all, const void* own, size_t n) {
    if (transport)
        transport->all_gather_host(all, own, n);
    else
        std::memcpy(all, own, n);
}

void Comm::broadcast_host(std::string& text, int64_t root) {
    uint64_t length = text.size();
    broadcast_host(length, root);
    text.resize(length);
    broadcast_host(text.data(), length, root);
}

void Comm::check() {
    if (transport) transport->check();
}

void Comm::watch(const std::string& what, Stream stream) {
    if (transport) transport->watch(what, stream);
}

#include "runtime/device/arena.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

Arena::Arena(int64_t bytes, const char* what, MemoryPlace where) : size(bytes), place(where) {
    if (bytes == 0) return;
    const bool host = place == MemoryPlace::Host;
    try {
        base = static_cast<char*>((host ? host_alloc : device_alloc)(static_cast<size_t>(bytes)));
    } catch (const Error& e) {
        throw Error(str("no memory for the ", what, " (", bytes / double(1 << 30), " GiB): ", e.what(),
                        host ? "; leave out --offload, or some of it"
                             : "; lower --batch-size or --seq-len, or use --recompute block"));
    }
}

Arena::Arena(const Tensor& part) : base(static_cast<char*>(part.data)), size(part.bytes()), borrowed(true) {}

Arena::~Arena() {
    if (base && !borrowed) (place == MemoryPlace::Host ? host_free : device_free)(base);
}

Arena::Arena(Arena&& other) noexcept
    : base(std::exchange(other.base, nullptr)),
      size(std::exchange(other.size, 0)),
      place(other.place),
      borrowed(other.borrowed) {}

Arena& Arena::operator=(Arena&& other) noexcept {
    std::swap(base, other.base);
    std::swap(size, other.size);
    std::swap(place, other.place);
    std::swap(borrowed, other.borrowed);
    return *this;
}

Tensor Arena::at(int64_t offset, DType dtype, const int64_t* shape, size_t rank) const {
    Tensor t = make_tensor(nullptr, dtype, backend_device(), shape, static_cast<int>(rank));
    require(offset >= 0 && offset <= size && t.bytes() <= size - offset, "arena of ", size, " bytes asked for ",
            t.bytes(), " bytes at ", offset);
    t.data = base + offset;
    return t;
}

int64_t ArenaPlan::add(const std::string& name, DType dtype, const std::vector<int64_t>& shape, int64_t first,
                       int64_t last) {
    int64_t bytes = dtype_size(dtype);
    bool fits = first <= last;
    for (const int64_t n : shape) fits = fits && n >= 0 && !__builtin_mul_overflow(bytes, n, &bytes);
    fits = fits && !__builtin_add_overflow(bytes, ALIGNMENT - 1, &bytes);
    require(fits, "memory plan: the size of ", name, " overflows 64 bits; lower --batch-size or --seq-len");
    list.push_back({name, dtype, shape, first, last, bytes / ALIGNMENT * ALIGNMENT, 0});
    return static_cast<int64_t>(list.size()) - 1;
}

void ArenaPlan::assign_offsets(bool overlap) {
    std::vector<size_t> order(list.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return list[a].bytes > list[b].bytes; });

    std::vector<const Entry*> placed;  // ascending offset
    total = 0;
    for (const size_t i : order) {
        Entry& e = list[i];
        e.offset = 0;
        for (const Entry* p : placed) {
            const bool meet = !overlap || (p->first <= e.last && e.first <= p->last);
            if (!meet) continue;
            if (p->offset >= e.offset + e.bytes) break;  // fits into the gap before p
            e.offset = std::max(e.offset, p->offset + p->bytes);
        }
        placed.insert(std::upper_bound(placed.begin(), placed.end(), &e,
                                       [](const Entry* a, const Entry* b) { return a->offset < b->offset; }),
                      &e);
        require(e.bytes <= INT64_MAX - e.offset, "memory plan: more than 2^63 bytes; lower --batch-size or --seq-len");
        total = std::max(total, e.offset + e.bytes);
    }
}

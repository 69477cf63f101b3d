#include "runtime/files/read_params.h"

#include <algorithm>
#include <exception>

#include "runtime/device/convert.h"
#include "runtime/files/crc32c.h"

namespace {

constexpr int64_t CHUNK = 1 << 17;  // elements: with its conversion 1 MiB at most, so it stays in a second-level cache
constexpr int64_t BLOCK = 1 << 24;  // elements of a copy to a device: 64 MiB

// Calls body(begin, end) on all cores for the chunks of [begin, end). Rethrows the first exception.
template <typename Body>
void for_chunks(int64_t begin, int64_t end, int64_t chunk, const Body& body) {
    std::exception_ptr error;
    const int64_t chunks = (end - begin + chunk - 1) / chunk;
#pragma omp parallel for schedule(dynamic) if (chunks > 1)
    for (int64_t i = 0; i < chunks; i++) {
        try {
            const int64_t b = begin + i * chunk;
            body(b, std::min(b + chunk, end));
        } catch (...) {
#pragma omp critical(read_params_error)
            if (!error) error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
}

// Elements [begin, end) of a tensor in the file's order, as fp32: a pointer to dst. raw: a buffer of this thread.
const float* read_chunk(const StoredPart& part, int64_t begin, int64_t end, float* dst, std::vector<char>& raw,
                        RangeChecksum* checksum) {
    const SafetensorsEntry& entry = *part.entry;
    const int64_t size = dtype_size(entry.dtype), n = end - begin;
    char* bytes = reinterpret_cast<char*>(dst);
    if (entry.dtype != DType::F32) {
        raw.resize(size_t(n * size));
        bytes = raw.data();
    }
    part.file->read(entry, begin, n, bytes);
    if (checksum) {
        const int64_t first = std::max(begin, checksum->begin), last = std::min(end, checksum->end);
        if (first < last) {
            const uint32_t crc = crc32c_shift(crc32c(bytes + (first - begin) * size, (last - first) * size),
                                              (entry.numel() - last) * size);
#pragma omp atomic
            checksum->value ^= crc;
        }
    }
    if (entry.dtype != DType::F32) convert_to_float(dst, bytes, entry.dtype, n);
    return dst;
}

}  // namespace

ParamReader::ParamReader(Takers who) : takers(who) {
    for (int i = 0; i < 2 && takers == Takers::Caller; i++)
        blocks.emplace_back(host_alloc(size_t(BLOCK) * sizeof(float)), host_free);
}

ParamReader::~ParamReader() {
    if (takers == Takers::AllThreads) return;
    try {
        for (const Event& event : copied) event.wait();
    } catch (const DeviceError&) {  // a destructor cannot report it
    }
}

ParamReader::Takers ParamReader::takers_of(const WeightArenas& arenas) {
    return arenas.weights.data.device == Device::CPU ? Takers::AllThreads : Takers::Caller;
}

void ParamReader::read(const StoredPart& part, int64_t begin, int64_t count, const TakeValues& take,
                       RangeChecksum* checksum) {
    const int64_t first = std::max(begin, part.begin) - part.begin,
                  last = std::min(begin + count, part.begin + part.numel()) - part.begin;
    if (part.transposed)
        read_transposed(part, first, last, take, checksum);
    else if (first < last)
        read_straight(part, first, last, take, checksum);
}

// begin, end: elements of the part.
void ParamReader::read_straight(const StoredPart& part, int64_t begin, int64_t end, const TakeValues& take,
                                RangeChecksum* checksum) {
    if (takers == Takers::AllThreads) {
        for_chunks(begin, end, CHUNK, [&](int64_t b, int64_t e) {
            thread_local std::vector<float> values(CHUNK);
            thread_local std::vector<char> raw;
            take(part.begin + b, e - b, read_chunk(part, b, e, values.data(), raw, checksum));
        });
        return;
    }
    for (; begin < end; begin += BLOCK) {
        const int64_t block_end = std::min(begin + BLOCK, end);
        copied[next].wait();
        float* const block = static_cast<float*>(blocks[next].get());
        for_chunks(begin, block_end, CHUNK, [&](int64_t b, int64_t e) {
            thread_local std::vector<char> raw;
            read_chunk(part, b, e, block + (b - begin), raw, checksum);
        });
        take(part.begin + begin, block_end - begin, block);
        copied[next].record(Stream{});
        next ^= 1;
    }
}

// Columns of the matrix are rows of the file. A block of columns is transposed in the cache.
void ParamReader::read_transposed(const StoredPart& part, int64_t begin, int64_t end, const TakeValues& take,
                                  RangeChecksum* checksum) {
    const int64_t R = part.rows, C = part.cols, columns = std::max<int64_t>(1, CHUNK / R);
    const bool wanted = begin < end;
    if (wanted) whole.resize(size_t(part.numel()));
    for_chunks(0, C, columns, [&](int64_t c0, int64_t c1) {
        const bool checked = checksum && c0 * R < checksum->end && c1 * R > checksum->begin;
        if (!wanted && !checked) return;
        thread_local std::vector<float> block;
        thread_local std::vector<char> raw;
        block.resize(size_t((c1 - c0) * R));
        read_chunk(part, c0 * R, c1 * R, block.data(), raw, checksum);
        if (!wanted) return;
        constexpr int64_t TILE = 16;  // a cache line of the block; as many rows of the matrix are written side by side
        for (int64_t r0 = 0; r0 < R; r0 += TILE)
            for (int64_t c = c0; c < c1; c++)
                for (int64_t r = r0; r < std::min(r0 + TILE, R); r++)
                    whole[size_t(r * C + c)] = block[size_t((c - c0) * R + r)];
    });
    if (!wanted) return;
    if (takers == Takers::Caller) return take(part.begin + begin, end - begin, whole.data() + begin);
    for_chunks(begin, end, CHUNK, [&](int64_t b, int64_t e) { take(part.begin + b, e - b, whole.data() + b); });
}

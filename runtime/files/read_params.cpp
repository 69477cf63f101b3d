#include "runtime/files/read_params.h"

#include <algorithm>
#include <exception>

#include "runtime/device/convert.h"
#include "runtime/files/crc32c.h"

namespace {

constexpr int64_t CHUNK = 1 << 17;  // elements: with its conversion 1 MiB at most, so it stays in a second-level cache
constexpr int64_t BLOCK = 1 << 24;  // elements of a copy to a device: 64 MiB

// Calls body(begin, end) on all cores for the chunks of [begin, end), which begin and end at multiples of `chunk`.
// Rethrows the first exception.
template <typename Body>
void for_chunks(int64_t begin, int64_t end, int64_t chunk, const Body& body) {
    if (begin >= end) return;
    std::exception_ptr error;
    const int64_t first = begin / chunk, last = (end + chunk - 1) / chunk;
#pragma omp parallel for schedule(dynamic) if (last - first > 1)
    for (int64_t i = first; i < last; i++) {
        try {
            body(std::max(i * chunk, begin), std::min((i + 1) * chunk, end));
        } catch (...) {
#pragma omp critical(read_params_error)
            if (!error) error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
}

// Elements [begin, end) of a tensor in the file's order, as fp32.
void read_chunk(const StoredPart& part, int64_t begin, int64_t end, float* dst, RangeChecksum* checksum) {
    thread_local std::vector<char> raw;
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
}

// Elements [begin, end) of a matrix [R, C] from its transpose.
void transpose(float* dst, const float* from, int64_t R, int64_t C, int64_t begin, int64_t end) {
    constexpr int64_t TILE = 16;  // a cache line of `from`; as many rows of dst are written side by side
    for (int64_t i = begin; i < end;) {
        const int64_t r = i / C, c = i - r * C, whole_rows = c ? 0 : std::min(TILE, (end - i) / C);
        const int64_t rows = std::max<int64_t>(1, whole_rows), cols = std::min(C - c, end - i);
        for (int64_t k = 0; k < cols; k++)
            for (int64_t j = 0; j < rows; j++) dst[i - begin + j * C + k] = from[(c + k) * R + r + j];
        i += whole_rows ? whole_rows * C : cols;
    }
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
                       RangeChecksum* checksum, const FindValues& find) {
    const int64_t first = std::max(begin, part.begin) - part.begin,
                  last = std::min(begin + count, part.begin + part.numel()) - part.begin;
    if (part.transposed) return read_transposed(part, first, last, take, checksum, find);
    deliver(
        part, first, last, CHUNK, [&](float* dst, int64_t b, int64_t e) { read_chunk(part, b, e, dst, checksum); },
        take, find);
}

template <typename Fill>
void ParamReader::deliver(const StoredPart& part, int64_t begin, int64_t end, int64_t chunk, const Fill& fill,
                          const TakeValues& take, const FindValues& find) {
    if (takers == Takers::AllThreads) {
        for_chunks(begin, end, chunk, [&](int64_t b, int64_t e) {
            thread_local std::vector<float> values;
            float* dst = find ? find(part.begin + b, e - b) : nullptr;
            if (!dst) {
                values.resize(size_t(e - b));
                dst = values.data();
            }
            fill(dst, b, e);
            take(part.begin + b, e - b, dst);
        });
        return;
    }
    for (; begin < end; begin += BLOCK) {
        const int64_t block_end = std::min(begin + BLOCK, end);
        copied[next].wait();
        float* const block = static_cast<float*>(blocks[next].get());
        for_chunks(begin, block_end, chunk, [&](int64_t b, int64_t e) { fill(block + (b - begin), b, e); });
        take(part.begin + begin, block_end - begin, block);
        copied[next].record(Stream{});
        next ^= 1;
    }
}

// Columns of the matrix are rows of the file, so the whole tensor is read first.
void ParamReader::read_transposed(const StoredPart& part, int64_t begin, int64_t end, const TakeValues& take,
                                  RangeChecksum* checksum, const FindValues& find) {
    const int64_t R = part.rows, C = part.cols;
    const bool wanted = begin < end;
    if (wanted) whole.resize(size_t(part.numel()));
    for_chunks(0, R * C, CHUNK, [&](int64_t b, int64_t e) {
        if (wanted) return read_chunk(part, b, e, whole.data() + b, checksum);
        thread_local std::vector<float> unused(CHUNK);
        if (checksum && b < checksum->end && e > checksum->begin) read_chunk(part, b, e, unused.data(), checksum);
    });
    const int64_t rows = std::max<int64_t>(1, CHUNK / C);
    deliver(
        part, begin, end, rows * C, [&](float* dst, int64_t b, int64_t e) { transpose(dst, whole.data(), R, C, b, e); },
        take, find);
}

#include "runtime/files/read_params.h"

#include <algorithm>
#include <exception>

#include "runtime/device/convert_dtype.h"
#include "runtime/files/crc32c.h"
#include "runtime/files/transpose.h"

namespace {

constexpr int64_t CHUNK = 1 << 17;  // elements: with its conversion 1 MiB at most, so it stays in a second-level cache
constexpr int64_t BLOCK = 1 << 24;  // elements of a copy to a device: 64 MiB, and 32 MiB in 16 bits

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

// Elements [begin, end) of a tensor in a GGUF file.
void read_gguf(const StoredPart& part, int64_t begin, int64_t end, float* dst) {
    const int64_t C = part.cols;
    if (!part.interleaved_head_size) return part.gguf->read(part.gguf_name, begin, end - begin, dst);
    for (int64_t n; begin < end; begin += n, dst += n) {
        const int64_t row = begin / C;
        n = std::min(end, (row + 1) * C) - begin;
        part.gguf->read(part.gguf_name, part.file_row(row) * C + begin % C, n, dst);
    }
}

// Elements [begin, end) of a tensor in the file's order, as fp32.
void read_chunk(const StoredPart& part, int64_t begin, int64_t end, float* dst, RangeChecksum* checksum) {
    if (part.gguf) return read_gguf(part, begin, end, dst);
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

}  // namespace

int64_t StoredPart::file_row(int64_t row) const {
    const int64_t HS = interleaved_head_size, r = HS ? row % HS : 0;
    return HS ? row - r + r % (HS / 2) * 2 + r / (HS / 2) : row;
}

DType StoredPart::dtype() const {
    if (!gguf) return entry->dtype;
    const GgufType type = gguf->tensor(gguf_name).type->type();
    return type == GgufType::F16 ? DType::F16 : type == GgufType::BF16 ? DType::BF16 : DType::F32;
}

std::vector<int64_t> StoredPart::shape(bool matrix) const {
    if (!matrix) return {rows};
    return transposed ? std::vector{cols, rows} : std::vector{rows, cols};
}

void StoredPart::read_values(int64_t first, int64_t end, float* dst) const {
    read_chunk(*this, first, end, dst, nullptr);
}

ParamReader::ParamReader(Takers who) : takers(who) {
    for (int i = 0; i < 2 && takers == Takers::Caller; i++)
        blocks.emplace_back(host_alloc(size_t(BLOCK) * (sizeof(float) + sizeof(uint16_t))), host_free);
}

uint16_t* ParamReader::rounded(float* values) const {
    return takers == Takers::AllThreads ? nullptr : reinterpret_cast<uint16_t*>(values + BLOCK);
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
    if (part.transposed)
        read_transposed(part, first, last, take, checksum, find);
    else
        read_in_order(part, first, last, take, checksum, find);
}

template <typename Fill>
void ParamReader::deliver_blocks(const StoredPart& part, int64_t begin, int64_t end, const Fill& fill,
                                 const TakeValues& take) {
    for (; begin < end; begin += BLOCK) {
        const int64_t block_end = std::min(begin + BLOCK, end);
        copied[next].wait();
        float* const block = static_cast<float*>(blocks[next].get());
        fill(block, begin, block_end);
        take(part.begin + begin, block_end - begin, block);
        copied[next].record(Stream{});
        next ^= 1;
    }
}

void ParamReader::read_in_order(const StoredPart& part, int64_t begin, int64_t end, const TakeValues& take,
                                RangeChecksum* checksum, const FindValues& find) {
    if (takers == Takers::Caller) {
        const auto fill = [&](float* block, int64_t first, int64_t last) {
            for_chunks(first, last, CHUNK,
                       [&](int64_t b, int64_t e) { read_chunk(part, b, e, block + (b - first), checksum); });
        };
        return deliver_blocks(part, begin, end, fill, take);
    }
    for_chunks(begin, end, CHUNK, [&](int64_t b, int64_t e) {
        thread_local std::vector<float> chunk;
        float* dst = find ? find(part.begin + b, e - b) : nullptr;
        if (!dst) {
            chunk.resize(size_t(e - b));
            dst = chunk.data();
        }
        read_chunk(part, b, e, dst, checksum);
        take(part.begin + b, e - b, dst);
    });
}

// Rows of the matrix are columns of the file, so all of the file's rows are read, in bands that stay in a second-level
// cache until they are transposed. GPT-2 124M: 32 rows of 768 to 3,072 floats are 96 to 384 KiB.
void ParamReader::read_transposed(const StoredPart& part, int64_t begin, int64_t end, const TakeValues& take,
                                  RangeChecksum* checksum, const FindValues& find) {
    constexpr int64_t BAND = 32;
    const int64_t R = part.rows, C = part.cols;
    const auto fill = [&](float* dst, int64_t first, int64_t last) {
        for_chunks(0, C, BAND, [&](int64_t c0, int64_t c1) {
            thread_local std::vector<float> band;
            const bool checked = checksum && c0 * R < checksum->end && c1 * R > checksum->begin;
            if (first >= last && !checked) return;
            band.resize(size_t(std::max<int64_t>(int64_t(band.size()), (c1 - c0) * R)));
            read_chunk(part, c0 * R, c1 * R, band.data(), checksum);
            transpose_band(dst, band.data(), R, C, c0, c1, first, last);
        });
        checksum = nullptr;  // a tensor of several blocks is read again for each
    };
    if (begin >= end) return fill(nullptr, begin, begin);
    if (takers == Takers::Caller) return deliver_blocks(part, begin, end, fill, take);
    float* dst = find ? find(part.begin + begin, end - begin) : nullptr;
    if (!dst) {
        buffer.resize(size_t(end - begin));
        dst = buffer.data();
    }
    fill(dst, begin, end);
    for_chunks(begin, end, CHUNK, [&](int64_t b, int64_t e) { take(part.begin + b, e - b, dst + (b - begin)); });
}

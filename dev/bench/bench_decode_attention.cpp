// Attention of a decode step: every key and value of the context is read once. GPT-2 124M and a LLaMA of 1.2B
// parameters, 1 and 64 sequences; a context of 32k tokens; the window of Mistral 7B in a long sequence.
#include "kernels/generation/decode_attention.h"

#include <numeric>

#include "dev/bench/bench_util.h"

namespace {

void decode(benchmark::State& state, DType T) {
    const int64_t N = state.range(0), NH = state.range(1), NKV = state.range(2), HS = state.range(3),
                  length = state.range(4), window = state.range(5), columns = (length + KV_PAGE - 1) / KV_PAGE,
                  rows = columns * KV_PAGE;
    const BenchArray out(T, {N, NH * HS}), qkv(T, {N, (NH + 2 * NKV) * HS}), k(T, {N * columns, KV_PAGE, NKV, HS}),
        v(T, {N * columns, KV_PAGE, NKV, HS});
    std::vector<int32_t> page_of(size_t(N * columns));  // of the sequences in turns, as they grow together
    for (int64_t i = 0; i < N * columns; i++) page_of[size_t(i)] = static_cast<int32_t>(i % columns * N + i / columns);
    std::vector<int32_t> slot_of(static_cast<size_t>(N));
    std::iota(slot_of.begin(), slot_of.end(), 0);
    const BenchArray slots = BenchArray::ints(slot_of),
                     positions = BenchArray::ints(std::vector<int32_t>(size_t(N), int32_t(length - 1)));
    const BenchArray pages = BenchArray::ints(page_of);
    const BenchArray scratch = BenchArray::bytes(decode_attention_scratch(N, NH, HS, length));
    DecodeBatch batch;
    batch.slots = slots;
    batch.positions = positions;
    const Tensor list = pages;
    batch.pages = make_tensor(list.data, DType::I32, list.device, {N, columns});
    batch.max_length = length;
    run_bench(state, [&] { decode_attention(out, qkv, k, v, batch, window, 0.125f, scratch, Stream{}); });
    report_bytes(state, (k.bytes() + v.bytes()) / rows * (window ? window : length));
}

const std::vector<std::string> NAMES = {"N", "NH", "NKV", "HS", "length", "window"};
BENCH(decode, NAMES,
      (Sizes{{1, 12, 12, 64, 1024, 0}, {8, 12, 12, 64, 1024, 0}, {1, 9, 3, 64, 2048, 0}, {1, 9, 3, 64, 2048, 512}}),
      (Sizes{{1, 12, 12, 64, 256, 0},
             {1, 12, 12, 64, 512, 0},
             {1, 12, 12, 64, 1024, 0},
             {64, 12, 12, 64, 128, 0},
             {64, 12, 12, 64, 256, 0},
             {1, 32, 8, 64, 2048, 0},
             {1, 32, 8, 64, 32768, 0},
             {16, 32, 8, 128, 4096, 0},
             {1, 32, 8, 128, 16384, 4096}}));

}  // namespace

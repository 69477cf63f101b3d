#include "data/loader.h"

#include <algorithm>
#include <limits>

#include "runtime/rng.h"

uint64_t permute(uint64_t key, uint64_t epoch, uint64_t i, uint64_t n) {
    require(i < n, "permute: ", i, " is outside [0, ", n, ")");
    // The network permutes the numbers of 2·half bits. `half` is the smallest for which this domain covers [0, n), so
    // for n > 1 the domain is smaller than 4n, and cycle walking needs fewer than four iterations on average.
    int half = 1;
    while (half < 32 && ((n - 1) >> (2 * half)) > 0) half++;
    const uint64_t mask = (uint64_t(1) << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            const Philox4 r = philox(key, round << 32 | right, epoch);
            const uint64_t next = left ^ (r.v[0] & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

namespace {

// Sets cum_seqlens, positions and max_seqlen from the tokens. An attention sequence starts at every training sequence
// and, if end_of_text ≥ 0, after every end_of_text.
void find_sequences(Batch& batch, int64_t T, int32_t end_of_text) {
    const int64_t N = int64_t(batch.tokens.size());
    batch.positions.resize(size_t(N));
    batch.cum_seqlens.assign(1, 0);
    batch.max_seqlen = 0;
    int64_t start = 0;
    for (int64_t t = 0; t < N; t++) {
        batch.positions[size_t(t)] = int32_t(t - start);
        const bool document_ends = end_of_text >= 0 && batch.tokens[size_t(t)] == end_of_text;
        if (!document_ends && (t + 1) % T != 0) continue;
        batch.max_seqlen = std::max(batch.max_seqlen, t + 1 - start);
        start = t + 1;
        batch.cum_seqlens.push_back(int32_t(start));
    }
}

// Makes the batch empty, for add_packed().
void clear(Batch& batch) {
    for (std::vector<int32_t>* numbers : {&batch.tokens, &batch.targets, &batch.positions}) numbers->clear();
    batch.cum_seqlens.assign(1, 0);
    batch.max_seqlen = batch.loss_tokens = 0;
}

// Adds the T positions of a packed training sequence to a batch: each example is an attention sequence, and so is the
// padding.
void add_packed(Batch& batch, const TokenFiles& files, const Packing& packing, int64_t sequence, int64_t vocab_size) {
    const auto add = [&](int64_t n) {  // an attention sequence of n positions; returns where it starts
        const size_t begin = batch.tokens.size();
        batch.tokens.resize(begin + size_t(n), 0);
        batch.targets.resize(begin + size_t(n), Batch::NO_TARGET);
        for (int64_t t = 0; t < n; t++) batch.positions.push_back(int32_t(t));
        batch.cum_seqlens.push_back(int32_t(batch.tokens.size()));
        batch.max_seqlen = std::max(batch.max_seqlen, n);
        return begin;
    };
    int64_t room = packing.seq_len();
    std::vector<uint8_t> mask;
    for (const PackedExample& example : packing.of_sequence(sequence)) {
        const int64_t n = example.tokens - 1;
        const size_t begin = add(n);
        mask.resize(size_t(n));
        files.read(example.begin, n, batch.tokens.data() + begin, vocab_size);
        files.read(example.begin + 1, n, batch.targets.data() + begin, vocab_size);
        files.read_mask(example.begin + 1, n, mask.data());
        for (size_t t = 0; t < mask.size(); t++)
            if (!mask[t]) batch.targets[begin + t] = Batch::NO_TARGET;
        room -= n;
    }
    if (room > 0) add(room);
}

int64_t loss_tokens_of(const Packing& packing, int64_t sequence) {
    int64_t count = 0;
    for (const PackedExample& example : packing.of_sequence(sequence)) count += example.loss_tokens;
    return count;
}

void check_shape(int64_t B, int64_t T) {
    int64_t N;
    require(B > 0 && T > 0, "batches of ", B, " sequences of ", T, " tokens; both must be positive");
    require(!__builtin_mul_overflow(B, T, &N) && N <= std::numeric_limits<int32_t>::max(), "batches of ", B,
            " sequences of ", T, " tokens hold more than 2^31 tokens; lower --batch-size");
}

}  // namespace

Loader::Loader(const TokenFiles& files_, const LoaderOptions& options_, int64_t first_step)
    : files(files_), options(options_) {
    const LoaderOptions& o = options;
    check_shape(o.B, o.T);
    require(o.micro_steps > 0 && o.world > 0 && 0 <= o.rank && o.rank < o.world && first_step >= 0, "loader: rank ",
            o.rank, " of ", o.world, ", ", o.micro_steps, " micro-steps, first step ", first_step, ": out of range");
    int64_t samples;
    require(!__builtin_mul_overflow(o.B, o.micro_steps, &samples) &&
                !__builtin_mul_overflow(samples, o.world, &samples) &&
                !__builtin_mul_overflow(samples, first_step + 1, &samples),
            "loader: the number of samples overflows 64 bits");
    require(!o.documents || o.end_of_text >= 0,
            "document boundaries need the end-of-text token, which is unknown; add a tokenizer.json or meta.json that "
            "names it to the data directory");
    require(!o.packing || (o.packing->seq_len() == o.T && !o.documents), "loader: a packing of sequences of ",
            o.packing ? o.packing->seq_len() : 0, " tokens for sequences of ", o.T);
    training_sequences = o.packing ? o.packing->num_sequences() : (files.size() - 1) / o.T;
    require(training_sequences > 0, files.pattern(), ": ", files.size(),
            " tokens are fewer than one training sequence of ", o.T, " + 1; use more text or a shorter --seq-len");
    first_micro_batch = first_step * o.micro_steps;
    // All memory is allocated here, none in a step. With documents there can be as many attention sequences as tokens.
    const int64_t most_sequences = o.packing ? o.B * (o.packing->max_examples() + 1) : o.documents ? o.B * o.T : o.B;
    for (Batch* batch : {&ready[0], &ready[1], &current}) {
        for (std::vector<int32_t>* numbers : {&batch->tokens, &batch->targets, &batch->positions})
            numbers->reserve(size_t(o.B * o.T));
        batch->cum_seqlens.reserve(size_t(std::max(most_sequences, o.max_sequences)) + 1);
    }
    worker = std::thread([this] { run(); });
}

Loader::~Loader() {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    changed.notify_all();
    worker.join();
}

int64_t Loader::dropped_tokens() const {
    return files.size() - 1 - training_sequences * options.T;
}

int64_t Loader::training_sequence_of_sample(uint64_t i) const {
    const uint64_t n = uint64_t(training_sequences);
    return int64_t(options.shuffle ? permute(options.seed, i / n, i % n, n) : i % n);
}

void Loader::fill(Batch& batch, int64_t micro_batch) const {
    const int64_t B = options.B, T = options.T;
    // Micro-batch a of step s starts at sample (s·micro_steps + a)·world·B of the run.
    const int64_t first_sample = (micro_batch * options.world + options.rank) * B;
    if (options.packing) {
        fill_packed(batch, first_sample);
        return add_room(batch);
    }
    batch.tokens.resize(size_t(B * T));
    batch.targets.resize(size_t(B * T));
    for (int64_t b = 0; b < B; b++) {
        const int64_t begin = training_sequence_of_sample(uint64_t(first_sample + b)) * T;
        int32_t* const tokens = batch.tokens.data() + b * T;
        int32_t* const targets = batch.targets.data() + b * T;
        files.read(begin, T, tokens, options.vocab_size);
        std::copy(tokens + 1, tokens + T, targets);
        files.read(begin + T, 1, targets + T - 1, options.vocab_size);
    }
    batch.loss_tokens = files.masked() ? apply_mask(batch.targets, first_sample) : options.world * B * T;
    find_sequences(batch, T, options.documents ? options.end_of_text : -1);
    add_room(batch);
}

void Loader::add_room(Batch& batch) const {
    const int64_t sequences = int64_t(batch.cum_seqlens.size()) - 1;
    const bool fits = sequences <= options.max_sequences;
    batch.num_sequences = fits ? sequences : 0;
    if (!fits) return;
    batch.cum_seqlens.resize(size_t(options.max_sequences) + 1, batch.cum_seqlens.back());
    batch.max_seqlen = options.T;
}

void Loader::fill_packed(Batch& batch, int64_t first_sample) const {
    const int64_t rank_begin = first_sample - options.rank * options.B;
    clear(batch);
    for (int64_t i = 0; i < options.world * options.B; i++) {
        const int64_t sequence = training_sequence_of_sample(uint64_t(rank_begin + i));
        batch.loss_tokens += loss_tokens_of(*options.packing, sequence);
        if (i / options.B == options.rank) add_packed(batch, files, *options.packing, sequence, options.vocab_size);
    }
}

int64_t Loader::apply_mask(std::vector<int32_t>& targets, int64_t first_sample) const {
    const int64_t B = options.B, T = options.T, rank_begin = first_sample - options.rank * B;
    std::vector<uint8_t> mask(static_cast<size_t>(T));
    int64_t loss_tokens = 0;
    for (int64_t i = 0; i < options.world * B; i++) {
        files.read_mask(training_sequence_of_sample(uint64_t(rank_begin + i)) * T + 1, T, mask.data());
        loss_tokens += std::count(mask.begin(), mask.end(), 1);
        const int64_t b = i - options.rank * B;
        if (b < 0 || b >= B) continue;
        for (int64_t t = 0; t < T; t++)
            if (!mask[size_t(t)]) targets[size_t(b * T + t)] = Batch::NO_TARGET;
    }
    return loss_tokens;
}

void Loader::run() {
    try {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return stop || filled - taken < 2; });
            if (stop) return;
            const int64_t slot = filled;
            lock.unlock();
            fill(ready[slot % 2], first_micro_batch + slot);
            lock.lock();
            filled++;
            lock.unlock();
            changed.notify_all();
        }
    } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = std::current_exception();
        changed.notify_all();
    }
}

const Batch& Loader::next() {
    {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return filled > taken || failure; });
        if (filled == taken) std::rethrow_exception(failure);  // batches from before the failure come first
        std::swap(current, ready[taken % 2]);
        taken++;
    }
    changed.notify_all();
    return current;
}

int64_t EvalBatches::num_tokens() const {
    check_shape(B, T);
    if (packing) return num_sequences() * T;
    const int64_t all = end_of_text >= 0 ? files.size() : files.size() - 1;
    require(all > 0, files.pattern(),
            ": there are no loss tokens: the split has a single token and no known end-of-text token; use more text");
    return limit > 0 ? std::min(limit, all) : all;
}

int64_t EvalBatches::num_sequences() const {
    if (!packing) return (num_tokens() - 1) / T + 1;
    const int64_t all = packing->num_sequences();
    return limit > 0 ? std::min(all, std::max<int64_t>(1, limit / T)) : all;
}

int64_t EvalBatches::num_batches() const {
    return (num_sequences() - 1) / B + 1;
}

Batch EvalBatches::batch(int64_t b) const {
    const int64_t batches = num_batches(), total = num_tokens();
    require(0 <= b && b < batches, "evaluation batch ", b, " is outside [0, ", batches, ")");
    if (packing) {
        Batch packed;
        clear(packed);
        const int64_t end = std::min((b + 1) * B, num_sequences()), all = packing->num_sequences();
        for (int64_t i = b * B; i < end; i++) {
            const int64_t sequence = int64_t(permute(0, 0, uint64_t(i), uint64_t(all)));
            packed.loss_tokens += loss_tokens_of(*packing, sequence);
            add_packed(packed, files, *packing, sequence, vocab_size);
        }
        return packed;
    }
    // Target k of the split is token k + shift; its input is the previous token.
    const bool have_start = end_of_text >= 0;
    const int64_t shift = have_start ? 0 : 1;
    const int64_t begin = b * B * T, count = std::min(B * T, total - begin);

    Batch batch;
    batch.tokens.assign(size_t(B * T), 0);  // an unused position may hold any token
    batch.targets.assign(size_t(B * T), Batch::NO_TARGET);
    files.read(begin + shift, count, batch.targets.data(), vocab_size);
    if (begin + shift > 0)
        files.read(begin + shift - 1, 1, batch.tokens.data(), vocab_size);
    else
        batch.tokens[0] = end_of_text;
    std::copy_n(batch.targets.data(), count - 1, batch.tokens.data() + 1);
    batch.loss_tokens = count;
    if (files.masked()) {
        std::vector<uint8_t> mask(static_cast<size_t>(count));
        files.read_mask(begin + shift, count, mask.data());
        for (int64_t k = 0; k < count; k++)
            if (!mask[size_t(k)]) batch.targets[size_t(k)] = Batch::NO_TARGET;
        batch.loss_tokens = std::count(mask.begin(), mask.end(), 1);
    }
    find_sequences(batch, T, -1);
    return batch;
}

#include "data/loader.h"

#include <algorithm>
#include <limits>
#include <utility>

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

// Adds the attention sequences of the training sequence of T tokens that begins at `begin`: one, or if end_of_text ≥ 0
// one after each end_of_text, too.
void find_sequences(Batch& batch, int64_t begin, int64_t T, int32_t end_of_text) {
    int64_t start = begin;
    for (int64_t t = begin; t < begin + T; t++) {
        batch.positions.push_back(int32_t(t - start));
        const bool document_ends = end_of_text >= 0 && batch.tokens[size_t(t)] == end_of_text;
        if (!document_ends && t + 1 < begin + T) continue;
        batch.max_seqlen = std::max(batch.max_seqlen, t + 1 - start);
        start = t + 1;
        batch.cum_seqlens.push_back(int32_t(start));
    }
}

// Makes the batch empty.
void clear(Batch& batch) {
    for (std::vector<int32_t>* numbers : {&batch.tokens, &batch.targets, &batch.positions}) numbers->clear();
    batch.cum_seqlens.assign(1, 0);
    batch.pairs.clear();
    batch.max_seqlen = batch.loss_tokens = batch.pairs_of_all_ranks = 0;
}

// Adds the T positions of a packed training sequence to a batch: each example is an attention sequence, and so is the
// padding. source: the number of the files among those of the run.
void add_packed(Batch& batch, const TokenFiles& files, const ExamplePacking& packing, int64_t sequence,
                int64_t vocab_size, size_t source = 0) {
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
    bool is_chosen = true;
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
        if (!packing.has_pairs()) continue;
        const auto end = int32_t(batch.tokens.size());
        if (is_chosen)
            batch.pairs.push_back({int32_t(begin), end, end, example.pair, int32_t(source)});
        else
            batch.pairs.back().end = end;
        is_chosen = !is_chosen;
    }
    if (room > 0) add(room);
}

// Adds the training sequence of T + 1 tokens from `begin` on.
void add_cut(Batch& batch, const TokenFiles& files, int64_t begin, const LoaderOptions& o) {
    const size_t at = batch.tokens.size(), T = size_t(o.T);
    batch.tokens.resize(at + T);
    batch.targets.resize(at + T);
    int32_t* const tokens = batch.tokens.data() + at;
    int32_t* const targets = batch.targets.data() + at;
    files.read(begin, o.T, tokens, o.vocab_size);
    std::copy(tokens + 1, tokens + T, targets);
    files.read(begin + o.T, 1, targets + T - 1, o.vocab_size);
    find_sequences(batch, int64_t(at), o.T, o.documents ? o.end_of_text : -1);
    if (!files.masked()) return;
    std::vector<uint8_t> mask(T);
    files.read_mask(begin + 1, o.T, mask.data());
    for (size_t t = 0; t < T; t++)
        if (!mask[t]) targets[t] = Batch::NO_TARGET;
}

// Counts what a packed training sequence adds to the sums of all ranks.
void count_packed(Batch& batch, const ExamplePacking& packing, int64_t sequence) {
    for (const PackedExample& example : packing.of_sequence(sequence)) batch.loss_tokens += example.loss_tokens;
    if (packing.has_pairs()) batch.pairs_of_all_ranks += packing.of_sequence(sequence).size() / 2;
}

int64_t loss_tokens_of(const TokenFiles& files, int64_t begin, int64_t T) {
    if (!files.masked()) return T;
    std::vector<uint8_t> mask(static_cast<size_t>(T));
    files.read_mask(begin + 1, T, mask.data());
    return std::count(mask.begin(), mask.end(), 1);
}

std::vector<int64_t> weights_of(const std::vector<TrainingSource>& sources) {
    std::vector<int64_t> weights;
    for (const TrainingSource& source : sources) weights.push_back(source.weight);
    return weights;
}

bool has_pairs(const TrainingSource& source) {
    return source.files->has_pairs();
}

void check_shape(int64_t B, int64_t T) {
    int64_t N;
    require(B > 0 && T > 0, "batches of ", B, " sequences of ", T, " tokens; both must be positive");
    require(!__builtin_mul_overflow(B, T, &N) && N <= std::numeric_limits<int32_t>::max(), "batches of ", B,
            " sequences of ", T, " tokens hold more than 2^31 tokens; lower --batch-size");
}

}  // namespace

int64_t num_training_sequences(const TrainingSource& source, int64_t T) {
    return source.packing ? source.packing->num_sequences() : (source.files->size() - 1) / T;
}

Loader::Loader(std::vector<TrainingSource> sources_, const LoaderOptions& options_, int64_t first_step)
    : sources(std::move(sources_)), options(options_), mixture(weights_of(sources)) {
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
    // With documents there can be as many attention sequences as tokens.
    int64_t in_sequence = o.documents ? o.T : 1, pairs = 0;
    for (const TrainingSource& source : sources) {
        const ExamplePacking* const packing = source.packing;
        require(!packing || (packing->seq_len() == o.T && !o.documents), "loader: a packing of sequences of ",
                packing ? packing->seq_len() : 0, " tokens for sequences of ", o.T);
        training_sequences.push_back(::num_training_sequences(source, o.T));
        require(training_sequences.back() > 0, source.files->pattern(), ": ", source.files->size(),
                " tokens are fewer than one training sequence of ", o.T, " + 1; use more text or a shorter --seq-len");
        if (!packing) continue;
        in_sequence = std::max(in_sequence, packing->max_examples() + 1);
        pairs = std::max(pairs, packing->max_pairs());
    }
    const auto with_pairs = std::find_if(sources.begin(), sources.end(), has_pairs),
               without_pairs = std::find_if_not(sources.begin(), sources.end(), has_pairs);
    require(with_pairs == sources.end() || without_pairs == sources.end(),
            without_pairs == sources.end() ? "" : without_pairs->files->pattern(),
            ": holds no preference pairs, unlike ", with_pairs == sources.end() ? "" : with_pairs->files->pattern(),
            "; train on pairs or on other data alone");
    first_micro_batch = first_step * o.micro_steps;
    // All memory is allocated here, none in a step.
    for (Batch* batch : {&ready[0], &ready[1], &current}) {
        for (std::vector<int32_t>* numbers : {&batch->tokens, &batch->targets, &batch->positions})
            numbers->reserve(size_t(o.B * o.T));
        batch->pairs.reserve(size_t(o.B * pairs));
        batch->cum_seqlens.reserve(size_t(std::max(o.B * in_sequence, o.max_sequences)) + 1);
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

int64_t Loader::dropped_tokens(size_t source) const {
    return sources[source].files->size() - 1 - training_sequences[source] * options.T;
}

Loader::Sample Loader::sample(uint64_t i) const {
    const auto [source, index] = mixture.locate(i);
    const uint64_t n = uint64_t(training_sequences[source]);
    if (!options.shuffle) return {source, int64_t(index % n)};
    const uint64_t key = options.seed + (uint64_t(source) << 32);  // sources of one size in orders of their own
    return {source, int64_t(permute(key, index / n, index % n, n))};
}

void Loader::fill(Batch& batch, int64_t micro_batch) const {
    const int64_t B = options.B, T = options.T;
    // Micro-batch a of step s starts at sample (s·micro_steps + a)·world·B of the run, with the rows of rank 0.
    const int64_t first_sample = micro_batch * options.world * B;
    clear(batch);
    for (int64_t i = 0; i < options.world * B; i++) {
        const bool own = i / B == options.rank;
        const auto [source, sequence] = sample(uint64_t(first_sample + i));
        const TokenFiles& files = *sources[source].files;
        if (const ExamplePacking* packing = sources[source].packing) {
            count_packed(batch, *packing, sequence);
            if (own) add_packed(batch, files, *packing, sequence, options.vocab_size, source);
        } else {
            batch.loss_tokens += loss_tokens_of(files, sequence * T, T);
            if (own) add_cut(batch, files, sequence * T, options);
        }
    }
    add_room(batch, options.max_sequences, options.T);
}

void add_room(Batch& batch, int64_t max_sequences, int64_t T) {
    const int64_t sequences = int64_t(batch.cum_seqlens.size()) - 1;
    const bool fits = sequences <= max_sequences;
    batch.num_sequences = fits ? sequences : 0;
    if (!fits) return;
    batch.cum_seqlens.resize(size_t(max_sequences) + 1, batch.cum_seqlens.back());
    batch.max_seqlen = T;
}

void Loader::run() {
    try {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return stop || filled - taken < 2; });
            if (stop) return;
            const int64_t index = filled;
            lock.unlock();
            fill(ready[index % 2], first_micro_batch + index);
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
            count_packed(packed, *packing, sequence);
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
    batch.cum_seqlens = {0};
    for (int64_t row = 0; row < B; row++) find_sequences(batch, row * T, T, -1);
    return batch;
}

#include "parallel/distributed_muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/scratch.h"
#include "runtime/device/convert_dtype.h"
#include "runtime/rng.h"

namespace {

// Rounds under way with several ranks: one is collected, one orthogonalised, one distributed.
constexpr int64_t OVERLAPPED_ROUNDS = 3;
// Elements: a batch begins where GEMMs find their preferred alignment.
constexpr int64_t ALIGNMENT = 128;

int64_t aligned(int64_t n) {
    return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

// FLOP of an iteration: two matmuls with the matrix and one of two square matrices, on the smaller side.
double cost(const MuonMatrix& x) {
    const double small = double(std::min(x.rows, x.cols)), large = double(std::max(x.rows, x.cols));
    return 4 * small * small * large + 2 * small * small * small;
}

// The matrices of a round by owner: the next ones of each, as many as fit.
using RoundMatrices = std::vector<std::vector<MuonMatrix>>;
std::vector<RoundMatrices> make_rounds(const ParamTable& table, int64_t world, DType dtype, int64_t round_bytes) {
    std::vector<RoundMatrices> rounds;
    std::vector<size_t> round(size_t(world), 0);
    std::vector<int64_t> bytes(size_t(world), 0);  // of the owner's matrices in that round
    for (const MuonMatrix& x : muon_matrices(table, world)) {
        const size_t owner = size_t(x.owner);
        const int64_t size = x.size() * dtype_size(dtype);
        if (bytes[owner] && bytes[owner] + size > round_bytes / world) {
            round[owner]++;
            bytes[owner] = 0;
        }
        bytes[owner] += size;
        if (round[owner] == rounds.size()) rounds.emplace_back(size_t(world));
        rounds[round[owner]][owner].push_back(x);
    }
    return rounds;
}

bool same_shape(const MuonMatrix& a, const MuonMatrix& b) {
    return a.rows == b.rows && a.cols == b.cols;
}

// The batches of an owner's matrices, from element `begin` on; returns the end.
int64_t make_batches(const std::vector<MuonMatrix>& matrices, int64_t begin, std::vector<Muon::Batch>& batches) {
    for (size_t i = 0; i < matrices.size(); i++) {
        if (i == 0 || !same_shape(matrices[i], matrices[i - 1])) {
            begin = aligned(begin);
            batches.push_back({begin, 0, matrices[i].rows, matrices[i].cols});
        }
        batches.back().count++;
        begin += matrices[i].size();
    }
    return begin;
}

int64_t batch_scratch(const Muon::Batch& b, DType dtype, const Target& target = this_target()) {
    return newton_schulz_scratch(b.count, b.rows, b.cols, dtype, target);
}

// The elements of a matrix that a rank updates.
ParamArena::Span held(const ParamTable& table, const Sharding& sharding, int64_t rank, const MuonMatrix& x) {
    ParamArena part;  // used for spans only, holds no memory
    if (sharding.splits_optimizer()) {
        part.part = rank;
        part.parts = sharding.world;
    }
    return part.span(table.params[x.param], x.first, x.size());
}

// With a sharded state: calls piece(j, matrix) for the j-th matrix of every owner, j by j; end(j) after each j.
template <typename Piece, typename End>
void for_each_transfer(const RoundMatrices& round, Piece piece, End end) {
    size_t most = 0;
    for (const auto& matrices : round) most = std::max(most, matrices.size());
    for (size_t j = 0; j < most; j++) {
        for (const auto& matrices : round)
            if (j < matrices.size()) piece(j, matrices[j]);
        end(j);
    }
}

// Elements of the buffer of a rank's pieces in a round.
int64_t updates_size(const ParamTable& table, const Sharding& sharding, int64_t rank, const RoundMatrices& round) {
    int64_t end = 0;
    std::vector<Muon::Batch> batches;
    if (!sharding.splits_optimizer()) {
        for (const auto& matrices : round) end = make_batches(matrices, aligned(end), batches);
    } else {
        for_each_transfer(
            round, [&](size_t, const MuonMatrix& x) { end += held(table, sharding, rank, x).count; },
            [&](size_t) { end = aligned(end); });
    }
    return aligned(end);
}

}  // namespace

float shape_scale(MuonScale scale, int64_t rows, int64_t cols) {
    if (scale == MuonScale::RMS) return float(0.2 * std::sqrt(double(std::max(rows, cols))));
    return float(std::sqrt(std::max(1.0, double(rows) / double(cols))));
}

std::vector<MuonMatrix> muon_matrices(const ParamTable& table, int64_t world) {
    std::vector<MuonMatrix> all;
    for (const Param& p : table.params) {
        if (p.optimizer != OptimizerType::Muon) continue;
        int64_t row = 0;
        for (const int64_t rows : p.part_rows) {
            all.push_back({p.index, row * p.cols, rows, p.cols});
            row += rows;
        }
    }
    std::stable_sort(all.begin(), all.end(), [](const MuonMatrix& a, const MuonMatrix& b) {
        if (cost(a) != cost(b)) return cost(a) > cost(b);
        return std::make_pair(a.rows, a.cols) > std::make_pair(b.rows, b.cols);
    });
    std::vector<double> work(size_t(world), 0);
    for (MuonMatrix& x : all) {
        const auto least = std::min_element(work.begin(), work.end());
        *least += cost(x);
        x.owner = least - work.begin();
    }
    return all;
}

MuonWorkspace muon_workspace(const ParamTable& table, const Sharding& sharding, DType dtype, int64_t round_bytes,
                             const Target& target) {
    MuonWorkspace sizes;
    const bool split = sharding.splits_optimizer();
    sizes.rounds_at_once = sharding.world > 1 ? OVERLAPPED_ROUNDS : 1;
    for (const RoundMatrices& round : make_rounds(table, sharding.world, dtype, round_bytes)) {
        for (int64_t rank = 0; rank < sharding.world; rank++) {
            std::vector<Muon::Batch> batches;
            const int64_t matrices = aligned(make_batches(round[size_t(rank)], 0, batches));
            if (split) sizes.matrices = std::max(sizes.matrices, matrices * dtype_size(dtype));
            const int64_t updates = updates_size(table, sharding, rank, round);
            sizes.updates = std::max(sizes.updates, updates * dtype_size(dtype));
            for (const Muon::Batch& b : batches)
                sizes.scratch = std::max(sizes.scratch, batch_scratch(b, dtype, target));
        }
    }
    return sizes;
}

Muon::Muon(const ParamTable& table, const Sharding& s, const std::vector<UpdateSlice>& slices, const ParamArena& m,
           const HyperparametersByGroup& rates, DType type, const MuonOptions& muon_options)
    : sharding(s), options(muon_options), dtype(type), sizes(muon_workspace(table, s, type, muon_options.round_bytes)) {
    const bool split = s.splits_optimizer();
    const size_t rank = size_t(s.rank), world = size_t(s.world);
    for (const RoundMatrices& matrices : make_rounds(table, s.world, dtype, options.round_bytes)) {
        Round round;
        // The matrix's elements of this rank, whose updates are at `begin`; returns their number.
        const auto add = [&](const MuonMatrix& x, int64_t begin) {
            const Param& p = table.params[x.param];
            const ParamArena::Span span = m.span(p, x.first, x.size());
            if (!span.count) return span.count;
            size_t slice = 0;
            while (p.group >= slices[slice].last_group) slice++;
            const auto same = [&](const Pieces& pieces) { return pieces.slice == slice; };
            auto pieces = std::find_if(round.pieces.begin(), round.pieces.end(), same);
            if (pieces == round.pieces.end()) pieces = round.pieces.insert(pieces, {slice, {}});
            MuonSegment segment;
            static_cast<ParamSegment&>(segment) = param_segment(table, slices[slice], m, p, span, rates);
            segment.update_begin = begin;
            segment.shape_scale = shape_scale(options.scale, x.rows, x.cols);
            pieces->segments.push_back(segment);
            return span.count;
        };
        std::vector<Batch> batches;  // of all ranks
        if (split) {
            int64_t end = 0;
            make_batches(matrices[rank], 0, round.batches);
            std::vector<int64_t> begins;  // of this rank's matrices
            for (const Batch& b : round.batches)
                for (int64_t i = 0; i < b.count; i++) begins.push_back(b.begin + i * b.rows * b.cols);
            const auto piece = [&](size_t j, const MuonMatrix& x) {
                if (round.transfers.size() == j)
                    round.transfers.push_back({0, end, std::vector<int64_t>(world, 0), std::vector<int64_t>(world, 0)});
                Transfer& transfer = round.transfers[j];
                const int64_t count = add(x, end);
                transfer.updates[size_t(x.owner)] = count;
                end += count;
                if (size_t(x.owner) != rank) return;
                transfer.matrix_begin = begins[j];
                for (size_t r = 0; r < world; r++) transfer.matrix[r] = held(table, s, int64_t(r), x).count;
            };
            for_each_transfer(matrices, piece, [&](size_t) { end = aligned(end); });
        } else {
            for (size_t owner = 0; owner < world; owner++) {
                std::vector<Batch> owned;
                const int64_t begin = round.blocks.empty() ? 0 : aligned(round.blocks.back().second);
                round.blocks.emplace_back(begin, make_batches(matrices[owner], begin, owned));
                size_t next = 0;
                for (const Batch& b : owned)
                    for (int64_t i = 0; i < b.count; i++) add(matrices[owner][next++], b.begin + i * b.rows * b.cols);
                if (owner == rank) round.batches = owned;
            }
        }
        for (Pieces& pieces : round.pieces)
            std::sort(pieces.segments.begin(), pieces.segments.end(),
                      [](const MuonSegment& a, const MuonSegment& b) { return a.begin < b.begin; });
        for (const auto& owned : matrices) make_batches(owned, 0, batches);
        for (Batch b : batches) {
            b.begin = 0;
            const auto same = [&](const Batch& o) {
                return o.count == b.count && o.rows == b.rows && o.cols == b.cols;
            };
            if (std::none_of(all_batches.begin(), all_batches.end(), same)) all_batches.push_back(b);
        }
        rounds.push_back(std::move(round));
    }
    buffers = std::vector<Buffers>(size_t(sizes.rounds_at_once));
}

Tensor Muon::Buffers::updates_of(const Transfer& t) const {
    return updates.rows(t.updates_begin, std::accumulate(t.updates.begin(), t.updates.end(), t.updates_begin));
}

Tensor Muon::Buffers::matrix_of(const Transfer& t) const {
    return matrices.rows(t.matrix_begin, std::accumulate(t.matrix.begin(), t.matrix.end(), t.matrix_begin));
}

// Views of the workspace.
void Muon::set_buffers(Tensor workspace) {
    int64_t at = 0;
    const auto part = [&](DType type, int64_t bytes) {
        const Tensor t = workspace.rows(at, at + bytes);
        at += bytes;
        return make_tensor(t.data, type, t.device, {bytes / dtype_size(type)});
    };
    for (Buffers& b : buffers) {
        b.updates = part(dtype, sizes.updates);
        b.matrices = sizes.matrices ? part(dtype, sizes.matrices) : b.updates;
    }
    scratch = part(DType::U8, sizes.scratch);
}

void Muon::momentum(const Context& ctx, const std::vector<UpdateSlice>& slices, const Round& round, Buffers& b,
                    Tensor scalars) const {
    const Range range(ctx.profiler, "momentum");
    for (const Pieces& p : round.pieces) {
        const UpdateSlice& slice = slices[p.slice];
        muon_momentum(b.updates, slice.m, slice.grads, p.segments.data(), int64_t(p.segments.size()), options.seed,
                      scalars, ctx.stream);
    }
}

void Muon::collect(const Context& ctx, const Round& round, Buffers& b) const {
    if (round.transfers.empty()) return;
    b.ready.record(ctx.stream);
    b.ready.make_wait(ctx.side);
    const Range range(ctx.profiler, "all_to_all of momentum", ctx.side);
    ctx.comm->group_start();
    for (const Transfer& t : round.transfers) {
        ctx.comm->all_to_all(b.matrix_of(t), b.updates_of(t), t.matrix, t.updates, ctx.side);
    }
    ctx.comm->group_end();
    b.collected.record(ctx.side);
}

void Muon::orthogonalise(const Context& ctx, const Round& round, Buffers& b) const {
    if (!round.transfers.empty()) b.collected.make_wait(ctx.stream);
    const Range range(ctx.profiler, "newton_schulz");
    for (const Batch& batch : round.batches) {
        const int64_t n = batch.count * batch.rows * batch.cols;
        const Tensor x = b.matrices.rows(batch.begin, batch.begin + n);
        newton_schulz(make_tensor(x.data, dtype, x.device, {batch.count, batch.rows, batch.cols}),
                      scratch.rows(0, batch_scratch(batch, dtype)), options.newton_schulz, ctx.stream);
    }
}

void Muon::distribute(const Context& ctx, const Round& round, Buffers& b) const {
    b.orthogonal.record(ctx.stream);
    b.orthogonal.make_wait(ctx.side);
    const Range range(ctx.profiler, sharding.splits_optimizer() ? "all_to_all of updates" : "broadcast of updates",
                      ctx.side);
    ctx.comm->group_start();
    for (const Transfer& t : round.transfers) {
        ctx.comm->all_to_all(b.updates_of(t), b.matrix_of(t), t.updates, t.matrix, ctx.side);
    }
    for (size_t owner = 0; owner < round.blocks.size(); owner++)
        ctx.comm->broadcast(b.updates.rows(round.blocks[owner].first, round.blocks[owner].second), int64_t(owner),
                            ctx.side);
    ctx.comm->group_end();
    b.distributed.record(ctx.side);
}

void Muon::apply(const Context& ctx, const std::vector<UpdateSlice>& slices, const Round& round, Buffers& b,
                 Tensor scalars) const {
    if (sharding.world > 1) {
        const Range waiting(ctx.profiler, "wait for updates");
        b.distributed.make_wait(ctx.stream);
    }
    const Range range(ctx.profiler, "muon_update");
    for (const Pieces& p : round.pieces) {
        const UpdateSlice& slice = slices[p.slice];
        muon_update(slice.params, slice.params_T, b.updates, p.segments.data(), int64_t(p.segments.size()),
                    options.seed, scalars, ctx.stream);
    }
}

void Muon::update(const Context& ctx, const std::vector<UpdateSlice>& slices, Tensor workspace, Tensor scalars) {
    if (rounds.empty()) return;
    set_buffers(workspace);
    const auto buffers_of = [&](size_t i) -> Buffers& { return buffers[i % buffers.size()]; };
    const auto start = [&](size_t i) {
        momentum(ctx, slices, rounds[i], buffers_of(i), scalars);
        collect(ctx, rounds[i], buffers_of(i));
    };
    const bool overlap = sharding.world > 1;
    if (overlap) start(0);
    for (size_t i = 0; i < rounds.size(); i++) {
        if (!overlap)
            start(i);
        else if (i + 1 < rounds.size())
            start(i + 1);
        orthogonalise(ctx, rounds[i], buffers_of(i));
        if (overlap) distribute(ctx, rounds[i], buffers_of(i));
        const size_t applied = overlap ? i - 1 : i;  // its distribution ran during Newton-Schulz
        if (applied < rounds.size()) apply(ctx, slices, rounds[applied], buffers_of(applied), scalars);
    }
    if (overlap) apply(ctx, slices, rounds.back(), buffers_of(rounds.size() - 1), scalars);
}

void Muon::warm_up(const Context& ctx, Tensor workspace) const {
    if (all_batches.empty()) return;
    // Numbers that differ: on zeros a GPU draws less power and is faster, and every algorithm gives the same result.
    std::vector<float> numbers(1 << 14);
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = float(normal01(0, 0, i));
    std::vector<char> block(numbers.size() * size_t(dtype_size(dtype)));
    convert_from_float(block.data(), dtype, numbers.data(), int64_t(numbers.size()));
    char* const data = static_cast<char*>(workspace.data);
    const Tensor scratch_bytes = workspace.rows(workspace.shape[0] - sizes.scratch, workspace.shape[0]);
    for (const Batch& b : all_batches) {
        const size_t bytes = size_t(b.count * b.rows * b.cols * dtype_size(dtype));
        copy_to_device(data, block.data(), std::min(block.size(), bytes), ctx.stream);
        for (size_t n = block.size(); n < bytes; n *= 2)
            device_copy(data + n, data, std::min(n, bytes - n), ctx.stream);
        newton_schulz(make_tensor(data, dtype, workspace.device, {b.count, b.rows, b.cols}),
                      scratch_bytes.rows(0, batch_scratch(b, dtype)), options.newton_schulz, ctx.stream);
    }
}

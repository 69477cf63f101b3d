// Muon on the ranks of a run: which rank orthogonalises which matrix, when, and what travels (kernels/muon.h has the
// formulas).
//
// The matrices are the hidden matrices of the parameter table; each part of a fused one is a matrix. Each has an owner,
// the rank that orthogonalises it; owners are balanced by FLOP and are the same in all ZeRO stages of one world. A step
// goes through them in rounds of bounded size:
//
//   momentum        every rank: m and u of its elements of the round's matrices
//   collect         sharded state: an all-to-all brings the pieces of u to the owners
//   orthogonalise   owners: Newton-Schulz, all matrices of one shape in one batch
//   distribute      sharded state: the all-to-all backwards; stage 0: a broadcast from each owner
//   apply           every rank: updates its elements
//
// With several ranks a round's collect and the previous one's distribute run on the side stream during Newton-Schulz.
// u is fp32 in fp32 training, else bf16, also on its way. Rounds and batches are the same in all stages of one world,
// and so are the bits: GEMMs may depend on the size of a batch, not on a matrix's index in it.
#pragma once

#include <vector>

#include "kernels/muon.h"
#include "parallel/update.h"
#include "runtime/context.h"
#include "runtime/device/target.h"

// The factor of an orthogonalised update: Spectral √max(1, rows/cols) (Jordan 2024), RMS 0.2·√max(rows, cols), which
// gives it the RMS of AdamW's updates (Liu et al. 2025, section 2.2).
enum class MuonScale : uint8_t { Spectral, RMS };
float shape_scale(MuonScale scale, int64_t rows, int64_t cols);

// Bytes of u of a round's matrices, over all ranks (at least one matrix for each rank). GPT-2 124M in bf16 has 170 MB:
// batches are large enough for a GPU, and the memory of activations is larger.
constexpr int64_t MUON_ROUND_BYTES = int64_t(128) << 20;

struct MuonOptions {
    NewtonSchulz newton_schulz;
    MuonScale scale = MuonScale::Spectral;
    int64_t round_bytes = MUON_ROUND_BYTES;
    uint64_t seed = 0;  // for stochastic rounding
};

// A matrix that Muon orthogonalises: rows [first / cols, first / cols + rows) of a parameter.
struct MuonMatrix {
    size_t param;   // Param::index
    int64_t first;  // its first element in the parameter
    int64_t rows, cols;
    int64_t owner = 0;
    int64_t size() const { return rows * cols; }
};

// All matrices with their owners, those of one shape together. Longest processing time first (Graham 1969): each
// matrix, the costliest first, goes to the rank with the least work.
std::vector<MuonMatrix> muon_matrices(const ParamTable& table, int64_t world);

// Memory of the update besides the arenas. Every rank needs the same, the most that any of them uses.
struct MuonWorkspace {
    // Bytes of a round: the elements that a rank updates; the whole matrices that it owns (0: they are in updates).
    int64_t updates = 0, matrices = 0;
    int64_t scratch = 0;         // bytes of Newton-Schulz
    int64_t rounds_at_once = 1;  // rounds that are under way at the same time
    int64_t bytes() const { return rounds_at_once * (updates + matrices) + scratch; }
};
MuonWorkspace muon_workspace(const ParamTable& table, const Sharding& sharding, DType dtype,
                             int64_t round_bytes = MUON_ROUND_BYTES, const Target& target = this_target());

class Muon {
  public:
    struct Pieces {  // of an update slice
        size_t slice;
        std::vector<MuonSegment> segments;
    };
    struct Batch {  // of one shape; begin: its first element among this rank's matrices
        int64_t begin, count, rows, cols;
    };
    // One all-to-all, for at most one matrix of each owner. matrix: by rank, the elements that it holds of the matrix
    // that this rank owns. updates: by owner, the elements that this rank holds of the owner's matrix.
    struct Transfer {
        int64_t matrix_begin = 0, updates_begin = 0;
        std::vector<int64_t> matrix, updates;
    };
    struct Round {
        std::vector<Pieces> pieces;
        std::vector<Batch> batches;
        std::vector<Transfer> transfers;                  // with a sharded state
        std::vector<std::pair<int64_t, int64_t>> blocks;  // else: [begin, end) of each owner's matrices in the updates
    };

    Muon() = default;
    // slices: of make_update_slices(). dtype: of u.
    Muon(const ParamTable& table, const Sharding& sharding, const std::vector<UpdateSlice>& slices, const ParamArena& m,
         const HyperparametersByGroup& rates, DType dtype, const MuonOptions& options);
    const std::vector<Round>& all_rounds() const { return rounds; }

    // Updates the matrices. workspace: MuonWorkspace::bytes() of U8. scalars: of the step (kernels/global_norm.h).
    void update(const Context& ctx, const std::vector<UpdateSlice>& slices, Tensor workspace, Tensor scalars);
    // Runs Newton-Schulz on every shape of batch that a rank of the run has, so that its GEMM algorithms are chosen.
    void warm_up(const Context& ctx, Tensor workspace) const;

  private:
    struct Buffers {  // of one of the rounds under way
        Tensor updates, matrices;
        Event ready, collected, orthogonal, distributed;
        Tensor updates_of(const Transfer& t) const;
        Tensor matrix_of(const Transfer& t) const;
    };
    void set_buffers(Tensor workspace);
    void momentum(const Context& ctx, const std::vector<UpdateSlice>& slices, const Round& round, Buffers& b,
                  Tensor scalars) const;
    void collect(const Context& ctx, const Round& round, Buffers& b) const;
    void orthogonalise(const Context& ctx, const Round& round, Buffers& b) const;
    void distribute(const Context& ctx, const Round& round, Buffers& b) const;
    void apply(const Context& ctx, const std::vector<UpdateSlice>& slices, const Round& round, Buffers& b,
               Tensor scalars) const;

    Sharding sharding;
    MuonOptions options;
    DType dtype = DType::F32;
    MuonWorkspace sizes;
    std::vector<Round> rounds;
    std::vector<Batch> all_batches;  // of all ranks, each shape once; begin is 0
    std::vector<Buffers> buffers;
    Tensor scratch;
};

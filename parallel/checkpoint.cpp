#include "parallel/checkpoint.h"

#include <memory>

#include "runtime/files/files.h"

Ranks ranks_of(const Context& ctx) {
    return {ctx.rank, ctx.world, [&ctx] { ctx.comm->barrier(); },
            [&ctx](void* all, const void* own, size_t bytes) { ctx.comm->all_gather_host(all, own, bytes); }};
}

void write_checkpoint(const Context& ctx, const std::string& path, const ParamTable& table,
                      const TrainingArenas& arenas, const SafetensorsWriter::Metadata& metadata,
                      const std::function<void(const std::string&)>& small_files) {
    std::unique_ptr<AtomicDirectory> directory;  // on rank 0; all ranks write into it
    if (ctx.rank == 0) directory = std::make_unique<AtomicDirectory>(path);
    std::string temporary = directory ? directory->path() : "";
    ctx.comm->broadcast_host(temporary, 0);
    const Ranks ranks = ranks_of(ctx);
    const std::string state = join_path(temporary, "state.safetensors");
    save_state(state, table, arenas, ranks, metadata);
    ctx.comm->barrier();
    // Read back from the state file, because with ZeRO no rank holds whole tensors.
    save_weights(join_path(temporary, "model.safetensors"), table, state_weights(state), DType::F32, ranks);
    ctx.comm->barrier();
    if (ctx.rank > 0) return;
    small_files(temporary);
    directory->commit();
}

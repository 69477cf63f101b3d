#include "parallel/checkpoint.h"

#include <iostream>

#include "runtime/files/files.h"

Ranks ranks_of(const Context& ctx) {
    return {ctx.rank, ctx.world, [&ctx] { ctx.comm->barrier(); },
            [&ctx](void* all, const void* own, size_t bytes) { ctx.comm->all_gather_host(all, own, bytes); }};
}

void claim_run_directory(const Context& ctx, const std::string& directory, std::unique_ptr<DirectoryLock>& lock) {
    std::string error;
    try {
        if (ctx.rank == 0 && !lock && is_directory(directory)) {
            lock = std::make_unique<DirectoryLock>(directory, "--out");
            if (!lock->locked())
                std::cerr << "--out " << directory << ": this file system has no locks; start no other run there\n";
            remove_leftovers(directory);
        }
    } catch (const Error& e) {
        error = e.what();
    }
    ctx.comm->broadcast_host(error, 0);
    if (!error.empty()) throw Error(error);
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

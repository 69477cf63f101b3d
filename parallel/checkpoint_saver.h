// Writes the checkpoints of a run with all its ranks (runtime/files/training_state.h describes the files).
//
// A save copies each rank's part of the state to pinned host memory; a thread of low priority then writes it, and the
// training goes on. Ranks agree in poll(), at a step's end, that all have written; then rank 0's thread completes the
// files and gives the checkpoint its name. The threads call no collective. Until then the previous checkpoint is the
// newest one, whatever happens.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "parallel/snapshot.h"
#include "runtime/context.h"
#include "runtime/files/checkpoint_directory.h"
#include "runtime/files/lock.h"
#include "runtime/signals.h"

// The ranks of a run, for load_state().
Ranks ranks_of(const Context& ctx);

// Rank 0 locks the run directory, if it exists and `lock` does not hold it yet, and removes what other runs left in
// it. If that fails, all ranks throw its error.
void claim_run_directory(const Context& ctx, const std::string& directory, std::unique_ptr<DirectoryLock>& lock);

struct SaveOptions {
    std::string run_dir;
    int64_t keep = 1;                 // the newest ones that stay; the best one stays too
    DType export_dtype = DType::F32;  // of model.safetensors
    bool stop_on_error = false;       // else note() tells of a save that fails, and the run goes on
};

class CheckpointSaver {
  public:
    // The table must be laid out for ctx.world ranks.
    CheckpointSaver(const Context& ctx, const ParamTable& table, SaveOptions options);
    // Waits for the writer. What one rank alone has written gets its name; several ranks cannot agree any more.
    ~CheckpointSaver();
    CheckpointSaver(const CheckpointSaver&) = delete;
    CheckpointSaver& operator=(const CheckpointSaver&) = delete;

    // The memory that is missing on a host that must have `bytes` for each of its ranks, snapshot included; "" if none
    // is. Collective.
    std::string lacks_memory(int64_t bytes) const;
    // Allocates the snapshot on all ranks, or on none. Without it save() writes before it returns. The first call
    // starts another thread, the second one waits for it and returns what is missing, "" if nothing is. Collective.
    void start_allocation(Snapshot snapshot);
    std::string finish_allocation();

    // The content of a checkpoint besides its tensors.
    struct Contents {
        int64_t step;
        SafetensorsWriter::Metadata metadata;                           // of both files of tensors
        std::function<void(const std::string& directory)> small_files;  // called on rank 0, perhaps by another thread
    };
    // Saves "step_<step>". Queued work must be done. Waits for the previous save first. last: the run ends with this
    // save, so it writes before it returns and throws an error. Collective, like all functions that follow.
    void save(Contents contents, const TrainingArenas& arenas, bool last);
    void poll();                                 // publishes what is written; call it at every step's end
    void wait();                                 // until nothing is being written; note() tells that it waits
    bool failed() const { return last_failed; }  // whether the last save that ended failed

    // Called with a line for the user, on all ranks alike.
    std::function<void(const std::string&)> note = [](const std::string&) {};

  private:
    enum class State : uint8_t { Idle, Writing, Publishing };
    std::string prepare(const TrainingArenas& arenas, std::string& temporary);
    void start(const std::function<void()>& task);
    bool all_ready(bool wait);
    std::string agreed_error();
    void advance(bool wait);
    void publish(const StateWriter::Part& parts);
    void end(const std::string& error);
    std::string path() const;

    const Context& ctx;
    const ParamTable& table;
    const SaveOptions options;
    std::optional<Snapshot> snapshot;
    std::future<void> allocation;  // valid between the two calls
    Contents contents;
    std::unique_ptr<AtomicDirectory> directory;  // on rank 0; all ranks write into it
    std::unique_ptr<StateWriter> writer;
    std::optional<HoldExit> hold;
    std::future<void> work;  // valid while this rank writes or publishes
    State state = State::Idle;
    bool last = false, background = false, last_failed = false;
    std::string kept_for;  // on rank 0: why older checkpoints were not removed
};

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
#include "runtime/files/checkpoint.h"
#include "runtime/files/lock.h"
#include "runtime/signals.h"

// The ranks of a run, for load_state().
Ranks ranks_of(const Context& ctx);

// Rank 0 locks the run directory, if it exists and `lock` does not hold it yet, and removes what dead processes left in
// it. If that fails, all ranks throw its error.
void claim_run_directory(const Context& ctx, const std::string& directory, std::unique_ptr<DirectoryLock>& lock);

struct SaveOptions {
    std::string run_dir;
    int64_t keep = 1;                 // the newest ones that stay; the best one stays too
    DType export_dtype = DType::F32;  // of model.safetensors
    bool stop_on_error = false;       // else a save that fails is told and the run goes on
};

class CheckpointSaver {
  public:
    // The table must be laid out for ctx.world ranks.
    CheckpointSaver(const Context& ctx, const ParamTable& table, SaveOptions options);
    // Waits for the writer. What one rank alone has written gets its name; several ranks cannot agree any more.
    ~CheckpointSaver();
    CheckpointSaver(const CheckpointSaver&) = delete;
    CheckpointSaver& operator=(const CheckpointSaver&) = delete;

    // Whether all hosts have `bytes` for each of their ranks, snapshot included: "" or what is missing. Collective.
    std::string lacks_memory(int64_t bytes) const;
    // Takes a snapshot's memory on all ranks, or on none; without, save() writes before it returns. Returns what is
    // missing, or "". Collective.
    std::string allocate(Snapshot snapshot);

    // What a checkpoint holds beside its tensors.
    struct Contents {
        int64_t step;
        SafetensorsWriter::Metadata metadata;                           // of both files of tensors
        std::function<void(const std::string& directory)> small_files;  // called on rank 0, perhaps by another thread
    };
    // Saves "step_<step>"; queued work must be done. Waits for the last save first. last: nothing follows that training
    // could go on with, so it writes before it returns, and an error is thrown. Collective, like all that follow.
    void save(Contents contents, const TrainingArenas& arenas, bool last);
    void poll();                                 // publishes what is written; call it at every step's end
    void wait();                                 // until nothing is being written; says so
    bool failed() const { return last_failed; }  // the last save that ended

    std::function<void(const std::string&)> note = [](const std::string&) {};  // told what happens, on all ranks alike

  private:
    enum class Phase : uint8_t { Idle, Writing, Publishing };
    std::string prepare(const TrainingArenas& arenas, std::string& temporary);
    void start(std::function<void()> task);
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
    Contents contents;
    std::unique_ptr<AtomicDirectory> directory;  // on rank 0; all ranks write into it
    std::unique_ptr<StateWriter> writer;
    std::optional<HoldExit> hold;
    std::future<void> work;  // valid while this rank writes or publishes
    Phase phase = Phase::Idle;
    bool last = false, background = false, last_failed = false;
};

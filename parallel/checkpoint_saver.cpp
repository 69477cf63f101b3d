#include "parallel/checkpoint_saver.h"

#include <chrono>
#include <cstdio>
#include <iostream>
#include <system_error>
#include <thread>
#include <utility>

#include "runtime/files/files.h"
#include "runtime/files/log.h"
#include "runtime/host_memory.h"
#include "runtime/limits.h"

Ranks ranks_of(const Context& ctx) {
    return {ctx.rank, ctx.world,
            [&ctx](void* all, const void* own, size_t bytes) { ctx.comm->all_gather_host(all, own, bytes); }};
}

void claim_run_directory(const Context& ctx, const std::string& directory, std::unique_ptr<DirectoryLock>& lock) {
    std::string error;
    try {
        if (ctx.rank == 0 && !lock && is_directory(directory)) {
            lock = std::make_unique<DirectoryLock>(directory, "--out");
            if (!lock->locked())
                std::cerr << "--out " << directory << ": this file system has no locks; start no other run there\n";
            remove_leftovers(directory, lock->locked());
        }
    } catch (const Error& e) {
        error = e.what();
    }
    ctx.comm->broadcast_host(error, 0);
    if (!error.empty()) throw Error(error);
}

CheckpointSaver::CheckpointSaver(const Context& context, const ParamTable& params, SaveOptions o)
    : ctx(context), table(params), options(std::move(o)) {}

CheckpointSaver::~CheckpointSaver() {
    if (!work.valid() || !background) return;
    if (ctx.rank == 0) std::cerr << "waiting for " << path() << " to be written\n";
    work.wait();
}

std::string CheckpointSaver::path() const {
    char name[32];
    std::snprintf(name, sizeof name, "step_%08lld", static_cast<long long>(contents.step));
    return join_path(options.run_dir, name);
}

std::string CheckpointSaver::lacks_memory(int64_t bytes) const {
    return lacks_host_memory(hosts_of_ranks(ctx), ctx.comm->all_gather_host(bytes));
}

void CheckpointSaver::start_allocation(Snapshot wanted) {
    snapshot.emplace(std::move(wanted));
    const auto allocate = [this, device = device_in_use()] {
        use_device(device);
        snapshot->allocate();
    };
    try {
        allocation = std::async(std::launch::async, allocate);
    } catch (const std::system_error&) {  // no thread: finish_allocation() does it
        allocation = std::async(std::launch::deferred, allocate);
    }
}

std::string CheckpointSaver::finish_allocation() {
    std::string missing;
    try {
        allocation.get();
    } catch (const DeviceError& e) {
        missing = e.what();
    }
    for (const char failed : ctx.comm->all_gather_host(char(!missing.empty())))
        if (failed && missing.empty()) missing = "another rank's host has too little memory";
    if (!missing.empty()) snapshot.reset();
    return missing;
}

// Makes the directory, on rank 0. Returns the error.
std::string CheckpointSaver::prepare(const TrainingArenas& arenas, std::string& temporary) {
    std::string error;
    try {
        if (ctx.rank == 0) {
            const int64_t needed = checkpoint_bytes(table, arenas, options.export_dtype),
                          free = free_disk_bytes(options.run_dir);
            require(needed <= free, path(), ": a checkpoint takes ", human_bytes(needed), " and ", human_bytes(free),
                    " of the disk are free; free some disk space");
            directory = std::make_unique<AtomicDirectory>(path());
            temporary = directory->path();
        }
    } catch (const std::exception& e) {
        error = e.what();
    }
    ctx.comm->broadcast_host(error, 0);
    ctx.comm->broadcast_host(temporary, 0);
    return error;
}

void CheckpointSaver::save(Contents next, const TrainingArenas& arenas, bool is_last) {
    wait();
    contents = std::move(next);
    last = is_last;
    background = snapshot && !last;
    hold.emplace();
    std::string temporary;
    const std::string error = prepare(arenas, temporary);
    if (!error.empty()) return end(error);
    if (background) snapshot->copy(arenas, ctx.stream);
    state = State::Writing;
    start([this, temporary, arenas] {
        struct Release {  // one rank needs no other for the end of the save
            CheckpointSaver& saver;
            ~Release() {
                if (saver.ctx.world == 1) saver.hold.reset();
            }
        } release{*this};
        writer = std::make_unique<StateWriter>(temporary, table, background ? snapshot->arenas() : arenas,
                                               options.export_dtype, contents.metadata, ranks_of(ctx));
        writer->write();
        if (ctx.world == 1) publish(writer->part());
    });
    if (!background) advance(true);
}

// In the background: in a thread that leaves the processors to the training, or at once where no thread can be started.
// Else: when all_ready() asks.
void CheckpointSaver::start(const std::function<void()>& task) {
    if (background) {
        try {
            work = std::async(std::launch::async, [task] {
                lower_thread_priority();
                task();
            });
            return;
        } catch (const std::system_error& e) {
            note(str("training waits while ", path(), " is written: cannot start a thread: ", e.code().message()));
        }
    }
    work = std::async(std::launch::deferred, task);
    if (background) work.wait();
}

void CheckpointSaver::poll() {
    advance(false);
}

void CheckpointSaver::wait() {
    if (state == State::Idle) return;
    if (work.valid() && work.wait_for(std::chrono::seconds(0)) == std::future_status::timeout)
        note(str("waiting for ", path(), " to be written"));
    advance(true);
}

// Whether all ranks have done their part of the state.
bool CheckpointSaver::all_ready(bool wait_for_them) {
    if (work.valid() && (!background || (wait_for_them && ctx.world == 1))) work.wait();
    for (;;) {
        const char ready = !work.valid() || work.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
        bool all = true;
        for (const char other : ctx.comm->all_gather_host(ready)) all &= other != 0;
        if (all || !wait_for_them) return all;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

// The error of the first rank that has one, on all ranks.
std::string CheckpointSaver::agreed_error() {
    std::string error;
    try {
        if (work.valid()) work.get();
    } catch (const std::exception& e) {
        error = e.what();
    }
    const std::vector<char> failed = ctx.comm->all_gather_host(char(!error.empty()));
    for (int64_t rank = 0; rank < ctx.world; rank++) {
        if (!failed[size_t(rank)]) continue;
        ctx.comm->broadcast_host(error, rank);
        break;
    }
    return error;
}

void CheckpointSaver::advance(bool wait_for_them) {
    while (state != State::Idle && all_ready(wait_for_them)) {
        const std::string error = agreed_error();
        if (state == State::Publishing || ctx.world == 1 || !error.empty()) return end(error);
        const StateWriter::Part own = writer->part();
        StateWriter::Part all(own.size() * size_t(ctx.world));
        ctx.comm->all_gather_host(all.data(), own.data(), own.size() * sizeof own[0]);
        state = State::Publishing;
        if (ctx.rank == 0) start([this, all] { publish(all); });
    }
}

void CheckpointSaver::publish(const StateWriter::Part& parts) {
    writer->finish(parts);
    contents.small_files(directory->path());
    directory->commit();
    std::string best;
    try {
        best = best_checkpoint(options.run_dir);
    } catch (const SystemError& e) {  // the one that cannot be read may be the best
        kept_for = e.what();
        return;
    }
    remove_old_checkpoints(options.run_dir, options.keep, best);
}

void CheckpointSaver::end(const std::string& error) {
    writer.reset();
    directory.reset();
    hold.reset();
    state = State::Idle;
    last_failed = !error.empty();
    if (!last_failed) {
        note("saved " + path());
        if (!kept_for.empty()) note("older checkpoints stay: " + std::exchange(kept_for, ""));
        return;
    }
    if (last || options.stop_on_error) throw Error(error);
    note(str("the checkpoint of step ", contents.step, " failed: ", error, "; the run goes on"));
}

// `--gpus N`: the parent process starts and watches one process per GPU. It does not touch a GPU itself.
#pragma once

#include <string>
#include <vector>

// The variables that the parent sets for its ranks (runtime/communication/launcher.cpp reads them).
constexpr const char* LOCAL_RANKS_RANK = "TRAIN_GPT_RANK";
constexpr const char* LOCAL_RANKS_SIZE = "TRAIN_GPT_WORLD_SIZE";
constexpr const char* LOCAL_RANKS_ADDRESS = "TRAIN_GPT_RENDEZVOUS";    // HOST:PORT
constexpr const char* LOCAL_RANKS_SOCKET = "TRAIN_GPT_LISTEN_SOCKET";  // rank 0: the socket that listens there
constexpr const char* LOCAL_RANKS_PARENT = "TRAIN_GPT_PARENT";         // the parent's process id

// Runs command (a program's path and its arguments) once per rank and waits for all of them.
// - Rank 0 inherits this process's stdout and stderr. The stdout of the other ranks is dropped. Their stderr is printed
//   line by line as "[rank 3] line". A line that equals the last one printed, of another rank, is dropped, since ranks
//   often fail alike.
// - stdin is empty. Each SIGINT, SIGTERM and SIGHUP is forwarded to every rank. A terminal's Ctrl-C reaches the ranks
//   only through the parent, so once.
// - When a rank fails, the parent kills the others. When the parent dies, the ranks die.
// Returns the exit status of the first rank that failed (128 + the signal number for a signal), or 0.
// Throws Error if a process or a socket cannot be created.
int run_local_ranks(const std::vector<std::string>& command, int ranks);

// In a rank: makes this process die with its parent. No effect in other processes.
void follow_parent();

// `--gpus N`: one process per GPU on this machine, started and watched by a parent that touches no GPU itself.
#pragma once

#include <string>
#include <vector>

// How the parent tells its ranks who they are (runtime/communication/launch.cpp reads it).
constexpr const char* LOCAL_RANKS_RANK = "TRAIN_GPT_RANK";
constexpr const char* LOCAL_RANKS_SIZE = "TRAIN_GPT_WORLD_SIZE";
constexpr const char* LOCAL_RANKS_PLACE = "TRAIN_GPT_RENDEZVOUS";      // HOST:PORT
constexpr const char* LOCAL_RANKS_SOCKET = "TRAIN_GPT_LISTEN_SOCKET";  // rank 0: the socket that listens there
constexpr const char* LOCAL_RANKS_PARENT = "TRAIN_GPT_PARENT";         // its process id

// Runs command (a program's path and its arguments) once per rank and waits for all of them.
// - Rank 0 keeps this process's stdout and stderr. The others' stdout is dropped, their stderr appears line by line on
//   this one's as "[rank 3] line", a line that another of them has had already once only: ranks often fail alike.
// - stdin is empty. SIGINT and SIGTERM are passed on to every rank, each as often as it comes; a terminal's Ctrl-C
//   reaches the ranks through the parent alone, so once.
// - When a rank fails, the others are killed. When the parent dies, they die.
// Returns the exit status of the first that failed (128 + its number for a signal), or 0.
// Throws Error when a process or a socket can't be had.
int run_local_ranks(const std::vector<std::string>& command, int ranks);

// In a rank: dies with its parent. Nothing in other processes.
void follow_parent();

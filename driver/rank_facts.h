// What must be equal on all ranks of a run: ranks that differ would write weights of several runs into one file.
#pragma once

#include <map>
#include <string>

#include "driver/train_setup.h"
#include "runtime/context.h"

// What a rank has, by names that a user knows: "--lr" and "0.001".
using RankFacts = std::map<std::string, std::string>;

// Collective. If a rank has a fact otherwise than rank 0, all ranks throw an Error that names it, the rank and both
// values. Only digests are exchanged where all are equal.
void check_equal_on_ranks(const Context& ctx, const RankFacts& facts);

// The program and the options.
RankFacts facts_of(const TrainOptions& options);
// The resolved options, the files of data and model (sizes, and checksums of their heads), the point of resuming.
RankFacts facts_of(const TrainSetup& setup);

// SPDX-License-Identifier: Apache-2.0
// State of the double of NCCL. Each call is a part. The parts of one group, or one call, form a
// batch, which is one piece of work of a stream. A part moves its bytes when the parts of the other
// ranks reach the front of their streams.

#pragma once

#include <nccl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "device/double/world.h"

// The real one is opaque.
struct ncclComm {
  std::string clique;
  int rank = 0;
  int size = 0;
  int process = 0;
  int device = 0;
  unsigned polls = 0;  // answers that are still "in progress"
  bool finalizing = false;
  ncclResult_t error = ncclSuccess;
  std::uint64_t given = 0;                                                // batches
  std::vector<std::shared_ptr<shardwright::cuda_double::Batch>> waiting;  // not on a stream yet
  std::vector<std::shared_ptr<shardwright::cuda_double::Batch>> batches;  // all of them
};

namespace shardwright::cuda_double {

enum class What { kAllGather, kBroadcast };

struct Part {
  What what = What::kAllGather;
  const void* from = nullptr;
  void* to = nullptr;
  std::uint64_t bytes = 0;  // of one rank
  int root = 0;             // of a broadcast
  bool done = false;
};

struct Clique {
  int size = 0;
  std::vector<ncclComm*> members;  // by rank, nullptr for a rank that has not joined
  int finalizing = 0;
  bool formed = false;  // all members have joined at least once
  bool broken = false;  // a member left before it finished
};

std::map<std::string, Clique>& Cliques();

std::set<ncclComm*>& Comms();

struct Batch {
  ncclComm* comm = nullptr;
  int process = 0;
  std::shared_ptr<Stream> stream;
  std::optional<std::uint64_t> place;  // in its stream, once it is there
  std::vector<Part> parts;
  bool aborted = false;
};

// Returns the number of bytes that a part writes on a communicator of `size` ranks.
std::uint64_t WrittenBytes(const Part& part, int size);

// Breaks a clique. Its members except `but` learn of it.
void BreakClique(const std::string& name, const ncclComm* but);

}  // namespace shardwright::cuda_double

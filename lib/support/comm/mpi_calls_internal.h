// SPDX-License-Identifier: Apache-2.0
// What lib/support/comm calls of MPI, with the same types for every MPI.
// The handles and constants of mpi.h differ between Open MPI and MPICH, and so do the names of
// their libraries. So no command links MPI: mpi_plugin.cc is compiled once for each mpi.h that was
// found, and the one that fits is opened under a launcher (mpi_library_internal.h). A plugin holds
// these calls and nothing else; docs/decisions/0032-mpi-is-a-plugin.md says why.

#pragma once

#include <cstddef>
#include <cstdint>

namespace shardwright::comm::internal {

/// Part of a message between two ranks: bytes to send to the peer, or room for what it sends.
struct MpiPart {
  void* bytes = nullptr;  // only read where sends
  int count = 0;          // bytes
  int peer = 0;           // rank
  bool sends = false;
};

/// Counts up with every change of MpiCalls, so that a plugin of another release is not taken.
inline constexpr std::uint32_t kMpiCallsForm = 1;

/// The calls of one plugin. Those that return an int return MPI_SUCCESS (0) or a code for
/// `describe`. All but `describe`, `library`, `started` and `start` need a start before, and all
/// but these and `transfer` are collective.
struct MpiCalls {
  std::uint32_t form = kMpiCallsForm;

  /// Writes the name and version of the library into `text`, the first line of them.
  void (*library)(char* text, std::size_t text_bytes) = nullptr;

  /// Writes what a code means into `text`. \returns whether we called MPI wrongly
  bool (*describe)(int code, char* text, std::size_t text_bytes) = nullptr;

  /// Whether MPI was started in this process, by anybody.
  int (*started)(bool* yes) = nullptr;

  /// Starts MPI for calls from one thread, which `funneled` tells of, and opens a channel of our
  /// own, where errors are returned. Where that fails, MPI is ended again.
  int (*start)(bool* funneled, int* rank, int* size) = nullptr;

  /// Closes the channel and ends MPI.
  void (*stop)() = nullptr;

  int (*barrier)() = nullptr;
  int (*bcast)(void* bytes, int count, int root) = nullptr;
  int (*all_gather)(std::uint64_t mine, std::uint64_t* all) = nullptr;
  int (*all_to_all)(const std::uint64_t* mine, std::uint64_t* all) = nullptr;
  int (*all_max)(std::uint64_t mine, std::uint64_t* all) = nullptr;
  int (*all_sum)(std::uint64_t mine, std::uint64_t* all) = nullptr;
  int (*all_or)(std::uint64_t mine, std::uint64_t* all) = nullptr;

  /// Sends and receives all parts at once; returns when all are done. Parts between two ranks
  /// arrive in the order in which they were given.
  int (*transfer)(const MpiPart* parts, std::size_t count) = nullptr;
};

/// What every plugin defines under this name, kMpiPluginSymbol.
using MpiPlugin = const MpiCalls*();
inline constexpr const char* kMpiPluginSymbol = "ShardwrightMpiCalls";

}  // namespace shardwright::comm::internal

// SPDX-License-Identifier: Apache-2.0
// The MPI functions that lib/support/comm calls, with the same types for every MPI.
// The handles, constants and library names of Open MPI and MPICH differ, so no command links
// MPI. mpi_plugin.cc is compiled once for each mpi.h that the build finds. Under a launcher
// the program opens the matching plugin (mpi_library_internal.h). A plugin has these calls and
// nothing else. For the reasons see docs/decisions/0032-mpi-is-a-plugin.md.

#pragma once

#include <cstddef>
#include <cstdint>

namespace shardwright::comm::internal {

/// Part of a message between two ranks: bytes to send to the peer, or the buffer to receive into.
struct MpiPart {
  void* bytes = nullptr;  // read only if sends
  int count = 0;          // bytes
  int peer = 0;           // rank
  bool sends = false;
};

/// Version of MpiCalls, increased with every change, so that plugins of other releases fail.
inline constexpr std::uint32_t kMpiCallsForm = 1;

/// Functions of one plugin. Those that return an int return MPI_SUCCESS (0) or a code for
/// `describe`. Only `describe`, `library`, `started` and `start` may be called before MPI is
/// started. All functions except these four and `transfer` are collective.
struct MpiCalls {
  std::uint32_t form = kMpiCallsForm;

  /// Writes the first line of the library's name and version into `text`.
  void (*library)(char* text, std::size_t text_bytes) = nullptr;

  /// Writes the meaning of a code into `text`. \returns true if the code means invalid arguments
  bool (*describe)(int code, char* text, std::size_t text_bytes) = nullptr;

  /// Sets `yes` if any code in this process has started MPI.
  int (*started)(bool* yes) = nullptr;

  /// Starts MPI for calls from one thread, sets `funneled` if MPI supports that, and duplicates
  /// the world communicator with errors returned. If that fails, it finalizes MPI.
  int (*start)(bool* funneled, int* rank, int* size) = nullptr;

  /// Frees the communicator and finalizes MPI.
  void (*stop)() = nullptr;

  int (*barrier)() = nullptr;
  int (*bcast)(void* bytes, int count, int root) = nullptr;
  int (*all_gather)(std::uint64_t mine, std::uint64_t* all) = nullptr;
  int (*all_to_all)(const std::uint64_t* mine, std::uint64_t* all) = nullptr;
  int (*all_max)(std::uint64_t mine, std::uint64_t* all) = nullptr;
  int (*all_sum)(std::uint64_t mine, std::uint64_t* all) = nullptr;
  int (*all_or)(std::uint64_t mine, std::uint64_t* all) = nullptr;

  /// Sends and receives all parts at once, and returns when all are done. Parts between
  /// two ranks arrive in the order of `parts`.
  int (*transfer)(const MpiPart* parts, std::size_t count) = nullptr;
};

/// Function that every plugin exports under the name kMpiPluginSymbol.
using MpiPlugin = const MpiCalls*();
inline constexpr const char* kMpiPluginSymbol = "ShardwrightMpiCalls";

}  // namespace shardwright::comm::internal

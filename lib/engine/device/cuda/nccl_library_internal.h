// SPDX-License-Identifier: Apache-2.0
// Opens the NCCL library when a group has several ranks.

#pragma once

#include <nccl.h>

#include <string>

#include "support/base/result.h"

namespace shardwright::device::cuda {

/// The NCCL functions that this module calls.
struct Nccl {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&ncclCommGetAsyncError) comm_async_error = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
};

/// Opens libnccl.so.2, or the library in SHARDWRIGHT_NCCL, and keeps it open. Local.
/// \error kNotFound  NCCL is missing, lacks a required function, or is older than 2.18
Result<Nccl> OpenNccl();

/// Returns kIo "<what>: <error text>: <last NCCL error>" for errors; ncclInProgress is a success.
Status Check(const Nccl& nccl, ncclResult_t code, ncclComm_t comm, const std::string& what);

}  // namespace shardwright::device::cuda

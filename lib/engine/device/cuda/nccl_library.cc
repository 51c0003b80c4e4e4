// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstdlib>
#include <type_traits>

#include "engine/device/cuda/nccl_library_internal.h"
#include "support/base/plugin.h"

namespace shardwright::device::cuda {

namespace {

constexpr const char* kSetting = "SHARDWRIGHT_NCCL";
constexpr int kOldest = NCCL_VERSION(2, 18, 0);

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Result<Nccl> OpenNccl() {
  const char* const asked = std::getenv(kSetting);
  const std::string file = asked == nullptr || *asked == '\0' ? "libnccl.so.2" : asked;
  // Never closed, because NCCL runs threads of its own.
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Fail(Errc::kNotFound, "several ranks with CUDA require NCCL (set ", kSetting,
                " to its library): ", WhyNotOpened());
  }
  Nccl nccl;
  std::string missing;
  const auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, name));
    if (call == nullptr && missing.empty()) missing = name;
  };
  find(nccl.get_version, "ncclGetVersion");
  find(nccl.get_unique_id, "ncclGetUniqueId");
  find(nccl.comm_init, "ncclCommInitRankConfig");
  find(nccl.comm_async_error, "ncclCommGetAsyncError");
  find(nccl.comm_finalize, "ncclCommFinalize");
  find(nccl.comm_destroy, "ncclCommDestroy");
  find(nccl.comm_abort, "ncclCommAbort");
  find(nccl.group_start, "ncclGroupStart");
  find(nccl.group_end, "ncclGroupEnd");
  find(nccl.all_gather, "ncclAllGather");
  find(nccl.broadcast, "ncclBroadcast");
  find(nccl.error_string, "ncclGetErrorString");
  find(nccl.last_error, "ncclGetLastError");
  if (!missing.empty()) return Fail(Errc::kNotFound, file, ": has no function ", missing);
  int version = 0;
  SW_TRY(Check(nccl, nccl.get_version(&version), nullptr, "cannot query the version of NCCL"));
  if (version < kOldest) {
    return Fail(Errc::kNotFound, file, ": NCCL ", VersionText(kOldest),
                " or newer expected, found ", VersionText(version));
  }
  return nccl;
}

Status Check(const Nccl& nccl, ncclResult_t code, ncclComm_t comm, const std::string& what) {
  if (code == ncclSuccess || code == ncclInProgress) return {};
  std::string text = what + ": NCCL: " + nccl.error_string(code);
  const char* const words = nccl.last_error(comm);
  if (words != nullptr && *words != '\0') text += ": " + std::string(words);
  return Fail(Errc::kIo, text);
}

}  // namespace shardwright::device::cuda

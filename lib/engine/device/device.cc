// SPDX-License-Identifier: Apache-2.0
#include "engine/device/device.h"

#include "engine/device/cuda_plugin.h"
#include "engine/device/host.h"

namespace shardwright::device {

std::string_view Name(Kind kind) { return kind == Kind::kHost ? "host" : "cuda"; }

Result<Kind> ParseKind(std::string_view name) {
  for (const Kind kind : {Kind::kHost, Kind::kCuda}) {
    if (name == Name(kind)) return kind;
  }
  return Fail(Errc::kUsage, "device \"", name, "\": host or cuda expected");
}

Result<std::unique_ptr<Device>> OpenDevice(Kind kind, comm::Comm& comm,
                                           const DeviceOptions& options) {
  if (kind == Kind::kHost) return OpenHostDevice(comm, options);
  return OpenCudaDevice(comm, options);
}

}  // namespace shardwright::device

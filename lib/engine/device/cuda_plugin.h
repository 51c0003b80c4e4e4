// SPDX-License-Identifier: Apache-2.0
// Loads the CUDA backend, the plugin shardwright_cuda.so, only when
// a caller requests it: docs/decisions/0036-cuda-is-a-plugin.md.

#pragma once

#include <memory>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device {

/// Implements OpenDevice(Kind::kCuda, ...): loads the plugin, which stays loaded, and opens
/// a device. SHARDWRIGHT_CUDA names the plugin; if it is unset, FindPlugin searches for it.
/// \error kNotFound  no plugin, a plugin of another release, no
///        driver, or no device; kUsage  no device with that ordinal
/// Collective.
Result<std::unique_ptr<Device>> OpenCudaDevice(comm::Comm& comm, const DeviceOptions& options);

/// The symbol kCudaPluginSymbol of the plugin. It uses the types of device.h, so plugins
/// of other builds are rejected: `form` increases with every change of device.h or comm.h.
struct CudaPlugin {
  unsigned form = 0;
  const char* version = nullptr;  ///< kVersion of the plugin's build
  Result<std::unique_ptr<Device>> (*open)(comm::Comm& comm, const DeviceOptions& options) = nullptr;
};
inline constexpr unsigned kCudaPluginForm = 2;
inline constexpr const char* kCudaPluginSymbol = "shardwright_cuda_plugin";

}  // namespace shardwright::device

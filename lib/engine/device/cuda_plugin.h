// SPDX-License-Identifier: Apache-2.0
// The cuda twin lies in a plugin, shardwright_cuda.so, that is opened only when it is asked for:
// docs/decisions/0036-cuda-is-a-plugin.md.

#pragma once

#include <memory>

#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device {

/// OpenDevice(Kind::kCuda, ...): opens the plugin, which stays open, and a device of it. The plugin
/// lies where FindPlugin looks, or SHARDWRIGHT_CUDA names it.
/// \error kNotFound  no plugin, one of another release, no driver, no device; kUsage  no device of
///        that ordinal
/// Collective.
Result<std::unique_ptr<Device>> OpenCudaDevice(comm::Comm& comm, const DeviceOptions& options);

/// What the plugin defines under the name kCudaPluginSymbol. Its objects are those of device.h, so
/// a plugin of another build is not taken: `form` counts up with each change of device.h or comm.h.
struct CudaPlugin {
  unsigned form = 0;
  const char* version = nullptr;  ///< kVersion of its build
  Result<std::unique_ptr<Device>> (*open)(comm::Comm& comm, const DeviceOptions& options) = nullptr;
};
inline constexpr unsigned kCudaPluginForm = 1;
inline constexpr const char* kCudaPluginSymbol = "shardwright_cuda_plugin";

}  // namespace shardwright::device

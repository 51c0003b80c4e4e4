// SPDX-License-Identifier: Apache-2.0
#include "engine/device/cuda_plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "support/base/plugin.h"
#include "support/base/version.h"

namespace shardwright::device {

namespace {

Result<const CudaPlugin*> OpenPlugin() {
  const char* const asked = std::getenv("SHARDWRIGHT_CUDA");
  std::string path = asked == nullptr ? "" : asked;
  if (path.empty()) {
    auto found = FindPlugin("shardwright_cuda.so");
    if (!found) return Within("built or installed without CUDA support", found.error());
    path = *std::move(found);
  }
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Fail(Errc::kNotFound, WhyNotOpened());
  const auto* const plugin = static_cast<const CudaPlugin*>(dlsym(library, kCudaPluginSymbol));
  if (plugin == nullptr) return Fail(Errc::kNotFound, path, ": not a Shardwright plugin");
  if (plugin->form != kCudaPluginForm || std::string(plugin->version) != kVersion) {
    return Fail(Errc::kNotFound, path, ": belongs to another release of Shardwright: ", kVersion,
                " expected, found ", plugin->version);
  }
  return plugin;
}

}  // namespace

Result<std::unique_ptr<Device>> OpenCudaDevice(comm::Comm& comm, const DeviceOptions& options) {
  SW_TRY_ASSIGN(const CudaPlugin* const plugin, comm.Agree(OpenPlugin()));
  return plugin->open(comm, options);
}

}  // namespace shardwright::device

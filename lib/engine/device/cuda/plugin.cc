// SPDX-License-Identifier: Apache-2.0
// Defines the symbol that programs look up in the plugin: see engine/device/cuda_plugin.h.

#include "engine/device/cuda/open.h"
#include "engine/device/cuda_plugin.h"
#include "support/base/version.h"

extern "C" __attribute__((visibility("default")))
const shardwright::device::CudaPlugin shardwright_cuda_plugin;  // NOLINT: looked up by name
const shardwright::device::CudaPlugin shardwright_cuda_plugin = {
    .form = shardwright::device::kCudaPluginForm,
    .version = shardwright::kVersion,
    .open = shardwright::device::cuda::Open,
};

// What a program opens: see device/cuda_plugin.h.

#include "base/version.h"
#include "device/cuda/open.h"
#include "device/cuda_plugin.h"

extern "C" __attribute__((visibility("default")))
const shardwright::device::CudaPlugin shardwright_cuda_plugin;  // NOLINT: what is looked up
const shardwright::device::CudaPlugin shardwright_cuda_plugin = {
    .form = shardwright::device::kCudaPluginForm,
    .version = shardwright::kVersion,
    .open = shardwright::device::cuda::Open,
};

// SPDX-License-Identifier: Apache-2.0
// lib/engine/device/kernels: device code for bytes and elements, written once for CPU and GPU.
// A function does the work of one index. Every compiler compiles it for the
// CPU and nvcc compiles it for the GPU, so a test on a CPU checks the same
// source. Launches add only the number of indexes and the loop over them.

#pragma once

#if defined(__CUDACC__)
#define SW_HOST_DEVICE __host__ __device__
#else
#define SW_HOST_DEVICE
#endif

// SPDX-License-Identifier: Apache-2.0
// lib/engine/device/kernels: what a device does to bytes, written once.
// A body does the work of one index and is compiled for the CPU by every compiler and for the GPU
// by nvcc, so that a test on a CPU proves the same text. Launches say only how many indexes there
// are.

#pragma once

#if defined(__CUDACC__)
#define SW_HOST_DEVICE __host__ __device__
#else
#define SW_HOST_DEVICE
#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Exports a symbol from libshardwright.so. All other symbols are hidden.
#define SW_API __attribute__((visibility("default")))

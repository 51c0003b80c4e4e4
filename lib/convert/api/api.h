// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks what libshardwright.so exports; everything else of it is hidden.
#define SW_API __attribute__((visibility("default")))

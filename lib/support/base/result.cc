// SPDX-License-Identifier: Apache-2.0
#include "support/base/result.h"

#include <cstdio>
#include <cstdlib>

namespace shardwright::internal {

void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: internal check failed: %s\n", file, line, condition);
  std::abort();
}

}  // namespace shardwright::internal

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "support/base/result.h"

namespace shardwright {

/// Converts the exception that is being handled to an error: kLimit if memory or threads ran out,
/// kInternal for any other exception of a library. Call it only within a catch block.
/// Local.
Error CaughtError();

}  // namespace shardwright

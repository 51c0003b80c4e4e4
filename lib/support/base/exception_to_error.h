// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "support/base/result.h"

namespace shardwright {

/// What the exception that is being handled means: kLimit where memory or threads were wanting,
/// kInternal for anything else that a library has thrown. Within a catch block only.
/// Local.
Error CaughtError();

}  // namespace shardwright

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include "engine/tensor/dtype.h"

namespace shardwright::pickle {

/// Returns the element type of a global like "torch.float32".
std::optional<DType> DTypeOfGlobal(std::string_view dotted);

}  // namespace shardwright::pickle

#pragma once

#include "dialect/core/checkpoint.h"
#include "format/pickle/node.h"

namespace shardwright::dialect {

/// What a parameter group of an optimizer says of its hyper-parameters; nothing of a null or of
/// what is no dict.
HyperParams HyperOf(const pickle::Node* options);

}  // namespace shardwright::dialect

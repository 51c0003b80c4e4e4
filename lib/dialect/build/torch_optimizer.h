#pragma once

#include <set>
#include <string>

#include "base/result.h"
#include "dialect/core/checkpoint.h"
#include "format/pickle/node.h"

namespace shardwright::dialect {

/// The number of steps of a parameter as optimizers of PyTorch have it, one 32-bit float: what its
/// scalars say, else its group, else the iteration.
/// \error kUnsupported  nobody tells
/// Pure.
Result<float> TorchStep(const Checkpoint& source, const Param& param);

/// A parameter group as an optimizer of PyTorch saves it, without "params": what the source says,
/// and what loading needs. Options that
/// the optimizer does not know stay, for the way back.
/// \param made  owns what is made
/// \param left  gets the names of options that are more than plain values, and are left out
/// Pure.
const pickle::Node* TorchOptions(const Checkpoint& source, const Group& group, pickle::Arena* made,
                                 std::set<std::string>* left);

}  // namespace shardwright::dialect

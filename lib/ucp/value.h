#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "dialect/core/checkpoint.h"
#include "tensor/dtype.h"

namespace shardwright::ucp {

/// One element as a person reads it: "0.0125", "17", and the bits where a number would hide the
/// difference.
std::string ElementText(DType dtype, std::span<const std::byte> element);

/// A plain value of an object graph as text: "0.001", "[0.9, 0.95]", "'decay'". A long one is cut
/// off, with "..." in place of the rest.
std::string ValueText(const pickle::Node* node);

/// A line for every scalar that differs: "step: 4 and 5".
std::vector<std::string> ScalarDifferences(const std::vector<dialect::Scalar>& a,
                                           const std::vector<dialect::Scalar>& b);

/// A line for every hyper-parameter that differs: "lr: 0.001 and 0.002". Values are compared, not
/// how a format spells them: 1 is 1.0, a tuple is a list. Of two formats only what both of them can
/// say is compared: a group without options says what its HyperParams hold, and of groups of two
/// formats (\param one_format is false) the keys that both have, and those without which nobody
/// knows how a parameter is trained (lr, betas, eps, weight_decay) if one of two trainers has them.
/// A key that one side lacks and the other has at the value which optimizers take without it is no
/// difference. The name of an expert group holds the size of its layout and is not compared; of
/// tensors among options only type and shape are.
/// Pure.
std::vector<std::string> GroupDifferences(const dialect::Group& a, const dialect::Group& b,
                                          bool one_format = true);

}  // namespace shardwright::ucp

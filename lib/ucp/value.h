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

/// A plain value of an object graph as text: "0.001", "[0.9, 0.95]", "'decay'".
std::string ValueText(const pickle::Node* node);

/// A line for every scalar that differs: "step: 4 and 5".
std::vector<std::string> ScalarDifferences(const std::vector<dialect::Scalar>& a,
                                           const std::vector<dialect::Scalar>& b);

/// A line for every hyper-parameter that differs: "lr: 0.001 and 0.002". The name of an expert
/// group holds the size of its layout and is not compared.
std::vector<std::string> OptionDifferences(const pickle::Node* a, const pickle::Node* b);

}  // namespace shardwright::ucp

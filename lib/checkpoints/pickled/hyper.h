// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Returns the hyper-parameters of an optimizer's parameter
/// group. The result is empty if `options` is null or not a dict.
/// \param tensors  values of options that are tensors, as in Group::tensors
HyperParams HyperOf(const pickle::Node* options, std::span<const Scalar> tensors = {});

/// Reads the elements of a tensor in an object graph.
using TensorBytes = std::function<Result<std::string>(const pickle::Node* tensor)>;

/// Finds the options of a group that are tensors of one element, or lists with such tensors. An
/// example is the learning rate of a captured or compiled optimizer. Leaves out other tensors and
/// those that `bytes_of` cannot read; UnreadTensor names them.
/// \returns as Group::tensors
std::vector<Scalar> TensorOptions(const pickle::Node* options, const TensorBytes& bytes_of);

/// Returns a group's options with numbers in place of tensors, or `options` itself if it has no
/// tensors.
/// \param made  owns the new nodes
const pickle::Node* PlainOptions(const pickle::Node* options, std::span<const Scalar> tensors,
                                 pickle::Arena* made);

/// Returns the first option that is a tensor, or a list with one,
/// and that has no value in `tensors`; empty if all have values.
std::string UnreadTensor(const pickle::Node* options, std::span<const Scalar> tensors);

/// Returns the tensor at a position in the options, such as "lr" or "betas.1", or null.
const Scalar* FindTensor(std::span<const Scalar> tensors, std::string_view place);

/// Returns the value of a tensor of one element as a Python number.
const pickle::Node* NumberNode(const Scalar& tensor, pickle::Arena* made);

}  // namespace shardwright::checkpoints

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/tensor/shape.h"
#include "files/pickle/node.h"
#include "files/torch_pt/reader.h"
#include "files/torch_pt/writer.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// The source of the bytes of one storage in a pickled file.
struct Fill {
  enum class Kind : std::uint8_t {
    kTensor,  ///< elements of tensors
    kMember,  ///< an unchanged storage of the source
    kInline,  ///< `bytes`
  };
  Kind kind = Kind::kInline;
  std::uint32_t tensor = 0;  ///< kTensor: the writer's own index of its tensors
  std::uint32_t member = 0;  ///< kMember: index into the source map
  std::string bytes;         ///< kInline
};

/// The object graph of one pickled file to be written.
struct Document {
  pickle::Arena arena;
  const pickle::Node* root = nullptr;
  std::vector<torch_pt::StorageSpec> storages;
  std::vector<Fill> fills;  ///< by storage

  /// Adds a contiguous tensor that has a storage of its own.
  const pickle::Node* AddTensor(std::uint32_t tensor, DType dtype, Shape shape,
                                bool requires_grad = false);
  /// Like AddTensor, for known bytes. An empty tensor gets no Fill.
  const pickle::Node* AddInline(std::string bytes, DType dtype, Shape shape);

 private:
  const pickle::Node* AddFilled(Fill fill, DType dtype, Shape shape, bool requires_grad);
};

/// Copies passed-through values into a document. Values with tensors are copied
/// together with their storages; other values are shared with the source.
class Graft {
 public:
  /// \param source   the document that contains the values
  /// \param members  for each of its storages, the member of the source map
  Graft(Document& document, const torch_pt::Document& source,
        const std::vector<std::uint32_t>& members)
      : document_(document), source_(source), members_(members) {}
  /// Copies one value. \error kBadInput  a tensor's storage is not in the source map
  Result<const pickle::Node*> Take(const pickle::Node* node);

 private:
  bool HoldsTensor(const pickle::Node* node);
  Result<std::vector<const pickle::Node*>> TakeAll(const std::vector<const pickle::Node*>& nodes);
  Result<const pickle::Node*> TakeTensor(const pickle::Tensor& source);

  Document& document_;
  const torch_pt::Document& source_;
  const std::vector<std::uint32_t>& members_;
  std::unordered_map<const pickle::Node*, bool> holds_;
  std::unordered_map<const pickle::Node*, const pickle::Node*> copies_;
  std::unordered_map<std::uint32_t, std::uint32_t> storages_;
};

}  // namespace shardwright::checkpoints

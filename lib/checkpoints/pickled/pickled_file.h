// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "checkpoints/pickled/document.h"
#include "engine/plan/target_builder.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Makes the object graph of a file: the same one every time.
using BuildDocument = std::function<Result<std::unique_ptr<Document>>()>;

/// Enters the elements of one storage, Fill::Kind::kTensor, into the target.
/// \param file     its number
/// \param offset   of the payload in the file
/// \param tensor   Fill::tensor
/// \param storage  what it is, and its number in the document
using AddPayload =
    std::function<void(std::uint32_t file, std::uint64_t offset, std::uint32_t tensor,
                       const torch_pt::StorageSpec& spec, std::size_t storage)>;

/// Adds a file of torch.save to a target. Its graph is made twice, now and when the file is
/// written, so that none is kept.
/// \pre storages of the document are in the order in which its graph uses them
/// \error as torch_pt::Layout::Make, with the path
Status AddPickledFile(plan::TargetBuilder* builder, const std::string& path, BuildDocument build,
                      const AddPayload& add);

}  // namespace shardwright::checkpoints

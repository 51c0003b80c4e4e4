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

/// Creates the object graph of a file; every call must return the same graph.
using BuildDocument = std::function<Result<std::unique_ptr<Document>>()>;

/// Adds the elements of one storage, Fill::Kind::kTensor, to the target.
/// \param file     number of the file in the target
/// \param offset   of the payload in the file
/// \param tensor   Fill::tensor
/// \param storage  its specification, and its index in the document
using AddPayload =
    std::function<void(std::uint32_t file, std::uint64_t offset, std::uint32_t tensor,
                       const torch_pt::StorageSpec& spec, std::size_t storage)>;

/// Adds a torch.save file to a target. Builds the object graph twice, first to compute
/// the layout and again when the file is written, so that no graph stays in memory.
/// \pre the storages of the document are in the order in which its graph uses them
/// \error as torch_pt::Layout::Make; the message includes the path
Status AddPickledFile(plan::TargetBuilder* builder, const std::string& path, BuildDocument build,
                      const AddPayload& add);

}  // namespace shardwright::checkpoints

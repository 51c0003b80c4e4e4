// SPDX-License-Identifier: Apache-2.0
// Files that the writer of universal folders creates (write_files.cc).

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/universal/universal.h"
#include "checkpoints/pickled/document.h"

namespace shardwright::checkpoints::atoms {

// Inputs of all atoms of the folder. Outlives the source checkpoint.
struct Context {
  Topology to, from;
  std::string tag;                                                // of the output folder
  std::vector<Param> params;                                      // with the dtypes of the target
  std::vector<std::vector<std::pair<std::string, DType>>> atoms;  // by parameter: state, type
  std::vector<std::size_t> first_zero;  // by parameter: this atom and later ones are zeros
  std::vector<layout::Cut> cuts;        // by parameter: cut of its atoms
  std::vector<Group> groups;
  std::vector<Passed> model_states, optimizer;
  std::vector<OpaqueEntry> entries;
  std::shared_ptr<pickle::Arena> arena;
  const pickle::Node* release = nullptr;  // release that saved the source, or null
  bool bare = false;                      // states are bare tensors
};

enum class FileKind : std::uint8_t { kAtom, kStep, kModel, kOptimizer };

struct FileId {
  FileKind kind = FileKind::kAtom;
  std::uint32_t param = 0;  // kAtom, kStep
  std::uint32_t atom = 0;   // kAtom: index into Context::atoms[param]
  std::uint32_t mp = 0;     // kModel
  bool stage3 = false;      // kModel: with the file name of stage 3
};

/// Returns the step count of a parameter's optimizer state, or null if it has none.
const Scalar* StepOf(const Param& param);

/// Returns the path of a file in the output.
std::string PathOf(const Context& context, const FileId& id);

/// Builds the content of a file. Local.
Result<std::unique_ptr<Document>> Build(const Context& context, const FileId& id);

}  // namespace shardwright::checkpoints::atoms

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/pickled/map_builder.h"
#include "checkpoints/safetensors/notes_internal.h"
#include "checkpoints/safetensors/safetensors.h"
#include "engine/layout/whole_cuts.h"
#include "files/safetensors/header.h"
#include "files/safetensors/index.h"

namespace shardwright::checkpoints::safetensors {

/// A tensor of the set, or one piece of it.
struct Tensor {
  shardwright::safetensors::Entry entry;
  std::uint32_t file = 0;
  std::uint32_t storage = 0;
  TensorNote note;                  // only if there are notes
  std::optional<Shape> offsets;     // of a piece: its first element in the full tensor
  std::vector<std::uint32_t> more;  // of the first piece: the other pieces
  bool is_more = false;             // one of the other pieces
};

/// Makes a Checkpoint from a set of files.
class Reader {
 public:
  Reader(const SourceSet& source, const Patterns& patterns)
      : source_(source), patterns_(patterns) {}

  Result<Checkpoint> Run() {
    out_.origin = "safetensors";
    out_.tag = source_.tag;
    out_.arena = std::make_shared<pickle::Arena>();
    out_.warnings = source_.warnings;
    SW_TRY(ReadIndex());
    SW_TRY(ReadHeaders());
    SW_TRY(CheckNames());
    TakeNotes();
    MakeParams();
    AddTied();
    Order();
    SW_TRY(DecideRules());
    SW_TRY(AddTensors());
    MakeGroups();
    Finish();
    return std::move(out_);
  }

 private:
  Status ReadIndex();
  Status ReadHeaders();
  Status ReadHeader(std::uint32_t file);
  Status SetPieces(std::uint32_t file, const std::string& text);
  Status CheckPieces();
  Status CheckNames();
  void TakeNotes();
  bool NotesAgree();
  void MergeMetadata();
  void MakeParams();
  void AddTied();
  void Order();
  Result<Shape> WholeShape(const Tensor& first) const;
  Status DecideRules();
  Status AddFragment(const Tensor& tensor, MapBuilder* map, layout::LogicalTensor* logical);
  Status AddTensors();
  void MakeGroups();
  void Finish();

  void Warn(std::string text) { out_.warnings.push_back(std::move(text)); }
  const std::string& NameOf(std::uint32_t file) const { return source_.files[file].name; }

  const SourceSet& source_;
  const Patterns& patterns_;
  Checkpoint out_;
  shardwright::safetensors::Index index_;
  std::vector<shardwright::safetensors::Header> headers_;   // by file, without their entries
  std::vector<Tensor> tensors_;                             // by file, in the order of their bytes
  std::unordered_map<std::string, std::uint32_t> by_name_;  // index into tensors_
  std::optional<Notes> notes_;                              // merged notes of all files
  std::vector<std::uint64_t> places_;                       // by index of the parameter
  layout::WholeCuts cuts_;
};

}  // namespace shardwright::checkpoints::safetensors

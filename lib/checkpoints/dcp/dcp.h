// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/dcp: folders of torch.distributed.checkpoint, as trainers fill them.
// The index (lib/files/dcp) tells of every tensor which box of it lies in which item of which
// file. What the names mean is each trainer's own: Naming says where model and optimizer are, and
// in which of two forms the optimizer's state is. scan.cc reads the items, read.cc and sort.cc tell
// model, optimizer and the rest apart, write.cc does the reverse for any mesh.
// Source: docs/formats/dcp.md.

#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "files/dcp/index.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dcp {

inline constexpr std::string_view kName = "dcp";

/// Whose names and files.
enum class Flavour : std::uint8_t { kPlain, kTorchtitan, kAccelerate, kTransformers };

/// slime keeps its scheduler in a separate DCP folder, which any number of ranks can load.
inline constexpr std::array<std::string_view, 1> kFoldersBeside = {"lr_scheduler"};

inline constexpr std::array<std::string_view, 5> kFlavourWords = {"source", "plain", "torchtitan",
                                                                  "accelerate", "transformers"};
inline constexpr std::array<std::string_view, 3> kOptimizerWords = {"source", "nested", "flat"};

/// How a trainer names what it saves.
struct Naming {
  std::vector<std::string> model = {"model"};      ///< path above parameters
  std::vector<std::string> optimizer = {"optim"};  ///< path above "state" and "param_groups"
  /// State and options under one flat key for each parameter; else nested by parameter and group.
  bool flat = false;
  bool pair = false;  ///< model and optimizer are folders of their own
  std::string model_folder = "pytorch_model_fsdp_0";
  std::string optimizer_folder = "optimizer_0";

  friend bool operator==(const Naming&, const Naming&) = default;
};

/// The names of a flavour.
Naming NamingOf(Flavour flavour);

/// What is neither model nor optimizer, or only this format can use: an item under its own name.
struct Extra {
  struct Value {
    torch_pt::Document document;         ///< of a raw one without a root
    std::vector<std::uint32_t> members;  ///< of the source, by storage
  };
  shardwright::dcp::Entry entry;  ///< without places
  std::vector<Value> values;      ///< by chunk; of an object one
  bool raw = false;  ///< an object that is not understood: one storage, the bytes of its item
  bool with_optimizer = false;            ///< in the optimizer's folder, if there are two folders
  std::optional<std::uint32_t> set = {};  ///< a tensor of other weights: index into DcpState::sets
};

/// What only this format understands.
struct DcpState : OwnState {
  Naming naming;
  Flavour flavour = Flavour::kPlain;
  /// Hold the values of options and of what the optimizer has of parameters.
  std::vector<std::shared_ptr<pickle::Arena>> arenas;
  std::vector<Extra> extras;
  /// By group: all parameter names that the optimizer lists.
  std::vector<std::vector<std::string>> groups;
  /// The optimizer's names by the model's names, if wrappers make them differ.
  std::unordered_map<std::string, std::string> optimizer_names;
  std::vector<WeightSet> sets;  ///< as Checkpoint::weight_sets

  /// Returns the optimizer's name of a parameter of the model.
  const std::string& OptimizerName(const std::string& name) const;
  std::vector<std::uint32_t> Members() const override;
  std::vector<std::string> Contents() const override;
};

/// How a folder is to be written.
struct FolderLayout : OwnLayout {
  Mesh mesh;
  std::uint64_t files = 0;  ///< data files of each folder; 0: one for each rank
  Flavour flavour = Flavour::kPlain;
  Naming naming;

  std::string Json() const override;
};

// The row of the table; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);

/// Finds the index, or those of a pair of folders, and reads the items of the files that it names.
/// \error kNotFound  files that it names are missing, or it is itself: an incomplete save;
///        kBadInput, kUnsupported  as ReadIndex and ReadItems
/// Local; reads files.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan has found, as Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Parameters, their optimizer's state and groups. What is in float32 and has states is a master.
/// \error kBadInput  chunks that overlap or leave a part of a tensor out; kUnsupported  several
///        optimizers
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights: reads the entries of the model and ignores the optimizer's.
Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns);

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// torchtitan has names of its own, Accelerate and Trainer those of Hugging Face.
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// The files of a save on the ranks of a mesh, and the index, such that
/// torch.distributed.checkpoint.load takes them. Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);

FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files);

/// As TargetKey::check. \error kUsage
Status CheckKey(std::string_view key, std::string_view value);

}  // namespace shardwright::checkpoints::dcp

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 7> kDcpKeys = {{
    {.name = "dp_shard", .help = "ranks that share out every tensor", .check = dcp::CheckKey},
    {.name = "dp_replicate",
     .help = "copies of the model, each of dp_shard ranks",
     .check = dcp::CheckKey},
    {.name = "tp", .help = "tensor-parallel ranks", .check = dcp::CheckKey},
    {.name = "ep",
     .help = "expert-parallel ranks, within those of dp_shard and tp",
     .check = dcp::CheckKey},
    {.name = "optimizer",
     .help = "form of the optimizer's state: nested or flat",
     .check = dcp::CheckKey},
    {.name = "flavour",
     .help = "the trainer that shall load a DCP folder",
     .check = dcp::CheckKey,
     .is_flag = true,
     .words = dcp::kFlavourWords},
    {.name = "files",
     .help = "data files of a DCP folder, one for each rank unless told otherwise",
     .check = dcp::CheckKey,
     .is_flag = true,
     .value_kind = "N"},
}};

}  // namespace shardwright::checkpoints

// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/dcp: torch.distributed.checkpoint (DCP) folders as trainers write them.
// The index (lib/files/dcp) lists for every tensor the boxes and the file and item of each. The
// meaning of names depends on the trainer: Naming specifies the paths of model and optimizer,
// and which of two forms the optimizer state has. scan.cc reads the items, read.cc and sort.cc
// separate model, optimizer and other entries, and write.cc writes a folder for any mesh.
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

/// The trainer that uses the names and files of a folder.
enum class Flavour : std::uint8_t { kPlain, kTorchtitan, kAccelerate, kTransformers };

/// slime keeps its scheduler in a separate DCP folder, which any number of ranks can load.
inline constexpr std::array<std::string_view, 1> kSiblingFolders = {"lr_scheduler"};

inline constexpr std::array<std::string_view, 5> kFlavourWords = {"source", "plain", "torchtitan",
                                                                  "accelerate", "transformers"};
inline constexpr std::array<std::string_view, 3> kOptimizerWords = {"source", "nested", "flat"};

/// The naming that a trainer uses for the entries of a folder.
struct Naming {
  std::vector<std::string> model = {"model"};      ///< path of the parameters
  std::vector<std::string> optimizer = {"optim"};  ///< path of "state" and "param_groups"
  /// Flat: one key per parameter for state and options. Otherwise nested by parameter and group.
  bool flat = false;
  bool pair = false;  ///< model and optimizer are in separate folders
  /// The model's entries have the names of PEFT's files, without the name of the adapter. Those of
  /// the optimizer have the names of the running model.
  bool peft = false;
  std::string model_folder = "pytorch_model_fsdp_0";
  std::string optimizer_folder = "optimizer_0";

  friend bool operator==(const Naming&, const Naming&) = default;
};

/// Returns the naming of a flavour.
Naming NamingOf(Flavour flavour);

/// An entry that is neither model nor optimizer, or that only this format can use; copied by name.
struct Extra {
  struct Value {
    torch_pt::Document document;         ///< without a root if `raw`
    std::vector<std::uint32_t> members;  ///< members of the source, by storage
  };
  shardwright::dcp::Entry entry;  ///< without places
  std::vector<Value> values;      ///< by chunk; an object has exactly one
  bool raw = false;  ///< an object of unknown type: one storage with the bytes of its item
  bool with_optimizer = false;            ///< in the optimizer's folder, if there are two folders
  std::optional<std::uint32_t> set = {};  ///< a tensor of other weights: index into DcpState::sets
};

/// State that only the DCP format understands.
struct DcpState : OwnState {
  Naming naming;
  Flavour flavour = Flavour::kPlain;
  /// Own the values of options and of the optimizer state of parameters.
  std::vector<std::shared_ptr<pickle::Arena>> arenas;
  std::vector<Extra> extras;
  /// For each group, all parameter names that the optimizer lists.
  std::vector<std::vector<std::string>> groups;
  /// From the model's names to the optimizer's, if wrappers make them differ.
  std::unordered_map<std::string, std::string> optimizer_names;
  std::vector<WeightSet> sets;  ///< as Checkpoint::weight_sets

  /// Returns the optimizer's name for a parameter of the model.
  const std::string& OptimizerName(const std::string& name) const;
  std::vector<std::uint32_t> Members() const override;
  std::vector<std::string> Contents() const override;
};

/// Layout of a DCP folder to write.
struct FolderLayout : OwnLayout {
  Mesh mesh;
  std::uint64_t files = 0;  ///< data files per folder; 0: one for each rank
  Flavour flavour = Flavour::kPlain;
  Naming naming;

  std::string Json() const override;
};

// Functions of the format's row in the table; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);

/// Finds the index, or the two indexes of a pair of folders, and reads the items of their files.
/// \error kNotFound  the index or files that it names are missing (an
///        incomplete save); kBadInput, kUnsupported  as ReadIndex and ReadItems
/// Local; reads files.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan has found, as Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Reads parameters, optimizer state and groups. A float32 tensor with states is a master weight.
/// \error kBadInput  chunks overlap or do not cover their tensor;
///        kUnsupported  the folder contains several optimizers
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights: reads the entries of the model and ignores the optimizer's.
Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns);

/// \error kUnsupported  flavour=transformers, and several adapters have the same names without
///        theirs; kInfeasible, kLimit, kUsage  as Format::resolve
Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// Implements Format::running_names: a Trainer alone saves weights of adapters under other names.
bool HasRunningNames(const TargetSpec& spec, const Checkpoint& source);

/// Returns the scheme of the flavour: torchtitan has its own, Accelerate and Trainer use "hf".
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// Plans the files and the index of a save by the ranks of a mesh,
/// in a form that torch.distributed.checkpoint.load accepts. Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);

FileReaders Readers(const Layout& layout, std::span<const plan::OutputFile> files);

/// Implements TargetKey::check. \error kUsage
Status CheckKey(std::string_view key, std::string_view value);

}  // namespace shardwright::checkpoints::dcp

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 7> kDcpKeys = {{
    {.name = "dp_shard", .help = "ranks that shard every tensor", .check = dcp::CheckKey},
    {.name = "dp_replicate",
     .help = "copies of the model, each of dp_shard ranks",
     .check = dcp::CheckKey},
    {.name = "tp", .help = "tensor-parallel ranks", .check = dcp::CheckKey},
    {.name = "ep",
     .help = "expert-parallel ranks, a divisor of dp_shard x tp",
     .check = dcp::CheckKey},
    {.name = "optimizer",
     .help = "form of the optimizer's state: nested or flat",
     .check = dcp::CheckKey},
    {.name = "flavour",
     .help = "trainer that will load the DCP folder",
     .check = dcp::CheckKey,
     .is_flag = true,
     .words = dcp::kFlavourWords},
    {.name = "files",
     .help = "data files of the DCP folder, by default one for each rank",
     .check = dcp::CheckKey,
     .is_flag = true,
     .value_kind = "N"},
}};

}  // namespace shardwright::checkpoints

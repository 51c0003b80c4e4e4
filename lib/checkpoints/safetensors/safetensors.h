// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/safetensors: weights in .safetensors files, as Hugging Face libraries keep them.
// One file, or several with an index that names them. Read: weights alone, so whoever writes a
// trainer's layout of them makes masters of weights and starts with fresh moments. Written: weights
// or masters, tied ones once, the same bytes for the same source. Source:
// docs/formats/safetensors.md.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::safetensors {

/// What only this format understands: `__metadata__` of the files, by key, but for our own notes.
/// Of several files: the keys whose values are equal in all that have them.
struct FileMetadata : OwnState {
  std::map<std::string, std::string> values;

  std::vector<std::uint32_t> Members() const override { return {}; }
  std::vector<std::string> Contents() const override;
};

/// Value of --adapter that writes every tensor under its own name.
inline constexpr std::string_view kAllTensors = "all";

/// Which state of a trained parameter its tensor is.
enum class Only : std::uint8_t { kWeight, kMaster };

/// How a set of files is to be written.
struct FilesLayout : OwnLayout {
  std::uint64_t shard_bytes = 0;  ///< of payloads in a file; a tensor above it has one of its own
  Only only = Only::kWeight;
  bool convert = false;  ///< --target dtype: all trained and frozen floating tensors become `dtype`
  DType dtype = DType::kF32;
  bool keep_prefixes = false;  ///< keep the source's names, including parts that wrappers add
  std::string
      adapter;  ///< name of the LoRA adapter to write; kAllTensors: write none as an adapter
  std::uint64_t lora_alpha = 0;  ///< lora_alpha of the adapter; 0: not known

  std::string Json() const override;
};

/// Whether parameters of that type can be trained: floating, of more than a byte.
bool IsTrained(DType dtype);

/// Whether a file of that name says which files make a set.
bool IsIndex(std::string_view name);

/// What the name of one of several files says: "model-00002-of-00003.safetensors".
struct Numbered {
  std::string stem;  ///< "model"
  std::uint64_t number = 0;
  std::uint64_t count = 0;
};

/// Nothing if the name is of another form.
std::optional<Numbered> ParseNumbered(std::string_view name);

// The row of the table; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);
bool StandsAlone(std::string_view name);

/// Finds the files of a set. With an index those that it names, else `model.safetensors`, else
/// every file; the set's `manifest` is the index.
/// \error kBadInput  several sets, a broken file; kNotFound  numbered files that are missing
/// Local; reads headers.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan has found, as Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Tensors by name. Files that we wrote tell in their notes in which order the model has them, and
/// what is frozen or a buffer; of other files that is not known.
/// Source: docs/formats/safetensors.md, "As a checkpoint".
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// Those of Hugging Face.
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// model.safetensors, or numbered files and their index. Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);

/// As TargetKey::check. \error kUsage
Status CheckKey(std::string_view key, std::string_view value);

inline constexpr std::array<std::string_view, 2> kOnlyWords = {"weight", "master"};

}  // namespace shardwright::checkpoints::safetensors

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 6> kSafetensorsKeys = {{
    {.name = "shard-size",
     .help = "bytes of tensors in a file, 5GB unless told otherwise; a larger tensor has its own",
     .check = safetensors::CheckKey,
     .is_flag = true,
     .value_kind = "SIZE"},
    {.name = "dtype",
     .help = "type of the weights, such as bf16 or float8_e4m3fn",
     .check = safetensors::CheckKey,
     .is_flag = true,
     .value_kind = "TYPE"},
    {.name = "only",
     .help = "state of the trained parameters to write: compute weights, or master weights",
     .check = safetensors::CheckKey,
     .is_flag = true,
     .words = safetensors::kOnlyWords},
    {.name = "keep-prefixes",
     .help = "keep parts that wrappers add to names, such as _orig_mod., in model files",
     .check = safetensors::CheckKey,
     .is_flag = true,
     .is_switch = true},
    {.name = "adapter",
     .help = "LoRA adapter to write for PEFT if the checkpoint has several; all: write every "
             "tensor under its own name",
     .check = safetensors::CheckKey,
     .is_flag = true,
     .value_kind = "NAME|all"},
    {.name = "lora-alpha",
     .help =
         "lora_alpha of the adapter, used if no adapter_config.json is found next to the source",
     .check = safetensors::CheckKey,
     .is_flag = true,
     .value_kind = "N"},
}};

}  // namespace shardwright::checkpoints

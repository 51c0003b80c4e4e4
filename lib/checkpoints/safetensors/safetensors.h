// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/safetensors: weights in .safetensors files, as Hugging Face libraries keep them.
// A checkpoint is one file, or several files and an index. It contains only weights,
// so writers of trainer formats derive master weights from them and start with fresh
// moments. This writer stores compute weights or master weights, tied tensors once.
// Equal sources yield equal bytes. Source: docs/formats/safetensors.md.

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

/// State that only this format understands: `__metadata__` of the files without our notes,
/// by key. For several files: the keys with equal values in all files that have the key.
struct FileMetadata : OwnState {
  std::map<std::string, std::string> values;

  std::vector<std::uint32_t> Members() const override { return {}; }
  std::vector<std::string> Contents() const override;
};

/// Value of --adapter that writes every tensor under its own name.
inline constexpr std::string_view kAllTensors = "all";

/// Selects the state to write for a trained parameter.
enum class Only : std::uint8_t { kWeight, kMaster };

/// Layout of a set of files to write.
struct FilesLayout : OwnLayout {
  std::uint64_t shard_bytes = 0;  ///< maximum payload per file; a larger tensor gets its own file
  Only only = Only::kWeight;
  bool convert = false;  ///< --target dtype: all trained and frozen floating tensors become `dtype`
  DType dtype = DType::kF32;
  bool keep_prefixes = false;  ///< keep the source's names, including parts that wrappers add
  std::string
      adapter;  ///< name of the LoRA adapter to write; kAllTensors: write none as an adapter
  std::uint64_t lora_alpha = 0;  ///< lora_alpha of the adapter; 0: not known

  std::string Json() const override;
};

/// Returns true if parameters of this type can be trained: floating point, more than one byte.
bool IsTrained(DType dtype);

/// Returns true for the name of an index, which lists the files of a set.
bool IsIndex(std::string_view name);

/// The parts of a numbered file name, such as "model-00002-of-00003.safetensors".
struct Numbered {
  std::string stem;  ///< "model"
  std::uint64_t number = 0;
  std::uint64_t count = 0;
};

/// Parses a numbered file name; returns nothing for names of another form.
std::optional<Numbered> ParseNumbered(std::string_view name);

// Functions of the format's row in the table; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);
bool StandsAlone(std::string_view name);

/// Finds the files of a set: the files that an index names. Without an index,
/// `model.safetensors` if it exists, or all files. Sets `manifest` to the index.
/// \error kBadInput  several sets or a broken file; kNotFound  numbered files are missing
/// Local; reads headers.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan has found, as Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Reads tensors by name. Notes in our own files record the model's order
/// and which tensors are frozen or buffers. For other files this is unknown.
/// Source: docs/formats/safetensors.md, "As a checkpoint".
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// Returns the naming scheme of Hugging Face, "hf".
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// Plans model.safetensors, or numbered files and their index. Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);

/// Implements TargetKey::check. \error kUsage
Status CheckKey(std::string_view key, std::string_view value);

inline constexpr std::array<std::string_view, 2> kOnlyWords = {"weight", "master"};

}  // namespace shardwright::checkpoints::safetensors

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 6> kSafetensorsKeys = {{
    {.name = "shard-size",
     .help = "bytes of tensors in a file, by default 5GB; a larger tensor has its own file",
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

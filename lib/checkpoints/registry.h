// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints: how trainers lay out checkpoints.
// registry.cc contains the table of formats, one row for each. No other code names a format.
// To read, ScanSource (open_source.h) asks every row if it claims a folder and reads the
// metadata of its files, without the payloads. ReadCheckpoint then makes a Checkpoint of
// them. To write, a row resolves --target to a Layout and makes a plan::Target from it.
// Submodules: `model` defines the common types, `pickled` has building blocks for formats
// made of pickles, `tp_rules` knows how tensor parallelism shards a parameter, and
// `name_maps` translates names. Each format has a folder; `deepspeed` contains two formats.

#pragma once

#include <span>
#include <string>
#include <string_view>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "checkpoints/open_source.h"
#include "checkpoints/tp_rules/patterns.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Returns one row for each format. If several formats claim a folder, the first of them reads it.
std::span<const Format> Formats();

/// Adds a row at the end of the table, for test programs with a format from outside lib/, such as
/// examples/format_minimal. Invalidates pointers to rows.
/// \pre called before main or at its beginning, before any other function of this header
/// \returns true, so that the initializer of a global variable can call it
bool AddFormat(const Format& format);

/// Returns the names of all formats for messages: "deepspeed, universal".
std::string FormatNames();

/// Returns the row of the format with this name, or null.
const Format* FindFormat(std::string_view name);

/// Like FindFormat. \error kUsage  no format has this name; the message lists the known names
Result<const Format*> RequireFormat(std::string_view name);

/// Interprets a scanned source with the `read` function of its format.
/// \error kBadInput, kNotFound (rank files are missing; names them), kUnsupported
/// Pure: the scan has already inlined the payload values that this function needs.
Result<Checkpoint> ReadCheckpoint(const SourceSet& source, const Patterns& patterns);

/// Calls ReadCheckpoint. If that fails because a part of the optimizer is missing or not supported,
/// reads only the model's tensors, if possible, and sets Checkpoint::only_weights.
/// \error as ReadCheckpoint
/// Pure.
Result<Checkpoint> ReadCheckpointOrWeights(const SourceSet& source, const Patterns& patterns);

/// Parses `key=value,...` with the keys of a format. If a key accepts lists of
/// ranges, which may contain commas, it must come last: "pp=2,stages=0-3,4-7".
/// \error kUsage  the message names the key and the accepted values
/// Pure.
Result<TargetSpec> ParseTarget(const Format& format, std::string_view text);

}  // namespace shardwright::checkpoints

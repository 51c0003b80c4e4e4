// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints: how trainers lay out checkpoints.
// formats.cc holds the table: one row for each format, and nothing else names one. Reading:
// ScanSource (scan.h) asks every row whether it claims a folder and reads its files but for the
// payloads, then ReadCheckpoint makes a Checkpoint of them. Writing is the reverse: a row resolves
// --target to a Layout and makes a plan::Target of Checkpoint and Layout. Rooms: core has the words
// that all of them speak, build what every reader and writer needs, rules knows how tensor
// parallelism cuts a parameter; each format is a folder, and zero is what the two of DeepSpeed
// share.

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

/// All formats, each a row; where several claim a folder, the first does.
std::span<const Format> Formats();

/// The names of all formats, for messages: "deepspeed, universal".
std::string FormatNames();

/// The row of that name, or null.
const Format* FindFormat(std::string_view name);

/// \error kUsage  there is none; the message names those there are
Result<const Format*> RequireFormat(std::string_view name);

/// Understands a scanned source by its format's `read`.
/// \error kBadInput, kNotFound (missing rank files, named), kUnsupported
/// Pure: payload values that it needs are inlined in the set.
Result<Checkpoint> ReadCheckpoint(const SourceSet& source, const Patterns& patterns);

/// Calls ReadCheckpoint. If that fails because a part of the optimizer is missing or not supported,
/// reads only the model's tensors, if possible, and sets Checkpoint::only_weights.
/// \error as ReadCheckpoint
/// Pure.
Result<Checkpoint> ReadCheckpointOrWeights(const SourceSet& source, const Patterns& patterns);

/// Parses `key=value,...` with the keys of a format. A key that lists ranges comes last when it
/// does, since they hold commas: "pp=2,stages=0-3,4-7".
/// \error kUsage names the key and what it accepts
/// Pure.
Result<TargetSpec> ParseTarget(const Format& format, std::string_view text);

}  // namespace shardwright::checkpoints

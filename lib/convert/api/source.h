// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/api/api.h"
#include "convert/api/ranks.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright {

/// A source to read: a checkpoint of any format, a catalogue, or a folder of atoms.
struct Source {
  /// The save or tag folder, or a single file that is a complete
  /// source. Further paths add parts of the same checkpoint.
  std::vector<std::string> paths;
  /// Pattern files with rules for sharded and frozen parameters (--patterns).
  std::vector<std::string> pattern_files = {};
  /// Maps to other names and shapes, applied in order: "NAME[:FROM][:TO]", or "auto" (--map).
  std::vector<std::string> maps = {};
  std::string map_sizes = {};  ///< "kv_heads=8,head_dim=64", or empty (--map-sizes)
  /// The set of weights to read if there are several (--weights-of). Empty: the model's.
  std::string weights_of = {};
  /// Every node has only a part. `{rank}` and `{node}` in paths are replaced (--node-local).
  bool node_local = false;
  /// Read the source even if its files come from two saves (--allow-mixed).
  bool allow_mixed = false;
};

/// A parameter or buffer of a source.
struct Parameter {
  std::string name;
  /// "trainable", "frozen", "buffer", "state entry", "buffer or frozen", "state entry or frozen",
  /// or "tied to NAME"
  std::string kind;
  std::vector<std::uint64_t> shape;  ///< extents, outermost first; empty: a scalar
  std::uint64_t bytes = 0;           ///< of all its states, each element counted once
};

/// Contents of a source.
struct Contents {
  std::string format;                 ///< format of the source: "deepspeed"
  std::string tag;                    ///< "global_step100"; empty if the format has none
  std::string layout;                 ///< "zero=2 dp=3 tp=1 pp=1 ep=1 dtype=bfloat16"
  std::vector<Parameter> parameters;  ///< in model order, as far as the files record it
  /// The whole description as a JSON object: the `result` of `ucp-load --list --json`.
  std::string json;
};

/// Describes the contents of a source. Reads headers and object graphs, but no payloads.
/// \error kNotFound  no checkpoint, or rank files are missing; kBadInput  damaged or
///        unsafe; kUnsupported  an unknown layout or version; kUsage  an invalid map
/// Collective.
SW_API Result<Contents> Describe(Ranks& ranks, const Source& source, Sink& sink);

}  // namespace shardwright

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

/// What is read: a checkpoint of any format, a catalogue, or a folder of atoms.
struct Source {
  /// Its save or tag folder, or a file that is a source by itself; more paths hold further parts of
  /// the same checkpoint.
  std::vector<std::string> paths;
  /// Rules: how parameters are cut and which are frozen (--patterns).
  std::vector<std::string> pattern_files = {};
  /// Maps to other names and shapes, gone through in turn: "NAME[:FROM][:TO]", or "auto" (--map).
  std::vector<std::string> maps = {};
  std::string map_sizes = {};  ///< "kv_heads=8,head_dim=64", or empty (--map-sizes)
  /// The set of weights to read if there are several (--weights-of); empty: the model's.
  std::string weights_of = {};
  /// Every node has a part only. `{rank}` and `{node}` in paths are replaced (--node-local).
  bool node_local = false;
  /// Read the source even if its files come from two saves (--allow-mixed).
  bool allow_mixed = false;
};

/// A parameter, or a buffer, of a source.
struct Parameter {
  std::string name;
  /// "trainable", "frozen", "buffer", "state entry", "buffer or frozen", "state entry or frozen",
  /// or "tied to NAME"
  std::string kind;
  std::vector<std::uint64_t> shape;  ///< extents, outermost first; empty: a scalar
  std::uint64_t bytes = 0;           ///< of all its states, each element counted once
};

/// What a source holds.
struct Contents {
  std::string format;                 ///< the name of the format that it is in: "deepspeed"
  std::string tag;                    ///< "global_step100"; empty where the format has none
  std::string layout;                 ///< "zero=2 dp=3 tp=1 pp=1 ep=1 dtype=bfloat16"
  std::vector<Parameter> parameters;  ///< in the order of the model, as far as files tell it
  /// All of it as a JSON object: the `result` of `ucp-load --list --json`.
  std::string json;
};

/// Tells what a source holds. Reads headers and object graphs, no payload.
/// \error kNotFound  nothing there, or rank files missing; kBadInput  damaged or unsafe;
///        kUnsupported  a layout or version; kUsage  a map
/// Collective.
SW_API Result<Contents> Describe(Ranks& ranks, const Source& source, Sink& sink);

}  // namespace shardwright

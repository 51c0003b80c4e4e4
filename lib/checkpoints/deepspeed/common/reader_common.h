// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/source.h"
#include "checkpoints/pickled/map_builder.h"
#include "checkpoints/tp_rules/patterns.h"
#include "files/pickle/node.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

// What readers of native and of universal folders do alike.

namespace shardwright::checkpoints::reader {

using pickle::Node;
using torch_pt::Document;

/// The work on one checkpoint of DeepSpeed's files.
struct EngineReading {
  EngineReading(const SourceSet& set, const Patterns& rules)
      : source(set), patterns(rules), map(set, &out.map) {}
  EngineReading(const EngineReading&) = delete;
  EngineReading& operator=(const EngineReading&) = delete;

  const SourceSet& source;
  const Patterns& patterns;
  Checkpoint out;
  MapBuilder map;
  Topology topology;
  EngineState state;
  EntryList opaque;  ///< for state.entries

  const std::string& file_name(std::uint32_t file) const { return source.files[file].name; }
};

/// A parameter with the shape of its shard.
struct NamedShape {
  std::string name;
  Shape shape;
  std::uint64_t elems = 0;
};

/// Tied parameters of a module, from shared_params.
struct Ties {
  /// Names without data of their own, and the names that hold it.
  std::vector<std::pair<std::string, std::string>> aliases;
  /// All names in the module of parameters whose holder was left out of it, and the holder. At
  /// stages 0 to 2 their data is there, and the first name holds it.
  std::unordered_map<std::string, std::string> left_out;
};

/// zero_stage in any of its forms.
Result<std::uint64_t> StageOf(const Node* node);
/// A dict of name -> shape.
Result<std::vector<NamedShape>> ShapesOf(const Node* dict);
/// Reads shared_params of a model file. DeepSpeed leaves a frozen parameter out under the name that
/// holds it and keeps its other names: then the first of those in the module is the holder.
/// \param module        null in a pipeline
/// \param lists_frozen  the file lists all frozen parameters, so that none was left out
/// \error kBadInput not a dict of names
Result<Ties> TiesOf(const Node* root, const Node* module,
                    const std::function<bool(const std::string&)>& trainable, bool lists_frozen);
/// Stage 3: maps names to the parameters to which they are tied. The placeholder of such a name
/// shares its storage with the placeholder of exactly one partitioned parameter. shared_params does
/// not list a module's second names below the same parent.
std::unordered_map<std::string, std::string> TiedPlaceholders(
    const Node* module, const std::function<bool(const std::string&)>& partitioned);
/// The warning for a name of Ties::left_out at stage 3.
std::string LeftOutToo(const std::string& file, const std::string& name);
/// The first of a path of nested string keys that is there, or null.
const Node* FindPath(const Node* dict, std::initializer_list<std::string_view> keys);
/// The name of a model file as DeepSpeed writes it.
std::string ModelFileName(bool zero3, std::uint64_t rank, std::uint64_t mp);
/// "3 shards missing: a, b, c".
tl::unexpected<Error> Missing(const EngineReading& reading, const std::vector<std::string>& names);
/// Parses a file; errors name it.
Result<Document> Open(const EngineReading& reading, std::uint32_t file);
/// A tensor of one number: of no dimension, or of one with one element.
bool IsNumber(const Shape& shape);
/// True for None, a number, a truth value or a text: what may be in the place of a scalar. Pure.
bool IsPlainValue(const pickle::Node& node);
/// A one-number state of the optimizer, if `node` is one and not a tensor over the parameter.
/// \param state  its name of engine/layout/states.h, or the optimizer's for others
/// \param elems  of the parameter or partition that a tensor state would have
Result<std::optional<Scalar>> ScalarOf(EngineReading* reading, std::uint32_t file,
                                       const Document& document, std::string_view state,
                                       const Node* node, const Shape& shape);

}  // namespace shardwright::checkpoints::reader

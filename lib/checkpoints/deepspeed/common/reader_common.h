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

// Functions that the readers of native and universal folders share.

namespace shardwright::checkpoints::reader {

using pickle::Node;
using torch_pt::Document;

/// State of reading one checkpoint of DeepSpeed's files.
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
  EntryList opaque;  ///< becomes state.entries

  const std::string& file_name(std::uint32_t file) const { return source.files[file].name; }
};

/// A parameter and the shape of its shard.
struct NamedShape {
  std::string name;
  Shape shape;
  std::uint64_t elems = 0;
};

/// Tied parameters of a module, from shared_params.
struct Ties {
  /// Names without data of their own, each with the name that has the data.
  std::vector<std::pair<std::string, std::string>> aliases;
  /// Other names of tied parameters for which DeepSpeed omitted the first name (the value). At
  /// stages 0 to 2 the module has their data, which the reader stores under the first other name.
  std::unordered_map<std::string, std::string> left_out;
};

/// Reads zero_stage in any of its forms.
Result<std::uint64_t> StageOf(const Node* node);
/// Reads a dict of name -> shape.
Result<std::vector<NamedShape>> ShapesOf(const Node* dict);
/// Reads shared_params of a model file. With exclude_frozen_parameters DeepSpeed omits a tied
/// frozen parameter under one name and keeps its other names. The first of these then has the data.
/// \param module        null in a pipeline
/// \param lists_frozen  the file lists all frozen parameters, so DeepSpeed omitted none
/// \error kBadInput not a dict of names
Result<Ties> TiesOf(const Node* root, const Node* module,
                    const std::function<bool(const std::string&)>& trainable, bool lists_frozen);
/// Maps names to the parameters to which they are tied, at stage 3. The placeholder
/// of such a name shares its storage with the placeholder of exactly one partitioned
/// parameter. shared_params omits a module's second names below the same parent.
std::unordered_map<std::string, std::string> TiedPlaceholders(
    const Node* module, const std::function<bool(const std::string&)>& partitioned);
/// Returns the warning for a name of Ties::left_out at stage 3.
std::string LeftOutToo(const std::string& file, const std::string& name);
/// Returns the first existing value of a path of nested string keys, or null.
const Node* FindPath(const Node* dict, std::initializer_list<std::string_view> keys);
/// Returns the name of a model file as DeepSpeed writes it.
std::string ModelFileName(bool zero3, std::uint64_t rank, std::uint64_t mp);
/// Returns the error for missing files: "3 shards missing: a, b, c".
tl::unexpected<Error> Missing(const EngineReading& reading, const std::vector<std::string>& names);
/// Parses a file. Errors name it.
Result<Document> Open(const EngineReading& reading, std::uint32_t file);
/// Returns true for the shape of a single number: no dimensions, or one with one element.
bool IsNumber(const Shape& shape);
/// Returns true for None, a number, a boolean or a text, which may replace a scalar. Pure.
bool IsPlainValue(const pickle::Node& node);
/// Returns a one-number state of the optimizer, or nothing if `node` is a tensor state.
/// \param state  its name in engine/layout/states.h, or the optimizer's name for other states
/// \param elems  elements of the parameter or partition, which a tensor state would have
Result<std::optional<Scalar>> ScalarOf(EngineReading* reading, std::uint32_t file,
                                       const Document& document, std::string_view state,
                                       const Node* node, const Shape& shape);

}  // namespace shardwright::checkpoints::reader

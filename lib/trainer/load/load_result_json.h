// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "files/pickle/node.h"
#include "trainer/load/load.h"

namespace shardwright::trainer {

/// Returns the result of a load for the trainer: a summary, and all data
/// of the checkpoint that is not a tensor of the model or the optimizer.
///
///   "step"         iteration, or null
///   "samples"      consumed samples, or null
///   "missing", "unused", "not_carried"   lists of strings
///   "bytes_read", "bytes_filled", "members_verified"
///   "holders"      maps the name of a tied parameter to the name that has its data
///   "steps"        maps the name of a trained parameter to its number of optimizer steps
///   "groups"       list of {"params": names, "options": a dict as PlainJson makes it}
///   "engine", "scaler"   state of DeepSpeed's engine and loss scaler, or null
/// Pure.
nlohmann::json LoadResultJson(const Loaded& loaded);

/// Returns the part of the result that depends on the source alone: "step", "samples",
/// "origin", "tag", "holders", "steps", "groups", "engine", "scaler", "not_carried".
/// Pure.
nlohmann::json TellSource(const convert::Input& input);

/// Adds "missing", "unused", "bytes_read", "bytes_filled" and "members_verified" of the load.
/// Pure.
void TellLoad(const Loaded& loaded, nlohmann::json* told);

/// Converts a Python value to JSON. None, bool, int, float, str and list keep their form. Other
/// values become objects: {"tuple": [...]}, {"dict": [[key, value], ...]}, {"float": "inf"}, and
/// {"object": CLASS, "dict": ...} for objects with plain attributes. Omits entries of other types.
/// \param path  path of the value, for `left`
/// \param left  receives the paths of omitted entries
/// \returns null if the value itself has another type; `left` then has its path
/// Pure.
nlohmann::json PlainJson(const pickle::Node* node, const std::string& path,
                         std::vector<std::string>* left);

}  // namespace shardwright::trainer

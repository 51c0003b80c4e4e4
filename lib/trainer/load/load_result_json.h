// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "files/pickle/node.h"
#include "trainer/load/load.h"

namespace shardwright::trainer {

/// What a load tells the trainer: what was loaded, and all of the checkpoint that is no tensor of
/// the model or the optimizer.
///
///   "step"         iteration, or null
///   "samples"      consumed samples, or null
///   "missing", "unused", "not_carried"   lists of texts
///   "bytes_read", "bytes_filled", "members_verified"
///   "holders"      by name of a tied parameter: the name that holds its data
///   "steps"        by name of a trained parameter: the steps of its optimizer
///   "groups"       list of {"params": names, "options": a dict as PlainJson makes it}
///   "engine", "scaler"   what DeepSpeed's engine and its loss scaler keep, or null
/// Pure.
nlohmann::json LoadResultJson(const Loaded& loaded);

/// What of that is of the source alone, and not of what was loaded from it: "step", "samples",
/// "origin", "tag", "holders", "steps", "groups", "engine", "scaler", "not_carried".
/// Pure.
nlohmann::json TellSource(const convert::Input& input);

/// Adds what is of the load: "missing", "unused", "bytes_read", "bytes_filled", "members_verified".
/// Pure.
void TellLoad(const Loaded& loaded, nlohmann::json* told);

/// A value of Python as JSON: None, bool, int, float and str as they are, a list as a list, and
/// objects {"tuple": [...]}, {"dict": [[key, value], ...]}, {"float": "inf"}, and {"object": CLASS,
/// "dict": ...} for objects with plain attributes. Entries that are anything else are left out.
/// \param path  where the value is, for `left`
/// \param left  gets the places of what is left out
/// \returns null, and the place of the value itself in `left`, where it is none of these
/// Pure.
nlohmann::json PlainJson(const pickle::Node* node, const std::string& path,
                         std::vector<std::string>* left);

}  // namespace shardwright::trainer

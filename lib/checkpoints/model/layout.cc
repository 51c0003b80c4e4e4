// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/model/layout.h"

#include <nlohmann/json.hpp>

namespace shardwright::checkpoints {

std::string_view Layout::Option(std::string_view key) const {
  for (const auto& [name, value] : options) {
    if (name == key) return value;
  }
  return {};
}

std::string Layout::Json() const {
  if (own != nullptr) return own->Json();
  nlohmann::ordered_json json = {{"dp", mesh.dp()}, {"tp", mesh.tp}, {"pp", mesh.pp},
                                 {"ep", mesh.ep},   {"cp", mesh.cp}, {"dtype", Name(dtype)}};
  return json.dump();
}

}  // namespace shardwright::checkpoints

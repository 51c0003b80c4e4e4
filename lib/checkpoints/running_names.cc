// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/running_names.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace shardwright::checkpoints {
namespace {

void NameAsRunning(Checkpoint* checkpoint) {
  const std::map<std::string, std::string> running = std::exchange(checkpoint->running_names, {});
  if (running.empty()) return;
  const auto name_as_running = [&](std::string* name) {
    const auto found = running.find(*name);
    if (found != running.end()) *name = found->second;
  };
  for (Param& param : checkpoint->params) {
    name_as_running(&param.name);
    name_as_running(&param.alias_of);
    name_as_running(&param.left_out_holder);
  }
  for (layout::LogicalTensor& tensor : checkpoint->map.tensors) name_as_running(&tensor.name);
}

void NameLike(Checkpoint* checkpoint, const Checkpoint& other) {
  if (checkpoint->running_names.empty()) return;
  const std::string& running = checkpoint->running_names.begin()->second;
  if (std::ranges::any_of(other.params, [&](const Param& one) { return one.name == running; })) {
    NameAsRunning(checkpoint);
  }
}

}  // namespace

void NameForTarget(const Format& format, const TargetSpec& spec, Checkpoint* checkpoint) {
  if (format.running_names != nullptr && format.running_names(spec, *checkpoint)) {
    NameAsRunning(checkpoint);
  }
}

void NameAlike(Checkpoint* a, Checkpoint* b) {
  NameLike(a, *b);
  NameLike(b, *a);
}

}  // namespace shardwright::checkpoints

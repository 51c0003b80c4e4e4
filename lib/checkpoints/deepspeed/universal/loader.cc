// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <charconv>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/universal/atoms_internal.h"

namespace shardwright::checkpoints {
namespace {

using Release = std::array<std::uint32_t, 3>;

/// First release with a stage-3 loader that opens
/// dicts. Source: docs/interop.md, "Universal loaders".
constexpr Release kStage3OpensDicts = {0, 19, 3};

/// Parses "0.16.9" or "0.16.9+cu12". Parts that are not numbers become zeros.
Release ParseRelease(std::string_view text) {
  Release out{};
  for (std::uint32_t& number : out) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc()) return out;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (!text.starts_with('.')) return out;
    text.remove_prefix(1);
  }
  return out;
}

}  // namespace

const pickle::Node* ReleaseOf(const Checkpoint& checkpoint) {
  const EngineState* state = EngineStateOf(checkpoint);
  if (state == nullptr) return nullptr;
  for (const auto* files : {&state->model_states, &state->optimizer}) {
    if (files->empty() || files->front().document.root == nullptr) continue;
    const pickle::Node* root = files->front().document.root;
    const pickle::Node* release = root->is_dict() ? root->Find("ds_version") : nullptr;
    if (release != nullptr && release->is_string() && !release->text.empty()) return release;
  }
  return nullptr;
}

Result<bool> WantsBareStates(const Checkpoint& source, const Topology& topology, Loader loader) {
  if (loader == Loader::kStage3 && topology.tp > 1) {
    return Fail(Errc::kUnsupported, "tp=", topology.tp,
                ": state files for every stage-3 loader are bare tensors, which no loader shards "
                "for tensor parallelism");
  }
  if (loader != Loader::kAuto) return loader == Loader::kStage3;
  const pickle::Node* release = ReleaseOf(source);
  const bool opens_dicts = release != nullptr && ParseRelease(release->text) >= kStage3OpensDicts;
  return topology.zero == 3 && topology.tp == 1 && !opens_dicts;
}

}  // namespace shardwright::checkpoints

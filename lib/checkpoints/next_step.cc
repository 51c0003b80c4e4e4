// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/next_step.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/model/source.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::checkpoints {
namespace {

/// A kind of pickled weights: its description, and the steps that make it readable.
struct PickledKind {
  std::string_view what;
  std::string_view next;
};

/// Returns the kind of a file that contains weights in an unreadable form, by its name.
std::optional<PickledKind> PickledKindOf(std::string_view name) {
  constexpr PickledKind kHub = {
      "Hugging Face weights, pickled by torch.save",
      "convert them with transformers: from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes "
      ".safetensors files, which can be read"};
  constexpr PickledKind kPickled = {
      "a single torch.save file",
      "if it holds weights, load it with torch.load(FILE, weights_only=True) and save them with "
      "safetensors.torch.save_file; such files can be read"};
  // Excludes files that trainers write next to weights.
  for (const std::string_view other :
       {"optimizer", "scheduler", "scaler", "rng_state", "random_states", "training_args"}) {
    if (name.starts_with(other)) return std::nullopt;
  }
  const bool bin = name.ends_with(".bin") || name.ends_with(".bin.index.json");
  const bool hub = name.starts_with("pytorch_model") || name.starts_with("adapter_model") ||
                   name.starts_with("diffusion_pytorch_model");
  if (bin && hub) return kHub;
  for (const std::string_view suffix : {".pt", ".pth", ".ckpt", ".bin"}) {
    if (name.ends_with(suffix)) return kPickled;
  }
  return std::nullopt;
}

/// Returns a name without its digits; folders of different steps have this in common.
std::string WithoutDigits(const std::string& name) {
  std::string rest;
  std::copy_if(name.begin(), name.end(), std::back_inserter(rest),
               [](char c) { return c < '0' || c > '9'; });
  return rest;
}

/// Returns the newest folders of other steps next to `folder` that the format
/// can scan, newest first. Used in the message about a step that is incomplete.
std::vector<std::string> CompleteNextTo(const Format& format, const std::string& folder,
                                        const std::string& name) {
  constexpr std::size_t kTried = 3;
  const std::string parent = folder + "/..";
  const auto entries = os::ListDir(parent);
  if (!entries) return {};
  std::vector<std::string> names;
  for (const os::Entry& entry : *entries) {
    const bool step = entry.type == os::EntryType::kDir && entry.name != name &&
                      WithoutDigits(entry.name) == WithoutDigits(name);
    if (step) names.push_back(entry.name);
  }
  std::sort(names.begin(), names.end(),
            [](const std::string& a, const std::string& b) { return NaturalLess(b, a); });
  std::vector<std::string> complete;
  std::size_t tried = 0;
  for (const std::string& one : names) {
    std::string path = parent;
    path.append("/").append(one);
    const auto inside = os::ListDir(path);
    const Listing listing = inside ? Listing{{{path, *inside}}} : Listing{};
    if (!inside || !format.claims(listing)) continue;
    if (tried++ == kTried) break;
    if (format.scan(listing, ScanOptions())) complete.push_back(one);
  }
  return complete;
}

}  // namespace

std::optional<Error> PickledWeights(const std::string& folder, const std::string& name) {
  const std::optional<PickledKind> kind = PickledKindOf(name);
  if (!kind) return std::nullopt;
  return Error{Errc::kUnsupported, folder + "/" + name + ": " + std::string(kind->what) +
                                       ", which cannot be read: " + std::string(kind->next)};
}

Error WithOtherSteps(Error error, const Format& format, const std::string& folder,
                     const std::string& name) {
  if (error.code != Errc::kNotFound || folder.empty() || name.empty()) return error;
  const std::vector<std::string> complete = CompleteNextTo(format, folder, name);
  if (!complete.empty())
    error.message += "; complete checkpoints next to it: " + FirstFew(complete);
  return error;
}

}  // namespace shardwright::checkpoints

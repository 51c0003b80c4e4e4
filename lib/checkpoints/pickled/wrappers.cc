// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/wrappers.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <unordered_set>
#include <vector>

#include "checkpoints/model/name_parts.h"

namespace shardwright::checkpoints {
namespace {

// By torch.compile, activation checkpointing, FSDP1.
constexpr std::array<std::string_view, 4> kWrappers = {"_orig_mod", "_checkpoint_wrapped_module",
                                                       "_fsdp_wrapped_module", "_fpw_module"};

constexpr std::array<std::string_view, 2> kFronts = {"module.", "model."};

bool IsWrapper(std::string_view part) {
  return std::find(kWrappers.begin(), kWrappers.end(), part) != kWrappers.end();
}

/// Returns true for PEFT modules that contain one entry per adapter, named after the adapter.
bool HoldsAdapters(std::string_view part) {
  return part.starts_with("lora_") || part.starts_with("ia3_") || part.starts_with("vera_") ||
         part == "modules_to_save";
}

void AddPart(std::string* text, std::string_view part) {
  if (!text->empty()) *text += '.';
  *text += part;
}

bool AllBeginWith(std::span<const std::string_view> names, std::string_view front) {
  return !names.empty() && std::all_of(names.begin(), names.end(), [&](std::string_view name) {
    return name.starts_with(front) && name.size() > front.size();
  });
}

/// Names by their form without wrappers; nothing if several names have the same form.
using ByPlain = std::unordered_map<std::string, std::optional<std::string_view>>;

ByPlain PlainNames(std::span<const std::string_view> names, std::string_view front) {
  ByPlain plain;
  for (const std::string_view name : names) {
    std::string key = PlainName(name);
    if (key.starts_with(front)) key.erase(0, front.size());
    const auto [at, fresh] = plain.try_emplace(std::move(key), name);
    if (!fresh) at->second.reset();
  }
  return plain;
}

}  // namespace

std::string PlainName(std::string_view name) {
  std::string plain;
  bool adapter = false;  // the previous part contains adapters
  ForEachPart(name, [&](std::string_view part, std::size_t /*end*/) {
    const bool is_name = adapter && part != "weight" && part != "bias";
    adapter = HoldsAdapters(part);
    if (!IsWrapper(part) && !is_name && part != "modules_to_save") AddPart(&plain, part);
    return true;
  });
  return plain;
}

bool IsAdapterName(std::string_view name) {
  bool found = false;
  ForEachPart(name, [&](std::string_view part, std::size_t /*end*/) {
    found = HoldsAdapters(part);
    return !found;
  });
  return found;
}

bool IsWithAdapter(std::string_view full, std::string_view name) {
  if (full.size() <= name.size() || PlainName(full) != PlainName(name)) return false;
  bool wrapped = false;
  ForEachPart(full, [&](std::string_view part, std::size_t /*end*/) {
    wrapped = IsWrapper(part);
    return !wrapped;
  });
  return !wrapped;
}

std::string PeftName(std::string_view name) {
  std::string plain = IsAdapterName(name) ? PlainName(name) : std::string(name);
  return IsWithAdapter(name, plain) ? plain : std::string(name);
}

std::unordered_map<std::string_view, std::string_view> MatchNames(
    std::span<const std::string_view> model, std::span<const std::string_view> optimizer) {
  std::unordered_map<std::string_view, std::string_view> matched;
  std::unordered_set<std::string_view> there(model.begin(), model.end());
  std::vector<std::string_view> left;
  for (const std::string_view name : optimizer) {
    const auto same = there.find(name);
    if (same == there.end()) {
      left.push_back(name);
    } else {
      matched.emplace(name, *same);
    }
  }
  if (left.empty()) return matched;
  for (const auto& [name, same] : matched) there.erase(same);
  const std::vector<std::string_view> rest(there.begin(), there.end());
  const auto match = [&](std::string_view front_of_model, std::string_view front_of_optimizer) {
    const ByPlain of_model = PlainNames(rest, front_of_model);
    const ByPlain of_optimizer = PlainNames(left, front_of_optimizer);
    std::size_t found = 0;
    for (const auto& [plain, name] : of_optimizer) {
      const auto same = of_model.find(plain);
      if (!name || same == of_model.end() || !same->second) continue;
      matched.emplace(*name, *same->second);
      ++found;
    }
    return found > 0;
  };
  if (match("", "")) return matched;
  for (const std::string_view front : kFronts) {
    const bool of_model = AllBeginWith(model, front);
    const bool of_optimizer = AllBeginWith(optimizer, front);
    if (of_model == of_optimizer) continue;
    if (match(of_model ? front : "", of_optimizer ? front : "")) break;
  }
  return matched;
}

Unwrapped Unwrap(std::span<const std::string_view> names, bool lightning) {
  Unwrapped out;
  std::set<std::string> wrappers;
  for (const std::string_view name : names) {
    std::string plain;
    ForEachPart(name, [&](std::string_view part, std::size_t end) {
      if (IsWrapper(part) && end < name.size()) {
        wrappers.insert(std::string(part) + ".");
      } else {
        AddPart(&plain, part);
      }
      return true;
    });
    out.names.push_back(std::move(plain));
  }
  const std::vector<std::string_view> plain(out.names.begin(), out.names.end());
  const bool nested = std::any_of(plain.begin(), plain.end(), [](std::string_view name) {
    return name.starts_with("model.model.");
  });
  if (AllBeginWith(plain, "module.")) {
    out.front = "module.";
  } else if (AllBeginWith(plain, "model.") && (nested || lightning)) {
    out.front = "model.";
  }
  for (std::string& name : out.names) name.erase(0, out.front.size());
  out.wrappers.assign(wrappers.begin(), wrappers.end());
  const std::set<std::string_view> different(out.names.begin(), out.names.end());
  if (different.size() == names.size()) return out;
  Unwrapped same;
  same.names.assign(names.begin(), names.end());
  return same;
}

}  // namespace shardwright::checkpoints

// SPDX-License-Identifier: Apache-2.0
#include "convert/check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/running_names.h"
#include "convert/check_internal.h"
#include "convert/element_text.h"
#include "engine/layout/states.h"
#include "engine/plan/plan.h"
#include "engine/tensor/convert.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::convert {
namespace {

using layout::LogicalTensor;

std::string Label(const std::string& name, const std::string& state) {
  return "\"" + name + "\" " + state;
}

/// Returns true if a checkpoint has the tensor or another from which it can be derived.
bool Derivable(const layout::TensorIndex& index, const LogicalTensor& tensor) {
  if (index.Find(tensor.name, tensor.state)) return true;
  return (tensor.state == layout::kWeight && index.Find(tensor.name, layout::kMaster)) ||
         (tensor.state == layout::kMaster && index.Find(tensor.name, layout::kWeight));
}

/// Returns the trained parameters without optimizer state, in a checkpoint that has such state.
std::set<std::string> Stateless(const checkpoints::Checkpoint& checkpoint) {
  std::set<std::string> names;
  if (checkpoint.states.empty()) return names;
  for (const checkpoints::Param& param : checkpoint.params) {
    const bool trained = param.kind == checkpoints::ParamKind::kTrainable && param.alias_of.empty();
    if (trained && param.scalars.empty()) names.insert(param.name);
  }
  for (const LogicalTensor& tensor : checkpoint.map.tensors) {
    if (!layout::IsModelState(tensor.state)) names.erase(tensor.name);
  }
  return names;
}

/// Computes the differences of floating-point elements by value. Pure.
Apart ApartOf(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  constexpr std::size_t kElems = 4096;
  std::vector<double> left(kElems);
  std::vector<double> right(kElems);
  const std::size_t item = ItemSize(dtype);
  Apart apart;
  for (std::size_t at = 0; at < a.size(); at += kElems * item) {
    const std::size_t bytes = std::min(kElems * item, a.size() - at);
    const auto numbers = [&](std::span<const std::byte> from, std::vector<double>& to) {
      Convert(dtype, from.subspan(at, bytes), DType::kF64,
              std::as_writable_bytes(std::span(to).first(bytes / item)));
    };
    numbers(a, left);
    numbers(b, right);
    for (std::size_t i = 0; i < bytes / item; ++i) {
      if (left[i] == right[i] || (std::isnan(left[i]) && std::isnan(right[i]))) continue;
      double difference = std::abs(left[i] - right[i]);
      if (std::isnan(difference)) difference = std::numeric_limits<double>::infinity();
      apart.largest = std::max(apart.largest, difference);
      apart.sum += difference;
    }
  }
  return apart;
}

/// Formats a number with few digits, such as "0.125".
std::string NumberText(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", number);
  return text;
}

}  // namespace

Checker::Checker(comm::Comm& comm, Input& a, Input& b, const CompareOptions& options,
                 std::string only, Sink& sink)
    : comm_(comm),
      a_(a),
      b_(b),
      options_(options),
      only_(std::move(only)),
      sink_(sink),
      alike_(MakeAlike(a.checkpoint, b.checkpoint)),
      idle_a_(Stateless(a.checkpoint)),
      idle_b_(Stateless(b.checkpoint)),
      commons_(1 + alike_.tied.size() + kSides) {
  report_.notes = alike_.notes;
}

void Checker::AddUnpaired(const LogicalTensor& tensor, bool first) {
  const std::set<std::string>& idle = first ? idle_b_ : idle_a_;
  if (layout::IsModelState(tensor.state) || !idle.contains(tensor.name)) {
    Differ(Label(tensor.name, tensor.state) +
           (first ? ": only in the first" : ": only in the second"));
    return;
  }
  commons_[IdlePass(first)].Add(tensor);
  idle_.push_back(Quoted(tensor.name));
}

void Checker::CompareNames() {
  const layout::ShardMap& map_a = MapOfA(0);
  const layout::ShardMap& map_b = MapOfB(0);
  const layout::TensorIndex of_a(map_a);
  const layout::TensorIndex of_b(map_b);
  Common& common = commons_.front();
  for (const LogicalTensor& tensor : map_a.tensors) {
    if (layout::IsPadding(tensor.state)) continue;
    if (!Derivable(of_b, tensor)) {
      AddUnpaired(tensor, true);
      continue;
    }
    const auto found = of_b.Find(tensor.name, tensor.state);
    if (found) {
      const LogicalTensor& other = map_b.tensors[*found];
      if (other.shape != tensor.shape) {
        Differ(Label(tensor.name, tensor.state) + ": shape " + ToString(tensor.shape) + " and " +
               ToString(other.shape));
        continue;
      }
      if (other.dtype != tensor.dtype) {
        Differ(Label(tensor.name, tensor.state) + ": " + std::string(Name(tensor.dtype)) + " and " +
               std::string(Name(other.dtype)));
        continue;
      }
    }
    common.Add(tensor);
  }
  for (const LogicalTensor& tensor : map_b.tensors) {
    if (layout::IsPadding(tensor.state)) continue;
    if (of_a.Find(tensor.name, tensor.state)) continue;
    if (Derivable(of_a, tensor)) {
      common.Add(tensor);
    } else {
      AddUnpaired(tensor, false);
    }
  }
  for (std::size_t pass = 1; pass < IdlePass(true); ++pass) {
    for (const LogicalTensor& tensor : MapOfA(pass).tensors) commons_[pass].Add(tensor);
  }
}

namespace {

/// Returns the model's tensors by name, each in one of its states, preferably the wanted one.
std::map<std::string_view, const LogicalTensor*> ModelOf(const layout::ShardMap& map,
                                                         std::string_view wanted) {
  std::map<std::string_view, const LogicalTensor*> model;
  for (const LogicalTensor& tensor : map.tensors) {
    if (!layout::IsModelState(tensor.state)) continue;
    const LogicalTensor*& chosen = model[tensor.name];
    if (chosen == nullptr || tensor.state == wanted) chosen = &tensor;
  }
  return model;
}

/// Returns the types of compute weights by name.
std::map<std::string_view, DType> WeightTypes(const checkpoints::Checkpoint& checkpoint) {
  std::map<std::string_view, DType> types;
  for (const checkpoints::Param& param : checkpoint.params) types.emplace(param.name, param.dtype);
  return types;
}

/// Returns the type in which compute weights of two types are compared.
DType Narrower(DType a, DType b) {
  if (a == b) return a;
  if (ItemSize(a) == ItemSize(b)) return DType::kF32;
  return ItemSize(a) < ItemSize(b) ? a : b;
}

}  // namespace

void Checker::CompareModel() {
  const std::string_view wanted = only_ == "master" ? layout::kMaster : layout::kWeight;
  const auto of_a = ModelOf(MapOfA(0), wanted);
  const auto of_b = ModelOf(MapOfB(0), wanted);
  const auto types_a = WeightTypes(a_.checkpoint);
  const auto types_b = WeightTypes(b_.checkpoint);
  const auto type_of = [](const auto& types, const LogicalTensor& tensor) {
    const auto found = types.find(tensor.name);
    return tensor.state == layout::kMaster && found != types.end() ? found->second : tensor.dtype;
  };
  for (const auto& [name, tensor] : of_a) {
    const auto found = of_b.find(name);
    if (found == of_b.end()) {
      Differ(Label(tensor->name, tensor->state) + ": only in the first");
      continue;
    }
    const LogicalTensor& other = *found->second;
    if (other.shape != tensor->shape) {
      Differ(Label(tensor->name, tensor->state) + ": shape " + ToString(tensor->shape) + " and " +
             ToString(other.shape));
      continue;
    }
    LogicalTensor common;
    common.name = tensor->name;
    common.shape = tensor->shape;
    common.state = tensor->state;
    common.dtype = Narrower(type_of(types_a, *tensor), type_of(types_b, other));
    const bool trained = tensor->state == layout::kWeight || tensor->state == layout::kMaster;
    if (trained) common.state = wanted;
    if (trained && wanted == layout::kMaster) common.dtype = DType::kF32;
    commons_.front().Add(common);
  }
  for (const auto& [name, tensor] : of_b) {
    if (!of_a.contains(name)) Differ(Label(tensor->name, tensor->state) + ": only in the second");
  }
  for (std::size_t pass = 1; pass < IdlePass(true); ++pass) {
    for (const LogicalTensor& tensor : MapOfA(pass).tensors) {
      if (layout::IsModelState(tensor.state)) commons_[pass].Add(tensor);
    }
  }
}

void Checker::CompareBytes(std::size_t pass, std::uint64_t index, const plan::Unit& unit,
                           std::span<const std::byte> of_a, std::span<const std::byte> of_b) {
  const bool idle = IsIdle(pass);
  const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
  if (idle ? std::ranges::all_of(of_a.first(unit.bytes), is_zero)
           : std::memcmp(of_a.data(), of_b.data(), unit.bytes) == 0) {
    return;
  }
  const LogicalTensor& tensor = commons_[pass].target().map.tensors[unit.file];
  if (idle) {
    const std::lock_guard lock(mutex_);
    different_[Tensor(pass, unit.file)].text = Label(tensor.name, tensor.state) + ": only in the " +
                                               (pass == IdlePass(true) ? "first" : "second") +
                                               ", and not zeros";
    return;
  }
  const std::uint64_t item = ItemSize(tensor.dtype);
  const auto byte = static_cast<std::uint64_t>(
      std::mismatch(of_a.begin(), of_a.end(), of_b.begin()).first - of_a.begin());
  const std::uint64_t at = byte / item * item;
  const auto show = [&](std::span<const std::byte> bytes) {
    return ElementText(tensor.dtype, bytes.subspan(at, item));
  };
  Apart apart;
  if (IsFloating(tensor.dtype)) {
    apart = ApartOf(tensor.dtype, of_a.first(unit.bytes), of_b.first(unit.bytes));
  }
  const std::lock_guard lock(mutex_);
  const auto [entry, fresh] = different_.try_emplace(Tensor(pass, unit.file));
  Difference& difference = entry->second;
  difference.apart.largest = std::max(difference.apart.largest, apart.largest);
  difference.apart.sum += apart.sum;
  if (fresh || index < difference.unit) {
    difference.unit = index;
    difference.text = Label(tensor.name, tensor.state) + " " + ToString(tensor.shape) +
                      ": element " + std::to_string((unit.first + at) / item) + ": " + show(of_a) +
                      " and " + show(of_b);
  }
}

Status Checker::ComparePayloads(std::size_t pass) {
  if (IsIdle(pass) && commons_[pass].target().files.empty()) return {};
  sink_.Pass("compare");
  const auto side = [&](bool first) {
    const std::size_t of = IsIdle(pass) ? 0 : pass;
    return first ? Compared{MapOfA(of), *a_.bytes, a_.file_owner}
                 : Compared{MapOfB(of), *b_.bytes, b_.file_owner};
  };
  const Compared of_a = side(!IsIdle(pass) || pass == IdlePass(true));
  const Compared of_b = side(pass == IdlePass(true));
  auto compared = CompareSources(
      comm_, of_a, of_b, commons_[pass].target(), options_,
      [this, pass](std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> left,
                   std::span<const std::byte> right) {
        CompareBytes(pass, index, unit, left, right);
      },
      sink_);
  SW_TRY_ASSIGN(const std::uint64_t bytes, std::move(compared));
  report_.bytes_compared += bytes;
  return {};
}

Status Checker::ShareDifferences() {
  nlohmann::json mine = nlohmann::json::array();
  for (const auto& [tensor, one] : different_) {
    mine.push_back({tensor.first, tensor.second, one.text,
                    std::bit_cast<std::uint64_t>(one.apart.largest),
                    std::bit_cast<std::uint64_t>(one.apart.sum)});
  }
  const std::vector<std::uint8_t> packed = nlohmann::json::to_msgpack(mine);
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm_.AllGather(std::as_bytes(std::span(packed))));
  std::map<Tensor, Difference> all;
  for (const comm::Bytes& part : parts) {
    SW_TRY_ASSIGN(const json::Json theirs, json::ParseMessagePack(part, "differences of a rank"));
    for (const json::Json& one : theirs) {
      // Ranks have consecutive units, so the first rank has the first difference.
      Difference& whole = all[Tensor(one[0].get<std::size_t>(), one[1].get<std::uint32_t>())];
      if (whole.text.empty()) whole.text = one[2].get<std::string>();
      const auto largest = std::bit_cast<double>(one[3].get<std::uint64_t>());
      whole.apart.largest = std::max(whole.apart.largest, largest);
      whole.apart.sum += std::bit_cast<double>(one[4].get<std::uint64_t>());
    }
  }
  std::vector<std::pair<double, std::string>> lines;
  lines.reserve(all.size());
  for (const auto& [tensor, one] : all) {
    std::string line = one.text;
    const LogicalTensor& of = commons_[tensor.first].target().map.tensors[tensor.second];
    if (one.apart.largest > 0) {
      SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(of.shape));
      line.append("; largest difference ").append(NumberText(one.apart.largest));
      line.append(", mean ").append(NumberText(one.apart.sum / static_cast<double>(elems)));
    }
    lines.emplace_back(one.apart.largest, std::move(line));
  }
  std::ranges::stable_sort(lines, std::greater<>(), &std::pair<double, std::string>::first);
  for (auto& [largest, line] : lines) Differ(std::move(line));
  report_.tensors_different = all.size();
  for (const Common& common : commons_) {
    report_.tensors_equal += common.target().map.tensors.size();
  }
  report_.tensors_equal -= all.size();
  return {};
}

Result<CheckReport> Checker::Run() {
  const exec::CountReads reads_a(*a_.bytes, sink_);
  const exec::CountReads reads_b(*b_.bytes, sink_);
  for (const Input* input : {&a_, &b_}) {
    SW_TRY(VerifyDigests(comm_, *input, options_.threads, sink_));
  }
  for (const std::string& note : report_.notes) sink_.Note("not compared: " + note, 0);
  if (only_.empty()) {
    CompareParams();
    for (std::string& line : checkpoints::EntryDifferences(a_.checkpoint, b_.checkpoint)) {
      Differ(std::move(line));
    }
    CompareNames();
  } else {
    CompareModel();
  }
  if (!idle_.empty()) {
    std::sort(idle_.begin(), idle_.end());
    idle_.erase(std::unique(idle_.begin(), idle_.end()), idle_.end());
    report_.notes.push_back(
        "these have no optimizer state in one checkpoint, so it must be zeros in the other: " +
        FirstFew(idle_));
    sink_.Note(report_.notes.back(), 0);
  }
  for (std::size_t pass = 0; pass < commons_.size(); ++pass) SW_TRY(ComparePayloads(pass));
  SW_TRY(ShareDifferences());
  return report_;
}

Result<CheckReport> Check(comm::Comm& comm, Input& a, Input& b, const CompareOptions& options,
                          Sink& sink, const std::string& only) {
  checkpoints::NameAlike(&a.checkpoint, &b.checkpoint);
  Checker checker(comm, a, b, options, only, sink);
  return checker.Run();
}

}  // namespace shardwright::convert

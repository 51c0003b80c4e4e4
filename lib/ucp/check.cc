#include "ucp/check.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>

#include "layout/states.h"
#include "plan/plan.h"
#include "plan/target_builder.h"
#include "ucp/value.h"

namespace shardwright::ucp {
namespace {

using layout::LogicalTensor;

std::string Label(const std::string& name, const std::string& state) {
  return "\"" + name + "\" " + state;
}

/// True if a checkpoint holds the tensor, or something that it is derived from.
bool Derivable(const layout::TensorIndex& index, const LogicalTensor& tensor) {
  if (index.Find(tensor.name, tensor.state)) return true;
  return (tensor.state == layout::kWeight && index.Find(tensor.name, layout::kMaster)) ||
         (tensor.state == layout::kMaster && index.Find(tensor.name, layout::kWeight));
}

/// The tensors to compare, as a target that is never written: one whole tensor per file.
class Common {
 public:
  void Add(const LogicalTensor& tensor) {
    const std::uint32_t file = builder_.AddFile(tensor.name);
    builder_.AddWhole(file, 0, tensor.name, tensor.state, tensor.dtype, tensor.shape, tensor.state);
  }
  const plan::Target& target() const { return builder_.target(); }

 private:
  plan::TargetBuilder builder_;
};

class Checker {
 public:
  Checker(comm::Comm& comm, Input& a, Input& b, const CompareOptions& options, Sink& sink)
      : comm_(comm), a_(a), b_(b), options_(options), sink_(sink) {}

  Result<CheckReport> Go();

 private:
  void CompareNames();
  void CompareParams();
  void CompareProgress();
  void CompareGroups();
  void CompareGroupsOfParams(bool one_format);
  void Differ(std::string line) {
    const std::lock_guard lock(mutex_);
    ++report_.difference_count;
    if (report_.differences.size() < kShownDifferences)
      report_.differences.push_back(std::move(line));
  }
  Status ComparePayloads();
  void CompareBytes(std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> of_a,
                    std::span<const std::byte> of_b);

  comm::Comm& comm_;
  Input& a_;
  Input& b_;
  const CompareOptions& options_;
  Sink& sink_;
  Common common_;
  std::mutex mutex_;
  std::map<std::uint32_t, std::string>
      different_;  // by tensor: the first difference seen, by unit order
  std::map<std::uint32_t, std::uint64_t> different_at_;
  CheckReport report_;
};

void Checker::CompareNames() {
  const layout::TensorIndex of_a(a_.checkpoint.map);
  const layout::TensorIndex of_b(b_.checkpoint.map);
  for (const LogicalTensor& tensor : a_.checkpoint.map.tensors) {
    if (layout::IsPadding(tensor.state)) continue;
    if (!Derivable(of_b, tensor)) {
      Differ(Label(tensor.name, tensor.state) + ": only in the first");
      continue;
    }
    const auto found = of_b.Find(tensor.name, tensor.state);
    if (found) {
      const LogicalTensor& other = b_.checkpoint.map.tensors[*found];
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
    common_.Add(tensor);
  }
  for (const LogicalTensor& tensor : b_.checkpoint.map.tensors) {
    if (layout::IsPadding(tensor.state)) continue;
    if (of_a.Find(tensor.name, tensor.state)) continue;
    if (Derivable(of_a, tensor)) {
      common_.Add(tensor);
    } else {
      Differ(Label(tensor.name, tensor.state) + ": only in the second");
    }
  }
}

/// Those of the model and those that the optimizer has as one.
std::vector<const dialect::Param*> AllOf(const dialect::Checkpoint& checkpoint) {
  std::vector<const dialect::Param*> all;
  for (const dialect::Param& param : checkpoint.params) all.push_back(&param);
  for (const dialect::Param& param : checkpoint.fused) all.push_back(&param);
  return all;
}

void Checker::CompareParams() {
  std::map<std::string, const dialect::Param*> of_b;
  for (const dialect::Param* param : AllOf(b_.checkpoint)) of_b[param->name] = param;
  for (const dialect::Param* one : AllOf(a_.checkpoint)) {
    const dialect::Param& param = *one;
    const auto found = of_b.find(param.name);
    if (found == of_b.end()) {
      Differ("\"" + param.name + "\": only in the first");
      continue;
    }
    const dialect::Param& other = *found->second;
    if (param.kind != other.kind)
      Differ("\"" + param.name + "\": trainable, frozen or buffer differ");
    if (param.alias_of != other.alias_of) {
      Differ("\"" + param.name + "\": tied to \"" + param.alias_of + "\" and \"" + other.alias_of +
             "\"");
    }
    for (const std::string& line : ScalarDifferences(param.scalars, other.scalars)) {
      Differ("\"" + param.name + "\" " + line);
    }
    of_b.erase(found);
  }
  for (const auto& [name, param] : of_b) Differ("\"" + name + "\": only in the second");
  const auto& groups_a = a_.checkpoint.groups;
  const auto& groups_b = b_.checkpoint.groups;
  const auto is_moe = [](const dialect::Group& group) { return group.moe; };
  const bool experts = std::any_of(groups_a.begin(), groups_a.end(), is_moe) ||
                       std::any_of(groups_b.begin(), groups_b.end(), is_moe);
  const bool parted = experts && groups_a.size() != groups_b.size();
  const bool one_format = a_.checkpoint.origin == b_.checkpoint.origin;
  CompareProgress();
  if (one_format && !parted) return CompareGroups();
  CompareGroupsOfParams(one_format);
}

/// How far training was. Not every format has a place for it.
void Checker::CompareProgress() {
  const auto compare = [&](const char* what, const auto& a, const auto& b) {
    if (!a || !b || *a == *b) return;
    Differ(std::string(what) + ": " + std::to_string(*a) + " and " + std::to_string(*b));
  };
  compare("iteration", a_.checkpoint.iteration, b_.checkpoint.iteration);
  compare("consumed samples", a_.checkpoint.consumed_samples, b_.checkpoint.consumed_samples);
}

void Checker::CompareGroups() {
  const auto& groups_a = a_.checkpoint.groups;
  const auto& groups_b = b_.checkpoint.groups;
  if (groups_a.size() != groups_b.size()) {
    return Differ("parameter groups: " + std::to_string(groups_a.size()) + " and " +
                  std::to_string(groups_b.size()));
  }
  for (std::size_t g = 0; g < groups_a.size(); ++g) {
    for (const std::string& line : GroupDifferences(groups_a[g], groups_b[g], true)) {
      Differ("parameter group " + std::to_string(g) + " " + line);
    }
  }
  std::map<std::string, std::int32_t> of_b;
  for (const dialect::Param* param : AllOf(b_.checkpoint)) of_b[param->name] = param->group;
  for (const dialect::Param* one : AllOf(a_.checkpoint)) {
    const dialect::Param& param = *one;
    const auto found = of_b.find(param.name);
    if (found == of_b.end() || !param.alias_of.empty() || found->second == param.group) continue;
    const auto text = [](std::int32_t group) {
      return group < 0 ? std::string("none") : std::to_string(group);
    };
    Differ("\"" + param.name + "\": in parameter group " + text(param.group) + " and " +
           text(found->second));
  }
}

/// Formats order groups as they like, and part or unite those of experts; what a parameter is
/// trained with is the same in all.
void Checker::CompareGroupsOfParams(bool one_format) {
  std::map<std::string, std::int32_t> of_b;
  for (const dialect::Param* param : AllOf(b_.checkpoint)) of_b[param->name] = param->group;
  std::set<std::pair<std::int32_t, std::int32_t>> seen;
  for (const dialect::Param* one : AllOf(a_.checkpoint)) {
    const dialect::Param& param = *one;
    const auto found = of_b.find(param.name);
    if (found == of_b.end() || !param.alias_of.empty()) continue;
    const std::int32_t other = found->second;
    if (param.group < 0 && other < 0) continue;
    if (param.group < 0 || other < 0) {
      Differ("\"" + param.name + "\": in a parameter group of one only");
      continue;
    }
    if (!seen.emplace(param.group, other).second) continue;
    const auto& of_first = a_.checkpoint.groups[static_cast<std::size_t>(param.group)];
    const auto& of_second = b_.checkpoint.groups[static_cast<std::size_t>(other)];
    for (const std::string& line : GroupDifferences(of_first, of_second, one_format)) {
      Differ("parameter groups " + std::to_string(param.group) + " and " + std::to_string(other) +
             " (\"" + param.name + "\") " + line);
    }
  }
}

void Checker::CompareBytes(std::uint64_t index, const plan::Unit& unit,
                           std::span<const std::byte> of_a, std::span<const std::byte> of_b) {
  if (std::memcmp(of_a.data(), of_b.data(), unit.bytes) == 0) return;
  const LogicalTensor& tensor = common_.target().map.tensors[unit.file];
  const std::uint64_t item = ItemSize(tensor.dtype);
  const auto byte = static_cast<std::uint64_t>(
      std::mismatch(of_a.begin(), of_a.end(), of_b.begin()).first - of_a.begin());
  const std::uint64_t at = byte / item * item;
  const auto show = [&](std::span<const std::byte> bytes) {
    return ElementText(tensor.dtype, bytes.subspan(at, item));
  };
  const std::lock_guard lock(mutex_);
  const auto [entry, fresh] = different_at_.emplace(unit.file, index);
  if (fresh || index < entry->second) {
    entry->second = index;
    different_[unit.file] = Label(tensor.name, tensor.state) + " " + ToString(tensor.shape) +
                            ": element " + std::to_string((unit.first + at) / item) + ": " +
                            show(of_a) + " and " + show(of_b);
  }
}

Status Checker::ComparePayloads() {
  sink_.Pass("compare");
  const auto side = [](Input& input) {
    return Compared{input.checkpoint.map, *input.bytes, input.file_owner};
  };
  auto compared = CompareSources(
      comm_, side(a_), side(b_), common_.target(), options_,
      [this](std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> of_a,
             std::span<const std::byte> of_b) { CompareBytes(index, unit, of_a, of_b); },
      sink_);
  SW_TRY_ASSIGN(report_.bytes_compared, std::move(compared));
  return {};
}

Result<CheckReport> Checker::Go() {
  for (const Input* input : {&a_, &b_}) {
    SW_TRY(VerifyDigests(comm_, *input, options_.threads, sink_));
  }
  CompareParams();
  CompareNames();
  SW_TRY(ComparePayloads());
  // Tensors that differ, from all ranks: one line each, "tensor \n text".
  std::string mine;
  for (const auto& [tensor, text] : different_) mine += std::to_string(tensor) + "\n" + text + "\n";
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm_.AllGather(std::as_bytes(std::span(mine))));
  std::map<std::uint32_t, std::string> all;
  for (const comm::Bytes& part : parts) {
    std::string_view text(reinterpret_cast<const char*>(part.data()), part.size());
    while (!text.empty()) {
      const std::size_t number = text.find('\n');
      const std::size_t end = text.find('\n', number + 1);
      all.emplace(static_cast<std::uint32_t>(std::stoul(std::string(text.substr(0, number)))),
                  text.substr(number + 1, end - number - 1));
      text.remove_prefix(end + 1);
    }
  }
  for (const auto& [tensor, text] : all) Differ(text);
  report_.tensors_different = all.size();
  report_.tensors_equal = common_.target().map.tensors.size() - all.size();
  sink_.AddRead(a_.bytes->bytes_read() + b_.bytes->bytes_read(),
                a_.bytes->files_read() + b_.bytes->files_read());
  return report_;
}

}  // namespace

Result<CheckReport> Check(comm::Comm& comm, Input& a, Input& b, const CompareOptions& options,
                          Sink& sink) {
  Checker checker(comm, a, b, options, sink);
  return checker.Go();
}

}  // namespace shardwright::ucp

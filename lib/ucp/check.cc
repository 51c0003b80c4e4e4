#include "ucp/check.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include <tbb/blocked_range.h>
#include <tbb/enumerable_thread_specific.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "exec/first_error.h"
#include "exec/gather.h"
#include "plan/plan.h"
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
  return (tensor.state == "weight" && index.Find(tensor.name, "fp32")) ||
         (tensor.state == "fp32" && index.Find(tensor.name, "weight"));
}

/// The tensors to compare, as a target that is never written: one whole tensor per file.
class Common {
 public:
  void Add(const LogicalTensor& tensor) {
    layout::ShardMap& map = target_.map;
    const auto index = static_cast<std::uint32_t>(map.tensors.size());
    const std::uint64_t elems = Elems(tensor.shape);
    const std::uint64_t bytes = elems * ItemSize(tensor.dtype);
    map.files.push_back(tensor.name);
    map.members.push_back({index, 0, bytes, std::nullopt, tensor.state});
    map.arrays.push_back({tensor.dtype, {{index, 0, elems}}});
    LogicalTensor whole{tensor.name, tensor.state, tensor.dtype, tensor.shape, {}};
    layout::Placement at;
    at.array = index;
    whole.fragments.push_back({std::make_shared<layout::Cut>(layout::Cut::Whole(tensor.shape)), at,
                               layout::Role::kOwner});
    map.tensors.push_back(std::move(whole));
    plan::Payload payload;
    payload.array = index;
    payload.bytes = bytes;
    plan::OutputFile file;
    file.path = tensor.name;
    file.bytes = bytes;
    file.payloads.push_back(payload);
    target_.files.push_back(std::move(file));
  }
  const plan::Target& target() const { return target_; }

 private:
  plan::Target target_;
};

class Checker {
 public:
  Checker(comm::Comm& comm, Input& a, Input& b, unsigned threads, Sink& sink)
      : comm_(comm), a_(a), b_(b), arena_(static_cast<int>(threads)), sink_(sink) {}

  Result<CheckReport> Go();

 private:
  void CompareNames();
  void CompareParams();
  void Differ(std::string line) {
    const std::lock_guard lock(mutex_);
    ++report_.difference_count;
    if (report_.differences.size() < kShownDifferences)
      report_.differences.push_back(std::move(line));
  }
  Status ComparePayloads();
  Status CompareUnit(const plan::Plan& a, const plan::Plan& b, std::uint64_t index,
                     exec::SourceSums* sums_a, exec::SourceSums* sums_b, exec::Workspace* of_a,
                     exec::Workspace* of_b);
  Status VerifyMembers(const plan::Plan& plan, exec::SourceSums* sums, Input& input);

  comm::Comm& comm_;
  Input& a_;
  Input& b_;
  tbb::task_arena arena_;
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
    if (of_a.Find(tensor.name, tensor.state)) continue;
    if (Derivable(of_a, tensor)) {
      common_.Add(tensor);
    } else {
      Differ(Label(tensor.name, tensor.state) + ": only in the second");
    }
  }
}

void Checker::CompareParams() {
  std::map<std::string, const dialect::Param*> of_b;
  for (const dialect::Param& param : b_.checkpoint.params) of_b[param.name] = &param;
  for (const dialect::Param& param : a_.checkpoint.params) {
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
  if (groups_a.size() != groups_b.size()) {
    return Differ("parameter groups: " + std::to_string(groups_a.size()) + " and " +
                  std::to_string(groups_b.size()));
  }
  for (std::size_t g = 0; g < groups_a.size(); ++g) {
    for (const std::string& line : OptionDifferences(groups_a[g].options, groups_b[g].options)) {
      Differ("parameter group " + std::to_string(g) + " " + line);
    }
  }
}

Status Checker::CompareUnit(const plan::Plan& a, const plan::Plan& b, std::uint64_t index,
                            exec::SourceSums* sums_a, exec::SourceSums* sums_b,
                            exec::Workspace* of_a, exec::Workspace* of_b) {
  const plan::Unit unit = a.unit(index);
  std::vector<exec::Share> shares;
  SW_TRY(exec::GatherUnit(a, unit, *a_.bytes, of_a, &shares));
  sums_a->Add(shares);
  shares.clear();
  SW_TRY(exec::GatherUnit(b, unit, *b_.bytes, of_b, &shares));
  sums_b->Add(shares);
  if (of_a->unit == of_b->unit) return {};
  const LogicalTensor& tensor = common_.target().map.tensors[unit.file];
  const std::uint64_t item = ItemSize(tensor.dtype);
  const auto byte = static_cast<std::uint64_t>(
      std::mismatch(of_a->unit.begin(), of_a->unit.end(), of_b->unit.begin()).first -
      of_a->unit.begin());
  const std::uint64_t at = byte / item * item;
  const auto show = [&](const exec::Workspace& side) {
    return ElementText(tensor.dtype, std::span(side.unit).subspan(at, item));
  };
  const std::lock_guard lock(mutex_);
  const auto [entry, fresh] = different_at_.emplace(unit.file, index);
  if (fresh || index < entry->second) {
    entry->second = index;
    different_[unit.file] = Label(tensor.name, tensor.state) + " " + ToString(tensor.shape) +
                            ": element " + std::to_string((unit.first + at) / item) + ": " +
                            show(*of_a) + " and " + show(*of_b);
  }
  return {};
}

Status Checker::VerifyMembers(const plan::Plan& plan, exec::SourceSums* sums, Input& input) {
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> packed, comm_.AllGather(sums->Pack()));
  for (std::size_t rank = 0; rank < packed.size(); ++rank) {
    if (rank != static_cast<std::size_t>(comm_.rank())) sums->Combine(packed[rank]);
  }
  exec::FirstError error;
  arena_.execute([&] {
    tbb::parallel_for(std::size_t{0}, plan.source().members.size(), [&](std::size_t m) {
      const auto member = static_cast<std::uint32_t>(m);
      if (m % static_cast<std::size_t>(comm_.size()) != static_cast<std::size_t>(comm_.rank()))
        return;
      if (plan.primary_bytes(member) == 0 || error.failed()) return;
      Result<bool> ok = exec::VerifyMember(plan, *sums, member, *input.bytes);
      if (!ok) error.Set(m, std::move(ok).error());
    });
  });
  return comm_.Agree(error.Take());
}

Status Checker::ComparePayloads() {
  sink_.Pass("compare");
  SW_TRY_ASSIGN(const plan::Plan plan_a, plan::Plan::Make(a_.checkpoint.map, common_.target()));
  SW_TRY_ASSIGN(const plan::Plan plan_b, plan::Plan::Make(b_.checkpoint.map, common_.target()));
  exec::SourceSums sums_a(a_.checkpoint.map.members.size());
  exec::SourceSums sums_b(b_.checkpoint.map.members.size());
  const std::uint64_t units = plan_a.unit_count();
  const auto ranks = static_cast<std::uint64_t>(comm_.size());
  const auto rank = static_cast<std::uint64_t>(comm_.rank());
  const std::uint64_t first = units * rank / ranks;
  const std::uint64_t last = units * (rank + 1) / ranks;
  struct Pair {
    exec::Workspace a;
    exec::Workspace b;
  };
  tbb::enumerable_thread_specific<Pair> workspaces;
  exec::FirstError error;
  std::atomic<std::uint64_t> done = first;
  arena_.execute([&] {
    tbb::parallel_for(tbb::blocked_range<std::uint64_t>(first, last), [&](const auto& range) {
      for (std::uint64_t index = range.begin(); index < range.end() && !error.failed(); ++index) {
        if (sink_.stop_requested())
          return error.Set(index, {Errc::kStopped, "stopped on request", 0, -1});
        Pair& pair = workspaces.local();
        Status status = CompareUnit(plan_a, plan_b, index, &sums_a, &sums_b, &pair.a, &pair.b);
        if (!status) return error.Set(index, std::move(status).error());
        sink_.Progress((++done - first) * plan::kUnitBytes, (last - first) * plan::kUnitBytes);
      }
    });
  });
  SW_TRY(comm_.Agree(error.Take()));
  SW_TRY(VerifyMembers(plan_a, &sums_a, a_));
  SW_TRY(VerifyMembers(plan_b, &sums_b, b_));
  report_.bytes_compared = plan_a.totals().payload_bytes;
  return {};
}

Result<CheckReport> Checker::Go() {
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

Result<CheckReport> Check(comm::Comm& comm, Input& a, Input& b, unsigned threads, Sink& sink) {
  Checker checker(comm, a, b, threads, sink);
  return checker.Go();
}

}  // namespace shardwright::ucp

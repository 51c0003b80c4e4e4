#include "ucp/check.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>

#include <tbb/blocked_range.h>
#include <tbb/enumerable_thread_specific.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "exec/exchange.h"
#include "exec/first_error.h"
#include "exec/gather.h"
#include "exec/verify.h"
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
  Checker(comm::Comm& comm, Input& a, Input& b, const CheckOptions& options, Sink& sink)
      : comm_(comm),
        a_(a),
        b_(b),
        options_(options),
        arena_(static_cast<int>(options.threads)),
        sink_(sink) {}

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
  /// One of the two while payloads are compared.
  struct Side {
    Side(comm::Comm& comm, const plan::Plan& its_plan, const Input& input)
        : plan(its_plan),
          source(comm, input.checkpoint.map, *input.bytes, input.file_owner),
          sums(input.checkpoint.map.members.size()) {}
    const plan::Plan& plan;
    exec::Exchange source;
    exec::SourceSums sums;
  };
  struct Pair {
    exec::Workspace a;
    exec::Workspace b;
  };
  Status ComparePayloads();
  Status CompareUnits(std::uint64_t first, std::uint64_t last, Side* a, Side* b);
  Status CompareUnit(std::uint64_t index, Side* a, Side* b, Pair* pair);
  Status Verify(Side* side);

  comm::Comm& comm_;
  Input& a_;
  Input& b_;
  const CheckOptions& options_;
  tbb::task_arena arena_;
  Sink& sink_;
  Common common_;
  std::mutex mutex_;
  std::map<std::uint32_t, std::string>
      different_;  // by tensor: the first difference seen, by unit order
  std::map<std::uint32_t, std::uint64_t> different_at_;
  std::uint64_t units_mine_ = 0;
  std::atomic<std::uint64_t> compared_ = 0;
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

Status Checker::CompareUnit(std::uint64_t index, Side* a, Side* b, Pair* pair) {
  const plan::Unit unit = a->plan.unit(index);
  const auto gather = [&](Side* side, exec::Workspace* workspace) -> Status {
    std::vector<exec::Share> shares;
    SW_TRY(exec::GatherUnit(side->plan, unit, side->source, workspace, &shares));
    side->sums.Add(shares);
    return {};
  };
  SW_TRY(gather(a, &pair->a));
  SW_TRY(gather(b, &pair->b));
  const std::vector<std::byte>& of_a = pair->a.unit;
  const std::vector<std::byte>& of_b = pair->b.unit;
  if (of_a == of_b) return {};
  const LogicalTensor& tensor = common_.target().map.tensors[unit.file];
  const std::uint64_t item = ItemSize(tensor.dtype);
  const auto byte = static_cast<std::uint64_t>(
      std::mismatch(of_a.begin(), of_a.end(), of_b.begin()).first - of_a.begin());
  const std::uint64_t at = byte / item * item;
  const auto show = [&](const std::vector<std::byte>& bytes) {
    return ElementText(tensor.dtype, std::span(bytes).subspan(at, item));
  };
  const std::lock_guard lock(mutex_);
  const auto [entry, fresh] = different_at_.emplace(unit.file, index);
  if (fresh || index < entry->second) {
    entry->second = index;
    different_[unit.file] = Label(tensor.name, tensor.state) + " " + ToString(tensor.shape) +
                            ": element " + std::to_string((unit.first + at) / item) + ": " +
                            show(of_a) + " and " + show(of_b);
  }
  return {};
}

Status Checker::Verify(Side* side) {
  SW_TRY(exec::CombineSums(comm_, &side->sums));
  SW_TRY(exec::VerifyMembers(comm_, side->plan, side->sums, {}, side->source, arena_));
  return {};
}

Status Checker::CompareUnits(std::uint64_t first, std::uint64_t last, Side* a, Side* b) {
  tbb::enumerable_thread_specific<Pair> workspaces;
  exec::FirstError error;
  arena_.execute([&] {
    tbb::parallel_for(tbb::blocked_range<std::uint64_t>(first, last), [&](const auto& range) {
      for (std::uint64_t index = range.begin(); index < range.end() && !error.failed(); ++index) {
        if (sink_.stop_requested())
          return error.Set(index, {Errc::kStopped, "stopped on request", 0, -1});
        Status status = CompareUnit(index, a, b, &workspaces.local());
        if (!status) return error.Set(index, std::move(status).error());
        sink_.Progress(++compared_ * plan::kUnitBytes, units_mine_ * plan::kUnitBytes);
      }
    });
  });
  return error.Take();
}

Status Checker::ComparePayloads() {
  sink_.Pass("compare");
  SW_TRY_ASSIGN(const plan::Plan plan_a, plan::Plan::Make(a_.checkpoint.map, common_.target()));
  SW_TRY_ASSIGN(const plan::Plan plan_b, plan::Plan::Make(b_.checkpoint.map, common_.target()));
  Side a(comm_, plan_a, a_);
  Side b(comm_, plan_b, b_);
  const std::uint64_t units = plan_a.unit_count();
  const auto ranks = static_cast<std::uint64_t>(comm_.size());
  const auto rank = static_cast<std::uint64_t>(comm_.rank());
  const std::uint64_t first = units * rank / ranks;
  units_mine_ = units * (rank + 1) / ranks - first;
  const std::uint64_t workspaces = std::uint64_t{2} * options_.threads * exec::kWorkspaceBytes;
  const std::uint64_t budget =  // of a round, of which each side holds one
      (options_.memory_bytes - std::min(options_.memory_bytes, workspaces)) / 2;
  const std::uint64_t most = std::min(a.source.RoundUnits(budget), b.source.RoundUnits(budget));
  std::vector<std::uint64_t> part;
  SW_TRY(exec::InRounds(comm_, units_mine_, most, [&](std::uint64_t begin, std::uint64_t end) {
    part.resize(end - begin);
    std::iota(part.begin(), part.end(), first + begin);
    Status status = a.source.Round(plan_a, part);
    if (status) status = b.source.Round(plan_b, part);
    if (!status) return status;
    return comm_.Agree(CompareUnits(first + begin, first + end, &a, &b));
  }));
  SW_TRY(Verify(&a));
  SW_TRY(Verify(&b));
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

Result<CheckReport> Check(comm::Comm& comm, Input& a, Input& b, const CheckOptions& options,
                          Sink& sink) {
  Checker checker(comm, a, b, options, sink);
  return checker.Go();
}

}  // namespace shardwright::ucp

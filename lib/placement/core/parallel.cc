// SPDX-License-Identifier: Apache-2.0
#include "placement/core/parallel.h"

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

namespace shardwright::placement {
namespace {

class Writer {
 public:
  template <class T>
  void Number(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), first, first + sizeof value);
  }
  template <class T>
  void Numbers(const std::vector<T>& values) {
    Number(std::uint64_t{values.size()});
    const auto bytes = std::as_bytes(std::span(values));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void Text(const std::string& text) {
    Number(std::uint64_t{text.size()});
    const auto bytes = std::as_bytes(std::span(text));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void Place(const Placement& placement) {
    Number(placement.layers);
    Number(placement.experts);
    Numbers(placement.slot_begin);
    Numbers(placement.slot_expert);
  }
  comm::Bytes Take() { return std::move(bytes_); }

 private:
  comm::Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  Status Take(void* to, std::uint64_t bytes) {
    if (bytes > rest_.size()) {
      return Fail(Errc::kInternal, "plan of another rank: ends too early");
    }
    if (bytes > 0) std::memcpy(to, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    return {};
  }
  template <class T>
  Status Number(T* value) {
    return Take(value, sizeof *value);
  }
  template <class Container>
  Status Sequence(Container* values) {
    constexpr std::uint64_t kItem = sizeof(typename Container::value_type);
    std::uint64_t count = 0;
    SW_TRY(Number(&count));
    if (count > rest_.size() / kItem) {
      return Fail(Errc::kInternal, "plan of another rank: ends too early");
    }
    values->resize(count);
    return Take(values->data(), count * kItem);
  }
  Status Place(Placement* placement) {
    SW_TRY(Number(&placement->layers));
    SW_TRY(Number(&placement->experts));
    SW_TRY(Sequence(&placement->slot_begin));
    return Sequence(&placement->slot_expert);
  }
  bool at_end() const { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

/// Drafts this rank's share of the layers. Returns no bytes if the share is empty.
Result<comm::Bytes> DraftShare(comm::Comm& comm, const Strategy& strategy, const TokenCounts& loads,
                               const Cluster& cluster, const Placement* current,
                               const Options& options) {
  const auto ranks = static_cast<std::uint64_t>(comm.size());
  const auto rank = static_cast<std::uint64_t>(comm.rank());
  const auto first = static_cast<std::uint32_t>(loads.layers * rank / ranks);
  const auto last = static_cast<std::uint32_t>(loads.layers * (rank + 1) / ranks);
  if (first == last) return comm::Bytes();
  const TokenCounts part = LayersOf(loads, first, last);
  Placement held;
  if (current != nullptr) held = LayersOf(*current, first, last);
  SW_TRY_ASSIGN(const StrategyResult draft,
                strategy.draft(part, cluster, current == nullptr ? nullptr : &held, options));
  return Pack(draft);
}

}  // namespace

comm::Bytes Pack(const StrategyResult& result) {
  Writer writer;
  writer.Place(result.placement);
  writer.Number(std::uint8_t{result.owners.has_value()});
  if (result.owners) writer.Place(*result.owners);
  writer.Number(std::uint64_t{result.notes.size()});
  for (const LayerNotes& note : result.notes) {
    writer.Number(std::uint8_t{note.cut});
    writer.Number(note.copies_min);
    writer.Number(static_cast<std::uint8_t>(note.search_end));
    writer.Number(note.bound);
  }
  writer.Number(std::uint64_t{result.choices.size()});
  for (const auto& layer : result.choices) {
    writer.Number(std::uint64_t{layer.size()});
    for (const LayerChoice& choice : layer) {
      writer.Number(choice.moves);
      writer.Number(choice.imbalance);
      writer.Numbers(choice.slots);
    }
  }
  writer.Numbers(result.moves_curve);
  writer.Number(std::uint64_t{result.warnings.size()});
  for (const std::string& warning : result.warnings) writer.Text(warning);
  return writer.Take();
}

Result<StrategyResult> UnpackResult(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  StrategyResult result;
  SW_TRY(reader.Place(&result.placement));
  std::uint8_t flag = 0;
  SW_TRY(reader.Number(&flag));
  if (flag != 0) SW_TRY(reader.Place(&result.owners.emplace()));
  std::uint64_t count = 0;
  SW_TRY(reader.Number(&count));
  for (std::uint64_t i = 0; i < count; ++i) {
    LayerNotes note;
    SW_TRY(reader.Number(&flag));
    SW_TRY(reader.Number(&note.copies_min));
    note.cut = flag != 0;
    SW_TRY(reader.Number(&flag));
    if (flag > static_cast<std::uint8_t>(SearchEnd::kNoGain)) {
      return Fail(Errc::kInternal,
                  "plan of another rank: has an unknown reason for the end of a search");
    }
    note.search_end = static_cast<SearchEnd>(flag);
    SW_TRY(reader.Number(&note.bound));
    result.notes.push_back(note);
  }
  SW_TRY(reader.Number(&count));
  for (std::uint64_t i = 0; i < count; ++i) {
    std::vector<LayerChoice>& layer = result.choices.emplace_back();
    std::uint64_t choices = 0;
    SW_TRY(reader.Number(&choices));
    for (std::uint64_t c = 0; c < choices; ++c) {
      LayerChoice& choice = layer.emplace_back();
      SW_TRY(reader.Number(&choice.moves));
      SW_TRY(reader.Number(&choice.imbalance));
      SW_TRY(reader.Sequence(&choice.slots));
    }
  }
  SW_TRY(reader.Sequence(&result.moves_curve));
  SW_TRY(reader.Number(&count));
  for (std::uint64_t i = 0; i < count; ++i) {
    SW_TRY(reader.Sequence(&result.warnings.emplace_back()));
  }
  if (!reader.at_end()) return Fail(Errc::kInternal, "plan of another rank: is too long");
  return result;
}

Result<StrategyResult> PlanOnRanks(comm::Comm& comm, const Strategy& strategy,
                                   const TokenCounts& loads, const Cluster& cluster,
                                   const Placement* current, const Options& options) {
  if (comm.size() == 1) return strategy.plan(loads, cluster, current, options);
  SW_TRY_ASSIGN(const comm::Bytes mine,
                comm.Agree(DraftShare(comm, strategy, loads, cluster, current, options)));
  SW_TRY_ASSIGN(const auto drafts, comm.Gather(mine));
  comm::Bytes packed;
  SW_TRY(comm.OnRoot([&]() -> Status {
    std::vector<StrategyResult> parts;
    for (const comm::Bytes& draft : drafts) {
      if (draft.empty()) continue;
      SW_TRY_ASSIGN(StrategyResult part, UnpackResult(draft));
      parts.push_back(std::move(part));
    }
    SW_TRY_ASSIGN(const StrategyResult whole,
                  strategy.finish(Join(std::move(parts)), loads, cluster, current, options));
    packed = Pack(whole);
    return {};
  }));
  SW_TRY(comm.Bcast(packed));
  return UnpackResult(packed);
}

}  // namespace shardwright::placement

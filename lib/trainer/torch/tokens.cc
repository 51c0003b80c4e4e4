// SPDX-License-Identifier: Apache-2.0
// Moves tokens to replicated experts and back: torch.ops.shardwright.{count_experts,
// dispatch_plan, pack_tokens, unpack_tokens, token_dots, sum_parts} on the CPU, and
// extra_capacity. The package registers derivatives, other devices and shapes without data.

#include "trainer/torch/tokens.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "partial/planner/forecast/extra_capacity.h"
#include "placement/core/dispatch.h"
#include "support/base/limits.h"
#include "support/base/result.h"

namespace shardwright::trainer_torch {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Minimum number of bytes per thread.
constexpr std::int64_t kGrainBytes = std::int64_t{1} << 18;

/// Throws, because an operator on tensors cannot return an error. The package parses the text.
[[noreturn]] void Raise(const Error& error) {
  throw std::runtime_error(
      StrCat("shardwright error ", static_cast<int>(error.code), ": ", error.message));
}

template <class... Parts>
void Require(bool holds, Errc code, const Parts&... message) {
  if (!holds) Raise({code, StrCat(message...)});
}

template <class T>
T ValueOf(Result<T> result) {
  if (!result) Raise(result.error());
  return *std::move(result);
}

std::string ShapeText(const Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

/// Fails unless a tensor is on the CPU, without strides, and has so many dimensions.
void RequirePlain(const Tensor& tensor, const char* name, std::int64_t dims) {
  Require(tensor.is_cpu(), Errc::kUnsupported, name, ": a tensor on the CPU expected");
  Require(tensor.dim() == dims, Errc::kUsage, name, ": ", dims,
          " dimensions expected, found shape ", ShapeText(tensor));
  Require(tensor.is_contiguous(), Errc::kUnsupported, name,
          ": only contiguous tensors are supported: pass tensor.contiguous()");
}

std::span<const std::int64_t> Numbers(const Tensor& tensor, const char* name, std::int64_t dims) {
  RequirePlain(tensor, name, dims);
  Require(tensor.scalar_type() == ScalarType::Long, Errc::kUsage, name, ": int64 expected");
  return {static_cast<const std::int64_t*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

Tensor MakeNumbers(const std::vector<std::int64_t>& numbers,
                   const std::vector<std::int64_t>& shape) {
  Tensor out = torch::stable::empty(shape, ScalarType::Long);
  std::copy(numbers.begin(), numbers.end(), static_cast<std::int64_t*>(out.mutable_data_ptr()));
  return out;
}

/// Calls `visit` with a value of the tensor's floating type, of at least 16 bits.
template <class Visit>
void ForFloating(const Tensor& tensor, const char* name, Visit&& visit) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return visit(double{});
    case ScalarType::Float:
      return visit(float{});
    case ScalarType::Half:
      return visit(c10::Half{});
    case ScalarType::BFloat16:
      return visit(c10::BFloat16{});
    default:
      Raise({Errc::kUnsupported, StrCat(name, ": float64, float32, float16 or bfloat16 expected")});
  }
}

ScalarType SumTypeOf(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <class T>
const T* DataOf(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* DataOf(Tensor* tensor) {
  return static_cast<T*>(tensor->mutable_data_ptr());
}

/// Row of each token and choice, verified to be valid.
struct Places {
  std::span<const std::int64_t> place;
  std::int64_t tokens = 0, choices = 0;
};

Places PlacesOf(const Tensor& place, std::int64_t rows) {
  Places out{Numbers(place, "place", 2), place.size(0), place.size(1)};
  for (std::size_t i = 0; i < out.place.size(); ++i) {
    if (out.place[i] < rows) continue;
    const auto choices = static_cast<std::size_t>(out.choices);
    Raise({Errc::kUsage, StrCat("place: token ", i / choices, " choice ", i % choices, ": row ",
                                out.place[i], " does not exist, there are ", rows)});
  }
  return out;
}

/// Fails unless every row is used once. Unused rows would have undefined contents.
void RequireEachRowOnce(const Places& places, std::int64_t rows) {
  std::vector<bool> used(static_cast<std::size_t>(rows), false);
  std::int64_t count = 0;
  for (const std::int64_t row : places.place) {
    if (row < 0) continue;
    Require(!used[static_cast<std::size_t>(row)], Errc::kUsage, "place: row ", row,
            " is used twice");
    used[static_cast<std::size_t>(row)] = true;
    ++count;
  }
  Require(count == rows, Errc::kUsage, "place: only ", count, " of ", rows, " rows are used");
}

void RequireWeights(const std::optional<Tensor>& weights, const Places& places,
                    const Tensor& values) {
  if (!weights) return;
  RequirePlain(*weights, "weights", 2);
  Require(weights->size(0) == places.tokens && weights->size(1) == places.choices, Errc::kUsage,
          "weights: the shape of place, [", places.tokens, ", ", places.choices,
          "], expected, found ", ShapeText(*weights));
  const ScalarType type = SumTypeOf(values);
  Require(weights->scalar_type() == type, Errc::kUsage,
          "weights: ", type == ScalarType::Double ? "float64" : "float32",
          " expected, the type in which tokens are added");
}

template <class T>
TokenRows<T> WorkOf(const Places& places, const std::optional<Tensor>& weights,
                    std::int64_t hidden) {
  TokenRows<T> work;
  work.place = places.place.data();
  if (weights) work.weights = DataOf<Sum<T>>(*weights);
  work.choices = places.choices;
  work.hidden = hidden;
  return work;
}

/// Calls body(token) for all tokens, on PyTorch's threads if there is enough work.
template <class Body>
void ForTokens(std::int64_t tokens, std::int64_t bytes_each, const Body& body) {
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrainBytes / std::max<std::int64_t>(1, bytes_each));
  torch::stable::parallel_for(0, tokens, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t token = first; token < last; ++token) body(token);
  });
}

// TORCH_BOX requires functions that take parameters by value.
// NOLINTBEGIN(performance-unnecessary-value-param)

Tensor PackTokens(Tensor tokens, Tensor place, std::optional<Tensor> weights, std::int64_t rows) {
  RequirePlain(tokens, "tokens", 2);
  Require(rows >= 0, Errc::kUsage, "rows: a number from 0 on expected, found ", rows);
  const Places places = PlacesOf(place, rows);
  Require(tokens.size(0) == places.tokens, Errc::kUsage, "place: has ", places.tokens,
          " tokens, but tokens has ", tokens.size(0));
  RequireEachRowOnce(places, rows);
  RequireWeights(weights, places, tokens);
  const std::int64_t hidden = tokens.size(1);
  Tensor out = torch::stable::empty({rows, hidden}, tokens.scalar_type());
  ForFloating(tokens, "tokens", [&](auto zero) {
    using T = decltype(zero);
    const auto work = WorkOf<T>(places, weights, hidden);
    T* to = DataOf<T>(&out);
    const T* from = DataOf<T>(tokens);
    ForTokens(places.tokens, places.choices * hidden * static_cast<std::int64_t>(sizeof(T)),
              [&](std::int64_t token) { PackToken(work, to, from, token); });
  });
  return out;
}

Tensor UnpackTokens(Tensor rows, Tensor place, std::optional<Tensor> weights) {
  RequirePlain(rows, "rows", 2);
  const Places places = PlacesOf(place, rows.size(0));
  RequireWeights(weights, places, rows);
  const std::int64_t hidden = rows.size(1);
  Tensor out = torch::stable::empty({places.tokens, hidden}, rows.scalar_type());
  ForFloating(rows, "rows", [&](auto zero) {
    using T = decltype(zero);
    const auto work = WorkOf<T>(places, weights, hidden);
    T* to = DataOf<T>(&out);
    const T* from = DataOf<T>(rows);
    ForTokens(places.tokens, places.choices * hidden * static_cast<std::int64_t>(sizeof(T)),
              [&](std::int64_t token) { UnpackToken(work, to, from, token); });
  });
  return out;
}

Tensor TokenDots(Tensor rows, Tensor tokens, Tensor place) {
  RequirePlain(rows, "rows", 2);
  RequirePlain(tokens, "tokens", 2);
  const Places places = PlacesOf(place, rows.size(0));
  Require(tokens.size(0) == places.tokens && tokens.size(1) == rows.size(1) &&
              tokens.scalar_type() == rows.scalar_type(),
          Errc::kUsage, "tokens: shape [", places.tokens, ", ", rows.size(1),
          "] and the type of rows expected, found shape ", ShapeText(tokens));
  Tensor out = torch::stable::empty({places.tokens, places.choices}, SumTypeOf(rows));
  ForFloating(rows, "rows", [&](auto zero) {
    using T = decltype(zero);
    const auto work = WorkOf<T>(places, std::nullopt, rows.size(1));
    auto* to = DataOf<Sum<T>>(&out);
    const T* a = DataOf<T>(rows);
    const T* b = DataOf<T>(tokens);
    ForTokens(places.tokens * places.choices, rows.size(1) * static_cast<std::int64_t>(sizeof(T)),
              [&](std::int64_t k) { to[k] = DotOf(work, a, b, k); });
  });
  return out;
}

Tensor SumOfParts(Tensor parts) {
  RequirePlain(parts, "parts", 2);
  Require(parts.size(0) > 0, Errc::kUsage, "parts: at least one part expected");
  const std::int64_t elems = parts.size(1);
  Tensor out = torch::stable::empty({elems}, parts.scalar_type());
  ForFloating(parts, "parts", [&](auto zero) {
    using T = decltype(zero);
    T* to = DataOf<T>(&out);
    const T* from = DataOf<T>(parts);
    const std::int64_t count = parts.size(0);
    torch::stable::parallel_for(0, elems, kGrainBytes / static_cast<std::int64_t>(sizeof(T)),
                                [&](std::int64_t first, std::int64_t last) {
                                  SumParts(to, from, count, elems, first, last);
                                });
  });
  return out;
}

Tensor CountExperts(Tensor chosen, std::int64_t experts) {
  const auto numbers = Numbers(chosen, "chosen", 2);
  Require(experts > 0 && experts <= static_cast<std::int64_t>(limits::kMoeExperts), Errc::kLimit,
          "experts: a number from 1 to ", limits::kMoeExperts, " expected, found ", experts);
  std::vector<std::int64_t> count(static_cast<std::size_t>(experts), 0);
  const auto choices = static_cast<std::size_t>(std::max<std::int64_t>(1, chosen.size(1)));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] == placement::kNoRow) continue;
    Require(numbers[i] >= 0 && numbers[i] < experts, Errc::kBadInput, "chosen: token ", i / choices,
            " choice ", i % choices, ": expert ", numbers[i], " does not exist, there are ",
            experts, " (-1 means no expert)");
    ++count[static_cast<std::size_t>(numbers[i])];
  }
  return MakeNumbers(count, {experts});
}

/// Computes the dispatch table. All ranks compute the same one.
placement::DispatchTable TableOf(const Tensor& replicas, const Tensor& tokens, const Tensor& node,
                                 const std::string& rule) {
  const auto held = Numbers(replicas, "replicas", 2);
  const auto counts = Numbers(tokens, "tokens", 2);
  const auto nodes = Numbers(node, "node", 1);
  Require(tokens.size(0) == replicas.size(0) && tokens.size(1) == replicas.size(1) &&
              node.size(0) == replicas.size(1),
          Errc::kUsage,
          "replicas, tokens and node: shapes [expert][rank], [expert][rank] and [rank] expected, "
          "found ",
          ShapeText(replicas), ", ", ShapeText(tokens), ", ", ShapeText(node));
  const auto wrong = [](std::int64_t number) { return number < 0 || number > UINT32_MAX; };
  Require(std::none_of(held.begin(), held.end(), wrong) &&
              std::none_of(nodes.begin(), nodes.end(), wrong) &&
              std::all_of(counts.begin(), counts.end(), [](std::int64_t n) { return n >= 0; }),
          Errc::kUsage, "replicas, tokens and node: numbers from 0 on expected");
  const std::vector<std::uint64_t> load(counts.begin(), counts.end());
  const auto experts = static_cast<std::uint32_t>(replicas.size(0));
  const auto ranks = static_cast<std::uint32_t>(replicas.size(1));
  if (rule == "topology") {
    std::vector<std::vector<std::uint32_t>> holders(experts);
    for (std::uint32_t e = 0; e < experts; ++e) {
      for (std::uint32_t r = 0; r < ranks; ++r) {
        if (held[std::size_t{e} * ranks + r] > 0) holders[e].push_back(r);
      }
    }
    return ValueOf(placement::DispatchByTopology(
        holders, load, std::vector<std::uint32_t>(nodes.begin(), nodes.end())));
  }
  Require(rule == "capacity" || rule == "proportional", Errc::kUsage,
          "rule: capacity, proportional or topology expected, found \"", rule, "\"");
  return ValueOf(placement::DispatchByCapacity(
      std::vector<std::uint32_t>(held.begin(), held.end()), load, experts, ranks,
      rule == "capacity" ? placement::Split::kExact : placement::Split::kProportional));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> DispatchPlan(Tensor chosen, Tensor tokens,
                                                        Tensor replicas, Tensor node,
                                                        std::string rule, std::int64_t rank) {
  const auto numbers = Numbers(chosen, "chosen", 2);
  const placement::DispatchTable table = TableOf(replicas, tokens, node, rule);
  Require(rank >= 0 && rank < static_cast<std::int64_t>(table.ranks), Errc::kUsage,
          "rank: a rank below ", table.ranks, " expected, found ", rank);
  const auto me = static_cast<std::uint32_t>(rank);
  std::vector<std::int64_t> sent(table.ranks, 0);
  for (const placement::Send& send : table.sends) {
    if (send.from == me) sent[send.to] += static_cast<std::int64_t>(send.tokens);
  }
  const std::vector<std::uint64_t> received = table.ReceivedBy(me);
  const std::vector<std::int64_t> arrangement = table.ArrangementOf(me);
  return {MakeNumbers(ValueOf(table.RowsOf(me, numbers)), {chosen.size(0), chosen.size(1)}),
          MakeNumbers(sent, {replicas.size(1)}),
          MakeNumbers({received.begin(), received.end()}, {replicas.size(1), replicas.size(0)}),
          MakeNumbers(arrangement, {static_cast<std::int64_t>(arrangement.size()), 1})};
}

/// Returns the tokens above capacity that experts process to compensate for lost tokens.
Tensor ExtraCapacity(Tensor tokens, Tensor capacity, Tensor debt, std::int64_t devices) {
  const auto routed = Numbers(tokens, "tokens", 1);
  const auto room = Numbers(capacity, "capacity", 1);
  const auto owed = Numbers(debt, "debt", 1);
  const std::size_t experts = routed.size();
  Require(room.size() == experts && owed.size() == experts, Errc::kUsage,
          "tokens, capacity and debt: a number for each expert expected, found shapes ",
          ShapeText(tokens), ", ", ShapeText(capacity), ", ", ShapeText(debt));
  const auto parts = static_cast<std::size_t>(std::max<std::int64_t>(devices, 0));
  Require(parts > 0 && experts % parts == 0, Errc::kUsage,
          "devices: a divisor of the number of experts, ", experts, ", expected, found ", devices);
  for (const auto& numbers : {routed, room, owed}) {
    Require(std::all_of(numbers.begin(), numbers.end(), [](std::int64_t n) { return n >= 0; }),
            Errc::kUsage, "tokens, capacity and debt: numbers from 0 on expected");
  }
  std::vector<std::int64_t> out;
  out.reserve(experts);
  const std::size_t each = experts / parts;
  for (std::size_t first = 0; first < experts; first += each) {
    std::vector<partial::ExpertCapacity> device;
    for (std::size_t e = first; e < first + each; ++e) {
      device.push_back({static_cast<std::uint64_t>(room[e]), static_cast<std::uint64_t>(routed[e]),
                        static_cast<std::uint64_t>(owed[e])});
    }
    const std::vector<std::uint64_t> extra = ValueOf(partial::TokensToMakeUp(device));
    out.insert(out.end(), extra.begin(), extra.end());
  }
  return MakeNumbers(out, {tokens.size(0)});
}

// NOLINTEND(performance-unnecessary-value-param)

}  // namespace
}  // namespace shardwright::trainer_torch

STABLE_TORCH_LIBRARY_FRAGMENT(shardwright, library) {
  library.def("count_experts(Tensor chosen, int experts) -> Tensor");
  library.def(
      "dispatch_plan(Tensor chosen, Tensor tokens, Tensor replicas, Tensor node, str rule, int "
      "rank) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("pack_tokens(Tensor tokens, Tensor place, Tensor? weights, SymInt rows) -> Tensor");
  library.def("unpack_tokens(Tensor rows, Tensor place, Tensor? weights) -> Tensor");
  library.def("token_dots(Tensor rows, Tensor tokens, Tensor place) -> Tensor");
  library.def("sum_parts(Tensor parts) -> Tensor");
  library.def("extra_capacity(Tensor tokens, Tensor capacity, Tensor debt, int devices) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(shardwright, CPU, library) {
  using namespace shardwright::trainer_torch;
  library.impl("count_experts", TORCH_BOX(&CountExperts));
  library.impl("dispatch_plan", TORCH_BOX(&DispatchPlan));
  library.impl("pack_tokens", TORCH_BOX(&PackTokens));
  library.impl("unpack_tokens", TORCH_BOX(&UnpackTokens));
  library.impl("token_dots", TORCH_BOX(&TokenDots));
  library.impl("sum_parts", TORCH_BOX(&SumOfParts));
  library.impl("extra_capacity", TORCH_BOX(&ExtraCapacity));
}

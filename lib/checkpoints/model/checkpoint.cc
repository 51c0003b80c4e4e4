// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/model/checkpoint.h"

#include <bit>
#include <cstring>
#include <span>

#include "engine/tensor/convert.h"
#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

bool SameValue(const pickle::Node* a, const pickle::Node* b) {
  if (a == b) return true;
  if (a == nullptr || b == nullptr || a->kind != b->kind) return false;
  return a->integer == b->integer &&
         std::bit_cast<std::uint64_t>(a->real) == std::bit_cast<std::uint64_t>(b->real) &&
         a->text == b->text && a->items.empty() && b->items.empty();
}

}  // namespace

bool operator==(const Scalar& a, const Scalar& b) {
  return a.state == b.state && a.is_tensor == b.is_tensor &&
         (a.is_tensor ? a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes
                      : SameValue(a.value, b.value));
}

std::optional<double> NumberOf(const Scalar& scalar) {
  if (!scalar.is_tensor) {
    if (scalar.value == nullptr) return std::nullopt;
    const Result<double> plain = pickle::AsFloat(scalar.value);
    return plain ? std::optional(*plain) : std::nullopt;
  }
  if (scalar.bytes.size() != ItemSize(scalar.dtype)) return std::nullopt;
  if (scalar.dtype == DType::kI64) {
    std::int64_t count = 0;
    std::memcpy(&count, scalar.bytes.data(), sizeof count);
    return static_cast<double>(count);
  }
  if (!CanConvert(scalar.dtype, DType::kF64)) return std::nullopt;
  double value = 0;
  Convert(scalar.dtype, std::as_bytes(std::span(scalar.bytes)), DType::kF64,
          std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

Status CheckUnbound(const Checkpoint& checkpoint) {
  if (checkpoint.only_weights) return tl::unexpected<Error>(checkpoint.only_weights->why);
  if (checkpoint.bound.empty()) return {};
  std::string text = checkpoint.bound.front();
  if (checkpoint.bound.size() > 1) {
    text += StrCat("; ", checkpoint.bound.size() - 1, " more cannot be resharded either");
  }
  return Fail(Errc::kUnsupported, text);
}

Status CheckDecided(const Checkpoint& checkpoint, std::string_view why) {
  std::vector<std::string> names;
  for (const Param& param : checkpoint.params) {
    if (param.undecided) names.push_back(Quoted(param.name));
  }
  if (names.empty()) return {};
  std::string text = checkpoint.tag;
  text.append(": no file records whether ")
      .append(names.size() == 1 ? "this tensor is a" : "these");
  text.append(names.size() == 1 ? " frozen parameter: " : " tensors are frozen parameters: ");
  text.append(FirstFew(names)).append("; ").append(why);
  text.append(
      ". List each in a --patterns file, by an expression for its name: {\"family\": \"NAME\", "
      "\"frozen_parameters\": [\"EXPRESSION\"], \"not_parameters\": [\"EXPRESSION\"]}");
  return Fail(Errc::kUnsupported, text);
}

std::vector<std::string> OptimizerLeftOut(const Checkpoint& checkpoint) {
  std::vector<std::string> all;
  if (checkpoint.only_weights) {
    all.push_back("the optimizer and other state, which was not read: " +
                  checkpoint.only_weights->why.message);
  }
  for (const std::string& bound : checkpoint.bound) all.push_back(bound);
  return all;
}

}  // namespace shardwright::checkpoints

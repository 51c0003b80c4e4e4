#include "dialect/core/checkpoint.h"

#include <bit>

namespace shardwright::dialect {
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

Status CheckUnbound(const Checkpoint& checkpoint) {
  if (checkpoint.bound.empty()) return {};
  std::string text = checkpoint.bound.front();
  if (checkpoint.bound.size() > 1) {
    text += "; so it is with " + std::to_string(checkpoint.bound.size() - 1) + " more";
  }
  return Fail(Errc::kUnsupported, std::move(text));
}

}  // namespace shardwright::dialect

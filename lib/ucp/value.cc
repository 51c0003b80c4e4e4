#include "ucp/value.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

#include "base/text.h"
#include "tensor/convert.h"

namespace shardwright::ucp {
namespace {

std::string RealText(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", value);
  char shorter[40];
  std::snprintf(shorter, sizeof shorter, "%.9g", value);
  return std::strtod(shorter, nullptr) == value ? shorter : text;
}

/// As a number: the last byte first.
std::string HexText(std::span<const std::byte> bytes) {
  const std::vector<std::byte> number(bytes.rbegin(), bytes.rend());
  return "0x" + Hex(number);
}

std::string ScalarText(const dialect::Scalar& scalar) {
  if (!scalar.is_tensor) return ValueText(scalar.value);
  const std::uint64_t item = ItemSize(scalar.dtype);
  if (scalar.bytes.size() != item)
    return "tensor of " + std::to_string(scalar.bytes.size()) + " bytes";
  return ElementText(scalar.dtype, std::as_bytes(std::span(scalar.bytes)));
}

}  // namespace

std::string ElementText(DType dtype, std::span<const std::byte> element) {
  if (CanConvert(dtype, DType::kF64) && dtype != DType::kF64) {
    double value = 0;
    Convert(dtype, element, DType::kF64, std::as_writable_bytes(std::span(&value, 1)));
    return RealText(value) + " (" + HexText(element) + ")";
  }
  if (dtype == DType::kF64) {
    double value = 0;
    std::memcpy(&value, element.data(), sizeof value);
    return RealText(value) + " (" + HexText(element) + ")";
  }
  return HexText(element);
}

std::string ValueText(const pickle::Node* node) {
  if (node == nullptr) return "nothing";
  switch (node->kind) {
    case pickle::Kind::kNone:
      return "None";
    case pickle::Kind::kBool:
      return node->integer != 0 ? "True" : "False";
    case pickle::Kind::kInt:
      return std::to_string(node->integer);
    case pickle::Kind::kFloat:
      return RealText(node->real);
    case pickle::Kind::kString:
      return "'" + node->text + "'";
    case pickle::Kind::kTuple:
    case pickle::Kind::kList:
    case pickle::Kind::kSize: {
      std::string text = "[";
      for (const pickle::Node* item : node->items)
        text += (text.size() > 1 ? ", " : "") + ValueText(item);
      return text + "]";
    }
    default:
      return pickle::Describe(node);
  }
}

std::vector<std::string> ScalarDifferences(const std::vector<dialect::Scalar>& a,
                                           const std::vector<dialect::Scalar>& b) {
  std::map<std::string, std::pair<std::string, std::string>> sides;
  for (const dialect::Scalar& scalar : a) sides[scalar.state].first = ScalarText(scalar);
  for (const dialect::Scalar& scalar : b) sides[scalar.state].second = ScalarText(scalar);
  std::vector<std::string> lines;
  for (const auto& [state, pair] : sides) {
    if (pair.first == pair.second) continue;
    lines.push_back(state + ": " + (pair.first.empty() ? "nothing" : pair.first) + " and " +
                    (pair.second.empty() ? "nothing" : pair.second));
  }
  return lines;
}

std::vector<std::string> OptionDifferences(const pickle::Node* a, const pickle::Node* b) {
  std::vector<std::string> lines;
  if (a == nullptr || b == nullptr) return lines;
  const pickle::Node* moe = a->Find("moe");
  const bool expert = moe != nullptr && moe->integer != 0;
  std::set<std::string> keys;
  for (const pickle::Node* side : {a, b}) {
    for (std::size_t i = 0; i < side->entry_count(); ++i) {
      if (side->key(i)->is_string()) keys.insert(side->key(i)->text);
    }
  }
  for (const std::string& key : keys) {
    if (key == "params" || (expert && key == "name")) continue;
    const std::string left = ValueText(a->Find(key));
    const std::string right = ValueText(b->Find(key));
    if (left == right) continue;
    std::string& line = lines.emplace_back(key);
    line.append(": ").append(left).append(" and ").append(right);
  }
  return lines;
}

}  // namespace shardwright::ucp

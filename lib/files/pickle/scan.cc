// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>

#include "files/pickle/fold_internal.h"
#include "files/pickle/opcodes_internal.h"
#include "files/pickle/reader.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

namespace {

struct Operand {
  enum class Kind : std::uint8_t { kUnknown, kFixed, kCounted, kLines };
  Kind kind = Kind::kUnknown;
  std::uint8_t size = 0;  // bytes, bytes of the count, or lines
};

Operand OperandOf(std::uint8_t code) {
  using K = Operand::Kind;
  switch (code) {
    case op::kGlobal:
      return {K::kLines, 2};
    case op::kShortBinString:
    case op::kShortBinUnicode:
    case op::kShortBinBytes:
    case op::kLong1:
      return {K::kCounted, 1};
    case op::kBinString:
    case op::kBinUnicode:
    case op::kBinBytes:
    case op::kLong4:
      return {K::kCounted, 4};
    case op::kBinUnicode8:
    case op::kBinBytes8:
    case op::kByteArray8:
      return {K::kCounted, 8};
    case op::kProto:
    case op::kBinInt1:
    case op::kBinGet:
    case op::kBinPut:
      return {K::kFixed, 1};
    case op::kBinInt2:
      return {K::kFixed, 2};
    case op::kBinInt:
    case op::kLongBinGet:
    case op::kLongBinPut:
      return {K::kFixed, 4};
    case op::kBinFloat:
    case op::kFrame:
      return {K::kFixed, 8};
    case op::kMark:
    case op::kStop:
    case op::kPop:
    case op::kPopMark:
    case op::kDup:
    case op::kNone:
    case op::kBinPersId:
    case op::kReduce:
    case op::kAppend:
    case op::kBuild:
    case op::kAppends:
    case op::kSetItem:
    case op::kTuple:
    case op::kSetItems:
    case op::kEmptyDict:
    case op::kEmptyList:
    case op::kEmptyTuple:
    case op::kNewObj:
    case op::kTuple1:
    case op::kTuple2:
    case op::kTuple3:
    case op::kNewTrue:
    case op::kNewFalse:
    case op::kEmptySet:
    case op::kAddItems:
    case op::kFrozenSet:
    case op::kNewObjEx:
    case op::kStackGlobal:
    case op::kMemoize:
      return {K::kFixed, 0};
    default:
      return {};
  }
}

// Returns the bytes of the operand at the start of `rest`, or nothing if `rest` is too short.
std::optional<std::uint64_t> OperandBytes(Operand operand, std::string_view rest) {
  switch (operand.kind) {
    case Operand::Kind::kCounted: {
      if (rest.size() < operand.size) return std::nullopt;
      std::uint64_t count = 0;
      for (std::size_t i = operand.size; i > 0; --i) {
        count = (count << 8) | static_cast<std::uint8_t>(rest[i - 1]);
      }
      // Limited to the maximum size of a pickle, so that the addition cannot overflow.
      return std::min(count, limits::kPickleBytes) + operand.size;
    }
    case Operand::Kind::kLines: {
      const std::size_t first = rest.find('\n');
      if (first == std::string_view::npos) return std::nullopt;
      const std::size_t second = rest.find('\n', first + 1);
      if (second == std::string_view::npos) return std::nullopt;
      return second + 1;
    }
    default:
      return operand.size;
  }
}

/// Scans opcodes up to STOP and calls visit(code, text of the operand) for each.
/// \returns as FindEnd
template <class Visit>
Result<std::optional<std::size_t>> Walk(std::string_view stream, std::size_t& resume,
                                        Visit&& visit) {
  while (resume < stream.size()) {
    const auto code = static_cast<std::uint8_t>(stream[resume]);
    const Operand operand = OperandOf(code);
    if (operand.kind == Operand::Kind::kUnknown) {
      return Fail(Errc::kBadInput, "byte ", resume, ": unsupported opcode ", code);
    }
    if (code == op::kStop) return std::optional<std::size_t>(resume + 1);
    const std::optional<std::uint64_t> bytes = OperandBytes(operand, stream.substr(resume + 1));
    if (!bytes || *bytes >= stream.size() - resume) break;
    visit(code, stream.substr(resume + 1, *bytes));
    resume += 1 + *bytes;
  }
  return std::optional<std::size_t>();
}

}  // namespace

Result<std::optional<std::size_t>> FindEnd(std::string_view stream, std::size_t& resume) {
  return Walk(stream, resume, [](std::uint8_t, std::string_view) {});
}

Result<MemoUses> MemoUses::In(std::string_view pickle) {
  constexpr std::size_t kBits = 64;
  MemoUses uses;
  bool far = false;
  std::size_t resume = 0;
  SW_TRY_ASSIGN(const auto end,
                Walk(pickle, resume, [&](std::uint8_t code, std::string_view operand) {
                  if (code != op::kBinGet && code != op::kLongBinGet) return;
                  std::uint64_t index = 0;
                  for (std::size_t i = operand.size(); i > 0; --i) {
                    index = (index << 8) | static_cast<std::uint8_t>(operand[i - 1]);
                  }
                  // Each entry needs an opcode that writes it, so consecutive numbers stay below.
                  far = far || index > pickle.size();
                  if (far) return;
                  if (index / kBits >= uses.bits_.size()) uses.bits_.resize(index / kBits + 1);
                  uses.bits_[index / kBits] |= std::uint64_t{1} << (index % kBits);
                }));
  if (!end) return Fail(Errc::kBadInput, "pickle ends without STOP");
  if (far) return Fail(Errc::kUnsupported, "memo entries are numbered with gaps");
  for (const std::uint64_t word : uses.bits_) {
    uses.before_.push_back(static_cast<std::uint32_t>(uses.count_));
    uses.count_ += static_cast<std::size_t>(std::popcount(word));
  }
  return uses;
}

std::optional<std::size_t> MemoUses::RankOf(std::uint64_t index) const {
  constexpr std::uint64_t kBits = 64;
  if (index / kBits >= bits_.size()) return std::nullopt;
  const std::uint64_t word = bits_[index / kBits];
  const std::uint64_t bit = std::uint64_t{1} << (index % kBits);
  if ((word & bit) == 0) return std::nullopt;
  return before_[index / kBits] + static_cast<std::size_t>(std::popcount(word & (bit - 1)));
}

}  // namespace shardwright::pickle

// SPDX-License-Identifier: Apache-2.0
#include "files/pickle/emitter.h"

#include <bit>
#include <limits>
#include <utility>

#include "files/pickle/names_internal.h"
#include "files/pickle/opcodes_internal.h"

namespace shardwright::pickle {

void Emitter::Begin() {
  Op(op::kProto);
  Fixed(2, 1);
}

void Emitter::None() { Op(op::kNone); }
void Emitter::Bool(bool value) { Op(value ? op::kNewTrue : op::kNewFalse); }
void Emitter::Mark() { Op(op::kMark); }
void Emitter::EmptyTuple() { Op(op::kEmptyTuple); }
void Emitter::EmptyList() { Op(op::kEmptyList); }
void Emitter::EmptyDict() { Op(op::kEmptyDict); }
void Emitter::Reduce() { Op(op::kReduce); }
void Emitter::NewObj() { Op(op::kNewObj); }
void Emitter::Build() { Op(op::kBuild); }
void Emitter::Append(std::size_t items) { Op(items > 1 ? op::kAppends : op::kAppend); }
void Emitter::SetItems(std::size_t entries) { Op(entries > 1 ? op::kSetItems : op::kSetItem); }

void Emitter::Int(std::int64_t number) {
  if (number >= 0 && number <= 0xFF) {
    Op(op::kBinInt1);
    Fixed(static_cast<std::uint64_t>(number), 1);
  } else if (number >= 0 && number <= 0xFFFF) {
    Op(op::kBinInt2);
    Fixed(static_cast<std::uint64_t>(number), 2);
  } else if (number == static_cast<std::int32_t>(number)) {
    Op(op::kBinInt);
    Fixed(static_cast<std::uint64_t>(number), 4);
  } else {
    unsigned bytes = 8;
    while (number >> (8 * bytes - 9) == (number < 0 ? -1 : 0)) --bytes;
    Op(op::kLong1);
    Fixed(bytes, 1);
    Fixed(static_cast<std::uint64_t>(number), bytes);
  }
}

void Emitter::Float(double number) {
  Op(op::kBinFloat);
  const auto bits = std::bit_cast<std::uint64_t>(number);
  for (unsigned i = 8; i > 0; --i) out_.push_back(static_cast<char>(bits >> (8 * (i - 1))));
}

Status Emitter::Text(std::string_view text) {
  if (text.size() > std::numeric_limits<std::uint32_t>::max()) {
    return Fail(Errc::kBadInput, "text of ", text.size(), " bytes is too long for a pickle");
  }
  Op(op::kBinUnicode);
  Fixed(text.size(), 4);
  out_.append(text);
  return {};
}

void Emitter::Word(std::string_view word) {
  const std::string key = "word " + std::string(word);
  if (GetCached(key)) return;
  Op(op::kBinUnicode);
  Fixed(word.size(), 4);
  out_.append(word);
  cached_[key] = Put();
}

void Emitter::Global(std::string_view dotted) {
  const std::string key(dotted);
  if (GetCached(key)) return;
  const auto [module, name] = Spelling(dotted);
  Op(op::kGlobal);
  out_.append(module).append("\n").append(name).append("\n");
  cached_[key] = Put();
}

void Emitter::Tuple(std::size_t count) {
  const op::Code ends[] = {op::kEmptyTuple, op::kTuple1, op::kTuple2, op::kTuple3};
  Op(count > 3 ? op::kTuple : ends[count]);
}

std::uint32_t Emitter::Put() {
  const std::uint32_t entry = (*memo_next_)++;
  Op(entry < 256 ? op::kBinPut : op::kLongBinPut);
  Fixed(entry, entry < 256 ? 1 : 4);
  return entry;
}

void Emitter::Get(std::uint32_t entry) {
  Op(entry < 256 ? op::kBinGet : op::kLongBinGet);
  Fixed(entry, entry < 256 ? 1 : 4);
}

bool Emitter::GetCached(const std::string& key) {
  const auto found = cached_.find(key);
  if (found == cached_.end()) return false;
  Get(found->second);
  return true;
}

void Emitter::Fixed(std::uint64_t number, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) out_.push_back(static_cast<char>(number >> (8 * i)));
}

std::string Emitter::Finish() && {
  Op(op::kStop);
  return std::move(out_);
}

}  // namespace shardwright::pickle

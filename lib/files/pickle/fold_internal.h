// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "files/pickle/fold.h"
#include "support/base/result.h"

namespace shardwright::pickle {

/// The memo entries of a pickle that are read. Python adds
/// an entry for nearly every object, but reads few of them.
class MemoUses {
 public:
  /// Scans the opcodes of a whole pickle.
  /// \error kBadInput  an unknown opcode, no STOP; kUnsupported  an index beyond the pickle's size
  static Result<MemoUses> In(std::string_view pickle);

  /// Returns the number of entries that are read.
  std::size_t count() const { return count_; }
  /// Returns the position of a memo index among them, or nothing if it is never read.
  std::optional<std::size_t> RankOf(std::uint64_t index) const;

 private:
  std::vector<std::uint64_t> bits_;
  std::vector<std::uint32_t> before_;  // by word of bits_
  std::size_t count_ = 0;
};

/// Keeps boxes for reuse, because most live for a few opcodes.
class BoxPool {
 public:
  Box* Take(Box::Kind kind) {
    Box* box = nullptr;
    if (free_.empty()) {
      box = &all_.emplace_back();
      box->pool = this;
    } else {
      box = free_.back();
      free_.pop_back();
    }
    ++open_;
    box->kind = kind;
    box->held = false;
    box->depth = 1;
    return box;
  }
  void Give(Box* box) {
    --open_;
    box->items.clear();  // may give other boxes, so this box comes last
    if (box->items.capacity() > kKeptItems) std::vector<Cell>().swap(box->items);
    free_.push_back(box);
  }
  std::uint64_t open() const { return open_; }

 private:
  static constexpr std::size_t kKeptItems = 64;
  std::deque<Box> all_;
  std::vector<Box*> free_;
  std::uint64_t open_ = 0;
};

/// Runs the opcodes of a pickle for Fold. fold_containers.cc has the ones that build containers.
class Folding {
 public:
  Folding(std::string_view pickle, Folder& folder) : pickle_(pickle), folder_(folder) {}

  Status Run();

 private:
  Status Step(std::uint8_t code);
  Status StepContainer(std::uint8_t code);
  Status StepRest(std::uint8_t code);

  bool Has(std::uint64_t bytes) const { return pickle_.size() - at_ >= bytes; }
  Result<std::uint64_t> Fixed(unsigned bytes);
  Result<std::string_view> Take(unsigned length_bytes);
  Result<std::string_view> Line();
  tl::unexpected<Error> Bad(const std::string& message) const {
    return Fail(Errc::kBadInput, "byte ", op_at_, ": ", message);
  }

  Status Push(Cell cell);
  Status PushInt(unsigned bytes);
  Status PushLong(unsigned length_bytes);
  Status PushReal();
  Status PushText(unsigned length_bytes, Cell::Tag tag);
  Status PushGlobal(std::string_view module, std::string_view name);
  Status PushStackGlobal();
  Status PushBox(Box::Kind kind);
  Status Need(std::size_t count) const;
  Cell Pop();
  Result<std::size_t> PopMark();

  Status Hold(Box* holder, const Cell& cell) const;
  Box* Open(Box::Kind kind);
  Status MakeTuple(std::size_t first);
  Status MakeSet(std::size_t first);
  Status Change(const Cell& target, bool* ignored);
  Status TakeItems(Box* box, std::size_t first);
  Status Append(std::size_t first);
  Status AddItems(std::size_t first);
  Status SetItems(std::size_t first);
  Status Call(bool reduce);
  Status NewObjEx();
  Status Build();
  Status Put(std::uint64_t index);
  Status Get(std::uint64_t index);

  std::string_view pickle_;
  Folder& folder_;
  std::size_t at_ = 0;
  std::size_t op_at_ = 0;
  bool stopped_ = false;
  unsigned protocol_ = 2;
  bool numbered_ = false;  // memo entries were put under explicit numbers
  bool counted_ = false;   // or in the order of MEMOIZE
  std::uint64_t memo_next_ = 0;
  std::uint64_t dicts_ = 0;
  std::uint64_t open_most_ = 0;
  MemoUses uses_;
  BoxPool pool_;  // outlives all cells
  std::deque<std::string> names_;
  std::unordered_map<std::string, std::string_view> globals_;
  std::vector<Cell> memo_;  // of the entries that are read
  std::vector<bool> written_;
  std::vector<Cell> stack_;
  std::vector<std::size_t> marks_;
};

}  // namespace shardwright::pickle

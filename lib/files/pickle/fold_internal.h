// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string_view>
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

}  // namespace shardwright::pickle

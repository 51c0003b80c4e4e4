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

/// Which memo entries of a pickle are read at all. Python gives one to nearly every object, and
/// few are named again.
class MemoUses {
 public:
  /// Walks over the opcodes of a whole pickle.
  /// \error kBadInput  an unknown opcode, no STOP; kUnsupported  an index beyond the pickle's size
  static Result<MemoUses> In(std::string_view pickle);

  /// How many entries are read.
  std::size_t count() const { return count_; }
  /// Which one of them an index is, or nothing.
  std::optional<std::size_t> RankOf(std::uint64_t index) const;

 private:
  std::vector<std::uint64_t> bits_;
  std::vector<std::uint32_t> before_;  // by word of bits_
  std::size_t count_ = 0;
};

/// Keeps boxes for reuse: most live for a few opcodes.
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
    box->items.clear();  // may give others, so the box itself comes last
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

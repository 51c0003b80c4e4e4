// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "support/base/result.h"

namespace shardwright::pickle {

/// Puts a pickle of protocol 2 together, value after value, for what would be too large as a graph
/// of nodes. Values go onto the reader's stack in the order of the calls; who calls sees to it that
/// they fit together. Numbers of memo entries are counted, and so found again by Get.
class Emitter {
 public:
  Emitter() { Begin(); }
  /// For a pickle that is put together of the bytes of several emitters: they count memo entries
  /// together, so that one may get what another has named, if it comes later in the pickle.
  /// \param memo  outlives this. The first of them emits Begin
  explicit Emitter(std::uint32_t* memo) : memo_next_(memo) {}
  Emitter(const Emitter&) = delete;
  Emitter& operator=(const Emitter&) = delete;

  /// What every pickle begins with.
  void Begin();
  void None();
  void Bool(bool value);
  void Int(std::int64_t number);
  void Float(double number);
  /// \error kBadInput  longer than 4 GiB
  Status Text(std::string_view text);
  /// A text that is written once and named again where it comes again.
  void Word(std::string_view word);
  /// A class or function, "module.name", likewise. \pre Interpret accepts it
  void Global(std::string_view dotted);
  void Mark();
  void EmptyTuple();
  void EmptyList();
  void EmptyDict();
  /// A tuple of the last `count` values. \pre a Mark lies below them if there are more than three
  void Tuple(std::size_t count);
  void Reduce();
  void NewObj();
  void Build();
  /// Whether a Mark is needed before so many items of a list or dict that follow.
  static bool NeedsMark(std::size_t items) { return items > 1; }
  void Append(std::size_t items);
  void SetItems(std::size_t entries);
  /// torch.Size
  template <class Extents>
  void Size(const Extents& extents) {
    Global("torch.Size");
    if (extents.size() > 3) Mark();
    for (const std::uint64_t extent : extents) Int(static_cast<std::int64_t>(extent));
    Tuple(extents.size());
    Tuple(1);
    Reduce();
  }

  /// Names the value on top of the stack. \returns what Get takes
  std::uint32_t Put();
  void Get(std::uint32_t entry);

  /// One opcode, one number of so many bytes, text as it is: for what the above does not cover.
  void Op(std::uint8_t code) { out_.push_back(static_cast<char>(code)); }
  void Fixed(std::uint64_t number, unsigned bytes);
  void Raw(std::string_view bytes) { out_.append(bytes); }

  /// The whole pickle. \pre one value is on the stack
  std::string Finish() &&;
  /// What was emitted, without an end.
  std::string Take() && { return std::move(out_); }

  /// Items between a Mark and its end, at most.
  static constexpr std::size_t kBatch = 1000;

 private:
  bool GetCached(const std::string& key);

  std::unordered_map<std::string, std::uint32_t> cached_;  // globals and words
  std::uint32_t memo_own_ = 0;
  std::uint32_t* memo_next_ = &memo_own_;
  std::string out_;
};

}  // namespace shardwright::pickle

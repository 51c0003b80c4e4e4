// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "support/base/result.h"

namespace shardwright::pickle {

/// Writes a pickle of protocol 2 value by value, for data that is too large for a graph
/// of nodes. Calls push values onto the reader's stack in their order; the caller must
/// combine them correctly. Put counts memo entries, and Get reads them by number.
class Emitter {
 public:
  Emitter() { Begin(); }
  /// Shares memo numbers with other emitters, if all bytes are concatenated into one pickle. An
  /// emitter may then get an entry that another one has put, if its bytes come later in the pickle.
  /// \param memo  outlives this. Call Begin on the first emitter only
  explicit Emitter(std::uint32_t* memo) : memo_next_(memo) {}
  Emitter(const Emitter&) = delete;
  Emitter& operator=(const Emitter&) = delete;

  /// Writes the opcodes at the beginning of a pickle.
  void Begin();
  void None();
  void Bool(bool value);
  void Int(std::int64_t number);
  void Float(double number);
  /// \error kBadInput  the text is longer than 4 GiB
  Status Text(std::string_view text);
  /// Writes a text at its first use and a memo reference at later uses.
  void Word(std::string_view word);
  /// Writes a class or function, "module.name", like Word. \pre Interpret accepts it
  void Global(std::string_view dotted);
  void Mark();
  void EmptyTuple();
  void EmptyList();
  void EmptyDict();
  /// Makes a tuple of the last `count` values. \pre if count > 3, the values follow a Mark
  void Tuple(std::size_t count);
  void Reduce();
  void NewObj();
  void Build();
  /// Returns true if a list or dict needs a Mark before this number of items.
  static bool NeedsMark(std::size_t items) { return items > 1; }
  void Append(std::size_t items);
  void SetItems(std::size_t entries);
  /// Writes a torch.Size.
  template <class Extents>
  void Size(const Extents& extents) {
    Global("torch.Size");
    if (extents.size() > 3) Mark();
    for (const std::uint64_t extent : extents) Int(static_cast<std::int64_t>(extent));
    Tuple(extents.size());
    Tuple(1);
    Reduce();
  }

  /// Adds the value on top of the stack to the memo. \returns its number for Get
  std::uint32_t Put();
  void Get(std::uint32_t entry);

  /// Write one opcode, one number of so many bytes, or raw bytes, for all other needs.
  void Op(std::uint8_t code) { out_.push_back(static_cast<char>(code)); }
  void Fixed(std::uint64_t number, unsigned bytes);
  void Raw(std::string_view bytes) { out_.append(bytes); }

  /// Returns the whole pickle. \pre one value is on the stack
  std::string Finish() &&;
  /// Returns the emitted bytes without STOP.
  std::string Take() && { return std::move(out_); }

  /// Maximum number of items after a Mark.
  static constexpr std::size_t kBatch = 1000;

 private:
  bool GetCached(const std::string& key);

  std::unordered_map<std::string, std::uint32_t> cached_;  // globals and words
  std::uint32_t memo_own_ = 0;
  std::uint32_t* memo_next_ = &memo_own_;
  std::string out_;
};

}  // namespace shardwright::pickle

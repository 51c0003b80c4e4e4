// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "builders.h"

// Pieces of pickles, opcode by opcode.
namespace shardwright::pickle {

inline std::string Pickle(std::string_view body, int protocol = 2) {
  return "\x80" + Le(static_cast<std::uint64_t>(protocol), 1) + std::string(body) + ".";
}
inline std::string Str(std::string_view text) {
  return "X" + Le(text.size(), 4) + std::string(text);
}
inline std::string ShortStr(std::string_view text) {
  return "\x8C" + Le(text.size(), 1) + std::string(text);
}
inline std::string Glob(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string Int(std::int64_t number) {
  return "\x8A\x08" + Le(static_cast<std::uint64_t>(number), 8);
}
inline std::string Ints(const std::vector<std::int64_t>& numbers) {
  std::string out = "(";
  for (std::int64_t number : numbers) out += Int(number);
  return out + "t";
}
/// A storage through its persistent id.
inline std::string StorageOf(std::string_view cls, std::string_view key, std::int64_t elems) {
  const std::string module = cls == "UntypedStorage" ? "torch.storage" : "torch";
  return "(" + Str("storage") + Glob(module, cls) + Str(key) + Str("cpu") + Int(elems) + "tQ";
}
inline const std::string kHooks = "ccollections\nOrderedDict\n)R";
/// A call of _rebuild_tensor_v2 on a float32 storage.
inline std::string TensorOf(std::int64_t elems, std::int64_t offset,
                            const std::vector<std::int64_t>& size,
                            const std::vector<std::int64_t>& stride) {
  return Glob("torch._utils", "_rebuild_tensor_v2") + "(" + StorageOf("FloatStorage", "0", elems) +
         Int(offset) + Ints(size) + Ints(stride) + "\x89" + kHooks + "tR";
}

}  // namespace shardwright::pickle

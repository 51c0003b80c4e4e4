// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "pickles.h"

namespace shardwright::torch_pt {

/// A tensor in the object of torch.save's older stream of pickles.
inline std::string LegacyTensor(std::string_view key, std::string_view cls, std::int64_t elems,
                                std::string_view view = "N") {
  return pickle::Glob("torch._utils", "_rebuild_tensor_v2") + "((" + pickle::Str("storage") +
         pickle::Glob("torch", cls) + pickle::Str(key) + pickle::Str("cpu") + pickle::Int(elems) +
         std::string(view) + "tQ" + pickle::Int(0) + pickle::Ints({elems}) + pickle::Ints({1}) +
         "\x89" + pickle::kHooks + "tR";
}

/// A file in that stream, in parts that a test may change.
struct LegacyParts {
  std::string magic =
      pickle::Pickle("\x8A\x0A" + std::string("\x6C\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19"));
  std::string version = pickle::Pickle("M\xE9\x03");
  std::string machine = pickle::Pickle("}(" + pickle::Str("protocol_version") + "M\xE9\x03" +
                                       pickle::Str("little_endian") + "\x88u");
  std::string object = pickle::Pickle("](" + LegacyTensor("77", "FloatStorage", 3) +
                                      LegacyTensor("5", "LongStorage", 2) + "e");
  std::string keys = pickle::Pickle("](" + pickle::Str("5") + pickle::Str("77") + "e");
  std::string data = Le(2, 8) + std::string(16, 'l') + Le(3, 8) + std::string(12, 'f');

  std::string Bytes() const { return magic + version + machine + object + keys + data; }
};

}  // namespace shardwright::torch_pt

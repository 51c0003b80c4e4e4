// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "files/pickle/emitter.h"

// Objects of torch.distributed.checkpoint in pickles.
namespace shardwright::dcp {

inline constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata.";

inline void New(pickle::Emitter& out, std::string_view name) {
  out.Global(name);
  out.EmptyTuple();
  out.NewObj();
}

inline void New(pickle::Emitter& out, const char* name) { New(out, std::string(kModule) + name); }

}  // namespace shardwright::dcp

// SPDX-License-Identifier: Apache-2.0
// lib/files: readers and writers of file formats that others have defined.
// Each format is a submodule: safetensors, dcp, zip, pickle, and torch_pt, the files of torch.save,
// which uses zip and pickle. The readers expect hostile bytes: they compare a number with the file
// size and with the caps in support/base/limits.h before they use it, and execute nothing. They do
// not read tensor payloads. This folder itself has code that several submodules share.

#pragma once

#include <cstddef>
#include <string_view>

namespace shardwright {

enum class Surrogates : unsigned char { kRefuse, kAllow };

/// Returns true if `text` is well-formed UTF-8. Python's
/// pickles may contain lone surrogates; kAllow accepts them.
/// Local.
bool IsUtf8(std::string_view text, Surrogates surrogates);

/// Returns the length of the longest prefix that is ASCII.
/// Local.
std::size_t AsciiBytes(std::string_view text);

}  // namespace shardwright

// SPDX-License-Identifier: Apache-2.0
// lib/files: file formats that others have defined, a room for each.
// json and safetensors; zip and pickle, and on these two torch_pt, the files of torch.save. The
// readers expect hostile bytes: a number is compared with the size of the file and with the caps in
// support/base/limits.h before it is used, and nothing in a file is executed. Payloads of tensors
// stay unread. This folder itself holds what several rooms need.

#pragma once

#include <cstddef>
#include <string_view>

namespace shardwright {

enum class Surrogates : unsigned char { kRefuse, kAllow };

/// True if `text` is well-formed UTF-8. Python's pickles may carry lone surrogates: kAllow lets
/// those pass.
/// Local.
bool IsUtf8(std::string_view text, Surrogates surrogates);

/// Length of the longest prefix that is ASCII.
/// Local.
std::size_t AsciiBytes(std::string_view text);

}  // namespace shardwright

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shardwright {

/// Returns the CRC-32 of `data` as the zip format defines it (IEEE, reflected); 0 if it is empty.
std::uint32_t Crc32(std::span<const std::byte> data);

/// Returns the contribution of one piece to the CRC of a whole byte string. The CRC of the string
/// is the XOR of Crc32Share(CRC of the piece, bytes after the piece) over its pieces, in any order.
std::uint32_t Crc32Share(std::uint32_t crc, std::uint64_t bytes_after);

}  // namespace shardwright

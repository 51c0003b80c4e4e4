// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shardwright {

/// CRC-32 of the zip format (IEEE, reflected) of `data`; of nothing it is 0.
std::uint32_t Crc32(std::span<const std::byte> data);

/// The share of a piece in the CRC of a whole: the CRC of a byte string is the XOR of
/// Crc32Share(crc of piece, bytes that follow the piece) over its pieces, in any order.
std::uint32_t Crc32Share(std::uint32_t crc, std::uint64_t bytes_after);

}  // namespace shardwright

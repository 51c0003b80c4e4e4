// SPDX-License-Identifier: Apache-2.0
#define OPENSSL_SUPPRESS_DEPRECATED  // these calls, for the reason below
#include "support/os/sha256.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include <openssl/sha.h>

#include "support/base/result.h"
#include "support/base/text.h"
#include "support/os/file.h"

namespace shardwright::os {

// With the deprecated SHA256 calls, a static link includes only their code. EVP would link
// every algorithm of the library, because its providers refer to all of them.
struct Sha256::State {
  SHA256_CTX context;
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  SW_CHECK(SHA256_Init(&state_->context) == 1);
}

Sha256::~Sha256() = default;

void Sha256::Add(std::span<const std::byte> bytes) {
  SW_CHECK(SHA256_Update(&state_->context, bytes.data(), bytes.size()) == 1);
}

std::string Sha256::Finish() && {
  std::array<unsigned char, 32> sum{};
  SW_CHECK(SHA256_Final(sum.data(), &state_->context) == 1);
  return Hex(std::as_bytes(std::span(sum)));
}

std::string Sha256Of(std::string_view text) {
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(text)));
  return std::move(sum).Finish();
}

Result<std::string> Sha256Of(const File& file) {
  constexpr std::uint64_t kByteRangeBytes = std::uint64_t{1} << 20;
  SW_TRY_ASSIGN(const Identity identity, file.Stat());
  Sha256 sum;
  std::vector<std::byte> buffer;
  for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
    buffer.resize(std::min(kByteRangeBytes, identity.bytes - at));
    SW_TRY(file.ReadAt(at, buffer));
    sum.Add(buffer);
  }
  return std::move(sum).Finish();
}

}  // namespace shardwright::os

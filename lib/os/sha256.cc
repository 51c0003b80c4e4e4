#include "os/sha256.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include <openssl/evp.h>

#include "base/result.h"
#include "base/text.h"
#include "os/file.h"

namespace shardwright::os {

struct Sha256::State {
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context{EVP_MD_CTX_new(),
                                                                  &EVP_MD_CTX_free};
};

// These calls fail for lack of memory alone, or where a policy of the machine forbids SHA-256.
Sha256::Sha256() : state_(std::make_unique<State>()) {
  SW_CHECK(state_->context != nullptr);
  SW_CHECK(EVP_DigestInit_ex(state_->context.get(), EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::Add(std::span<const std::byte> bytes) {
  SW_CHECK(EVP_DigestUpdate(state_->context.get(), bytes.data(), bytes.size()) == 1);
}

std::string Sha256::Finish() && {
  std::array<unsigned char, 32> sum{};
  SW_CHECK(EVP_DigestFinal_ex(state_->context.get(), sum.data(), nullptr) == 1);
  return Hex(std::as_bytes(std::span(sum)));
}

std::string Sha256Of(std::string_view text) {
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(text)));
  return std::move(sum).Finish();
}

Result<std::string> Sha256OfFile(const std::string& path) {
  constexpr std::uint64_t kStretchBytes = std::uint64_t{1} << 20;
  SW_TRY_ASSIGN(const File file, File::OpenRead(path));
  SW_TRY_ASSIGN(const Identity identity, file.Stat());
  Sha256 sum;
  std::vector<std::byte> buffer;
  for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
    buffer.resize(std::min(kStretchBytes, identity.bytes - at));
    SW_TRY(file.ReadAt(at, buffer));
    sum.Add(buffer);
  }
  return std::move(sum).Finish();
}

}  // namespace shardwright::os

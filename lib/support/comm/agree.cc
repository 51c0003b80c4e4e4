// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "support/base/exception_to_error.h"
#include "support/comm/comm.h"

namespace shardwright::comm {

namespace {

// An error and the ranks that failed with it.
struct Failure {
  Error error;
  std::vector<int> ranks;
};

constexpr std::size_t kGroupsShown = 4;
constexpr std::size_t kHeadBytes = 9;

void Store32(std::byte* to, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

std::uint32_t Load32(const std::byte* from) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= std::to_integer<std::uint32_t>(from[i]) << (8 * i);
  return value;
}

// Layout: u8 code (0 = success), u32 errno, u32 rank, then the message or the answer.
Bytes Encode(const Error* error, std::string_view text) {
  Bytes out(kHeadBytes + text.size());
  if (error != nullptr) {
    out[0] = static_cast<std::byte>(error->code);
    Store32(out.data() + 1, static_cast<std::uint32_t>(error->sys));
    Store32(out.data() + 5, static_cast<std::uint32_t>(error->rank));
  }
  if (!text.empty()) std::memcpy(out.data() + kHeadBytes, text.data(), text.size());
  return out;
}

Bytes Encode(const Status& status) {
  return status ? Encode(nullptr, "") : Encode(&status.error(), status.error().message);
}

Result<std::string> Decode(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeadBytes) {
    return Fail(Errc::kInternal, "ranks exchanged a status of ", bytes.size(), " bytes, at least ",
                kHeadBytes, " expected");
  }
  std::string text(bytes.size() - kHeadBytes, '\0');
  if (!text.empty()) std::memcpy(text.data(), bytes.data() + kHeadBytes, text.size());
  if (bytes[0] == std::byte{0}) return text;
  Error error;
  error.code = static_cast<Errc>(bytes[0]);
  error.message = std::move(text);
  error.sys = static_cast<int>(Load32(bytes.data() + 1));
  error.rank = static_cast<int>(Load32(bytes.data() + 5));
  return tl::unexpected<Error>(std::move(error));
}

// Formats ranks as "0-3, 7".
std::string RankList(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string RankWord(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + RankList(ranks);
}

// Groups equal errors, in the order of their lowest rank, errors before stops.
std::vector<Failure> GroupFailures(std::vector<Error> errors) {
  std::stable_sort(errors.begin(), errors.end(), [](const Error& a, const Error& b) {
    return std::pair(a.code == Errc::kStopped, a.rank) <
           std::pair(b.code == Errc::kStopped, b.rank);
  });
  std::vector<Failure> groups;
  for (Error& error : errors) {
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Failure& group) {
      return group.error.code == error.code && group.error.message == error.message;
    });
    if (same == groups.end()) {
      const int rank = error.rank;
      groups.push_back({std::move(error), {rank}});
    } else if (same->ranks.back() != error.rank) {
      same->ranks.push_back(error.rank);
    }
  }
  return groups;
}

Error Merge(std::vector<Error> errors) {
  std::vector<Failure> groups = GroupFailures(std::move(errors));
  Error merged = groups[0].error;
  if (groups[0].ranks.size() > 1) merged.message += " (" + RankWord(groups[0].ranks) + ")";
  std::vector<int> unnamed;
  for (std::size_t i = 1; i < groups.size(); ++i) {
    // Omits stops if there is another error.
    if (groups[i].error.code == Errc::kStopped && merged.code != Errc::kStopped) continue;
    if (i < kGroupsShown) {
      merged.message += "; " + RankWord(groups[i].ranks) + ": " + groups[i].error.message;
    } else {
      unnamed.insert(unnamed.end(), groups[i].ranks.begin(), groups[i].ranks.end());
    }
  }
  std::sort(unnamed.begin(), unnamed.end());
  unnamed.erase(std::unique(unnamed.begin(), unnamed.end()), unnamed.end());
  if (!unnamed.empty()) merged.message += "; other failures on " + RankWord(unnamed);
  return merged;
}

}  // namespace

Result<std::vector<Bytes>> Comm::AllToAll(const std::vector<Bytes>& pieces) {
  const std::vector<std::span<const std::byte>> spans(pieces.begin(), pieces.end());
  return AllToAll(std::span<const std::span<const std::byte>>(spans));
}

Status Comm::Agree(Status mine) {
  if (size() == 1) return mine;
  if (!mine && mine.error().rank < 0) mine.error().rank = rank();
  // Success is the common case and takes one reduction of a single number.
  SW_TRY_ASSIGN(const std::uint64_t failed, AllReduceOr(mine ? 0 : 1));
  if (failed == 0) return {};
  SW_TRY_ASSIGN(const std::vector<Bytes> all, AllGather(Encode(mine)));
  std::vector<Error> errors;
  for (const Bytes& bytes : all) {
    if (Result<std::string> one = Decode(bytes); !one) errors.push_back(std::move(one).error());
  }
  return tl::unexpected<Error>(Merge(std::move(errors)));
}

Status Comm::OnRoot(const std::function<Status()>& act) {
  const Result<std::string> outcome = OnRootText([&]() -> Result<std::string> {
    SW_TRY(act());
    return std::string();
  });
  if (!outcome) return tl::unexpected<Error>(outcome.error());
  return {};
}

Result<std::string> Comm::OnRootText(const std::function<Result<std::string>()>& act) {
  Bytes bytes;
  if (rank() == 0) {
    Result<std::string> outcome = Fail(Errc::kInternal, "rank 0 did not act");
    try {
      outcome = act();
    } catch (...) {
      outcome = tl::unexpected<Error>(CaughtError());
    }
    if (size() == 1) return outcome;
    if (outcome) {
      bytes = Encode(nullptr, *outcome);
    } else {
      if (outcome.error().rank < 0) outcome.error().rank = 0;
      bytes = Encode(&outcome.error(), outcome.error().message);
    }
  }
  SW_TRY(Bcast(bytes, 0));
  return Decode(bytes);
}

}  // namespace shardwright::comm

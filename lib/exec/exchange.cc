#include "exec/exchange.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"

namespace shardwright::exec {
namespace {

/// What one rank asks of another, as it travels.
struct Request {
  std::uint64_t member;
  std::uint64_t offset;
  std::uint64_t bytes;
};

}  // namespace

Exchange::Exchange(comm::Comm& comm, const plan::Plan& plan, ByteSource& local,
                   std::vector<int> file_owner)
    : comm_(comm), plan_(plan), local_(local), file_owner_(std::move(file_owner)) {}

Status Exchange::Round(std::span<const std::uint64_t> units) {
  const auto ranks = static_cast<std::size_t>(comm_.size());
  std::vector<std::vector<Request>> asked(ranks);
  std::vector<std::uint64_t> at(ranks, 0);
  fetched_.clear();
  plan::Program program;
  for (const std::uint64_t index : units) {
    plan_.Fill(plan_.unit(index), &program);
    for (const plan::Read& read : program.reads) {
      const int from = owner(read.member);
      if (from == comm_.rank()) continue;
      const auto rank = static_cast<std::size_t>(from);
      asked[rank].push_back({read.member, read.offset, read.bytes});
      fetched_.push_back({read.member, read.offset, read.bytes, from, at[rank]});
      at[rank] += read.bytes;
    }
  }
  std::sort(fetched_.begin(), fetched_.end(), [](const Fetched& a, const Fetched& b) {
    return a.member != b.member ? a.member < b.member : a.offset < b.offset;
  });
  std::vector<std::span<const std::byte>> outgoing;
  outgoing.reserve(ranks);
  for (const auto& list : asked) outgoing.push_back(std::as_bytes(std::span(list)));
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> wanted, comm_.AllToAll(outgoing));

  std::vector<comm::Bytes> served(ranks);
  const auto serve = [&]() -> Status {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (std::size_t i = 0; i + sizeof(Request) <= wanted[rank].size(); i += sizeof(Request)) {
        Request request;
        std::memcpy(&request, wanted[rank].data() + i, sizeof request);
        const std::size_t end = served[rank].size();
        served[rank].resize(end + request.bytes);
        SW_TRY(local_.Read(static_cast<std::uint32_t>(request.member), request.offset,
                           std::span(served[rank]).subspan(end)));
      }
    }
    return {};
  };
  SW_TRY(comm_.Agree(serve()));
  SW_TRY_ASSIGN(answers_, comm_.AllToAll(served));
  return {};
}

Status Exchange::Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) {
  if (owner(member) == comm_.rank()) return local_.Read(member, offset, out);
  const auto after = std::upper_bound(fetched_.begin(), fetched_.end(), std::pair(member, offset),
                                      [](const auto& key, const Fetched& fetched) {
                                        return key.first != fetched.member
                                                   ? key.first < fetched.member
                                                   : key.second < fetched.offset;
                                      });
  // Reads of different units may start at one offset with different lengths; any that is long
  // enough will do.
  for (auto it = after; it != fetched_.begin();) {
    --it;
    if (it->member != member) break;
    if (it->offset <= offset && offset + out.size() <= it->offset + it->bytes) {
      const comm::Bytes& answer = answers_[static_cast<std::size_t>(it->rank)];
      const std::uint64_t from = it->at + (offset - it->offset);
      if (from + out.size() > answer.size()) break;
      std::memcpy(out.data(), answer.data() + from, out.size());
      return {};
    }
    if (it->offset + plan::kUnitBytes * 8 < offset) break;
  }
  return Fail(Errc::kInternal, plan_.source().files[plan_.source().members[member].file] +
                                   ": bytes of another node that were not asked for");
}

}  // namespace shardwright::exec

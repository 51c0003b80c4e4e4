// SPDX-License-Identifier: Apache-2.0
#include "engine/device/cuda/collective_internal.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/device/cuda/communicator_internal.h"
#include "engine/device/cuda/stream_internal.h"

namespace shardwright::device::cuda {

namespace {

std::size_t Index(int rank) { return static_cast<std::size_t>(rank); }

class CudaCollective final : public Collective {
 public:
  /// \param communicator  null for a group of one rank
  CudaCollective(std::shared_ptr<Communicator> communicator, int rank, int size)
      : communicator_(std::move(communicator)), rank_(rank), size_(size) {}
  ~CudaCollective() override {
    if (communicator_ != nullptr) communicator_->Finish();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status AllGather(Stream& stream, std::byte* to, const std::byte* from,
                   std::span<const std::uint64_t> bytes) override {
    if (bytes.size() != Index(size_)) {
      return Fail(Errc::kInternal, "one part per rank expected: ", size_, " ranks, found ",
                  bytes.size(), " parts");
    }
    const std::uint64_t all = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
    if (communicator_ == nullptr) {
      return to == from ? Status() : stream.Copy(to, from, bytes[0]);
    }
    if (all == 0) return communicator_->Healthy();
    const bool even = std::all_of(bytes.begin(), bytes.end(),
                                  [&](std::uint64_t part) { return part == bytes[0]; });
    const Nccl& nccl = communicator_->nccl();
    return Queue(stream, [&](ncclComm_t comm, cudaStream_t queue) {
      if (even) return nccl.all_gather(from, to, bytes[0], ncclInt8, comm, queue);
      // NCCL has no AllGather for parts of different sizes: broadcasts each part in one group.
      ncclResult_t code = nccl.group_start();
      if (code != ncclSuccess) return code;
      std::byte* at = to;
      for (int root = 0; root < size_; ++root) {
        const std::uint64_t part = bytes[Index(root)];
        const std::byte* const source = root == rank_ ? from : at;
        if (part > 0) Add(code, nccl.broadcast(source, at, part, ncclInt8, root, comm, queue));
        at += part;
      }
      return End(code);
    });
  }

 private:
  // Keeps the first failure of a group of calls.
  static void Add(ncclResult_t& all, ncclResult_t code) {
    if (all == ncclSuccess || all == ncclInProgress) all = code;
  }

  // Ends a group that was begun, even if one of its calls failed.
  ncclResult_t End(ncclResult_t code) const {
    const ncclResult_t ended = communicator_->nccl().group_end();
    return code == ncclSuccess || code == ncclInProgress ? ended : code;
  }

  // Queues an all-gather. Aborts the communicator on failure, because the other ranks wait for it.
  template <class Call>
  Status Queue(Stream& stream, Call&& call) {
    SW_TRY_ASSIGN(CudaStream* const ours, OfCuda(stream));
    SW_TRY(communicator_->Healthy());
    if (Status entered = ours->Enter(); !entered) {
      communicator_->Abort(entered.error().message);
      return entered;
    }
    ours->Shares(communicator_);
    const ncclResult_t code = call(communicator_->get(), ours->get());
    return ours->Keep(communicator_->Queued(code, "an all-gather"));
  }

  std::shared_ptr<Communicator> communicator_;
  int rank_;
  int size_;
};

// Data that each rank contributes when communicators are made.
struct Card {
  int group = 0;
  std::array<char, 16> device = {};
  ncclUniqueId id = {};  // of the first rank of its group
};

struct Meant {
  std::vector<int> ranks;  // ranks in `comm` of this rank's group
  int rank = 0;            // this rank's position in `ranks`
};

Result<Meant> GroupOf(const comm::Comm& comm, std::span<const int> group) {
  if (group.size() != Index(comm.size())) {
    return Fail(Errc::kInternal, "one group per rank expected: ", comm.size(), " ranks, found ",
                group.size());
  }
  Meant meant;
  for (int r = 0; r < comm.size(); ++r) {
    if (group[Index(r)] != group[Index(comm.rank())]) continue;
    if (r == comm.rank()) meant.rank = static_cast<int>(meant.ranks.size());
    meant.ranks.push_back(r);
  }
  return meant;
}

Status EachItsOwnDevice(const Meant& meant, const std::vector<Card>& cards,
                        const std::string& name) {
  for (std::size_t i = 0; i < meant.ranks.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const Card& one = cards[Index(meant.ranks[j])];
      const Card& other = cards[Index(meant.ranks[i])];
      if (one.device != other.device) continue;
      return Fail(Errc::kUnsupported, "ranks ", meant.ranks[j], " and ", meant.ranks[i],
                  " share a device, but NCCL requires one device per rank (this rank uses ", name,
                  ")");
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Collective>> MakeCudaCollective(const Context& context,
                                                       std::array<char, 16> uuid, comm::Comm& comm,
                                                       std::span<const int> group) {
  // Do everything that can fail on a single rank before all ranks
  // agree. After that, no rank fails before it joins the others.
  SW_TRY_ASSIGN(const Meant meant, comm.Agree(GroupOf(comm, group)));
  const int size = static_cast<int>(meant.ranks.size());
  Card card;
  card.group = group[Index(comm.rank())];
  card.device = uuid;
  std::optional<Nccl> nccl;
  const auto prepare = [&]() -> Status {
    if (size == 1) return {};
    SW_TRY_ASSIGN(nccl, OpenNccl());
    SW_TRY(context.Enter());
    if (meant.rank != 0) return {};
    return Check(*nccl, nccl->get_unique_id(&card.id), nullptr,
                 "cannot create the id of the communicator");
  };
  SW_TRY(comm.Agree(prepare()));
  SW_TRY_ASSIGN(const auto shown, comm.AllGather(std::as_bytes(std::span(&card, 1))));
  std::vector<Card> cards(shown.size());
  const auto read = [&]() -> Status {
    for (std::size_t r = 0; r < shown.size(); ++r) {
      if (shown[r].size() != sizeof(Card))
        return Fail(Errc::kInternal, "ranks run different builds of Shardwright");
      std::memcpy(&cards[r], shown[r].data(), sizeof(Card));
      if (cards[r].group != group[r]) {
        return Fail(Errc::kInternal, "rank ", r, " reports group ", cards[r].group,
                    ", this rank expects ", group[r]);
      }
    }
    return EachItsOwnDevice(meant, cards, context.name);
  };
  SW_TRY(comm.Agree(read()));
  Result<std::shared_ptr<Communicator>> made = std::shared_ptr<Communicator>();
  if (size > 1) {
    made = Communicator::Make(context, *nccl, cards[Index(meant.ranks[0])].id, size, meant.rank);
  }
  SW_TRY_ASSIGN(auto communicator, comm.Agree(std::move(made)));
  return std::make_unique<CudaCollective>(std::move(communicator), meant.rank, size);
}

}  // namespace shardwright::device::cuda

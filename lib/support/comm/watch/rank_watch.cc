// SPDX-License-Identifier: Apache-2.0
// A connection carries lines from a rank to the next one: "hello TOKEN" with the token of the
// receiver, then "beat WORK busy|waits" every second, "lost RANK REASON" and "bye".

#include "support/comm/watch/rank_watch.h"

#include <pthread.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "support/base/str_cat.h"
#include "support/base/system.h"
#include "support/os/sockets/socket_calls.h"

namespace shardwright::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kBeat(1'000);
constexpr int kBeatsPerTimeout = 5;  // at least
constexpr milliseconds kFirstBeat(200);
constexpr milliseconds kTick(200);
constexpr milliseconds kConnectWait(2'000);
constexpr milliseconds kHelloWait(5'000);
/// Wait after a rank's process closed its connection: it may connect again, and the launcher may
/// end the run first.
constexpr milliseconds kReopen(15'000);
/// Longest time between two turns of a thread that was not stopped meanwhile, at most half of the
/// timeout.
constexpr milliseconds kStoppedMeanwhile(5'000);
constexpr milliseconds kPassOn(3'000);
constexpr std::size_t kLine = 1024;
constexpr std::size_t kTokenBytes = 16;

std::int64_t CpuOf(const std::thread& thread) {
  clockid_t clock{};
  auto handle = const_cast<std::thread&>(thread).native_handle();
  return ::pthread_getcpuclockid(handle, &clock) == 0 ? ClockNanoseconds(clock) : 0;
}

/// Splits off the first word of a line.
std::string_view NextWord(std::string_view* line) {
  const std::size_t end = std::min(line->find(' '), line->size());
  const std::string_view word = line->substr(0, end);
  line->remove_prefix(std::min(end + 1, line->size()));
  return word;
}

std::int64_t NumberOf(std::string_view word) {
  std::int64_t number = 0;
  std::from_chars(word.data(), word.data() + word.size(), number);
  return number;
}

std::string Seconds(Clock::duration time) {
  return StrCat(std::chrono::duration_cast<std::chrono::seconds>(time).count(), " s");
}

}  // namespace

/// Sets a flag while a collective call is in progress.
class RankWatch::Waits final : public Comm {
 public:
  using Comm::AllToAll;

  Waits(Comm& comm, std::atomic<bool>& flag) : comm_(comm), flag_(flag) {}

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  Status Barrier() override {
    const Flag waits(flag_);
    return comm_.Barrier();
  }
  Status Bcast(Bytes& bytes, int root) override {
    const Flag waits(flag_);
    return comm_.Bcast(bytes, root);
  }
  Result<std::vector<Bytes>> Gather(std::span<const std::byte> mine, int root) override {
    const Flag waits(flag_);
    return comm_.Gather(mine, root);
  }
  Result<std::vector<Bytes>> AllGather(std::span<const std::byte> mine) override {
    const Flag waits(flag_);
    return comm_.AllGather(mine);
  }
  Result<std::vector<Bytes>> AllToAll(std::span<const std::span<const std::byte>> pieces,
                                      std::uint64_t receive_cap) override {
    const Flag waits(flag_);
    return comm_.AllToAll(pieces, receive_cap);
  }
  Result<std::uint64_t> AllReduce(std::uint64_t mine, ReduceOp op) override {
    const Flag waits(flag_);
    return comm_.AllReduce(mine, op);
  }

 private:
  struct Flag {
    explicit Flag(std::atomic<bool>& set) : flag(set) { flag = true; }
    ~Flag() { flag = false; }
    std::atomic<bool>& flag;
  };
  Comm& comm_;
  std::atomic<bool>& flag_;
};

RankWatch::RankWatch(Comm& comm, Options options)
    : options_(std::move(options)),
      rank_(comm.rank()),
      before_((comm.rank() + comm.size() - 1) % comm.size()),
      after_((comm.rank() + 1) % comm.size()),
      comm_(&comm) {}

Result<std::unique_ptr<RankWatch>> RankWatch::Start(Comm& comm, Options options) {
  std::unique_ptr<RankWatch> watch(new RankWatch(comm, std::move(options)));
  if (comm.size() == 1 || watch->options_.timeout.count() == 0) return watch;
  for (const char* any : {"::", "0.0.0.0"}) {
    if (watch->listener_) break;
    os::Address address;
    address.host = any;
    if (auto listener = os::Listener::Open(address)) watch->listener_ = *std::move(listener);
  }
  SW_TRY_ASSIGN(const std::vector<Bytes> all, comm.AllGather(watch->Introduce(watch->listener_)));
  for (std::size_t r = 0; r < all.size(); ++r) {
    SW_TRY_ASSIGN(Peer peer, ParsePeer(all[r], static_cast<int>(r)));
    watch->peers_.push_back(std::move(peer));
  }
  watch->watched_ = std::make_unique<Waits>(comm, watch->waits_);
  watch->comm_ = watch->watched_.get();
  std::unique_lock lock(watch->mutex_);  // the threads start when both are known
  watch->sender_ = std::thread([one = watch.get()] { one->Send(); });
  watch->receiver_ = std::thread([one = watch.get()] { one->Receive(); });
  // A rank that stops before its first beat is not missed.
  watch->changed_.wait_for(lock, kFirstBeat, [&] { return watch->begun_; });
  return watch;
}

RankWatch::~RankWatch() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  if (sender_.joinable()) sender_.join();
  if (receiver_.joinable()) receiver_.join();
}

/// Makes the text "TOKEN HOST PORT ADDRESS...". Without a listener the port is 0.
Bytes RankWatch::Introduce(const std::optional<os::Listener>& listener) {
  token_ = RandomHex(kTokenBytes).value_or("");
  std::string text = StrCat(token_.empty() ? "-" : token_, " ", HostName(), " ",
                            listener && !token_.empty() ? listener->address().port : 0);
  for (const std::string& address : os::sys::OwnAddresses()) text += " " + address;
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

Result<RankWatch::Peer> RankWatch::ParsePeer(const Bytes& bytes, int rank) {
  std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  Peer peer;
  peer.token = NextWord(&text);
  peer.host = NextWord(&text);
  const std::int64_t port = NumberOf(NextWord(&text));
  if (peer.token.empty() || peer.host.empty() || port < 0 || port > UINT16_MAX) {
    return Fail(Errc::kInternal, "rank ", rank, " introduces itself as \"",
                std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()), '"');
  }
  if (port == 0) return peer;
  if (peer.host == HostName()) {
    peer.addresses.push_back({{}, "127.0.0.1", static_cast<std::uint16_t>(port)});
  }
  while (!text.empty()) {
    peer.addresses.push_back({{}, std::string(NextWord(&text)), static_cast<std::uint16_t>(port)});
  }
  return peer;
}

/// Waits. \returns true if the watch ends
bool RankWatch::Over(milliseconds wait) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, wait, [&] { return over_ || (!loss_.empty() && !told_); }) &&
         over_;
}

std::int64_t RankWatch::Work() const {
  const std::int64_t own = CpuOf(sender_) + CpuOf(receiver_);
  return ((options_.work ? options_.work() : 0) - own) / 1'000'000;
}

/// Connects to the next rank. \returns nullopt if it cannot be reached now
std::optional<os::Connection> RankWatch::Connect() {
  const Peer& next = peers_[static_cast<std::size_t>(after_)];
  const auto over = [this] { return Over(milliseconds(0)); };
  for (const os::Address& address : next.addresses) {
    auto connection = os::Connection::Open(address, kConnectWait, over);
    if (connection && connection->Send("hello " + next.token + "\n")) {
      return *std::move(connection);
    }
  }
  return std::nullopt;
}

void RankWatch::Send() {
  std::optional<os::Connection> next;
  const milliseconds beat = std::min(kBeat, options_.timeout / kBeatsPerTimeout);
  for (bool over = Over(milliseconds(0)); !over; over = Over(beat)) {
    if (!next) next = Connect();
    std::string loss;
    {
      const std::lock_guard lock(mutex_);
      if (!told_) loss = loss_;
    }
    const std::string line =
        loss.empty() ? StrCat("beat ", Work(), waits_ ? " waits\n" : " busy\n") : loss;
    const bool sent = next && next->Send(line);
    if (!sent) next.reset();
    const std::lock_guard lock(mutex_);
    begun_ = true;
    told_ = told_ || !loss.empty();
    changed_.notify_all();
  }
  if (next) (void)next->Send("bye\n");
}

/// Accepts a connection. \returns true if it is one of the rank before this one
Result<bool> RankWatch::Welcome(Heard& heard) {
  const auto over = [this] { return Over(milliseconds(0)); };
  SW_TRY_ASSIGN(std::optional<os::Connection> met, listener_->Accept(kTick, kHelloWait, over));
  if (!met) return false;
  SW_TRY_ASSIGN(const std::optional<std::string> line, met->ReceiveLine(kLine));
  if (!line || *line != "hello " + token_) return false;
  heard.connection = std::move(met);
  heard.met = true;
  heard.closed = false;
  return true;
}

/// Receives the lines that have arrived, or waits shortly for one.
/// \error kIo  the connection has ended
Status RankWatch::Hear(Heard& heard) {
  SW_TRY_ASSIGN(bool more, heard.connection->HasLine(kLine, kTick));
  while (more) {
    SW_TRY_ASSIGN(const std::optional<std::string> line, heard.connection->ReceiveLine(kLine));
    if (!line) {
      heard.closed = true;
      return Fail(Errc::kIo, "closed");
    }
    std::string_view rest = *line;
    const std::string_view kind = NextWord(&rest);
    if (kind == "beat") {
      const std::int64_t work = NumberOf(NextWord(&rest));
      heard.waits = NextWord(&rest) == "waits";
      heard.last = Clock::now();
      if (heard.waits || work != heard.work) heard.worked = heard.last;
      heard.work = work;
    } else if (kind == "lost") {
      const auto rank = static_cast<int>(NumberOf(NextWord(&rest)));
      Report(rank, std::string(rest), false);
    } else if (kind == "bye") {
      heard.goodbye = true;
    }
    SW_TRY_ASSIGN(more, heard.connection->HasLine(kLine, milliseconds(0)));
  }
  return {};
}

/// Returns why the rank before this one counts as lost, or nothing.
std::string RankWatch::LossOf(const Heard& heard) const {
  if (!heard.met || heard.goodbye) return {};
  const Clock::time_point now = Clock::now();
  if (heard.closed && now - heard.last >= std::min(kReopen, options_.timeout)) {
    return "its process has ended without a message";
  }
  if (now - heard.last >= options_.timeout) {
    return StrCat("nothing was heard of it for ", Seconds(now - heard.last),
                  ": its process was stopped, its node failed, or the network does not reach it");
  }
  if (now - heard.worked >= options_.timeout) {
    return StrCat("it hangs: it has used no processor time and moved no data for ",
                  Seconds(now - heard.worked), ", as if a file system did not answer");
  }
  return {};
}

/// Passes a loss on to the next rank and ends this one.
void RankWatch::Report(int rank, const std::string& reason, bool found) {
  {
    std::unique_lock lock(mutex_);
    if (over_ || !loss_.empty()) return;
    loss_ = StrCat("lost ", rank, " ", reason, "\n");
    changed_.notify_all();
    changed_.wait_for(lock, kPassOn, [&] { return over_ || told_; });
  }
  const auto index = static_cast<std::size_t>(rank);
  const std::string host = index < peers_.size() ? peers_[index].host : "unknown";
  Error error{Errc::kStopped,
              StrCat("rank ", rank, " on ", host, " is lost: ", reason,
                     "; run the command again to continue (--rank-timeout sets the limit)"),
              0, rank};
  options_.lost(error, found);
}

void RankWatch::Receive() {
  if (!listener_) return;
  Heard heard;
  heard.last = heard.worked = Clock::now();
  const milliseconds stopped_meanwhile = std::min(kStoppedMeanwhile, options_.timeout / 2);
  Clock::time_point turn = heard.last;
  while (!Over(milliseconds(0))) {
    if (heard.connection) {
      if (!Hear(heard)) heard.connection.reset();
    } else if (const Result<bool> met = Welcome(heard); met && *met) {
      heard.last = heard.worked = Clock::now();
    } else if (!met) {
      if (Over(kTick)) return;
    }
    // After a suspension of this rank or of the whole run, the beats of that time are missing.
    const Clock::time_point now = Clock::now();
    if (now - turn >= stopped_meanwhile) heard.last = heard.worked = now;
    turn = now;
    if (const std::string reason = LossOf(heard); !reason.empty()) {
      return Report(before_, reason, true);
    }
  }
}

}  // namespace shardwright::comm

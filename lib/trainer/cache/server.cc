// SPDX-License-Identifier: Apache-2.0
#include "trainer/cache/server.h"

#include <unistd.h>

#include <utility>

#include "support/os/net/answer.h"

namespace shardwright::cache {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSessionTick(100);
/// Time limit for a transfer to a client without progress.
constexpr milliseconds kSessionTimeout(30'000);

}  // namespace

Server::Server(os::Listener listener, std::string secret, Sink& sink)
    : listener_(std::move(listener)), secret_(std::move(secret)), sink_(sink) {
  thread_ = std::thread([this] { Accept(); });
}

void Server::Tell(nlohmann::json status) {
  const std::lock_guard lock(mutex_);
  status_ = std::move(status);
}

void Server::Refuse(Error error) {
  const std::lock_guard lock(mutex_);
  state_ = State::kFailed;
  error_ = std::move(error);
  changed_.notify_all();
}

void Server::Hold(std::uint32_t process, int descriptor) {
  const std::lock_guard lock(mutex_);
  const auto [at, fresh] = descriptors_.try_emplace(process, descriptor);
  if (!fresh && descriptor >= 0) ::close(descriptor);
  changed_.notify_all();
}

bool Server::Await(std::size_t processes, milliseconds wait) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, wait, [&] { return descriptors_.size() == processes; });
}

void Server::Publish(std::string description) {
  const std::lock_guard lock(mutex_);
  state_ = State::kReady;
  description_ = std::move(description);
  changed_.notify_all();
}

std::optional<Error> Server::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void Server::End() {
  {
    const std::lock_guard lock(mutex_);
    if (over_.exchange(true)) return;
    changed_.notify_all();
  }
  thread_.join();
  for (const auto& [process, descriptor] : descriptors_) {
    if (descriptor >= 0) ::close(descriptor);
  }
}

void Server::Accept() {
  for (;;) {
    Reap(false);
    const bool over = over_;
    auto accepted = listener_.Accept(over ? milliseconds(0) : kSessionTick, kSessionTimeout, {});
    if (over && (!accepted || !*accepted)) break;
    if (!accepted) {
      sink_.Warn(accepted.error().message);
      if (accepted.error().code != Errc::kMismatch) std::this_thread::sleep_for(kSessionTick);
      continue;
    }
    if (!*accepted) continue;
    if (sessions_.size() >= kSessions) {
      (void)os::SendAnswer(**accepted,
                           Fail(Errc::kBusy, "already serves ", kSessions, " connections"));
      continue;
    }
    Session& session = sessions_.emplace_back();
    session.thread = std::thread([this, &session, connection = std::move(**accepted)]() mutable {
      Serve(session, std::move(connection));
      session.over = true;
    });
  }
  Reap(true);
}

void Server::Reap(bool all) {
  for (auto session = sessions_.begin(); session != sessions_.end();) {
    if (!all && !session->over) {
      ++session;
      continue;
    }
    session->thread.join();
    session = sessions_.erase(session);
  }
}

void Server::Serve(Session& session, os::Connection connection) {
  // Answer requests that arrived just before the end.
  for (bool over = false; !over;) {
    over = over_;
    const Result<bool> line = connection.HasLine(os::kLineBytes, kSessionTick);
    if (!line) break;
    if (!*line) continue;
    const auto request = connection.ReceiveLine(os::kLineBytes);
    if (!request || !*request || !Answer(session, connection, **request)) break;
  }
  if (session.attached) --attached_;
  if (!session.process) return;
  if (over_) {
    (void)connection.Send("end\n");
    return;
  }
  const std::lock_guard lock(mutex_);
  lost_ = Error{Errc::kIo, StrCat("process ", *session.process, " of the cache has ended")};
}

/// \error any  the connection cannot be used any more
Status Server::Answer(Session& session, os::Connection& connection, const std::string& line) {
  const std::vector<std::string_view> words = os::WordsOf(line);
  const std::string_view what = words.empty() ? std::string_view() : words[0];
  if (what == "attach" && words.size() == 1) return Attach(session, connection);
  if (what == "memory" && words.size() == 2) return SendMemory(session, connection, words[1]);
  if (what == "status" && words.size() == 1) return SendStatus(connection);
  if (what == "hand" && words.size() == 4) return TakeOver(session, connection, words);
  if (what == "detach" && words.size() == 1) {
    if (std::exchange(session.attached, false)) --attached_;
    return os::SendAnswer(connection, {});
  }
  if (what == "stop" && words.size() == 1) {
    stop_asked_ = true;
    if (session.process) return {};
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return over_.load(); });
    lock.unlock();
    return os::SendAnswer(connection, {});
  }
  return os::SendAnswer(connection, Fail(Errc::kUsage, "attach, detach, status or stop expected"));
}

Status Server::Attach(Session& session, os::Connection& connection) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return over_ || state_ != State::kLoading; });
  Status there;
  if (state_ == State::kFailed) {
    there = tl::unexpected<Error>(error_);
  } else if (over_ || stop_asked_) {
    there = Fail(Errc::kNotFound, "the cache is ending");
  }
  lock.unlock();
  if (!there) return os::SendAnswer(connection, there);
  if (!std::exchange(session.attached, true)) ++attached_;
  ++attaches_;
  // The description does not change after Publish.
  SW_TRY(os::SendAnswer(connection, {}, std::to_string(description_.size())));
  return connection.Send(description_);
}

Status Server::SendMemory(const Session& session, os::Connection& connection,
                          std::string_view process) {
  int descriptor = -1;
  if (const auto number = os::ParseNumber(process, ~std::uint32_t{0}, "process");
      number && session.attached) {
    const std::lock_guard lock(mutex_);
    const auto found = descriptors_.find(static_cast<std::uint32_t>(*number));
    if (found != descriptors_.end()) descriptor = found->second;
  }
  if (descriptor < 0) {
    return os::SendAnswer(
        connection,
        Fail(Errc::kUsage, "the client is not attached, or the process has no memory to send"));
  }
  return connection.SendDescriptor(descriptor);
}

/// Registers the memory of another process of the cache. Its connection stays open.
Status Server::TakeOver(Session& session, os::Connection& connection,
                        const std::vector<std::string_view>& words) {
  const auto process = os::ParseNumber(words[1], ~std::uint32_t{0}, "process");
  if (!process || words[2] != secret_) {
    return os::SendAnswer(connection,
                          Fail(Errc::kUsage, "the client is not a process of this cache"));
  }
  SW_TRY(os::SendAnswer(connection, {}));
  int descriptor = -1;
  if (words[3] == "1") {
    SW_TRY_ASSIGN(descriptor, connection.ReceiveDescriptor());
  }
  session.process = static_cast<std::uint32_t>(*process);
  Hold(*session.process, descriptor);
  return os::SendAnswer(connection, {});
}

Status Server::SendStatus(os::Connection& connection) {
  nlohmann::json status;
  {
    const std::lock_guard lock(mutex_);
    status = status_;
    status["state"] = over_ || stop_asked_       ? "ending"
                      : state_ == State::kReady  ? "ready"
                      : state_ == State::kFailed ? "failed"
                                                 : "loading";
  }
  status["pid"] = ::getpid();
  status["attached"] = attached_.load();
  status["attaches"] = attaches_.load();
  const std::string text = status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  SW_TRY(os::SendAnswer(connection, {}, std::to_string(text.size())));
  return connection.Send(text);
}

}  // namespace shardwright::cache

// SPDX-License-Identifier: Apache-2.0
#include "support/os/lock.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "support/base/system.h"
#include "support/os/locks/owner.h"
#include "support/os/sys_internal.h"

namespace shardwright::os {

namespace {

constexpr int kAttempts = 1000;

constexpr std::size_t kTextBytes = 512;

constexpr std::int64_t kSecond = 1'000'000'000;  // nanoseconds

/// Returns the text of a lock file, at most kTextBytes; nullopt if it cannot be read.
std::optional<std::string> TextOf(int fd) {
  std::string text(kTextBytes, '\0');
  const ssize_t bytes = sys::Read(fd, text.data(), text.size(), 0);
  if (bytes < 0) return std::nullopt;
  text.resize(static_cast<std::size_t>(bytes));
  return text;
}

/// Returns the owner in a lock file's text, for messages.
std::string OwnerIn(const std::string& text) {
  if (!text.starts_with(kLockFirstWord)) return "another process";
  const std::string shown = EscapedName(std::string_view(text).substr(0, text.find('\n')));
  return shown.substr(1, shown.size() - 2);
}

/// The last update of a lock file by its owner.
struct Heartbeat {
  std::int64_t at_ns = 0;
  std::int64_t age = 0;  // in seconds
};

/// Returns the heartbeat's time and age by the clock of the file system, not of this machine.
Result<Heartbeat> HeartbeatOf(const Directory& folder, const std::string& path, int fd) {
  struct stat beat {};
  if (sys::Stat(fd, &beat) != 0) return SysFail(Errc::kIo, path, "cannot stat", errno);
  std::int64_t now = ::time(nullptr) * kSecond;
  SW_TRY_ASSIGN(const std::string id, RandomHex(8));
  const std::string probe = ".shardwright-" + id;
  if (Result<File> file = folder.Create(probe)) {
    if (const Result<Identity> made = file->Stat()) now = made->mtime_ns;
    static_cast<void>(folder.RemoveFile(probe).has_value());
  }
  const std::int64_t at = beat.st_mtim.tv_sec * kSecond + beat.st_mtim.tv_nsec;
  return Heartbeat{at, std::max<std::int64_t>(now - at, 0) / kSecond};
}

/// Fails if a file is not one of our lock files. Accepts an empty, truncated or binary
/// file, as a power failure may leave one.
Status CheckIsLock(int fd, const std::string& path, std::string_view found) {
  struct stat info {};
  if (sys::Stat(fd, &info) != 0) return SysFail(Errc::kIo, path, "cannot stat", errno);
  const std::string_view first = found.substr(0, kLockFirstWord.size());
  const bool small = info.st_size <= static_cast<off_t>(kTextBytes);
  const bool text_only = std::all_of(found.begin(), found.end(), [](char c) {
    return c == '\n' || c == '\t' || (c >= ' ' && c <= '~');
  });
  const bool ours = kLockFirstWord.starts_with(first) || !text_only;
  if (info.st_nlink <= 1 && small && ours) return {};
  return Fail(Errc::kBusy, path, ": is not a lock file; move it away, or choose another name");
}

/// The file that a lock's name leads to.
struct Opened {
  Fd fd;                // not open if the file is gone
  std::string foreign;  // "belongs to user ..."; another user's file is open for reading only
  bool fresh = false;
};

Result<Opened> OpenLock(const Directory& folder, int folder_fd, const std::string& name) {
  const std::string path = folder.PathOf(name);
  constexpr int kFlags = O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  Opened opened;
  opened.fd = Fd(sys::OpenAt(folder_fd, name.c_str(), O_RDWR | O_CREAT | O_EXCL | kFlags));
  opened.fresh = opened.fd.ok();
  if (opened.fresh) return opened;
  if (errno != EEXIST) return CreateFail(folder_fd, path, "cannot create the lock file", errno);
  SW_TRY_ASSIGN(const std::optional<NameStatus> there, folder.Look(name));
  if (!there) return opened;
  opened.foreign = folder.WhyForeign(*there);
  const bool own = opened.foreign.empty();
  const std::string whose = own ? "" : " and " + opened.foreign;
  if (there->type != EntryType::kFile) {
    return Fail(Errc::kBusy, path, ": is not a lock file", whose,
                (there->type == EntryType::kSymlink ? " (a symbolic link)" : ""),
                "; remove it, or choose another name");
  }
  opened.fd = Fd(sys::OpenAt(folder_fd, name.c_str(), (own ? O_RDWR : O_RDONLY) | kFlags));
  if (opened.fd.ok()) {
    struct stat info {};
    if (sys::Stat(opened.fd.get(), &info) != 0) {
      return SysFail(Errc::kIo, path, "cannot stat", errno);
    }
    // The file was replaced after Look.
    if (!S_ISREG(info.st_mode) || info.st_uid != there->owner) opened.fd = Fd();
    return opened;
  }
  if (errno == ENOENT || errno == ELOOP) return opened;
  if (own) return SysFail(Errc::kIo, path, "cannot open the lock file", errno);
  return SysFail(Errc::kBusy, path,
                 opened.foreign +
                     "; ask its owner to remove it, or choose another name: cannot "
                     "open the lock file",
                 errno);
}

/// Checks the owner of a file that could be locked. On some file systems locks work only
/// within one machine or one mount, so its owner may still be running.
/// \returns true  the owner is on another machine
/// \error kBusy  the owner is a running process on this machine
Result<bool> IsOfAnotherMachine(const Directory& folder, const std::string& path, int fd,
                                const std::string& text) {
  const std::optional<LockOwner> owner = ParseOwner(text);
  if (!owner) return false;
  const bool same_boot = owner->boot == BootId();
  if (same_boot && owner->process != static_cast<std::uint64_t>(::getpid()) &&
      owner->started != 0 && ProcessStart(owner->process) == owner->started) {
    return Fail(Errc::kBusy, path, ": in use by ", OwnerIn(text),
                ", which is running; the locks of this file system do not hold "
                "between its mounts");
  }
  // Containers on one machine have the same boot id, but other names and processes.
  if (owner->host != HostName()) return true;
  if (same_boot || owner->boot.empty()) return false;
  // A machine that was booted again has lost its processes. But two machines may have one name: a
  // heartbeat since the boot of this machine is that of the other one.
  SW_TRY_ASSIGN(const Heartbeat beat, HeartbeatOf(folder, path, fd));
  return beat.age + 1 < ClockNanoseconds(CLOCK_BOOTTIME) / kSecond;
}

/// Decides if the lock of a process on another machine may be removed.
class Fence {
 public:
  explicit Fence(bool take_over) : take_over_(take_over) {}

  /// Checks the heartbeat in the lock file.
  /// \returns true  the heartbeat has expired; false it may still expire
  /// \error kBusy  take_over is not set, or the owner has updated its heartbeat
  Result<bool> HasExpired(const std::string& path, const std::string& text, const Heartbeat& beat) {
    const std::optional<LockOwner> owner = ParseOwner(text);
    const bool same_name = owner && owner->host == HostName();
    const std::string in_use = path + ": in use by " + OwnerIn(text) +
                               ", a process of another machine" +
                               (same_name ? " of this name" : "") + " (last heartbeat " +
                               std::to_string(beat.age) + " s ago)";
    if (!take_over_) {
      return Fail(Errc::kBusy, in_use,
                  "; if it has ended, --take-over removes its lock once the "
                  "heartbeat is more than ",
                  kHeartbeatExpires.count(), " s old");
    }
    if (text == text_ && beat.at_ns != at_ns_) return Fail(Errc::kBusy, in_use, "; it is running");
    text_ = text;
    at_ns_ = beat.at_ns;
    return beat.age > kHeartbeatExpires.count();
  }

 private:
  bool take_over_;
  std::string text_;  // found by the last call
  std::int64_t at_ns_ = 0;
};

/// Writes the text of a lock file. The text is for users and other machines, so a
/// full disk does not prevent locking.
/// \returns false  the disk is full, and the file is empty
Result<bool> WriteText(int fd, const std::string& path, const std::string& text) {
  bool ok = sys::Truncate(fd, 0) == 0;
  for (std::size_t done = 0; ok && done < text.size();) {
    const ssize_t moved =
        sys::Write(fd, text.data() + done, text.size() - done, static_cast<off_t>(done));
    ok = moved > 0;
    if (ok) done += static_cast<std::size_t>(moved);
  }
  if (ok) return true;
  const int error = errno;
  static_cast<void>(sys::Truncate(fd, 0));
  if (error == ENOSPC || error == EDQUOT) return false;
  return SysFail(Errc::kIo, path, "cannot write the lock file", error);
}

/// Returns a lock file's text. If it is empty, waits briefly for its owner to write it.
std::optional<std::string> SettledText(int fd) {
  constexpr int kLooks = 10;
  constexpr std::chrono::milliseconds kPause(20);
  std::optional<std::string> text = TextOf(fd);
  for (int look = 1; look < kLooks && text && text->empty(); ++look) {
    std::this_thread::sleep_for(kPause);
    text = TextOf(fd);
  }
  return text;
}

// Returns whether the name still leads to the locked file. Its last owner may have
// removed the file between our open and our lock.
Result<bool> IsCurrent(int fd, int folder_fd, const std::string& name, const std::string& path) {
  struct stat mine {};
  struct stat named {};
  if (sys::Stat(fd, &mine) != 0) return SysFail(Errc::kIo, path, "cannot stat", errno);
  if (sys::StatAt(folder_fd, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return false;
    return SysFail(Errc::kIo, path, "cannot stat", errno);
  }
  return mine.st_dev == named.st_dev && mine.st_ino == named.st_ino;
}

tl::unexpected<Error> LockFail(const std::string& path, const Opened& opened,
                               const std::string& whose, int error) {
  if (error == EWOULDBLOCK) {
    return FailErrno(Errc::kBusy, error, path, ": in use by ",
                     OwnerIn(TextOf(opened.fd.get()).value_or("")), whose);
  }
  if (error == ENOSYS || error == EOPNOTSUPP || error == ENOLCK) {
    return SysFail(Errc::kIo, path, "the file system has no locks (flock)", error);
  }
  if (opened.foreign.empty()) return SysFail(Errc::kIo, path, "cannot lock", error);
  return SysFail(Errc::kBusy, path, opened.foreign + ": cannot lock", error);
}

/// Result for an existing lock file that could be locked.
enum class Found : std::uint8_t {
  kFree,
  kMayExpire,  ///< of another machine, with a recent heartbeat
  kRemoved,    ///< was of another machine, with an expired heartbeat: try again
};

/// Removes an expired lock file, unless another process has taken it over since it was read:
/// moves it aside, and puts it back if its text is another one.
Status RemoveExpired(const Directory& folder, const std::string& name, const std::string& text,
                     bool own) {
  SW_TRY_ASSIGN(const std::string id, RandomHex(8));
  const std::string aside = name + "-" + id;
  if (const Status moved = folder.RenameNew(name, aside); !moved) {
    if (moved.error().sys == ENOENT) return {};
    return SysFail(
        Errc::kBusy, folder.PathOf(name),
        own ? "cannot be taken over" : "ask its owner to remove it: cannot be taken over",
        moved.error().sys);
  }
  const Result<std::string> found = folder.ReadWholeText(aside, kTextBytes);
  if (found && *found == text) return folder.RemoveFile(aside);
  return folder.RenameNew(aside, name);
}

/// \param own  the file is this user's
/// \error kBusy  the file is in use, or is not a lock file; kIo
Result<Found> LookAtOwner(const Directory& folder, const std::string& name, int fd, bool own,
                          Fence* fence) {
  const std::string path = folder.PathOf(name);
  const std::optional<std::string> text = SettledText(fd);
  if (!text) return SysFail(Errc::kIo, path, "cannot read the lock file", errno);
  if (own) SW_TRY(CheckIsLock(fd, path, *text));
  SW_TRY_ASSIGN(const bool other, IsOfAnotherMachine(folder, path, fd, *text));
  if (!other) return Found::kFree;
  SW_TRY_ASSIGN(const Heartbeat beat, HeartbeatOf(folder, path, fd));
  SW_TRY_ASSIGN(const bool expired, fence->HasExpired(path, *text, beat));
  if (!expired) return Found::kMayExpire;
  SW_TRY(RemoveExpired(folder, name, *text, own));
  return Found::kRemoved;
}

}  // namespace

/// A locked lock file and the thread that updates it.
class Lock::State {
 public:
  /// \param own  the file is this user's
  State(Fd fd, Directory folder, std::string name, bool own)
      : fd_(std::move(fd)), folder_(std::move(folder)), name_(std::move(name)), own_(own) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { StopBeating(); }

  /// Writes the owner to the file and starts the heartbeat.
  Status Describe(const std::string& note, std::chrono::milliseconds heartbeat) {
    if (!own_) return {};
    const std::string path = folder_.PathOf(name_);
    std::string text = DescribeOwner(note);
    SW_TRY_ASSIGN(const bool written, WriteText(fd_.get(), path, text));
    if (written) text_ = std::move(text);
    // Object stores make a file visible to other machines when it is synced.
    if (!folder_.CanSyncFileSystem()) static_cast<void>(sys::Sync(fd_.get()));
    // Blocks signals in the heartbeat thread. The command's own threads handle them.
    sigset_t all{};
    sigset_t before{};
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    Status started;
    try {
      thread_ = std::thread([this, heartbeat] { Beat(heartbeat); });
    } catch (const std::system_error& error) {
      started = Fail(Errc::kLimit, path, ": cannot start a thread: ", error.what());
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  /// Implements Lock::Check.
  Status Check() const {
    if (text_.empty()) return {};
    const std::string path = folder_.PathOf(name_);
    const Fd named(sys::OpenAt(folder_.fd(), name_.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
    if (!named.ok() && errno != ENOENT) {
      return SysFail(Errc::kIo, path, "cannot open the lock file", errno);
    }
    if (!named.ok()) return Fail(Errc::kBusy, path, ": another process has removed the lock file");
    const std::optional<std::string> text = TextOf(named.get());
    if (!text) return SysFail(Errc::kIo, path, "cannot read the lock file", errno);
    if (*text == text_) return {};
    return Fail(Errc::kBusy, path, ": taken over by ", OwnerIn(*text));
  }

  /// Implements Lock::Release.
  Status Release() {
    StopBeating();
    const Status mine = Check();
    if (!mine && mine.error().code == Errc::kBusy) {
      fd_ = Fd();
      return {};
    }
    // Removes the file before it unlocks: a process that waits with the old file open
    // then finds that the name is gone, and retries.
    const bool removed = sys::UnlinkAt(folder_.fd(), name_.c_str()) == 0;
    const int error = errno;
    fd_ = Fd();
    const bool stays = !own_ && (error == EACCES || error == EPERM);
    if (!removed && error != ENOENT && !stays) {
      return SysFail(Errc::kIo, folder_.PathOf(name_), "cannot remove the lock file", error);
    }
    return {};
  }

 private:
  void Beat(std::chrono::milliseconds heartbeat) {
    std::unique_lock guard(mutex_);
    while (!stop_changed_.wait_for(guard, heartbeat, [this] { return stop_; })) {
      // Does not update the heartbeat of a new owner that has taken over the lock.
      if (Check()) sys::Touch(fd_.get());
    }
  }

  void StopBeating() {
    {
      const std::lock_guard guard(mutex_);
      stop_ = true;
    }
    stop_changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  Fd fd_;
  Directory folder_;
  std::string name_;
  bool own_;
  std::string text_;  // text of the file; empty if it names another process or none
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

Lock::Lock(std::unique_ptr<State> held) : held_(std::move(held)) {}
Lock::Lock() = default;
Lock::Lock(Lock&& other) noexcept = default;

Lock& Lock::operator=(Lock&& other) noexcept {
  if (this != &other) {
    if (held()) static_cast<void>(Release().has_value());
    held_ = std::move(other.held_);
  }
  return *this;
}

Lock::~Lock() {
  if (held()) static_cast<void>(Release().has_value());
}

Result<Lock> Lock::Take(const std::string& path, const std::string& note, bool take_over) {
  const std::size_t slash = path.rfind('/');
  std::string parent = slash == std::string::npos ? "." : path.substr(0, slash);
  if (parent.empty()) parent = "/";
  Result<Directory> folder = Directory::Open(parent);
  if (!folder) {
    return SysFail(Errc::kIo, path, "cannot create the lock file", folder.error().sys);
  }
  return Take(*folder, path.substr(slash + 1), note, take_over);
}

Result<Lock> Lock::Take(const Directory& folder, const std::string& name, const std::string& note,
                        bool take_over, std::chrono::milliseconds heartbeat) {
  const std::string path = folder.PathOf(name);
  Fence fence(take_over);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    SW_TRY_ASSIGN(Opened opened, OpenLock(folder, folder.fd(), name));
    if (!opened.fd.ok()) continue;
    const bool own = opened.foreign.empty();
    const std::string whose = own ? "" : "; the lock file " + opened.foreign;
    if (sys::Lock(opened.fd.get()) != 0) return LockFail(path, opened, whose, errno);
    const int fd = opened.fd.get();
    auto held = std::make_unique<State>(std::move(opened.fd), folder, name, own);
    const Result<bool> current = IsCurrent(fd, folder.fd(), name, path);
    if (!current && opened.fresh) static_cast<void>(held->Release().has_value());
    SW_TRY(current);
    if (!*current) continue;
    if (!opened.fresh) {
      Result<Found> found = LookAtOwner(folder, name, fd, own, &fence);
      if (!found) found.error().message += whose;
      SW_TRY(found);
      if (*found == Found::kMayExpire) {
        held.reset();  // unlocks, as its owner may return
        std::this_thread::sleep_for(std::chrono::seconds(1));
      }
      if (*found != Found::kFree) continue;
    }
    if (Status described = held->Describe(note, heartbeat); !described) {
      static_cast<void>(held->Release().has_value());
      return tl::unexpected<Error>(std::move(described).error());
    }
    return Lock(std::move(held));
  }
  return Fail(Errc::kBusy, path, ": other processes keep taking and removing the lock");
}

Status Lock::Check() const { return held() ? held_->Check() : Status(); }

Status Lock::Release() {
  if (!held()) return {};
  const std::unique_ptr<State> held = std::move(held_);
  return held->Release();
}

Result<bool> Lock::IsLocked(const std::string& path) {
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(path));
  SW_TRY_ASSIGN(const Directory folder, Directory::Open(split.parent));
  SW_TRY_ASSIGN(const std::optional<NameStatus> there, folder.Look(split.name));
  if (!there) return false;
  if (!folder.IsOwnFile(*there)) return Fail(Errc::kBusy, path, ": is not a file of this user");
  const Fd file(sys::OpenAt(folder.fd(), split.name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  if (file.get() < 0) return SysFail(Errc::kIo, path, "cannot open", errno);
  if (sys::Lock(file.get()) == 0) return false;
  if (errno == EWOULDBLOCK) return true;
  return SysFail(Errc::kIo, path, "cannot lock", errno);
}

}  // namespace shardwright::os

// SPDX-License-Identifier: Apache-2.0
#include "support/os/tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/system.h"
#include "support/os/sys_internal.h"

// OpenSSL does not access the socket itself. A channel passes data between both, several records
// at once, since one system call per record would cost a third of the throughput.

namespace shardwright::os {
namespace {

/// Identity of the key on both sides.
constexpr std::string_view kIdentity = "shardwright-agent-1";
/// The fastest TLS 1.3 cipher on most processors, and its number in the protocol.
constexpr const char* kCipher = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipherNumber[] = {0x13, 0x01};
/// First byte of a TLS handshake.
constexpr unsigned char kHandshake = 0x16;
/// Bytes that are encrypted and sent at once.
constexpr std::size_t kSealBytes = std::size_t{256} << 10;
/// Output buffer, larger than an encrypted piece together with OpenSSL's own messages.
constexpr std::size_t kOutBytes = std::size_t{320} << 10;
/// Bytes that are received at once.
constexpr std::size_t kInBytes = std::size_t{128} << 10;

using KeyBytes = std::array<unsigned char, TlsKey::kBytes>;

/// Frees OpenSSL objects.
struct Freed {
  void operator()(SSL* one) const { SSL_free(one); }
  void operator()(SSL_CTX* one) const { SSL_CTX_free(one); }
  void operator()(SSL_SESSION* one) const { SSL_SESSION_free(one); }
  void operator()(BIO_METHOD* one) const { BIO_meth_free(one); }
};

/// Returns OpenSSL's reason for the last error.
std::string Reason() {
  const unsigned long code = ERR_peek_last_error();
  const char* text = code == 0 ? nullptr : ERR_reason_error_string(code);
  return text == nullptr ? "no reason given" : text;
}

tl::unexpected<Error> NoLibrary() { return Fail(Errc::kInternal, "OpenSSL: ", Reason()); }

/// Makes the TLS session of the key. \returns null if there is no memory
SSL_SESSION* SessionOf(SSL* ssl, const KeyBytes& key) {
  std::unique_ptr<SSL_SESSION, Freed> session(SSL_SESSION_new());
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipherNumber);
  const bool made = session && cipher != nullptr &&
                    SSL_SESSION_set1_master_key(session.get(), key.data(), key.size()) == 1 &&
                    SSL_SESSION_set_cipher(session.get(), cipher) == 1 &&
                    SSL_SESSION_set_protocol_version(session.get(), TLS1_3_VERSION) == 1;
  return made ? session.release() : nullptr;
}

class Channel13;

/// Implements TlsKey with OpenSSL.
class Key final : public TlsKey {
 public:
  explicit Key(const KeyBytes& key) : key_(key) {}
  ~Key() override { OPENSSL_cleanse(key_.data(), key_.size()); }
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  Status Prepare();
  Result<std::unique_ptr<Channel>> MakeChannel(bool accepted) const override;
  const BIO_METHOD* method() const { return method_.get(); }

 private:
  static int Find(SSL* ssl, const unsigned char* identity, std::size_t bytes,
                  SSL_SESSION** session);
  static int Use(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, std::size_t* bytes,
                 SSL_SESSION** session);

  KeyBytes key_;
  std::unique_ptr<BIO_METHOD, Freed> method_;
  std::unique_ptr<SSL_CTX, Freed> context_;
};

class Channel13 final : public Channel {
 public:
  Channel13(std::shared_ptr<const Key> key, std::unique_ptr<SSL, Freed> ssl, bool accepted)
      : key_(std::move(key)), ssl_(std::move(ssl)), accepted_(accepted) {}

  Result<short> Begin(int fd) override;
  Result<Step> Send(std::span<const std::byte> data) override;
  Result<Step> Receive(std::span<std::byte> out) override;
  bool Holds() const override { return SSL_has_pending(ssl_.get()) == 1; }

  /// Write and read functions of OpenSSL's BIO.
  int Put(BIO* bio, const char* data, int bytes);
  int Take(BIO* bio, char* out, int bytes);

 private:
  Result<bool> Flush();
  Result<short> Look() const;
  Error HandshakeError();

  const std::shared_ptr<const Key> key_;  // keeps its method in use
  const std::unique_ptr<SSL, Freed> ssl_;
  const bool accepted_;
  int fd_ = -1;
  bool looked_ = false;  // the peer begins with TLS
  bool heard_ = false;   // the peer has sent data
  bool closed_ = false;  // by the peer
  int error_ = 0;        // errno of receiving
  std::vector<char> out_;
  std::size_t out_done_ = 0;
  std::size_t sealed_ = 0;  // bytes of the caller that are in out_
};

int Channel13::Put(BIO* bio, const char* data, int bytes) {
  BIO_clear_retry_flags(bio);
  const auto count = static_cast<std::size_t>(bytes);
  if (out_.size() + count > kOutBytes) {
    BIO_set_retry_write(bio);
    return -1;
  }
  out_.insert(out_.end(), data, data + count);
  return bytes;
}

int Channel13::Take(BIO* bio, char* out, int bytes) {
  BIO_clear_retry_flags(bio);
  ssize_t got = -1;
  do {
    got = ::recv(fd_, out, static_cast<std::size_t>(bytes), 0);
  } while (got < 0 && errno == EINTR);
  if (got > 0) {
    heard_ = true;
  } else if (got == 0) {
    closed_ = true;
  } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
    BIO_set_retry_read(bio);
  } else {
    error_ = errno;
  }
  return static_cast<int>(got);
}

/// Sends OpenSSL's output. \returns true if all of it is sent
Result<bool> Channel13::Flush() {
  while (out_done_ < out_.size()) {
    const ssize_t sent =
        ::send(fd_, out_.data() + out_done_, out_.size() - out_done_, MSG_NOSIGNAL);
    if (sent >= 0) {
      out_done_ += static_cast<std::size_t>(sent);
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    if (errno != EINTR) return SysFail(Errc::kIo, "TLS", "cannot send", errno);
  }
  out_.clear();
  out_done_ = 0;
  return true;
}

/// Checks that the peer begins with TLS. \returns as Begin
Result<short> Channel13::Look() const {
  unsigned char first = 0;
  const ssize_t got = ::recv(fd_, &first, 1, MSG_PEEK);
  if (got == 0) return Fail(Errc::kBusy, "closed before the handshake");
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return short{POLLIN};
    return FailErrno(Errc::kBusy, errno, "closed before the handshake");
  }
  if (first == kHandshake) return short{0};
  return Fail(Errc::kUsage, "no TLS handshake: the peer does not use TLS");
}

Error Channel13::HandshakeError() {
  if (closed_ || error_ != 0) {
    return {Errc::kBusy, "closed during the handshake: the peer is busy, or has ended", error_};
  }
  return {Errc::kMismatch,
          "the handshake failed (" + Reason() +
              "): the peer has another key or none, or the data is changed on the way"};
}

Result<short> Channel13::Begin(int fd) {
  fd_ = fd;
  if (accepted_ && !looked_) {
    SW_TRY_ASSIGN(const short wait, Look());
    if (wait != 0) return wait;
    looked_ = true;
  }
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_.get());
  const int why = SSL_get_error(ssl_.get(), done);
  if (done != 1 && why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) {
    Error error = HandshakeError();
    (void)Flush();  // sends the alert, so that the peer fails too
    return tl::unexpected<Error>(std::move(error));
  }
  const Result<bool> flushed = Flush();
  if (!flushed) return FailErrno(Errc::kBusy, flushed.error().sys, flushed.error().message);
  if (!*flushed) return short{POLLOUT};
  if (done != 1) return short{POLLIN};
  // Without certificates, a handshake can only succeed with the key.
  if (SSL_session_reused(ssl_.get()) != 1) {
    return Fail(Errc::kMismatch, "the handshake did not use the key");
  }
  return short{0};
}

Result<Channel::Step> Channel13::Send(std::span<const std::byte> data) {
  for (;;) {
    SW_TRY_ASSIGN(const bool flushed, Flush());
    if (!flushed) return Step{0, POLLOUT};
    if (sealed_ > 0) return Step{std::exchange(sealed_, 0), 0};
    ERR_clear_error();
    const std::size_t count = std::min(data.size(), kSealBytes);
    if (SSL_write_ex(ssl_.get(), data.data(), count, &sealed_) != 1) {
      return Fail(Errc::kIo, "cannot send: ", Reason());
    }
  }
}

Result<Channel::Step> Channel13::Receive(std::span<std::byte> out) {
  ERR_clear_error();
  std::size_t got = 0;
  const int done = SSL_read_ex(ssl_.get(), out.data(), out.size(), &got);
  const int why = SSL_get_error(ssl_.get(), done);
  const std::string reason = done == 1 ? std::string() : Reason();
  // Sends an alert or a key update. If the socket is full, the rest goes with the next data.
  if (sealed_ == 0) (void)Flush();
  if (done == 1) return Step{got, 0};
  if (why == SSL_ERROR_WANT_READ) return Step{0, POLLIN};
  if (why == SSL_ERROR_WANT_WRITE) return Step{0, POLLOUT};
  if (closed_ || why == SSL_ERROR_ZERO_RETURN) return Step{0, 0};
  if (error_ != 0) return SysFail(Errc::kIo, "TLS", "cannot receive", error_);
  return Fail(Errc::kBadInput, "received data was damaged or changed on the way: ", reason);
}

int Put(BIO* bio, const char* data, int bytes) {
  return static_cast<Channel13*>(BIO_get_data(bio))->Put(bio, data, bytes);
}

int Take(BIO* bio, char* out, int bytes) {
  return static_cast<Channel13*>(BIO_get_data(bio))->Take(bio, out, bytes);
}

long Control(BIO*, int what, long, void*) { return what == BIO_CTRL_FLUSH ? 1 : 0; }

int Key::Find(SSL* ssl, const unsigned char* identity, std::size_t bytes, SSL_SESSION** session) {
  const auto* key = static_cast<const Key*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
  *session = nullptr;  // continues without a key, and fails without a certificate
  if (std::string_view(reinterpret_cast<const char*>(identity), bytes) != kIdentity) return 1;
  *session = SessionOf(ssl, key->key_);
  return *session == nullptr ? 0 : 1;
}

int Key::Use(SSL* ssl, const EVP_MD*, const unsigned char** identity, std::size_t* bytes,
             SSL_SESSION** session) {
  const auto* key = static_cast<const Key*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *bytes = kIdentity.size();
  *session = SessionOf(ssl, key->key_);
  return *session == nullptr ? 0 : 1;
}

Status Key::Prepare() {
  ERR_clear_error();
  method_.reset(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "shardwright"));
  context_.reset(SSL_CTX_new(TLS_method()));
  if (!method_ || !context_) return NoLibrary();
  SSL_CTX* context = context_.get();
  const bool made = BIO_meth_set_write(method_.get(), os::Put) == 1 &&
                    BIO_meth_set_read(method_.get(), os::Take) == 1 &&
                    BIO_meth_set_ctrl(method_.get(), Control) == 1 &&
                    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                    SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) == 1 &&
                    SSL_CTX_set_ciphersuites(context, kCipher) == 1 &&
                    SSL_CTX_set_num_tickets(context, 0) == 1 &&
                    SSL_CTX_set_app_data(context, this) == 1;
  if (!made) return NoLibrary();
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
  SSL_CTX_set_quiet_shutdown(context, 1);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, kInBytes);
  SSL_CTX_set_psk_find_session_callback(context, Find);
  SSL_CTX_set_psk_use_session_callback(context, Use);
  return {};
}

Result<std::unique_ptr<Channel>> Key::MakeChannel(bool accepted) const {
  ERR_clear_error();
  std::unique_ptr<SSL, Freed> ssl(SSL_new(context_.get()));
  BIO* bio = ssl ? BIO_new(method_.get()) : nullptr;
  if (bio == nullptr) return NoLibrary();
  SSL* raw = ssl.get();
  SSL_set_bio(raw, bio, bio);  // takes ownership
  (accepted ? SSL_set_accept_state : SSL_set_connect_state)(raw);
  // Rejects any certificate, as no authority is trusted.
  if (!accepted) SSL_set_verify(raw, SSL_VERIFY_PEER, nullptr);
  auto channel = std::make_unique<Channel13>(
      std::static_pointer_cast<const Key>(shared_from_this()), std::move(ssl), accepted);
  BIO_set_data(bio, channel.get());
  BIO_set_init(bio, 1);
  return std::unique_ptr<Channel>(std::move(channel));
}

/// Returns the value of a hexadecimal digit, 16 for other characters.
unsigned Hexadecimal(char digit) {
  if (digit >= '0' && digit <= '9') return static_cast<unsigned>(digit - '0');
  if (digit >= 'a' && digit <= 'f') return static_cast<unsigned>(digit - 'a') + 10;
  return 16;
}

/// Bytes of a key file, including the line feed.
constexpr std::size_t kTextBytes = 2 * TlsKey::kBytes + 1;

/// Checks that no other user can have read or written the file.
Status CheckFile(int fd, const std::string& path) {
  struct stat info {};
  if (sys::Stat(fd, &info) != 0) return SysFail(Errc::kNotFound, path, "cannot stat", errno);
  if (!S_ISREG(info.st_mode))
    return Fail(Errc::kBadInput, path, ": the key must be a regular file");
  if (const uid_t mine = ::geteuid(); info.st_uid != mine) {
    return Fail(Errc::kBadInput, path, ": a key of user ", mine, " expected, found one of user ",
                info.st_uid);
  }
  if ((info.st_mode & 077) != 0) {
    char mode[8] = "";
    std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(info.st_mode & 07777));
    return Fail(Errc::kBadInput, path, ": only its owner may read a key (mode 0600), found mode ",
                mode);
  }
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  if (bytes == kTextBytes || bytes == kTextBytes - 1) return {};
  return Fail(Errc::kBadInput, path, ": a key of ", kTextBytes - 1,
              " hexadecimal digits and a line feed expected, found ", bytes, " bytes");
}

}  // namespace

Status TlsKey::Make(const std::string& path) {
  auto random = RandomHex(TlsKey::kBytes);
  if (!random) return Within(path, std::move(random).error());
  std::string text = *std::move(random) + "\n";
  const Fd fd(sys::Open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  if (!fd.ok()) {
    return SysFail(errno == EEXIST ? Errc::kBusy : Errc::kIo, path, "cannot create the key", errno);
  }
  const bool written =
      sys::Write(fd.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()) &&
      sys::Sync(fd.get()) == 0;
  const int error = errno;
  OPENSSL_cleanse(text.data(), text.size());
  if (written) return {};
  sys::UnlinkAt(AT_FDCWD, path.c_str());
  return SysFail(Errc::kIo, path, "cannot write the key", error);
}

Result<std::shared_ptr<const TlsKey>> TlsKey::Read(const std::string& path) {
  const Fd fd(sys::Open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY));
  if (!fd.ok()) return SysFail(Errc::kNotFound, path, "cannot open the key", errno);
  SW_TRY(CheckFile(fd.get(), path));
  std::array<char, kTextBytes> text{};
  const ssize_t got = sys::Read(fd.get(), text.data(), text.size(), 0);
  KeyBytes bytes{};
  bool good = got >= static_cast<ssize_t>(kTextBytes - 1) &&
              (got < static_cast<ssize_t>(kTextBytes) || text.back() == '\n');
  for (std::size_t i = 0; good && i < bytes.size(); ++i) {
    const unsigned high = Hexadecimal(text[2 * i]);
    const unsigned low = Hexadecimal(text[2 * i + 1]);
    good = high < 16 && low < 16;
    bytes[i] = static_cast<unsigned char>(high << 4 | (low & 15));
  }
  OPENSSL_cleanse(text.data(), text.size());
  if (!good)
    return Fail(Errc::kBadInput, path, ": the key has characters that are not hexadecimal digits");
  auto key = std::make_shared<Key>(bytes);
  OPENSSL_cleanse(bytes.data(), bytes.size());
  SW_TRY(key->Prepare());
  return std::shared_ptr<const TlsKey>(std::move(key));
}

}  // namespace shardwright::os

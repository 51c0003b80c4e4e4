// SPDX-License-Identifier: Apache-2.0
// Cache descriptions that a process other than ucp-load sends to a trainer that attaches.

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/socket.h"
#include "trainer/cache/attach.h"
#include "trainer/cache/serve.h"
#include "unit/support/os/scratch.h"

namespace shardwright::cache {
namespace {

constexpr std::chrono::seconds kWait(60);

class ForgedLoad : public os::Scratch {
 protected:
  /// Listens, and answers the first request with "ok BYTES" and these bytes.
  Error Answered(std::string_view bytes, const auto& ask) const {
    os::Address address;
    address.path = At("load.sock");
    auto listener = os::Listener::Open(address);
    if (!listener) return listener.error();
    std::thread forged([&] {
      auto connection = listener->Accept(kWait, kWait);
      if (!connection || !*connection) return;
      (void)(*connection)->ReceiveLine(1000);
      (void)(*connection)->Send("ok " + std::to_string(bytes.size()) + "\n");
      (void)(*connection)->Send(std::string(bytes));
    });
    const auto result = ask(address);
    forged.join();
    EXPECT_FALSE(result);
    return result ? Error() : result.error();
  }
  Error Attached(std::string_view bytes) const {
    return Answered(bytes, [](const os::Address& address) -> Status {
      const auto comm = comm::MakeSerialComm();
      NullSink sink;
      SW_TRY(Attach(*comm, address, kWait, sink));
      return {};
    });
  }
};

TEST_F(ForgedLoad, DeepDescriptionsAreRefused) {
  const Error lists = Attached(std::string(5'000'000, '\x91'));
  EXPECT_EQ(lists.code, Errc::kLimit) << lists.message;
  EXPECT_NE(lists.message.find("description: more than 256 levels"), std::string::npos)
      << lists.message;
  std::string maps;
  for (int i = 0; i < 100'000; ++i)
    maps +=
        "\x81\xa1"
        "a";
  EXPECT_EQ(Attached(maps).code, Errc::kLimit);
}

TEST_F(ForgedLoad, OtherDescriptionsAreRefused) {
  for (const std::string_view bytes : {"", "\xc1", "\x80", "\x90", "\x81\xa6schema\x01"}) {
    EXPECT_EQ(Attached(bytes).code, Errc::kBadInput) << bytes.size();
  }
}

TEST_F(ForgedLoad, DeepStatesAreRefused) {
  const auto ask = [](const os::Address& address) {
    return AskStatus(address, std::chrono::milliseconds(0), {});
  };
  const Error deep = Answered(std::string(1'000'000, '['), ask);
  EXPECT_EQ(deep.code, Errc::kLimit) << deep.message;
  EXPECT_EQ(Answered(R"({"state":"ready","state":"ready"})", ask).code, Errc::kBadInput);
}

}  // namespace
}  // namespace shardwright::cache

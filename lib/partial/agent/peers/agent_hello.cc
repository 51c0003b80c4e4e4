// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/peers/agent_hello.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "support/base/system.h"
#include "support/os/net/answer.h"

namespace shardwright::partial {
namespace {

constexpr std::size_t kAgentNameBytes = 128;
constexpr std::string_view kRoleAgent = "agent";
constexpr std::string_view kRoleClient = "client";

bool IsNameCharacter(char c) { return c > ' ' && c < 0x7f; }

}  // namespace

bool IsAgentName(std::string_view name) {
  return !name.empty() && name.size() <= kAgentNameBytes &&
         std::ranges::all_of(name, IsNameCharacter);
}

Hello Hello::OfClient() {
  Hello hello;
  hello.name = HostName().substr(0, kAgentNameBytes);
  std::ranges::replace_if(
      hello.name, [](char c) { return !IsNameCharacter(c); }, '_');
  if (hello.name.empty()) hello.name = "_";
  hello.id = RandomHex(16).value_or("0");
  return hello;
}

std::string ToText(const Hello& hello) {
  std::string text = std::to_string(kAgentVersion) + " ";
  text += hello.role == Hello::Role::kAgent ? kRoleAgent : kRoleClient;
  text += " " + hello.name + " " + hello.id;
  return text;
}

Result<Hello> ParseHello(std::string_view text, const std::string& where) {
  const std::vector<std::string_view> words = os::WordsOf(text);
  SW_TRY_ASSIGN(const std::uint64_t version,
                os::ParseNumber(words.empty() ? std::string_view() : words[0], ~std::uint64_t{0},
                                where + ": version of the agent protocol"));
  if (version != kAgentVersion) {
    return Fail(Errc::kUnsupported, where, ": version ", kAgentVersion,
                " of the agent protocol expected, found version ", version,
                "; use the same release of Shardwright on both sides");
  }
  const bool good = words.size() == 4 && (words[1] == kRoleAgent || words[1] == kRoleClient) &&
                    IsAgentName(words[2]) && IsAgentName(words[3]);
  if (!good)
    return Fail(Errc::kBadInput, where, ": version, role, name and ID of a process expected");
  return Hello{words[1] == kRoleAgent ? Hello::Role::kAgent : Hello::Role::kClient,
               std::string(words[2]), std::string(words[3])};
}

Result<Hello> Greet(os::Connection& connection, const Hello& self) {
  const std::string& where = connection.name();
  SW_TRY(connection.Send("hello " + ToText(self) + "\n"));
  const Result<std::string> answer = os::ReceiveAnswer(connection, "an agent");
  if (!answer) {
    const bool older = answer.error().code == Errc::kUsage &&
                       answer.error().message.find("no such request") != std::string::npos;
    if (!older) return tl::unexpected<Error>(answer.error());
    return Fail(Errc::kUnsupported, where,
                ": an agent of an older version, which does not send a hello; "
                "use the same release of Shardwright on both sides");
  }
  SW_TRY_ASSIGN(Hello other, ParseHello(*answer, where));
  if (other.role != Hello::Role::kAgent) {
    return Fail(Errc::kMismatch, where, ": an agent expected at the other end, found a client");
  }
  if (other.id == self.id) {
    return Fail(Errc::kMismatch, where,
                ": leads back to this agent itself: --peer names its own address, "
                "or there is a relay in between");
  }
  if (self.role == Hello::Role::kAgent && other.name == self.name) {
    return Fail(Errc::kMismatch, where, ": both agents have the name \"", self.name,
                "\"; give agents different names with --name");
  }
  return other;
}

}  // namespace shardwright::partial

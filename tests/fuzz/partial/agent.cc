// SPDX-License-Identifier: Apache-2.0
// Any bytes as input of an agent's socket: a line of a request or an answer, a hello, and the list
// of checkpoints. Also an agent plan, and the gradients of a copy. Accepted lists name versions
// that a restore can use.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "partial/agent/agent_client.h"
#include "partial/agent/agent_protocol.h"
#include "partial/agent/gradient_copy.h"
#include "partial/agent/peers/agent_hello.h"
#include "partial/agent/peers/agent_plan.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"
#include "support/os/net/answer.h"

namespace os = shardwright::os;
namespace partial = shardwright::partial;
using shardwright::Errc;

namespace {

void UseList(std::string_view text) {
  const auto list = partial::ParseAgentList(text, "input");
  if (!list) {
    const Errc code = list.error().code;
    SW_CHECK(code == Errc::kBadInput || code == Errc::kLimit || code == Errc::kUnsupported);
    SW_CHECK(list.error().message.starts_with("input"));
    return;
  }
  for (const partial::AgentClient::Listed& one : *list) {
    const std::string again = partial::ToText(one.manifest);
    const auto same = partial::ParseManifest(again, "again");
    SW_CHECK(same && partial::ToText(*same) == again);
  }
}

/// An agent plan. An accepted plan is written the same again.
void UsePlan(std::string_view text) {
  const auto plan = partial::ParseAgentPlan(text, "input");
  if (!plan) {
    const Errc code = plan.error().code;
    SW_CHECK(code == Errc::kBadInput || code == Errc::kLimit || code == Errc::kUnsupported);
    SW_CHECK(plan.error().message.starts_with("input"));
    return;
  }
  const std::string again = partial::ToText(*plan);
  const auto same = partial::ParseAgentPlan(again, "again");
  SW_CHECK(same && partial::ToText(*same) == again);
}

/// A hello without its first word. An accepted hello is written the same again.
void UseHello(std::string_view line) {
  const auto hello = partial::ParseHello(line, "input");
  if (!hello) {
    const Errc code = hello.error().code;
    SW_CHECK(code == Errc::kBadInput || code == Errc::kUnsupported);
    SW_CHECK(hello.error().message.starts_with("input: "));
    return;
  }
  SW_CHECK(partial::IsAgentName(hello->name) && partial::IsAgentName(hello->id));
  const auto same = partial::ParseHello(partial::ToText(*hello), "again");
  SW_CHECK(same && partial::ToText(*same) == partial::ToText(*hello));
}

/// The gradients that a copy announces, a record per line.
void UseAnnounced(std::string_view text) {
  const auto announced = partial::CopyReplay::Find({}, {}, nullptr, {}, text, "input");
  if (announced) {
    SW_CHECK((*announced)->modules().empty());
    return;
  }
  const Errc code = announced.error().code;
  SW_CHECK(code == Errc::kBadInput || code == Errc::kLimit || code == Errc::kUnsupported);
  SW_CHECK(announced.error().message.starts_with("input"));
}

void UseLine(std::string_view line) {
  UseHello(line);
  for (const std::string_view word : os::WordsOf(line)) {
    SW_CHECK(word.find(' ') == std::string_view::npos);
    constexpr std::uint64_t kMost = 1000;
    const auto number = os::ParseNumber(word, kMost, "input");
    SW_CHECK(!number || *number <= kMost);
    const auto digest = partial::ParseDigest(word);
    if (!digest) continue;
    const auto same = partial::ParseDigest(shardwright::exec::Hex(*digest));
    SW_CHECK(same && *same == *digest);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), size_bytes);
  if (text.starts_with('[')) {
    UseList(text);
  } else if (text.starts_with('{')) {
    UsePlan(text);
    UseAnnounced(text);
  } else {
    UseLine(text.substr(0, text.find('\n')));
  }
  return 0;
}

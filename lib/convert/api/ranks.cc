// SPDX-License-Identifier: Apache-2.0
#include "convert/api/ranks.h"

#include <utility>

#include "convert/api/calls_internal.h"
#include "support/comm/comm.h"

namespace shardwright {

Ranks::Ranks() : comm_(comm::MakeSerialComm()) {}
Ranks::Ranks(std::unique_ptr<comm::Comm> comm) : comm_(std::move(comm)) {}
Ranks::Ranks(Ranks&& other) noexcept = default;
Ranks& Ranks::operator=(Ranks&& other) noexcept = default;
Ranks::~Ranks() = default;

Result<Ranks> Ranks::OfLauncher() {
  return internal::Guarded([&]() -> Result<Ranks> {
    SW_TRY_ASSIGN(auto comm, comm::MakeComm());
    return Ranks(std::move(comm));
  });
}

int Ranks::rank() const { return comm_->rank(); }
int Ranks::size() const { return comm_->size(); }

}  // namespace shardwright

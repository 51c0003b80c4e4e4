// SPDX-License-Identifier: Apache-2.0
// comm_mpi SIZE [big]: run by a launcher with SIZE processes; each checks the collectives over MPI,
// with messages of at most SW_TEST_CHUNK bytes if that is set. Exit code 0 only if all ranks
// succeed, 77 if there is too little memory for "big".

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "engine/device/host.h"
#include "support/comm/comm.h"
#include "unit/support/comm/collectives.h"

namespace shardwright::comm {
namespace {

constexpr std::size_t kBig = (std::size_t{9} << 28) + 12'345;  // 2.25 GiB and a bit

bool Holds(const Bytes& bytes, std::size_t size, int from) {
  if (bytes.size() != size) return false;
  for (std::size_t i = 0; i < size; i += 4093) {
    if (bytes[i] != static_cast<std::byte>((i / 4093 + static_cast<std::size_t>(from)) & 0xff)) {
      return false;
    }
  }
  return true;
}

Bytes Big(int from) {
  Bytes bytes(kBig);
  for (std::size_t i = 0; i < kBig; i += 4093) {
    bytes[i] = static_cast<std::byte>((i / 4093 + static_cast<std::size_t>(from)) & 0xff);
  }
  return bytes;
}

bool IsShortOfMemory() { return device::FreeHostBytes().value_or(0) < 3 * kBig; }

// Rank 0 sends more than 2 GiB in one piece to all ranks, then to the last rank only.
Status CheckBig(Comm& comm) {
  SW_TRY_ASSIGN(const std::uint64_t is_short, comm.AllReduceOr(IsShortOfMemory() ? 1 : 0));
  if (is_short != 0) return Fail(Errc::kUnsupported, "too little free memory for this test");
  Bytes data;
  if (comm.rank() == 0) data = Big(0);
  SW_TRY(comm.Bcast(data, 0));
  SW_TRY(comm.Agree(Expect(Holds(data, kBig, 0), "bcast beyond 2 GiB")));
  if (comm.rank() != 0) data = Bytes();

  const int last = comm.size() - 1;
  std::vector<std::span<const std::byte>> pieces(static_cast<std::size_t>(comm.size()));
  if (comm.rank() == 0) pieces[static_cast<std::size_t>(last)] = data;
  SW_TRY_ASSIGN(const std::vector<Bytes> received, comm.AllToAll(pieces));
  const std::size_t expected = comm.rank() == last ? kBig : 0;
  return comm.Agree(Expect(Holds(received[0], expected, 0), "all-to-all beyond 2 GiB"));
}

Status Run(int size, bool big) {
  // MPI starts once per process, so an environment variable selects the size of small messages.
  CommOptions options;
  if (const char* chunk = std::getenv("SW_TEST_CHUNK")) {
    options.chunk_bytes = static_cast<std::uint64_t>(std::atoll(chunk));
  }
  SW_TRY_ASSIGN(const std::unique_ptr<Comm> comm, MakeComm(options));
  SW_TRY(Expect(comm->size() == size, "size " + std::to_string(size) + " expected, found " +
                                          std::to_string(comm->size())));
  if (size > 1) {
    const auto again = MakeComm();
    SW_TRY(Expect(!again && again.error().code == Errc::kInternal, "a second start of MPI"));
  }
  if (big) return CheckBig(*comm);
  SW_TRY(comm->Agree(CheckCollectives(*comm)));
  SW_TRY(comm->Agree(CheckReceiveCap(*comm)));
  return comm->Agree(CheckMisuse(*comm));
}

}  // namespace
}  // namespace shardwright::comm

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 0;
  const bool big = argc > 2 && std::string_view(argv[2]) == "big";
  const shardwright::Status status = shardwright::comm::Run(size, big);
  if (status) return 0;
  std::fprintf(stderr, "comm_mpi: %s (rank %d)\n", status.error().message.c_str(),
               status.error().rank);
  if (status.error().code == shardwright::Errc::kUnsupported) return 77;
  return static_cast<int>(status.error().code);
}

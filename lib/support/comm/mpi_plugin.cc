// SPDX-License-Identifier: Apache-2.0
// Implements mpi_calls_internal.h with the mpi.h that it is compiled with.

#include <mpi.h>

#include <climits>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "support/comm/mpi_calls_internal.h"

namespace shardwright::comm::internal {

namespace {

constexpr int kTag = 1;

// Duplicate of MPI_COMM_WORLD. MPI is started once per process.
MPI_Comm world = MPI_COMM_NULL;

void Library(char* text, std::size_t text_bytes) {
  char whole[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  if (MPI_Get_library_version(whole, &length) != MPI_SUCCESS) whole[0] = '\0';
  whole[std::strcspn(whole, "\n,")] = '\0';
  for (char* at = whole; *at != '\0'; ++at) {
    if (*at == '\t') *at = ' ';
  }
  std::snprintf(text, text_bytes, "%s", whole);
}

bool Describe(int code, char* text, std::size_t text_bytes) {
  char whole[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  int kind = MPI_ERR_OTHER;
  MPI_Error_string(code, whole, &length);
  MPI_Error_class(code, &kind);
  std::snprintf(text, text_bytes, "%s", whole);
  return kind == MPI_ERR_BUFFER || kind == MPI_ERR_COUNT || kind == MPI_ERR_TYPE ||
         kind == MPI_ERR_TAG || kind == MPI_ERR_COMM || kind == MPI_ERR_RANK ||
         kind == MPI_ERR_ROOT || kind == MPI_ERR_OP || kind == MPI_ERR_ARG ||
         kind == MPI_ERR_TRUNCATE || kind == MPI_ERR_REQUEST;
}

int Started(bool* yes) {
  int flag = 0;
  const int code = MPI_Initialized(&flag);
  *yes = flag != 0;
  return code;
}

void Stop() {
  if (world != MPI_COMM_NULL) MPI_Comm_free(&world);
  MPI_Finalize();
}

int Start(bool* funneled, int* rank, int* size) {
  int provided = MPI_THREAD_SINGLE;
  int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  if (code != MPI_SUCCESS) return code;
  *funneled = provided >= MPI_THREAD_FUNNELED;
  code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
  if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(world, rank);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(world, size);
  if (code != MPI_SUCCESS) Stop();
  return code;
}

int Barrier() { return MPI_Barrier(world); }

int Bcast(void* bytes, int count, int root) {
  return MPI_Bcast(bytes, count, MPI_BYTE, root, world);
}

int AllGather(std::uint64_t mine, std::uint64_t* all) {
  return MPI_Allgather(&mine, 1, MPI_UINT64_T, all, 1, MPI_UINT64_T, world);
}

int AllToAll(const std::uint64_t* mine, std::uint64_t* all) {
  return MPI_Alltoall(mine, 1, MPI_UINT64_T, all, 1, MPI_UINT64_T, world);
}

int AllMax(std::uint64_t mine, std::uint64_t* all) {
  return MPI_Allreduce(&mine, all, 1, MPI_UINT64_T, MPI_MAX, world);
}

int AllSum(std::uint64_t mine, std::uint64_t* all) {
  return MPI_Allreduce(&mine, all, 1, MPI_UINT64_T, MPI_SUM, world);
}

int AllOr(std::uint64_t mine, std::uint64_t* all) {
  return MPI_Allreduce(&mine, all, 1, MPI_UINT64_T, MPI_BOR, world);
}

int Transfer(const MpiPart* parts, std::size_t count) {
  if (count > INT_MAX) return MPI_ERR_COUNT;
  std::vector<MPI_Request> requests;
  try {
    requests.assign(count, MPI_REQUEST_NULL);
  } catch (const std::bad_alloc&) {
    return MPI_ERR_NO_MEM;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const MpiPart& part = parts[i];
    const int code =
        part.sends
            ? MPI_Isend(part.bytes, part.count, MPI_BYTE, part.peer, kTag, world, &requests[i])
            : MPI_Irecv(part.bytes, part.count, MPI_BYTE, part.peer, kTag, world, &requests[i]);
    if (code != MPI_SUCCESS) return code;
  }
  return MPI_Waitall(static_cast<int>(count), requests.data(), MPI_STATUSES_IGNORE);
}

constexpr MpiCalls kCalls = {
    .library = Library,
    .describe = Describe,
    .started = Started,
    .start = Start,
    .stop = Stop,
    .barrier = Barrier,
    .bcast = Bcast,
    .all_gather = AllGather,
    .all_to_all = AllToAll,
    .all_max = AllMax,
    .all_sum = AllSum,
    .all_or = AllOr,
    .transfer = Transfer,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const MpiCalls* ShardwrightMpiCalls() {
  return &kCalls;
}

}  // namespace shardwright::comm::internal

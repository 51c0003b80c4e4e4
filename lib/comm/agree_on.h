#pragma once

#include "base/result.h"
#include "comm/comm.h"

namespace shardwright::comm {

/// Comm::Agree for work that returns something: the error that all ranks agree on, else what this
/// rank has made.
/// Collective.
template <class T>
Result<T> AgreeOn(Comm& comm, Result<T> mine) {
  SW_TRY(comm.Agree(mine ? Status() : Status(tl::unexpected<Error>(mine.error()))));
  return mine;
}

}  // namespace shardwright::comm

// SPDX-License-Identifier: Apache-2.0
#include "support/base/exception_to_error.h"

#include <exception>
#include <new>
#include <string>
#include <system_error>

namespace shardwright {

Error CaughtError() {
  const auto error = [](Errc code, std::string message) {
    return Error{code, std::move(message), 0, -1};
  };
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return error(Errc::kLimit, "out of memory");
  } catch (const std::system_error& thrown) {
    if (thrown.code() == std::errc::resource_unavailable_try_again) {
      return error(Errc::kLimit, "cannot start a thread: out of memory, or too many threads");
    }
    return error(Errc::kInternal, std::string("unexpected exception: ") + thrown.what());
  } catch (const std::exception& thrown) {
    return error(Errc::kInternal, std::string("unexpected exception: ") + thrown.what());
  } catch (...) {
    return error(Errc::kInternal, "unexpected exception of an unknown type");
  }
}

}  // namespace shardwright

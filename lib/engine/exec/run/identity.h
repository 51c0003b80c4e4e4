// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/os/directory.h"
#include "support/os/journal.h"

namespace shardwright::exec {

/// File next to the journals with the identity of the run.
inline constexpr const char* kIdentityName = "run.json";

/// Empty file next to the journals. It shows that a run has created all its files.
inline constexpr const char* kCreatedName = "created";

/// Version, inputs and flags that determine the output of a run. Only a run with an equal
/// identity continues the work of a stopped one.
class Identity {
 public:
  /// Adds a part that messages show with its value.
  /// \param name  what a user changes, such as "--target"
  void Add(std::string name, std::string value);
  /// Adds a part that messages show without its value, such as a fingerprint.
  void AddDigest(std::string name, std::string value);

  /// Returns the hash that journals store.
  os::Fingerprint Fingerprint() const;

  /// Writes the identity into the folder of the journals, unless a stopped run has done so.
  /// Does not sync it, because the journals have the fingerprint.
  /// \error kIo
  Status Write(const os::Directory& journals) const;

  /// Compares with the identity in the folder of a stopped run's journals. Ignores a
  /// file that is missing or damaged: the journals, which have the hash, decide then.
  /// \error kBusy  names every part that differs, with both values; kIo
  Status CheckSame(const os::Directory& journals) const;

  /// Returns the records of all ranks of a stopped run.
  /// \error as os::ReadJournals
  Result<std::vector<std::vector<std::byte>>> ReadJournals(const os::Directory& journals) const;

 private:
  struct Part {
    std::string name;
    std::string value;
    bool shown = true;
  };
  std::string Text() const;

  std::vector<Part> parts_;
};

}  // namespace shardwright::exec

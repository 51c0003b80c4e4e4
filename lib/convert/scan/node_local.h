// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <set>
#include <string>
#include <vector>

#include "checkpoints/model/source.h"
#include "engine/exec/byte_source.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// Returns how to open a file of a source, or a sibling file.
exec::SourcePath PathOf(const checkpoints::SourceFile& file);
exec::SourcePath PathOf(const checkpoints::SiblingFile& sibling);

/// Removes the files of a catalogue that this rank cannot open or that have changed.
/// Local.
void KeepVisible(unsigned io_threads, checkpoints::SourceSet* set);

/// Checks that the ranks together can open every catalogued file.
/// \error kNotFound  names a file that no rank can open
Status CheckCatalogued(const std::set<std::string>& catalogued, const checkpoints::SourceSet& all);

/// Gathers a text from every rank.
/// Collective.
Result<std::vector<std::string>> GatherTexts(comm::Comm& comm, const std::string& mine);

/// Adds digests to files of which only the contents can prove that
/// they are copies. One of the ranks that see a file reads it.
/// \param parts  the source set of every rank
/// Collective.
Status DigestCopies(comm::Comm& comm, std::vector<checkpoints::SourceSet>* parts);

}  // namespace shardwright::convert

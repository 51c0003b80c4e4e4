// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints/model/source.h"
#include "support/base/result.h"

namespace shardwright::convert {

/// Compares the files of an atoms folder with the manifest of the run that wrote it. The manifest
/// records what the atoms do not: the run to which they belong. An atom that replaced another
/// one, or that comes from another run, is an error. Files that the manifest does not list are
/// accepted: they are of another tag, or of a release without checksums in manifests.
/// \error kBadInput  a file differs from the manifest; the message names the file and both values
/// Local.
Status CheckListed(const checkpoints::SourceSet& set);

}  // namespace shardwright::convert

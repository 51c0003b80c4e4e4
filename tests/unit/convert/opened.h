// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoints/registry.h"
#include "convert/convert.h"
#include "convert/input.h"
#include "support/comm/comm.h"
#include "unit/support/os/scratch.h"

namespace shardwright::convert {

namespace fs = std::filesystem;

/// Returns the path of a checkpoint that the project carries.
inline std::string Own(const std::string& name) {
  return (fs::path(SW_SOURCE_DIR) / "tests/data/deepspeed" / name / "ckpt").string();
}

/// Opens a source on one process. \returns null on an error, which also fails the test
inline std::unique_ptr<Input> Opened(const std::string& root, bool siblings = false) {
  const auto comm = comm::MakeSerialComm();
  NullSink sink;
  InputOptions options;
  options.source_paths = {root};
  options.siblings = siblings;
  auto input = OpenInput(*comm, options, sink);
  EXPECT_TRUE(input.has_value()) << input.error().message;
  return input ? *std::move(input) : nullptr;
}

/// Converts on one process.
/// \param target  as --target
inline Result<ConvertReport> Converted(Input& input, const std::string& target,
                                       const ConvertOptions& options,
                                       std::string_view name = "deepspeed") {
  const auto comm = comm::MakeSerialComm();
  NullSink sink;
  SW_TRY_ASSIGN(const checkpoints::Format* format, checkpoints::RequireFormat(name));
  SW_TRY_ASSIGN(const checkpoints::TargetSpec spec, checkpoints::ParseTarget(*format, target));
  return Convert(*comm, input, spec, *format, "test", options, sink);
}

/// Files below a folder and their bytes, without the manifest.
inline std::map<std::string, std::string> Files(std::map<std::string, std::string> contents) {
  std::erase_if(contents, [](const auto& entry) {
    return entry.second == "/" || entry.first.ends_with("shardwright.json");
  });
  return contents;
}

}  // namespace shardwright::convert

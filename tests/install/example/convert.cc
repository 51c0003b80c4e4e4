// SPDX-License-Identifier: Apache-2.0
// Converts a checkpoint: convert CHECKPOINT OUTPUT TARGET, such as "zero=3,dp=4".

#include <iostream>

#include <shardwright/compare.h>
#include <shardwright/convert.h>
#include <shardwright/support/base/version.h>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: convert CHECKPOINT OUTPUT TARGET\n";
    return 2;
  }
  auto ranks = shardwright::Ranks::OfLauncher();  // without mpirun or srun, this process alone
  const auto end = [&](const shardwright::Error& error) {
    if (!ranks || ranks->rank() == 0) std::cerr << "convert: " << error.message << "\n";
    return static_cast<int>(error.code);
  };
  if (!ranks) return end(ranks.error());
  shardwright::NullSink sink;  // ignores messages and progress
  const shardwright::Source source{{argv[1]}};
  shardwright::ConvertOptions options;
  options.output = argv[2];
  options.target = argv[3];
  const auto done = shardwright::Convert(*ranks, source, options, sink);
  if (!done) return end(done.error());
  const auto found = shardwright::Compare(*ranks, source, {{options.output}}, {}, sink);
  if (!found) return end(found.error());
  if (ranks->rank() != 0) return 0;
  std::cout << "shardwright " << shardwright::kVersion << ": " << done->source_layout << " -> "
            << done->target_layout << ", " << done->output_files << " files, "
            << found->tensors_equal << " tensors equal, " << found->difference_count
            << " different\n";
}

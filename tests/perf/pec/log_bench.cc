// SPDX-License-Identifier: Apache-2.0
// Writes a log of gradients for all experts of a store, as a trainer would have left it:
//
//   pec_log_bench STORE LAST ITERATIONS [float32|bfloat16] [ZSTD_LEVEL]
//
// The records are of ITERATIONS iterations, the last one LAST, with AdamW steps that end with step
// count LAST. Prints the bytes of the log.

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "checkpoints/registry.h"
#include "engine/layout/states.h"
#include "partial/gradient_log/log_writer.h"
#include "partial/store/modules.h"
#include "partial/store/store.h"
#include "support/os/dir.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kPieceElems = std::uint64_t{4} << 20;

LogStep StepAt(std::uint64_t iteration) {
  LogStep logged;
  logged.step.lr = 1e-3;
  logged.step.beta1 = 0.9;
  logged.step.beta2 = 0.999;
  logged.step.eps = 1e-8;
  logged.step.weight_decay = 0.01;
  logged.step.count = static_cast<float>(iteration);
  return logged;
}

/// Gradients of usual size.
std::vector<std::byte> MakeGradient(DType dtype) {
  std::vector<std::byte> bytes((kPieceElems + 4096) * ItemSize(dtype));
  std::mt19937_64 random(1);
  for (std::size_t at = 0; at < bytes.size(); at += ItemSize(dtype)) {
    const std::uint64_t bits = random();
    for (std::size_t i = 0; i < ItemSize(dtype); ++i) {
      bytes[at + i] = static_cast<std::byte>(bits >> (8 * i));
    }
    // Between 2^-10 and 2^-8, of either sign.
    std::byte& top = bytes[at + ItemSize(dtype) - 1];
    top = (top & std::byte{0x80}) | std::byte{0x3A};
  }
  return bytes;
}

Status Write(const std::string& path, std::uint64_t last, std::uint64_t iterations, DType dtype,
             int zstd) {
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> all, store.List());
  SW_TRY_ASSIGN(const Manifest manifest, store.ReadManifest(all.back()));
  SW_TRY_ASSIGN(const checkpoints::SourceSet set, store.ReadCatalogue(manifest));
  SW_TRY_ASSIGN(const checkpoints::Checkpoint checkpoint, checkpoints::ReadCheckpoint(set, {}));
  SW_TRY_ASSIGN(const Model model, DescribeModel(checkpoint));
  LogWriterOptions options;
  options.fingerprint = store.head().fingerprint;
  options.zstd_level = zstd;
  SW_TRY_ASSIGN(LogWriter writer, LogWriter::Open(path + "/logs", options));
  const std::vector<std::byte> gradient = MakeGradient(dtype);
  std::uint64_t bytes = 0;
  for (std::uint64_t iteration = last - iterations + 1; iteration <= last; ++iteration) {
    const LogStep step = StepAt(iteration);
    for (const Module& module : model.modules) {
      if (!module.id.is_expert()) continue;
      std::vector<GradientRange> ranges;
      for (const ModuleTensor& one : module.part(Component::kMaster).tensors) {
        const layout::LogicalTensor& tensor = checkpoint.map.tensors[one.tensor];
        const std::uint64_t elems = Elems(tensor.shape);
        for (std::uint64_t first = 0; first < elems; first += kPieceElems) {
          GradientRange range;
          range.param = tensor.name;
          range.elems = elems;
          range.first = first;
          range.dtype = dtype;
          range.count = std::min(kPieceElems, elems - first);
          const std::uint64_t shift = (37 * iteration + one.offset) % 4096;
          range.gradient =
              std::span(gradient).subspan(shift * ItemSize(dtype), range.count * ItemSize(dtype));
          bytes += range.gradient.size();
          ranges.push_back(range);
        }
      }
      SW_TRY(writer.Append(iteration, module.name, std::span(&step, 1), ranges));
    }
  }
  SW_TRY(writer.Persist());
  std::printf("%llu bytes of gradients\n", static_cast<unsigned long long>(bytes));
  return {};
}

}  // namespace
}  // namespace shardwright::partial

int main(int argc, char** argv) {
  namespace sw = shardwright;
  if (argc < 4) {
    std::fprintf(stderr, "pec_log_bench STORE LAST ITERATIONS [float32|bfloat16] [ZSTD_LEVEL]\n");
    return 2;
  }
  const auto dtype = sw::DTypeFromName(argc > 4 ? argv[4] : "float32");
  const sw::Status done =
      sw::partial::Write(argv[1], std::stoull(argv[2]), std::stoull(argv[3]),
                         dtype.value_or(sw::DType::kF32), argc > 5 ? std::stoi(argv[5]) : 0);
  if (!done) std::fprintf(stderr, "pec_log_bench: %s\n", done.error().message.c_str());
  return done ? 0 : 1;
}

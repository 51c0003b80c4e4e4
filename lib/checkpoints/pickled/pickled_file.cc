// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/pickled_file.h"

#include <utility>
#include <vector>

namespace shardwright::checkpoints {

Status AddPickledFile(plan::TargetBuilder* builder, const std::string& path, BuildDocument build,
                      const AddPayload& add) {
  SW_TRY_ASSIGN(const auto document, build());
  auto layout = torch_pt::Layout::Make(document->root, document->storages);
  if (!layout) return Within(path, std::move(layout).error());
  const std::uint32_t file = builder->AddFile(path);
  for (std::size_t i = 0; i < document->fills.size(); ++i) {
    const Fill& fill = document->fills[i];
    const std::uint64_t offset = layout->payload_offset(i);
    switch (fill.kind) {
      case Fill::Kind::kTensor:
        if (layout->payload_bytes(i) == 0) {
          builder->AddInline(file, offset, {});
        } else {
          add(file, offset, fill.tensor, document->storages[i], i);
        }
        break;
      case Fill::Kind::kMember:
        builder->AddMember(file, offset, fill.member, layout->payload_bytes(i));
        break;
      case Fill::Kind::kInline:
        builder->AddInline(file, offset, fill.bytes);
        break;
    }
  }
  const auto frame = [build = std::move(build)](std::span<const std::uint32_t> crcs,
                                                const plan::PutFrame& put) -> Status {
    SW_TRY_ASSIGN(const auto again, build());
    SW_TRY_ASSIGN(const auto made, torch_pt::Layout::Make(again->root, again->storages));
    for (const torch_pt::Layout::Piece& piece : made.Frame(crcs)) {
      SW_TRY(put(piece.offset, piece.bytes));
    }
    return {};
  };
  builder->SetFrame(file, layout->file_bytes(), frame);
  return {};
}

}  // namespace shardwright::checkpoints

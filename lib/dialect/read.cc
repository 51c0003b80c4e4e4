#include "dialect/dialect.h"

namespace shardwright::dialect {

Result<Checkpoint> ReadCheckpoint(const SourceSet& source, const Patterns& patterns) {
  return source.kind == SourceKind::kUniversal ? ReadUniversal(source, patterns)
                                               : ReadDeepSpeed(source, patterns);
}

}  // namespace shardwright::dialect

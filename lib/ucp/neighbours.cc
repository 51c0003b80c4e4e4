#include "ucp/neighbours.h"

#include <algorithm>
#include <set>

#include "base/bytes.h"
#include "base/text.h"
#include "dialect/scan.h"

namespace shardwright::ucp {
namespace {

/// First parts of the paths of a target's files: no neighbour may have such a name.
std::set<std::string> NamesOf(const plan::Target& target) {
  std::set<std::string> names;
  for (const plan::OutputFile& file : target.files) {
    names.insert(file.path.substr(0, file.path.find('/')));
  }
  return names;
}

void WarnAboutRanks(const std::vector<std::string>& gone, std::uint64_t ranks,
                    const std::optional<std::uint64_t>& last, NeighbourReport* report, Sink& sink) {
  if (!gone.empty()) {
    sink.Warn("files of ranks that the target does not have, not carried over: " + FirstFew(gone));
    report->not_carried.push_back("files of ranks that the target does not have: " +
                                  Joined(gone, ", "));
  }
  if (last && *last + 1 < ranks) {
    sink.Warn("the target has " + std::to_string(ranks) + " ranks, the source random states of " +
              std::to_string(*last + 1) + ": those of the others begin anew");
  }
}

void Say(const NeighbourReport& report, Sink& sink) {
  if (report.copied.empty() && report.left_out.empty()) return;
  std::string note = "beside the checkpoint: " + std::to_string(report.copied.size()) +
                     " carried over (" + FormatBytes(report.bytes) + ")";
  if (!report.left_out.empty()) note += ", " + std::to_string(report.left_out.size()) + " left out";
  sink.Note(note, 0);
}

}  // namespace

NeighbourReport ListNeighbours(const dialect::SourceSet& set) {
  NeighbourReport report;
  report.folders = set.save_folders;
  report.left_out = set.left_out;
  for (const dialect::Neighbour& neighbour : set.neighbours) {
    report.bytes += neighbour.identity.bytes;
    report.copied.emplace_back(neighbour.name, neighbour.identity.bytes);
  }
  return report;
}

NeighbourReport AddNeighbours(const dialect::SourceSet& set, const dialect::Dialect& format,
                              const std::optional<std::uint64_t>& ranks, plan::Twin twin,
                              layout::ShardMap* map, plan::Target* target, Sink& sink) {
  NeighbourReport report;
  report.folders = set.save_folders;
  report.left_out = set.left_out;
  std::set<std::string> taken = NamesOf(*target);
  std::vector<std::string> gone;
  std::optional<std::uint64_t> last;  // rank of which there is a file
  // Every file has its place in the source map, carried over or not (PathsOf).
  const auto leave_out = [&](const dialect::Neighbour& neighbour, const char* why) {
    if (!neighbour.content) map->files.push_back(neighbour.path);
    report.left_out.push_back({neighbour.name, why});
  };
  const auto surprise = [&](const std::string& what) {
    sink.Warn("beside the checkpoint, not carried over: " + what);
    report.not_carried.push_back("beside the checkpoint: " + what);
  };
  for (const dialect::Neighbour& neighbour : set.neighbours) {
    const std::optional<std::uint64_t> rank = dialect::RankOfNeighbour(neighbour.name);
    if (rank) last = std::max(last.value_or(0), *rank);
    if (rank && ranks && *rank >= *ranks) {
      gone.push_back(neighbour.name);
      leave_out(neighbour, "of a rank that the target does not have");
      continue;
    }
    if (format.pointer.empty() && format.belongs(neighbour.name) != dialect::Belongs::kNo) {
      leave_out(neighbour, "a file of the format that is written");
      surprise(neighbour.name + ": it would be taken for a part of the output");
      continue;
    }
    if (!taken.insert(neighbour.name).second) {
      leave_out(neighbour, "a name that the output itself has");
      surprise(neighbour.name + ": the output has a file or folder of that name");
      continue;
    }
    plan::OutputFile file =
        neighbour.content
            ? plan::WholeFile(neighbour.name, *neighbour.content)
            : plan::WholeFile(neighbour.name, neighbour.path, neighbour.identity.bytes, twin, map);
    file.executable = neighbour.executable;
    report.bytes += file.bytes;
    report.copied.emplace_back(neighbour.name, file.bytes);
    target->files.push_back(std::move(file));
  }
  if (ranks) WarnAboutRanks(gone, *ranks, last, &report, sink);
  Say(report, sink);
  return report;
}

}  // namespace shardwright::ucp

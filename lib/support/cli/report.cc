// SPDX-License-Identifier: Apache-2.0
#include "support/cli/report.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "support/base/version.h"
#include "support/cli/console.h"
#include "support/cli/exit_code.h"

namespace shardwright::cli {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string Dump(const OrderedJson& json, int indent) {
  return json.dump(indent, ' ', false, OrderedJson::error_handler_t::replace);
}

template <class T>
OrderedJson OrNull(const std::optional<T>& value) {
  return value ? OrderedJson(*value) : OrderedJson(nullptr);
}

OrderedJson ErrorJson(const Status& status) {
  if (status) return nullptr;
  const Error& error = status.error();
  OrderedJson json = OrderedJson::object();
  json["code"] = static_cast<int>(error.code);
  json["name"] = ErrcName(error.code);
  json["message"] = error.message;
  json["rank"] = error.rank >= 0 ? OrderedJson(error.rank) : OrderedJson(nullptr);
  json["errno"] = error.sys != 0 ? OrderedJson(error.sys) : OrderedJson(nullptr);
  return json;
}

OrderedJson PassesJson(const std::vector<PassTime>& passes) {
  OrderedJson list = OrderedJson::array();
  for (const PassTime& pass : passes)
    list.push_back({{"name", pass.name}, {"seconds", pass.seconds}});
  return list;
}

tl::unexpected<Error> FileError(const std::string& path, const char* what, int error) {
  return FailErrno(Errc::kIo, error, "report ", path, ": ", what, ": ", std::strerror(error));
}

/// Returns whether a file must be written in place: a pipe, a terminal or /dev/null.
bool IsSpecial(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
}

Status WriteAndClose(const std::string& path, int fd, const std::string& text, bool sync) {
  int error = WriteAll(fd, text);
  if (error == 0 && sync && fsync(fd) != 0) error = errno;
  if (close(fd) != 0 && error == 0) error = errno;
  if (error != 0) return FileError(path, "cannot write", error);
  return {};
}

}  // namespace

MergedStats Merge(std::span<const RankStats> ranks) {
  MergedStats merged;
  RankStats& total = merged.total;
  std::map<std::string_view, std::size_t> pass_index;
  std::map<std::string_view, std::size_t> warning_index;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankStats& facts = ranks[rank];
    total.bytes_read += facts.bytes_read;
    total.bytes_written += facts.bytes_written;
    total.files_read += facts.files_read;
    total.files_written += facts.files_written;
    total.peak_memory_bytes = std::max(total.peak_memory_bytes, facts.peak_memory_bytes);
    total.warnings_omitted += facts.warnings_omitted;
    for (const PassTime& pass : facts.passes) {
      const auto [at, is_new] = pass_index.try_emplace(pass.name, total.passes.size());
      if (is_new) total.passes.push_back({pass.name, 0});
      double& seconds = total.passes[at->second].seconds;
      seconds = std::max(seconds, pass.seconds);
    }
    for (const std::string& warning : facts.warnings) {
      const auto [at, is_new] = warning_index.try_emplace(warning, merged.warnings.size());
      if (is_new) merged.warnings.push_back({warning, {}});
      merged.warnings[at->second].ranks.push_back(static_cast<int>(rank));
    }
  }
  return merged;
}

std::string PackStats(const RankStats& facts) {
  OrderedJson json = OrderedJson::object();
  json["passes"] = PassesJson(facts.passes);
  json["counts"] = {facts.bytes_read,    facts.bytes_written,     facts.files_read,
                    facts.files_written, facts.peak_memory_bytes, facts.warnings_omitted};
  json["warnings"] = facts.warnings;
  return Dump(json, -1);
}

Result<RankStats> UnpackStats(std::string_view text) {
  try {
    const OrderedJson json = OrderedJson::parse(text);
    RankStats facts;
    for (const OrderedJson& pass : json.at("passes")) {
      facts.passes.push_back({pass.at("name"), pass.at("seconds")});
    }
    const OrderedJson& counts = json.at("counts");
    facts.bytes_read = counts.at(0);
    facts.bytes_written = counts.at(1);
    facts.files_read = counts.at(2);
    facts.files_written = counts.at(3);
    facts.peak_memory_bytes = counts.at(4);
    facts.warnings_omitted = counts.at(5);
    facts.warnings = json.at("warnings").get<std::vector<std::string>>();
    return facts;
  } catch (const nlohmann::json::exception& error) {
    return Fail(Errc::kInternal, "unpacking the statistics of a rank: ", error.what());
  }
}

std::string ReportText(const Report& report, const nlohmann::json& result) {
  const RankStats& total = report.facts.total;
  OrderedJson json = OrderedJson::object();
  json["schema"] = "shardwright-report";
  json["schema_version"] = kReportSchemaVersion;
  json["command"] = report.command;
  json["version"] = kVersion;
  json["argv"] = report.argv;
  json["started"] = report.started;
  json["ended"] = report.ended;
  json["seconds"] = report.seconds;
  json["ranks"] = report.ranks;
  json["threads"] = OrNull(report.threads);
  json["memory_bytes"] = OrNull(report.memory_bytes);
  json["seed"] = OrNull(report.seed);
  json["dry_run"] = report.dry_run;
  json["exit_code"] = ExitCode(report.status);
  json["status"] = RunState(report.status);
  json["error"] = ErrorJson(report.status);
  json["passes"] = PassesJson(total.passes);
  json["bytes_read"] = total.bytes_read;
  json["bytes_written"] = total.bytes_written;
  json["files_read"] = total.files_read;
  json["files_written"] = total.files_written;
  json["peak_memory_bytes"] = total.peak_memory_bytes;
  json["warnings"] = OrderedJson::array();
  for (const MergedWarning& warning : report.facts.warnings) {
    json["warnings"].push_back({{"message", warning.message}, {"ranks", warning.ranks}});
  }
  json["warnings_omitted"] = total.warnings_omitted;
  // The resume script of a trainer expects these two at the top level, as in a versions file.
  if (result.is_object() && result.contains("iteration") && result.contains("versions")) {
    json["iteration"] = OrderedJson(result["iteration"]);
    json["versions"] = OrderedJson(result["versions"]);
  }
  json["result"] = OrderedJson(result);
  return Dump(json, 2) + "\n";
}

Status CheckReportFile(const std::string& path) {
  if (IsSpecial(path)) return {};
  struct stat info {};
  if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    return FileError(path, "cannot write", EISDIR);
  }
  const std::size_t slash = path.rfind('/');
  std::string folder = slash == std::string::npos ? "." : path.substr(0, slash);
  if (folder.empty()) folder = "/";
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return FileError(path, ("cannot write into " + folder).c_str(), errno);
  }
  return {};
}

Status WriteReportFile(const std::string& path, const std::string& text) {
  if (IsSpecial(path)) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_APPEND);
    if (fd < 0) return FileError(path, "cannot open", errno);
    return WriteAndClose(path, fd, text, false);
  }
  const std::string part = path + ".partial-" + std::to_string(getpid());
  unlink(part.c_str());  // left by a killed process with the same id
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return FileError(path, "cannot create", errno);
  Status written = WriteAndClose(path, fd, text, true);
  if (written && rename(part.c_str(), path.c_str()) != 0) {
    written = FileError(path, "cannot rename", errno);
  }
  if (!written) unlink(part.c_str());
  return written;
}

}  // namespace shardwright::cli

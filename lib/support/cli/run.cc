// SPDX-License-Identifier: Apache-2.0
// Runs a command in these steps:
//
// 1. Parses arguments. Prints -h, --help and --version here, before MPI starts, which takes a
//    tenth of a second.
// 2. Installs signal handlers and connects the ranks. Ends the run on all ranks after a usage
//    error, or if the log cannot be opened.
// 3. Runs the body. An exception becomes an internal error, or kLimit if memory ran out.
// 4. Agrees on the status. Rank 0 gathers the byte and file counts and warnings of all ranks.
// 5. Rank 0 prints the answer, writes the report and prints the summary line.
// 6. Returns the same exit code on all ranks.

#include <execinfo.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/exception_to_error.h"
#include "support/base/memory.h"
#include "support/base/text.h"
#include "support/cli/console.h"
#include "support/cli/exit_code.h"
#include "support/cli/parser_internal.h"
#include "support/cli/report.h"
#include "support/cli/resources.h"
#include "support/cli/run_sink.h"
#include "support/cli/signals.h"
#include "support/comm/watch/rank_watch.h"
#include "support/os/fault.h"
#include "support/text/text.h"

namespace shardwright::cli {
namespace {

/// Ends the process with the out-of-memory error if std::bad_alloc is not caught: before and
/// after the body, in threads, and in noexcept functions. Does not allocate.
[[noreturn]] void Terminate() {
  bool memory = false;
  try {
    const std::exception_ptr thrown = std::current_exception();
    if (thrown) std::rethrow_exception(thrown);
    // An inlined noexcept destructor ends the process without a current exception.
    memory = std::uncaught_exceptions() > 0 && MemoryWasWanting();
  } catch (const std::bad_alloc&) {
    memory = true;
  } catch (const std::system_error& error) {
    memory = error.code() == std::errc::resource_unavailable_try_again;  // cannot start a thread
  } catch (...) {
    std::abort();
  }
  if (!memory) std::abort();
  constexpr std::string_view kText = ": error: out of memory\n";
  const std::array<iovec, 2> line{
      iovec{program_invocation_short_name, std::strlen(program_invocation_short_name)},
      iovec{const_cast<char*>(kText.data()), kText.size()}};
  [[maybe_unused]] const ssize_t written = ::writev(STDERR_FILENO, line.data(), line.size());
  ::_exit(static_cast<int>(Errc::kLimit));
}

// Set before main, because parsing its arguments may already run out of memory.
[[maybe_unused]] const std::terminate_handler kFormer = [] {
  WatchMemory();
  return std::set_terminate(Terminate);
}();

// The C library loads its unwinder when an exception first passes through one of its own
// frames, and aborts the process if there is no memory for that. This backtrace loads it
// now. Throwing an exception would load it too, but aborts a program that has its own
// unwinder, as the programs of the wheel have (-static-libgcc).
[[maybe_unused]] const bool kUnwinds = [] {
  void* frame = nullptr;
  return ::backtrace(&frame, 1) > 0;
}();

using Clock = std::chrono::steady_clock;

/// Objects that outlive the body.
struct Session {
  const Parser& parser;
  comm::Comm& comm;
  Console& console;
  RunSink& sink;
  Report report;
  Clock::time_point start;
  std::atomic_flag leaving = {};  ///< LeaveLost ends the process

  const CommonFlags& flags() const { return parser.flags(); }
};

/// Prints the answer to stdout. A closed pipe is not an error: its reader has read enough.
Status WriteStdout(std::string_view text) {
  const int error = WriteAll(STDOUT_FILENO, text);
  if (error == 0 || error == EPIPE) return {};
  return FailErrno(Errc::kIo, error, "stdout: cannot write: ", std::strerror(error));
}

int AnswerAtOnce(const std::string& command, const std::string& text) {
  if (comm::UnderLauncher() && LauncherRank() != 0) return 0;
  const SignalGuard signals;
  const Status written = WriteStdout(text);
  if (!written) Console({command, 0, false, 0}).Error(written.error().message);
  return ExitCode(written);
}

Status Prepare(Session& session, const Result<Action>& action) {
  Status mine;
  if (session.flags().mode) ::umask(UmaskOf(*session.flags().mode));
  if (!action) {
    mine = tl::unexpected<Error>(action.error());
  } else if (!session.flags().log_file.empty()) {
    mine = session.console.OpenLog(session.flags().log_file);
  }
  const auto& json = session.flags().json;
  if (mine && json && *json != "-" && session.comm.rank() == 0) mine = CheckReportFile(*json);
  return session.comm.Agree(std::move(mine));
}

Result<MergedStats> GatherStats(comm::Comm& comm, const RankStats& own) {
  const std::string packed = PackStats(own);
  SW_TRY_ASSIGN(const auto all, comm.Gather(std::as_bytes(std::span(packed))));
  if (comm.rank() != 0) return MergedStats();
  std::vector<RankStats> ranks;
  for (const auto& bytes : all) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    SW_TRY_ASSIGN(RankStats facts, UnpackStats(text));
    ranks.push_back(std::move(facts));
  }
  return Merge(ranks);
}

std::string ErrorText(const Error& error, int ranks) {
  std::string text;
  // The message already lists ranks that failed with the same error.
  const bool listed = error.message.find(" (ranks ") != std::string::npos;
  if (ranks > 1 && error.rank >= 0 && !listed) text = text::RankList({&error.rank, 1}) + ": ";
  text += error.message;
  if (error.sys == 0) return text;
  const std::string system = std::strerror(error.sys);
  // Compares without the first letter, which may be lower case in the message.
  const bool told = text.find(system.substr(1)) != std::string::npos;
  return told ? text : text + ": " + system;
}

/// Returns the summary line at the end of every command.
std::string Summary(const Session& session) {
  const Report& report = session.report;
  const RankStats& total = report.facts.total;
  const bool wrote = total.bytes_written != 0 || total.files_written != 0;
  const std::uint64_t bytes = wrote ? total.bytes_written : total.bytes_read;
  const std::uint64_t files = wrote ? total.files_written : total.files_read;
  std::string text(RunState(report.status));
  if (report.dry_run && report.status) text = "dry run done";
  text += ": ";
  text += FormatBytes(bytes) + (wrote ? " written" : " read");
  text += " in " + text::FormatSeconds(report.seconds);
  if (bytes != 0 && report.seconds > 0) {
    const double rate = static_cast<double>(bytes) / report.seconds;
    text += " (" + FormatBytes(static_cast<std::uint64_t>(rate)) + "/s)";
  }
  text += ", " + Plural(files, "file") + ", ";
  text += Plural(report.facts.warnings.size() + total.warnings_omitted, "warning");
  if (!report.status) text += ", exit code " + std::to_string(ExitCode(report.status));
  return text;
}

void ShowEnd(Session& session) {
  const Report& report = session.report;
  if (report.ranks > 1) {
    for (const MergedWarning& warning : report.facts.warnings) {
      session.console.Warning(warning.message + " (" + text::RankList(warning.ranks) + ")", true);
    }
  }
  if (const std::uint64_t omitted = report.facts.total.warnings_omitted; omitted != 0) {
    session.console.Warning(Plural(omitted, "more warning") + " not shown");
  }
  if (!report.status) session.console.Error(ErrorText(report.status.error(), report.ranks));
  if (!report.status && report.status.error().code == Errc::kUsage) {
    session.console.Note("try " + session.parser.name() + " --help", 0);
  } else {
    session.console.Note(Summary(session), 0);
  }
}

/// Writes the report to the file of --json, or to stdout.
Status WriteReport(const Session& session, const nlohmann::json& result) {
  const auto& json = session.flags().json;
  if (!json) return {};
  const std::string text = ReportText(session.report, result);
  return *json == "-" ? WriteStdout(text) : WriteReportFile(*json, text);
}

void SealReport(Session& session, Status status, MergedStats facts) {
  Report& report = session.report;
  report.status = std::move(status);
  report.facts = std::move(facts);
  report.ended = TimestampUtc();
  report.seconds = std::chrono::duration<double>(Clock::now() - session.start).count();
}

/// Escapes the answer for a terminal, because it may contain names from files.
std::string PrintableLines(std::string_view answer) {
  std::string out;
  out.reserve(answer.size());
  while (!answer.empty()) {
    const std::size_t end = answer.find('\n');
    out += text::Printable(answer.substr(0, end));
    if (end == std::string_view::npos) break;
    out += '\n';
    answer.remove_prefix(end + 1);
  }
  return out;
}

/// Prints the answer, report and summary on rank 0. \returns the exit code
int EndOnRoot(Session& session, const std::string& answer, const nlohmann::json& result) {
  Report& report = session.report;
  if (session.flags().json != "-" && !answer.empty()) {
    Status shown = WriteStdout(PrintableLines(answer));
    if (!shown && report.status) report.status = std::move(shown);
  }
  if (Status written = WriteReport(session, result); !written) {
    const Error& error = written.error();
    // If the report was found impossible at the start, its error is already known.
    const bool known = !report.status && report.status.error().code == error.code &&
                       report.status.error().message.starts_with("report ");
    if (report.status) {
      report.status = std::move(written);
    } else if (!known) {
      session.console.Error(ErrorText(error, 1));
    }
  }
  ShowEnd(session);
  return ExitCode(report.status);
}

/// Ends this rank immediately while others may wait for it in a collective call. It must not make
/// collective calls, and the launcher ends the whole job when one of its processes ends this way.
[[noreturn]] void LeaveAlone(Session& session, const Error& error, const nlohmann::json& result,
                             const RankStats& facts) {
  const int rank = session.comm.rank();
  Error own = error;
  if (session.comm.size() > 1) own.rank = rank;
  const int code = static_cast<int>(own.code);
  SealReport(session, tl::unexpected<Error>(own), Merge({&facts, 1}));
  session.console.Error(ErrorText(own, session.report.ranks));
  if (const auto& json = session.flags().json; json && (*json != "-" || rank == 0)) {
    if (Status written = WriteReport(session, result); !written) {
      session.console.Error(ErrorText(written.error(), 1));
    }
  }
  if (session.comm.size() == 1) session.console.Note(Summary(session), 0);
  std::_Exit(code);
}

/// Ends this rank while others wait for a lost one, from a thread of the watch. Rank 0 writes the
/// report, or, if it is the lost one, the rank that found the loss.
[[noreturn]] void LeaveLost(Session& session, const Error& error, bool found) {
  // The launcher may end all ranks as soon as one has left. Rank 0 has to write the report before.
  constexpr std::chrono::milliseconds kOthersHear(500);
  constexpr std::chrono::milliseconds kRootWrites(2'000);
  session.leaving.test_and_set();
  const RankStats facts = session.sink.StatsNow();
  if (found) session.console.Error(error.message);
  if (session.comm.rank() == 0 || (found && error.rank == 0)) {
    SealReport(session, tl::unexpected<Error>(error), Merge({&facts, 1}));
    if (Status written = WriteReport(session, nlohmann::json()); !written) {
      session.console.Error(ErrorText(written.error(), 1));
    }
    std::this_thread::sleep_for(kOthersHear);
  } else {
    std::this_thread::sleep_for(kRootWrites);
  }
  std::_Exit(static_cast<int>(error.code));
}

/// Returns what RankWatch::Options::work asks for.
std::int64_t WorkOf(const RunSink& sink) {
  // Long enough for the sync of a node's memory, or an upload on close.
  constexpr std::chrono::hours kMostPatient(1);
  const auto patient = os::PatientCallTime();
  const auto calls = static_cast<std::int64_t>(os::CallsDone());
  return sink.ProcessorTime() + std::chrono::nanoseconds(std::chrono::milliseconds(calls)).count() +
         (patient < kMostPatient ? std::chrono::nanoseconds(patient).count() : 0);
}

/// Runs steps 4 to 6.
/// \returns the exit code
/// Collective.
int Finish(Session& session, Status status, const std::string& answer,
           const nlohmann::json& result) {
  comm::Comm& comm = session.comm;
  RankStats facts = session.sink.Finish();
  if (const int error = session.console.log_errno(); error != 0) {
    facts.warnings.push_back(std::string("the log file is incomplete: ") + std::strerror(error));
    if (comm.size() == 1) session.console.Warning(facts.warnings.back());
  }
  Result<MergedStats> merged = GatherStats(comm, facts);
  if (!merged && status) status = tl::unexpected<Error>(merged.error());
  SealReport(session, std::move(status), merged ? *std::move(merged) : MergedStats());
  std::uint64_t code = 0;
  if (comm.rank() == 0) code = static_cast<std::uint64_t>(EndOnRoot(session, answer, result));
  const Result<std::uint64_t> agreed = comm.AllReduceMax(code);
  return agreed ? static_cast<int>(*agreed) : ExitCode(session.report.status);
}

Report NewReport(const Parser& parser, int argc, const char* const* argv, int ranks) {
  const CommonFlags& flags = parser.flags();
  Report report;
  report.command = parser.command();
  report.argv.assign(argv, argv + argc);
  report.ranks = ranks;
  if (parser.Uses(Shared::kThreads)) report.threads = flags.threads;
  if (parser.Uses(Shared::kMemory)) report.memory_bytes = flags.memory_bytes;
  if (parser.Uses(Shared::kSeed)) report.seed = flags.seed;
  report.dry_run = flags.dry_run;
  return report;
}

/// Runs the body and converts exceptions of libraries to errors.
/// \param threw  set if the body threw an exception
Status CallBody(const App::Body& body, Context& context, bool& threw) {
  try {
    return body(context);
  } catch (...) {
    threw = true;
    return tl::unexpected<Error>(CaughtError());
  }
}

/// Runs the body like CallBody in one of several tasks that srun has started without MPI. The
/// first task to lock the output writes it. The others wait, then accept the complete output
/// as --resume does. So does a task that starts after the output is complete.
/// \param flags  flags of the context
Status CallBodyApart(const App::Body& body, Context& context, CommonFlags& flags, bool& threw) {
  constexpr std::chrono::milliseconds kFirstWait(200);
  constexpr std::chrono::milliseconds kLongestWait(10'000);
  constexpr std::chrono::milliseconds kTick(100);
  Sink& sink = context.sink();
  sink.Note(StrCat("srun started ", comm::TasksApart(),
                   " tasks without MPI: one task writes the output and the others wait for it. To "
                   "share the work, use srun --mpi=pmix (or pmi2)"),
            0);
  flags.resume = Resume::kIfSameOrDone;
  for (std::chrono::milliseconds wait = kFirstWait;; wait = std::min(2 * wait, kLongestWait)) {
    Status status = CallBody(body, context, threw);
    if (status || status.error().code != Errc::kBusy || status.error().sys != EWOULDBLOCK) {
      return status;
    }
    for (const auto end = Clock::now() + wait; Clock::now() < end;) {
      if (sink.stop_requested()) return Fail(Errc::kStopped, "stopped on request");
      std::this_thread::sleep_for(kTick);
    }
  }
}

}  // namespace

Context::Context(comm::Comm& comm, Sink& sink, const CommonFlags& flags)
    : comm_(comm),
      sink_(sink),
      flags_(flags),
      out_(std::make_unique<std::ostringstream>()),
      result_(std::make_unique<nlohmann::json>()) {}

Context::~Context() = default;

void Context::Print(const text::Table& table) {
  out() << table.Render(TerminalColumns(STDOUT_FILENO));
}

void Context::SetResult(nlohmann::json result) {
  SW_CHECK(result.is_object());
  *result_ = std::move(result);
}

int App::Run(int argc, const char* const* argv, const Body& body) {
  const Clock::time_point start = Clock::now();
  const std::string started = TimestampUtc();
  const int words = std::min(argc, parser_->is_subcommand() ? 2 : 1);
  const Result<Action> action = parser_->Parse({argv + words, argv + argc});
  const std::string command = parser_->command();
  if (action && *action == Action::kShortHelp) {
    return AnswerAtOnce(command, parser_->ShortHelpText());
  }
  if (action && *action == Action::kHelp) return AnswerAtOnce(command, parser_->HelpText());
  if (action && *action == Action::kDescribe) return AnswerAtOnce(command, parser_->DescribeText());
  if (action && *action == Action::kVersion) return AnswerAtOnce(command, parser_->VersionText());
  const CommonFlags& flags = parser_->flags();
  if (parser_->Uses(Shared::kMemory)) LimitTextMemory(flags.memory_bytes);
  RaiseOpenFileLimit();
  const SignalGuard signals;
  Result<std::unique_ptr<comm::Comm>> met =
      alone_ ? Result<std::unique_ptr<comm::Comm>>(comm::MakeSerialComm()) : comm::MakeComm();
  Status meeting = met ? Status() : tl::unexpected<Error>(met.error());
  const std::unique_ptr<comm::Comm> comm = met ? *std::move(met) : comm::MakeSerialComm();
  Console console({command, flags.verbosity, WantColor(flags.color), comm->rank()});
  std::function<void()> leave;
  RunSink sink({DecideProgress(flags), comm->rank(), comm->size(), [&leave] { leave(); }}, console,
               signals);
  std::atomic<Session*> running = nullptr;
  comm::RankWatch::Options watched;
  watched.timeout = std::chrono::seconds(flags.rank_timeout_s);
  watched.work = [&sink] { return WorkOf(sink); };
  watched.lost = [&running](const Error& error, bool found) {
    if (Session* const one = running) LeaveLost(*one, error, found);
    std::_Exit(static_cast<int>(error.code));
  };
  auto watch = comm::RankWatch::Start(*comm, std::move(watched));
  if (!watch && meeting) meeting = tl::unexpected<Error>(watch.error());
  Session session{*parser_,
                  watch ? (*watch)->comm() : *comm,
                  console,
                  sink,
                  NewReport(*parser_, argc, argv, comm->size()),
                  start};
  session.report.started = started;
  running = &session;
  // Interruptible work starts in the body, after this is set.
  leave = [&session] {
    if (session.leaving.test()) return;
    LeaveAlone(session, {Errc::kStopped, "stopped on request", 0, -1}, nlohmann::json(),
               session.sink.StatsNow());
  };

  CommonFlags own = flags;
  Context context(session.comm, sink, own);
  context.command_line_ = command;
  for (int i = words; i < argc; ++i) context.command_line_.append(" ").append(ShellWord(argv[i]));
  Status status = meeting ? Prepare(session, action) : meeting;
  if (status) {
    bool threw = false;
    const bool apart = parser_->Uses(Shared::kResume) && comm::TasksApart() > 1;
    status = apart ? CallBodyApart(body, context, own, threw) : CallBody(body, context, threw);
    if (threw && comm->size() > 1) {
      LeaveAlone(session, status.error(), *context.result_, sink.Finish());
    }
    status = session.comm.Agree(std::move(status));
  }
  if (!status && status.error().code == Errc::kBusy && !alone_ && comm::TasksApart() > 1) {
    status.error().message += "; srun started " + std::to_string(comm::TasksApart()) +
                              " tasks without MPI, so each of them does all of the work. To share "
                              "the work, use srun --mpi=pmix (or pmi2)";
  }
  const int code = Finish(session, std::move(status), context.out_->str(), *context.result_);
  if (watch) watch->reset();  // before the session that it refers to
  return code;
}

}  // namespace shardwright::cli

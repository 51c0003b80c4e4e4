// SPDX-License-Identifier: Apache-2.0
// Makes the optimizer steps that a file describes: replay_probe CASES RESULTS ROOTS LAST
//
// A case is a line of JSON, {"optimizer", "elems", "gradient_dtype", "separate", "threads", "cuts",
// "steps": [{"options", "count", "gradient_factor", "skipped", "first_momentum"}...]}, then in
// float32 the parameter and three states, then the gradient of every step. RESULTS gets the
// parameter and the three states after every step. A case that fails ends RESULTS: its message goes
// to standard error and the exit code is the code of the error. `ROOTS` has the trainer's
// square roots of all numbers of [1, 4), and LAST is as for RootTable.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <nlohmann/json.hpp>

#include "partial/optimizer_steps/apply.h"

namespace {

namespace optimizer_steps = shardwright::optimizer_steps;
using Json = nlohmann::json;
using shardwright::DType;
using shardwright::Result;
using shardwright::Status;

/// Parameter and states.
using Arrays = std::vector<std::vector<float>>;

Result<optimizer_steps::Step> StepFrom(const Json& described, const Json& made) {
  std::vector<optimizer_steps::Option> options;
  for (const auto& [name, value] : made.at("options").items()) {
    options.push_back({name, value.get<double>()});
  }
  SW_TRY_ASSIGN(optimizer_steps::Step step,
                optimizer_steps::StepOf(described.at("optimizer").get<std::string>(), options));
  step.rounding = described.at("separate").get<bool>() ? optimizer_steps::Rounding::kSeparate
                                                       : optimizer_steps::Rounding::kFused;
  step.count = made.at("count").get<float>();
  step.gradient_factor = made.at("gradient_factor").get<double>();
  step.skipped = made.at("skipped").get<bool>();
  step.first_momentum = made.at("first_momentum").get<bool>();
  return step;
}

/// A step on the ranges between the cuts, on the threads of an arena.
Status MakeStep(const optimizer_steps::Step& step, DType dtype,
                const std::vector<std::size_t>& cuts, std::span<const std::byte> gradient,
                const optimizer_steps::RootTable& roots, tbb::task_arena& arena, Arrays* arrays) {
  const std::size_t states = optimizer_steps::StatesOf(step).size();
  std::vector<Status> done(cuts.size() - 1);
  arena.execute([&] {
    tbb::parallel_for(std::size_t{0}, done.size(), [&](std::size_t i) {
      const std::size_t first = cuts[i];
      const std::size_t count = cuts[i + 1] - first;
      optimizer_steps::Elements range;
      range.param = std::span((*arrays)[0]).subspan(first, count);
      for (std::size_t s = 0; s < states; ++s) {
        range.states[s] = std::span((*arrays)[s + 1]).subspan(first, count);
      }
      range.gradient_dtype = dtype;
      const std::uint64_t item = shardwright::ItemSize(dtype);
      range.gradient = gradient.subspan(first * item, count * item);
      done[i] = optimizer_steps::Apply(step, range, roots.IsCorrect() ? nullptr : &roots);
    });
  });
  for (Status& status : done) SW_TRY(std::move(status));
  return {};
}

template <class T>
void Read(std::istream& in, std::vector<T>* to) {
  in.read(reinterpret_cast<char*>(to->data()),
          static_cast<std::streamsize>(to->size() * sizeof(T)));
}

Status MakeCase(const std::string& line, const optimizer_steps::RootTable& roots, std::istream& in,
                std::ostream& out) {
  const Json described = Json::parse(line);
  const auto elems = described.at("elems").get<std::size_t>();
  const auto dtype = shardwright::DTypeFromName(described.at("gradient_dtype").get<std::string>());
  if (!dtype) return shardwright::BadInput("no dtype");
  Arrays arrays(4, std::vector<float>(elems));
  for (auto& array : arrays) Read(in, &array);
  tbb::task_arena arena(described.at("threads").get<int>());
  // One byte late: gradients need not be aligned.
  std::vector<std::byte> gradient(elems * shardwright::ItemSize(*dtype) + 1);
  const bool unaligned = described.at("unaligned").get<bool>();
  for (const Json& made : described.at("steps")) {
    const auto bytes = std::span(gradient).subspan(unaligned ? 1 : 0, gradient.size() - 1);
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    SW_TRY_ASSIGN(const optimizer_steps::Step step, StepFrom(described, made));
    SW_TRY(MakeStep(step, *dtype, described.at("cuts").get<std::vector<std::size_t>>(), bytes,
                    roots, arena, &arrays));
    for (const auto& array : arrays) {
      out.write(reinterpret_cast<const char*>(array.data()),
                static_cast<std::streamsize>(array.size() * sizeof(float)));
    }
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape): a test's helper
  if (argc != 5) {
    std::fputs("replay_probe CASES RESULTS ROOTS LAST\n", stderr);
    return 2;
  }
  // More threads than cores, too.
  const tbb::global_control threads(tbb::global_control::max_allowed_parallelism, 4);
  std::vector<float> listed(optimizer_steps::RootTable::kRoots);
  std::ifstream roots_file(argv[3], std::ios::binary);
  Read(roots_file, &listed);
  const auto roots = optimizer_steps::RootTable::FromRoots(
      listed, static_cast<std::uint32_t>(std::strtoul(argv[4], nullptr, 10)));
  if (!roots) {
    std::fprintf(stderr, "%s\n", roots.error().message.c_str());
    return static_cast<int>(roots.error().code);
  }
  std::ifstream in(argv[1], std::ios::binary);
  std::ofstream out(argv[2], std::ios::binary);
  std::string line;
  while (std::getline(in, line)) {
    if (const Status status = MakeCase(line, *roots, in, out); !status) {
      std::fprintf(stderr, "%s\n", status.error().message.c_str());
      return static_cast<int>(status.error().code);
    }
  }
  return out.flush() ? 0 : 7;
}

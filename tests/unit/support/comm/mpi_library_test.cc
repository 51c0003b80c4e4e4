// SPDX-License-Identifier: Apache-2.0
#include "support/comm/mpi_library_internal.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace shardwright::comm::internal {
namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

Environment With(const Variables& variables) {
  return [&variables](const char* name) -> std::string_view {
    const auto found = variables.find(name);
    return found == variables.end() ? std::string_view() : std::string_view(found->second);
  };
}

std::string Chosen(const Variables& variables) {
  const Result<MpiChoice> choice = ChooseMpi(With(variables));
  if (!choice) return choice.error().message;
  std::string text = choice->path;
  for (const MpiFamily family : choice->families) {
    text += family == MpiFamily::kOpenMpi ? "O" : "M";
  }
  return text;
}

TEST(MpiLibraryTest, TheLaunchersVariablesTellTheFamily) {
  // As `env` prints them below each launcher.
  const Variables open_mpi = {{"OMPI_COMM_WORLD_SIZE", "4"}, {"PMIX_RANK", "2"}};
  const Variables hydra = {{"PMI_SIZE", "4"}, {"PMI_RANK", "2"}, {"MPI_LOCALNRANKS", "4"}};
  const Variables slurm_pmix = {{"PMIX_RANK", "0"}, {"SLURM_MPI_TYPE", "pmix"}};
  const Variables slurm_pmi2 = {{"PMI_SIZE", "4"}, {"PMI_RANK", "2"}, {"SLURM_MPI_TYPE", "pmi2"}};
  const Variables slurm_cray = {{"SLURM_MPI_TYPE", "cray_shasta"}, {"SLURM_PROCID", "0"}};
  EXPECT_EQ(Chosen(open_mpi), "O");
  EXPECT_EQ(Chosen(hydra), "M");
  EXPECT_EQ(Chosen(slurm_pmix), "OM");
  EXPECT_EQ(Chosen(slurm_pmi2), "MO");
  EXPECT_EQ(Chosen(slurm_cray), "MO");
}

TEST(MpiLibraryTest, TheSettingOverridesTheLauncher) {
  Variables variables = {{"OMPI_COMM_WORLD_SIZE", "4"}, {"SHARDWRIGHT_MPI", "mpich"}};
  EXPECT_EQ(Chosen(variables), "M");
  variables["SHARDWRIGHT_MPI"] = "openmpi";
  EXPECT_EQ(Chosen(variables), "O");
  variables["SHARDWRIGHT_MPI"] = "/opt/mpi/lib/libmpi.so.12";
  EXPECT_EQ(Chosen(variables), "/opt/mpi/lib/libmpi.so.12");
  variables["SHARDWRIGHT_MPI"] = "Open MPI";
  EXPECT_EQ(
      Chosen(variables),
      "SHARDWRIGHT_MPI: openmpi, mpich, none or the path of a library expected, found 'Open MPI'");
}

TEST(MpiLibraryTest, TheLauncherSaysHowManyItHasStarted) {
  const auto size = [](const Variables& variables) { return LauncherSize(With(variables)); };
  EXPECT_EQ(size({{"OMPI_COMM_WORLD_SIZE", "4"}, {"PMI_SIZE", "8"}}), 4);
  EXPECT_EQ(size({{"PMI_SIZE", "8"}}), 8);
  EXPECT_EQ(size({{"PMIX_RANK", "1"}, {"SLURM_STEP_NUM_TASKS", "6"}}), 6);
  EXPECT_EQ(size({{"PMIX_RANK", "3"}}), 4);
  EXPECT_EQ(size({{"PMIX_RANK", "0"}}), std::nullopt);
  EXPECT_EQ(size({{"PMI_SIZE", "many"}}), std::nullopt);
  EXPECT_EQ(size({}), std::nullopt);
}

}  // namespace
}  // namespace shardwright::comm::internal

// SPDX-License-Identifier: Apache-2.0
#include "partial/store/store.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "partial/store/check_store.h"
#include "partial/store/collect.h"
#include "partial/store/dynamic_run.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "support/os/fault.h"
#include "unit/partial/store_fixture.h"

namespace shardwright::partial {
namespace {

TEST_F(StoreTest, IsMadeOnceAndOpenedAgain) {
  EXPECT_EQ(Store::Open(At("store")).error().code, Errc::kNotFound);
  StoreHead head;
  head.fingerprint = exec::DigestOf(os::AsBytes("model"));
  head.modules = 3;
  ASSERT_TRUE(Store::OpenOrCreate(At("store"), head));
  const auto again = Store::OpenOrCreate(At("store"), {});
  ASSERT_TRUE(again);
  EXPECT_EQ(again->head().fingerprint, head.fingerprint);
  EXPECT_TRUE(again->List()->empty());
  EXPECT_EQ(*again->NextSequence(), 1U);
}

TEST_F(StoreTest, ACopyWithoutItsEmptyFoldersIsComplete) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  for (const char* folder : {"store/recoveries", "store/tokens"}) {
    ASSERT_TRUE(std::filesystem::remove(At(folder))) << folder << " was empty";
  }
  const auto copy = Store::Open(At("store"));
  ASSERT_TRUE(copy) << copy.error().message;
  const auto list = copy->List();
  ASSERT_TRUE(list) << list.error().message;
  ASSERT_EQ(list->size(), 1U);
  EXPECT_FALSE(list->at(0).abandoned);
  EXPECT_FALSE(copy->LastRecovery()->has_value());
  EXPECT_TRUE(copy->RecoveriesAfter(0)->empty());
  EXPECT_TRUE(copy->ListTokens()->empty());
  EXPECT_FALSE(copy->Pending()->has_value());
  EXPECT_EQ(*copy->NextSequence(), 2U);
  EXPECT_EQ(*Store::HasNoCheckpoint(At("store")), false);
  // A writer makes the folders again.
  const auto lock = copy->LockForWriting("a restore");
  ASSERT_TRUE(lock) << lock.error().message;
  RecoveryRecord recovery;
  recovery.sequence = 1;
  recovery.manifest = 1;
  recovery.resume = 10;
  const Status added = copy->AddRecovery(recovery);
  ASSERT_TRUE(added) << added.error().message;
  EXPECT_EQ(copy->LastRecovery()->value().resume, 10U);
  EXPECT_TRUE(std::filesystem::is_directory(At("store/tokens")));
}

TEST_F(StoreTest, AFolderThatCannotBeListedIsNotEmpty) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  ASSERT_TRUE(std::filesystem::remove(At("store/recoveries")));
  Scratch::Put("store/recoveries", "a file");
  EXPECT_EQ(store.List().error().code, Errc::kNotFound);
  for (const char* folder : {"manifests", "catalogues"}) {
    std::filesystem::remove_all(At("store/recoveries"));
    std::filesystem::rename(At("store/" + std::string(folder)), At("aside"));
    EXPECT_EQ(store.NextSequence().error().code, Errc::kNotFound) << folder;
    EXPECT_FALSE(store.LockForWriting("a save") && store.NextSequence()) << folder;
    std::filesystem::rename(At("aside"), At("store/" + std::string(folder)));
  }
}

TEST_F(StoreTest, LeavesOtherFoldersAlone) {
  Scratch::Put("store/mine", "precious");
  const auto made = Store::OpenOrCreate(At("store"), {});
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, Errc::kBusy);
  EXPECT_EQ(Contents("store").size(), 1U);
}

// After a power failure a head has its folders, and a store that was reported has its name.
TEST_F(StoreTest, TheFoldersAreDurableBeforeTheHeadAndTheNameAtTheEnd) {
  {
    const os::ScopedFault fault({.target = "rename", .first = 1, .error = EIO});
    EXPECT_FALSE(Store::OpenOrCreate(At("store"), {}));
    EXPECT_TRUE(fault.fired());
    EXPECT_EQ(fault.Count(os::Op::kSync), 2U);  // the folders' names, the text of the head
  }
  const os::ScopedFault count;
  ASSERT_TRUE(Store::OpenOrCreate(At("store"), {}));
  EXPECT_EQ(count.Count(os::Op::kSync),
            2U + 3);  // the head's name, as one of the store, the store's
}

TEST_F(StoreTest, BlobsGoOnceTheManifestsAreGoneForGood) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  const BlobFile blob = store.ListBlobs()->at(0);
  {
    const os::ScopedFault fault({.target = "sync", .first = 1, .error = EIO});
    EXPECT_FALSE(store.Remove({{1, 10, false}}, {blob}));
    EXPECT_TRUE(fault.fired());
  }
  EXPECT_TRUE(store.List()->empty());
  EXPECT_TRUE(std::filesystem::exists(store.BlobPath(blob)));
  ASSERT_TRUE(store.Remove({}, {blob}));
  EXPECT_FALSE(std::filesystem::exists(store.BlobPath(blob)));
}

TEST_F(StoreTest, NumbersOfFailedSavesAreNotGivenAgain) {
  const Store store = Make();
  Scratch::Put("store/catalogues/0000000007.swc", "x");
  EXPECT_EQ(*store.NextSequence(), 8U);
  Scratch::Put("store/tokens/0000000009.json", "{}");
  EXPECT_EQ(*store.NextSequence(), 10U);
}

TEST_F(StoreTest, ARecoveryIsNotAfterItself) {
  const Store store = Make();
  for (const std::uint64_t sequence : {1U, 2U}) {
    RecoveryRecord recovery;
    recovery.sequence = sequence;
    recovery.resume = 10;
    ASSERT_TRUE(store.AddRecovery(recovery));
  }
  const auto later = store.RecoveriesAfter(1);
  ASSERT_TRUE(later) << later.error().message;
  ASSERT_EQ(later->size(), 1U);
  EXPECT_EQ(later->front().sequence, 2U);
  EXPECT_TRUE(store.CheckPast(2, 20, "a copy"));
  EXPECT_EQ(store.CheckPast(1, 20, "a copy").error().code, Errc::kMismatch);
}

TEST_F(StoreTest, ATokenRecordOfAnotherCheckpointIsRefused) {
  const Store store = Make();
  const TokenRecord tokens{0, {{10, {{1, 2}}}}};
  ASSERT_TRUE(store.Commit({1, 10, false}, "", "", tokens));
  ASSERT_TRUE(store.ReadTokens(1));
  std::filesystem::copy(store.TokensPath(1), store.TokensPath(2));
  const auto other = store.ReadTokens(2);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Errc::kBadInput);
  EXPECT_NE(other.error().message.find("record of checkpoint 1"), std::string::npos);
}

TEST_F(StoreTest, StrangersAmongTheBlobsAreNamed) {
  const Store store = Make();
  Scratch::Put("store/blobs/ab/.nfs00000000012", "a removed blob that a program on NFS has open");
  EXPECT_TRUE(store.ListBlobs());
  const std::string stranger = "store/blobs/ab/cd" + std::string(30, '0');
  Scratch::Put(stranger, "of another folder");
  const auto blobs = store.ListBlobs();
  ASSERT_FALSE(blobs);
  EXPECT_NE(blobs.error().message.find(At(stranger)), std::string::npos) << blobs.error().message;
}

TEST_F(StoreTest, CheckNamesDamagedTexts) {
  const Store store = Make();
  Put(store, 1, 10, "a");  // its catalogue is not the one that the manifest has
  Scratch::Put("store/tokens/0000000001.json", "{");
  const auto said = [&] {
    NullSink sink;
    const auto comm = comm::MakeSerialComm();
    const auto check = CheckStore(*comm, At("store"), checkpoints::Patterns(), 1, sink);
    EXPECT_TRUE(check) << check.error().message;
    std::string lines;
    for (const std::string& line : check->damaged) lines += line + '\n';
    return lines;
  };
  EXPECT_NE(said().find(store.CataloguePath(1) + ": digest "), std::string::npos) << said();
  EXPECT_NE(said().find(store.TokensPath(1)), std::string::npos) << said();
  const TokenRecord tokens{0, {{20, {{1, 2}}}}};
  Manifest manifest = *store.ReadManifest({1, 10, false});
  ASSERT_TRUE(store.Commit({1, 10, false}, ToText(manifest), "", tokens));
  EXPECT_NE(said().find(store.TokensPath(1) +
                        ": expected tokens up to iteration 10, found tokens up to iteration 20"),
            std::string::npos)
      << said();
}

TEST_F(StoreTest, ListsCheckpointsAndWhatIsAbandoned) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  Put(store, 2, 20, "b");
  Put(store, 3, 30, "c");
  RecoveryRecord recovery;
  recovery.sequence = 1;
  recovery.manifest = 1;
  recovery.abandoned = {2, 3};
  ASSERT_TRUE(store.AddRecovery(recovery));
  const auto list = store.List();
  ASSERT_TRUE(list);
  EXPECT_EQ(*list, (std::vector<StoredCheckpoint>{{1, 10, false}, {2, 20, true}, {3, 30, true}}));
  EXPECT_EQ(*store.NextSequence(), 4U);
  // A number that was abandoned is not used again, even when its checkpoint is gone.
  ASSERT_TRUE(store.Remove({{2, 20, true}, {3, 30, true}}, {}));
  EXPECT_EQ(*store.NextSequence(), 4U);
  EXPECT_EQ(store.LastRecovery()->value().manifest, 1U);
}

TEST_F(StoreTest, OfOneIterationTheLastSaveCounts) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  Put(store, 2, 20, "b");
  Put(store, 3, 20, "c");
  EXPECT_EQ(*store.List(),
            (std::vector<StoredCheckpoint>{{1, 10, false}, {2, 20, true}, {3, 20, false}}));
  // If it is abandoned too, it does not make the first one valid again.
  RecoveryRecord recovery;
  recovery.sequence = 1;
  recovery.manifest = 1;
  recovery.abandoned = {3};
  ASSERT_TRUE(store.AddRecovery(recovery));
  EXPECT_EQ(*store.List(),
            (std::vector<StoredCheckpoint>{{1, 10, false}, {2, 20, true}, {3, 20, true}}));
}

TEST_F(StoreTest, TellsWhatIsGoneFromWhatCannotBeRead) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  EXPECT_FALSE(store.IsGone({1, 10, false}));
  {
    const os::ScopedFault fault({.target = "open", .first = 1, .error = EIO});
    EXPECT_FALSE(store.IsGone({1, 10, false}));
    EXPECT_TRUE(fault.fired());
  }
  ASSERT_TRUE(store.Remove({{1, 10, false}}, {}));
  EXPECT_TRUE(store.IsGone({1, 10, false}));
}

TEST_F(StoreTest, TheNewestStateOfDynamicKIsTheRuns) {
  const Store store = Make();
  const auto put = [&](std::uint64_t sequence, std::uint64_t iteration, double total) {
    Manifest manifest = Put(store, sequence, iteration, "a");
    manifest.state.dynamic_k = DynamicK{4, 1, 2, 0.5, total, total, false, 0};
    EXPECT_TRUE(store.Commit({sequence, iteration, false}, ToText(manifest), "", std::nullopt));
  };
  const auto total = [&] {
    const auto now = NewestDynamicK(store, *store.List(), *store.LastRecovery());
    EXPECT_TRUE(now) << now.error().message;
    return now && *now ? (*now)->total : -1.0;
  };
  Put(store, 1, 10, "a");
  EXPECT_EQ(total(), -1);
  put(2, 20, 0);
  put(3, 30, 0);
  EXPECT_EQ(total(), 0);
  RecoveryRecord recovery;
  recovery.sequence = 1;
  recovery.manifest = 2;
  recovery.abandoned = {3};
  recovery.state.dynamic_k = DynamicK{4, 1, 2, 0.5, 0.125, 0.125, false, 0};
  ASSERT_TRUE(store.AddRecovery(recovery));
  EXPECT_EQ(total(), 0.125) << "what is spent does not go with what is given up";
  put(4, 30, 0.25);
  EXPECT_EQ(total(), 0.25);
  EXPECT_EQ(NewestIteration(*store.List()), 30U);
  EXPECT_EQ(IntervalBefore(*store.List(), 30), 10U);
  EXPECT_EQ(IntervalBefore(*store.List(), 10), 0U);
  // An unreadable manifest does not hide the value that a recovery records.
  std::ofstream(store.ManifestPath({4, 30, false})) << "{";
  EXPECT_EQ(total(), 0.125);
}

TEST_F(StoreTest, OneWriterAtATime) {
  const Store store = Make();
  auto lock = store.LockForWriting("first");
  ASSERT_TRUE(lock);
  const int status = os::InChild([&] {
    const auto second = store.LockForWriting("second");
    return !second && second.error().code == Errc::kBusy ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  ASSERT_TRUE(lock->Release());
  EXPECT_TRUE(store.LockForWriting("third"));
}

TEST_F(StoreTest, TheNextWriterRemovesWhatAKilledOneLeft) {
  const Store store = Make();
  Scratch::Put("store/incoming-dead/0/1", "half a blob");
  ASSERT_TRUE(store.LockForWriting("next"));
  EXPECT_FALSE(std::filesystem::exists(At("store/incoming-dead")));
}

TEST_F(StoreTest, ADamagedCatalogueIsNamed) {
  const Store store = Make();
  Manifest manifest = Put(store, 1, 10, "a");
  const auto damaged = store.ReadCatalogue(manifest);
  ASSERT_FALSE(damaged);
  EXPECT_EQ(damaged.error().code, Errc::kBadInput);
  EXPECT_NE(damaged.error().message.find("0000000001.swc"), std::string::npos);
  manifest.catalogue = exec::DigestOf(os::AsBytes(checkpoints::Serialize(Nothing())));
  EXPECT_TRUE(store.ReadCatalogue(manifest));
}

TEST_F(StoreTest, AManifestMustBeTheOneItsNameSays) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  std::filesystem::rename(store.ManifestPath({1, 10, false}), store.ManifestPath({1, 11, false}));
  EXPECT_EQ(store.ReadManifest({1, 11, false}).error().code, Errc::kBadInput);
}

TEST_F(StoreTest, EveryFaultOfACommitLeavesTheCheckpointsBefore) {
  const Store store = Make();
  Put(store, 1, 10, "a");
  Manifest next = Put(store, 2, 20, "b");
  std::filesystem::remove(store.ManifestPath({2, 20, false}));
  const TokenRecord tokens{1, {{20, {{1, 2}}}}};
  std::uint64_t calls = 0;
  {
    const os::ScopedFault count;
    ASSERT_TRUE(store.Commit({2, 20, false}, ToText(next), "catalogue", tokens));
    calls = count.CountMutating();
  }
  ASSERT_GT(calls, 6U);
  for (std::uint64_t n = 1; n <= calls; ++n) {
    std::filesystem::remove(store.ManifestPath({2, 20, false}));
    std::uint64_t seen = 0;
    {
      const os::ScopedFault fault({.target = "any", .first = n, .error = EIO});
      const Status done = store.Commit({2, 20, false}, ToText(next), "catalogue", tokens);
      EXPECT_TRUE(fault.fired());
      EXPECT_TRUE(done || done.error().code == Errc::kIo) << n;
      seen = store.List()->size();
    }
    EXPECT_GE(seen, 1U);
    EXPECT_TRUE(store.ReadManifest({1, 10, false}));
    // Its texts are there exactly if it is.
    EXPECT_EQ(std::filesystem::exists(store.CataloguePath(2)), seen == 2) << n;
    EXPECT_EQ(std::filesystem::exists(store.TokensPath(2)), seen == 2) << n;
    if (seen == 2) {
      EXPECT_TRUE(store.ReadManifest({2, 20, false})) << n;
    }
  }
}

TEST_F(StoreTest, CollectionKeepsWhatIsNamed) {
  const Store store = Make();
  Manifest last;
  for (std::uint64_t i = 1; i <= 4; ++i) {
    last = Put(store, i, i * 10, "content " + std::to_string(i % 2));
    last.catalogue = exec::DigestOf(os::AsBytes(checkpoints::Serialize(Nothing())));
    ASSERT_TRUE(store.Commit({i, i * 10, false}, ToText(last), checkpoints::Serialize(Nothing()),
                             std::nullopt));
  }
  Scratch::Put("store/blobs/ab/ab" + std::string(30, '0'), "garbage");
  const auto dry = CollectGarbage(At("store"), {1, 20}, true);
  ASSERT_TRUE(dry) << dry.error().message;
  EXPECT_EQ(dry->removed.size(), 2U);
  EXPECT_EQ(store.List()->size(), 4U);
  const auto done = CollectGarbage(At("store"), {1, 20}, false);
  ASSERT_TRUE(done);
  EXPECT_EQ(*store.List(), (std::vector<StoredCheckpoint>{{2, 20, false}, {4, 40, false}}));
  // Both hold "content 0"; "content 1" and the stranger went.
  EXPECT_EQ(done->blobs_kept, 1U);
  EXPECT_EQ(done->blobs_removed, 2U);
  EXPECT_EQ(store.ListBlobs()->size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(store.CataloguePath(3)));
  std::filesystem::remove(store.BlobPath(last.modules[0][0]->blob));
  const auto refused = CollectGarbage(At("store"), {1, std::nullopt}, false);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kMismatch);
  EXPECT_EQ(store.List()->size(), 2U);
}

TEST_F(StoreTest, CollectionKeepsNothingThatWasGivenUp) {
  const Store store = Make();
  for (std::uint64_t i = 1; i <= 3; ++i) {
    Manifest manifest = Put(store, i, i == 3 ? 20 : i * 10, "content");
    manifest.catalogue = exec::DigestOf(os::AsBytes(checkpoints::Serialize(Nothing())));
    ASSERT_TRUE(store.Commit({i, manifest.iteration, false}, ToText(manifest),
                             checkpoints::Serialize(Nothing()), std::nullopt));
  }
  const auto done = CollectGarbage(At("store"), {9, std::nullopt}, false);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(*store.List(), (std::vector<StoredCheckpoint>{{1, 10, false}, {3, 20, false}}));
}

TEST_F(StoreTest, CollectionKeepsClientState) {
  const Store store = Make();
  const Manifest other = Put(store, 1, 10, "client state");
  Manifest manifest = Put(store, 2, 20, "a");
  manifest.passed = other.modules[0][0]->blob;
  manifest.catalogue = exec::DigestOf(os::AsBytes(checkpoints::Serialize(Nothing())));
  ASSERT_TRUE(store.Commit({2, 20, false}, ToText(manifest), checkpoints::Serialize(Nothing()),
                           std::nullopt));
  const auto done = CollectGarbage(At("store"), {1, std::nullopt}, false);
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(done->removed.size(), 1U);
  EXPECT_EQ(done->blobs_removed, 0U);
  EXPECT_TRUE(std::filesystem::exists(store.BlobPath(*manifest.passed)));
}

TEST_F(StoreTest, CollectionWaitsForNoWriterAndTellsWhatIsStillNeeded) {
  const Store store = Make();
  Manifest manifest = Put(store, 1, 10, "a");
  manifest.catalogue = exec::DigestOf(os::AsBytes(checkpoints::Serialize(Nothing())));
  manifest.modules[0][0]->version = 4;
  ASSERT_TRUE(store.Commit({1, 10, false}, ToText(manifest), checkpoints::Serialize(Nothing()),
                           std::nullopt));
  const auto lock = store.LockForWriting("a save");
  ASSERT_TRUE(lock);
  const int status = os::InChild([&] {
    const auto beside = CollectGarbage(At("store"), {}, false);
    const auto dry = CollectGarbage(At("store"), {}, true);
    return !beside && beside.error().code == Errc::kBusy && dry ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(CollectGarbage(At("store"), {}, true)->oldest_version, 4U);
}

}  // namespace
}  // namespace shardwright::partial

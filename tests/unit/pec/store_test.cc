#include "pec/store/store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/crc32.h"
#include "base/sink.h"
#include "dialect/scan.h"
#include "exec/manifest.h"
#include "os/fault.h"
#include "pec/store/collect.h"
#include "pec/store/dynamic_run.h"
#include "pec/store/read_blobs.h"
#include "pec/store/write_blobs.h"
#include "plan/plan.h"
#include "unit/os/scratch.h"

namespace shardwright::pec {
namespace {

/// A source without files, as a catalogue has it.
dialect::SourceSet Nothing() {
  dialect::SourceSet set;
  set.dialect = "deepspeed";
  return set;
}

class StoreTest : public os::Scratch {
 protected:
  Store Make() {
    StoreHead head;
    head.modules = 1;
    auto store = Store::OpenOrCreate(At("store"), head);
    EXPECT_TRUE(store) << store.error().message;
    return *std::move(store);
  }

  /// A manifest of one module that holds `text`, with its blob in place.
  Manifest Put(const Store& store, std::uint64_t sequence, std::uint64_t iteration,
               const std::string& text) {
    Manifest manifest;
    manifest.sequence = sequence;
    manifest.iteration = iteration;
    manifest.names = {"module"};
    manifest.modules.resize(1);
    Held held;
    held.version = iteration;
    const exec::UnitSum sum = exec::SumOf(os::AsBytes(text));
    held.blob = Summarize({&sum, 1});
    manifest.modules[0][0] = held;
    manifest.catalogue = exec::DigestOf(os::AsBytes("catalogue"));
    const std::string path = store.BlobPath(held.blob);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
    EXPECT_TRUE(store.Commit({sequence, iteration, false}, ToText(manifest),
                             dialect::Serialize(Nothing()), std::nullopt));
    return manifest;
  }
};

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

TEST_F(StoreTest, LeavesOtherFoldersAlone) {
  Scratch::Put("store/mine", "precious");
  const auto made = Store::OpenOrCreate(At("store"), {});
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, Errc::kBusy);
  EXPECT_EQ(Contents("store").size(), 1U);
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
  // Given up too, it does not let the first one come back.
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
  // A manifest that cannot be read does not hide what a recovery says.
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
  manifest.catalogue = exec::DigestOf(os::AsBytes(dialect::Serialize(Nothing())));
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
    last.catalogue = exec::DigestOf(os::AsBytes(dialect::Serialize(Nothing())));
    ASSERT_TRUE(store.Commit({i, i * 10, false}, ToText(last), dialect::Serialize(Nothing()),
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

/// Members of a source in memory.
class Memory final : public exec::ByteSource {
 public:
  explicit Memory(std::vector<std::string> texts) : members(std::move(texts)) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    std::memcpy(out.data(), members[member].data() + offset, out.size());
    reads += out.size();
    return {};
  }
  std::uint64_t bytes_read() const override { return reads; }
  std::uint64_t files_read() const override { return 1; }
  std::atomic<std::uint64_t> reads = 0;
  std::vector<std::string> members;
};

/// Two blobs: one of three units, one small, each a copy of a member.
class WriteBlobsTest : public StoreTest {
 protected:
  WriteBlobsTest() {
    std::string large(2 * plan::kUnitBytes + 100, '\0');
    for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 7 + i / 999);
    bytes_ = std::make_unique<Memory>(std::vector<std::string>{large, "small"});
    map_.files = {"source"};
    for (const std::string& member : bytes_->members) {
      map_.members.push_back({.file = 0,
                              .offset = 0,
                              .bytes = member.size(),
                              .crc32 = Crc32(os::AsBytes(member)),
                              .name = "m"});
      plan::OutputFile file;
      file.path = "blob";
      file.bytes = member.size();
      plan::Payload payload;
      payload.kind = plan::Payload::Kind::kMember;
      payload.bytes = member.size();
      payload.member = static_cast<std::uint32_t>(target_.files.size());
      file.payloads.push_back(payload);
      target_.files.push_back(std::move(file));
    }
  }

  Result<std::vector<BlobResult>> Write(const Store& store, std::vector<BlobJob> jobs,
                                        bool zstd = false, bool look = false) {
    const auto plan = plan::Plan::Make(map_, target_);
    EXPECT_TRUE(plan);
    std::filesystem::create_directories(At("store/incoming-x"));
    exec::SourceSums sums(map_.members.size());
    NullSink sink;
    bytes_->reads = 0;
    BlobOptions options;
    options.incoming = At("store/incoming-x");
    options.zstd = zstd;
    options.look_for_known = look;
    options.threads = 2;
    auto done = WriteBlobs(store, *plan, *bytes_, jobs, options, &sums, sink);
    std::filesystem::remove_all(At("store/incoming-x"));
    return done;
  }

  std::unique_ptr<Memory> bytes_;
  layout::ShardMap map_;
  plan::Target target_;
};

TEST_F(WriteBlobsTest, NamesContentByItsTreeDigest) {
  const Store store = Make();
  for (const bool zstd : {false, true}) {
    std::filesystem::remove_all(At("store/blobs"));
    std::filesystem::create_directories(At("store/blobs"));
    const auto done = Write(store, {{0, {}}, {1, {}}}, zstd);
    ASSERT_TRUE(done) << done.error().message;
    const std::string& large = bytes_->members[0];
    std::vector<exec::Digest> units;
    for (std::size_t at = 0; at < large.size(); at += plan::kUnitBytes) {
      units.push_back(exec::DigestOf(os::AsBytes(large.substr(at, plan::kUnitBytes))));
    }
    const BlobRef& ref = (*done)[0].ref;
    EXPECT_EQ(ref.digest, exec::FileDigest(units, exec::DigestOf({})));
    EXPECT_EQ(ref.crc32, Crc32(os::AsBytes(large)));
    EXPECT_EQ(ref.head, units[0]);
    EXPECT_EQ(ref.bytes, large.size());
    EXPECT_EQ(ref.zstd, zstd);
    const std::vector<std::uint64_t> payloads{large.size()};
    EXPECT_TRUE(VerifyBlob(store.BlobPath(ref), ref, payloads));
    EXPECT_EQ(std::filesystem::file_size(store.BlobPath(ref)) == large.size(), !zstd);
    EXPECT_EQ(store.ListBlobs()->size(), 2U);
  }
}

TEST_F(WriteBlobsTest, UnchangedContentIsHashedOnce) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}, {1, {}}});
  ASSERT_TRUE(first);
  const auto before = Contents("store/blobs");
  const auto again = Write(store, {{0, (*first)[0].ref}, {1, (*first)[1].ref}});
  ASSERT_TRUE(again);
  EXPECT_TRUE((*again)[0].unchanged);
  EXPECT_EQ((*again)[0].written_bytes, 0U);
  EXPECT_EQ(bytes_->reads, bytes_->members[0].size() + bytes_->members[1].size());
  EXPECT_EQ(Contents("store/blobs"), before);
}

TEST_F(WriteBlobsTest, AChangeBehindTheFirstUnitIsSeen) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}});
  ASSERT_TRUE(first);
  bytes_->members[0].back() = static_cast<char>(bytes_->members[0].back() ^ 1);
  map_.members[0].crc32 = Crc32(os::AsBytes(bytes_->members[0]));
  const auto again = Write(store, {{0, (*first)[0].ref}});
  ASSERT_TRUE(again);
  EXPECT_FALSE((*again)[0].unchanged);
  EXPECT_NE((*again)[0].ref.digest, (*first)[0].ref.digest);
  EXPECT_EQ(Get("store" + store.BlobPath((*again)[0].ref).substr(At("store").size())),
            bytes_->members[0]);
}

TEST_F(WriteBlobsTest, KnownContentThatIsGoneIsWrittenAgainIfLookedFor) {
  const Store store = Make();
  const auto first = Write(store, {{0, {}}});
  ASSERT_TRUE(first);
  std::filesystem::remove(store.BlobPath((*first)[0].ref));
  const auto trusted = Write(store, {{0, (*first)[0].ref}});
  ASSERT_TRUE(trusted);
  EXPECT_TRUE((*trusted)[0].unchanged);
  EXPECT_FALSE(std::filesystem::exists(store.BlobPath((*first)[0].ref)));
  const auto again = Write(store, {{0, (*first)[0].ref}}, false, true);
  ASSERT_TRUE(again);
  EXPECT_FALSE((*again)[0].unchanged);
  EXPECT_EQ((*again)[0].ref.digest, (*first)[0].ref.digest);
  EXPECT_TRUE(std::filesystem::exists(store.BlobPath((*first)[0].ref)));
}

TEST_F(WriteBlobsTest, PassedMembersAreComparedWithTheirChecksum) {
  const Store store = Make();
  map_.members[1].crc32 = 1;
  const auto done = Write(store, {{1, {}}});
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Errc::kBadInput);
  EXPECT_TRUE(store.ListBlobs()->empty());
}

TEST_F(WriteBlobsTest, FindBlobTellsSizes) {
  const Store store = Make();
  const auto done = Write(store, {{1, {}}});
  ASSERT_TRUE(done);
  const BlobRef& ref = (*done)[0].ref;
  std::ofstream(store.BlobPath(ref), std::ios::app) << "x";
  const auto found = FindBlob(store.BlobPath(ref), ref);
  ASSERT_FALSE(found);
  EXPECT_NE(found.error().message.find("5 bytes expected, found 6"), std::string::npos);
  EXPECT_FALSE(store.Find(ref.digest, 5));
}

}  // namespace
}  // namespace shardwright::pec

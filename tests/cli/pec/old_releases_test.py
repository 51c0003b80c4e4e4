#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models with experts in the form of DeepSpeed before 0.19.3: no lists of names and
shapes, before 0.14.5 slices of a part of the experts only. They give the same as newer ones, or an
error that names the missing part.

Usage: old_releases_test.py BIN [MPIEXEC]
"""

import shutil
import zipfile

import stores  # first: it adds the folder of the next one to the path
import ptfile
from stores import Given, Stores, moe_checkpoint

OLD = (0, 12, 6)      # slices of the first 1/ep
MIDDLE = (0, 16, 9)   # slices of all
BIAS = {"0.bias": (7,), "2.bias": (6,)}


class Old(Stores):
    def make(self, folder="old", iteration=3, **options):
        """\\returns the checkpoint's folder"""
        moe_checkpoint.write(self.work / folder, moe_checkpoint.Model(**options), iteration)
        return self.work / folder

    def shard(self, folder, rank=0):
        return folder / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def change(self, folder, change):
        """Changes the slices of the experts on all ranks."""
        for path in sorted((folder / "global_step3").glob("zero_pp_rank_*")):
            shard = ptfile.load(path)
            change(shard["optimizer_state_dict"]["param_slice_mappings"][1])
            ptfile.save(path, shard)

    def damage(self, path):
        """Turns the sign of every number in the payloads of a file, and leaves their checksums."""
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            payloads = [archive.read(name) for name in archive.namelist() if "/data/" in name]
        for payload in payloads:
            if len(payload) > 16:
                at = content.index(payload)
                content[at + 3:at + len(payload):4] = bytes(byte ^ 128 for byte in payload[3::4])
        path.write_bytes(content)

    def refuse(self, folder, code, *words):
        self.run_tool("ucp-load", folder, self.work / "out", "--target", "ep=1", code=code)
        for word in words:
            self.assertIn(word, self.stderr)
        self.assertFalse((self.work / "out").exists())


class OldReleases(Old):
    def same_as_new(self, **options):
        """The output for an old release is the one that a new release would have written."""
        for release in (MIDDLE, OLD):
            with self.subTest(release=release, **options):
                old = self.make("old", release=release, **options)
                new = self.make("new", **options)
                self.run_tool("ucp-load", "--check", new, old)
                self.run_tool("ucp-load", old, self.work / "out", "--target", "ep=1,dp=3,zero=1")
                self.run_tool("ucp-load", "--check", new, self.work / "out")
                self.run_tool("ucp-union", old, self.work / "atoms")
                self.run_tool("ucp-load", "--check", new, self.work / "atoms")
                for folder in ("old", "new", "out", "atoms"):
                    shutil.rmtree(self.work / folder)

    def test_they_hold_what_new_ones_hold(self):
        self.same_as_new()
        self.same_as_new(ep=1)
        self.same_as_new(ranks=4, dtype="bf16")
        self.same_as_new(ep=4, ranks=4, layers=1)
        self.same_as_new(ep=4, ranks=8, layers=3, expert=BIAS)
        self.same_as_new(ranks=4, expert=BIAS, frozen=("0.bias",))

    def test_what_is_not_trained_is_told_by_its_name(self):
        tensors = {"blocks.0.scale": (3,), "blocks.1.table": (2, 5)}
        self.same_as_new(buffers=tensors)
        old = self.make(release=MIDDLE, buffers={**tensors, "blocks.1.skip.weight": (4, 4)})
        listed = self.run_tool("ucp-extract", old, "--list")
        kinds = {row["name"]: row["kind"] for row in listed["parameters"]}
        self.assertEqual(kinds["blocks.0.scale"], "buffer")
        self.assertEqual(kinds["blocks.1.skip.weight"], "frozen")
        self.assertIn("3 tensors are not trained, and there is no buffer_names", self.stderr)

    def test_a_tied_matrix_is_known_by_its_checksum(self):
        old = self.make(release=MIDDLE)
        path = old / "global_step3" / "mp_rank_00_model_states.pt"
        states = ptfile.load(path)
        emb = states["module"]["emb.weight"]
        storage = emb.args[0]
        states["module"]["head.weight"] = ptfile.tensor("FloatStorage", storage.data, (11, 6), 4)
        ptfile.save(path, states)
        listed = self.run_tool("ucp-extract", old, "--list")
        kinds = {row["name"]: row["kind"] for row in listed["parameters"]}
        self.assertEqual(kinds["head.weight"], "tied to emb.weight")

    def test_configuration_is_taken_from_the_shards(self):
        old = self.make(release=MIDDLE)
        self.run_tool("ucp-load", old, self.work / "out", "--target", "ep=1,zero=1")
        states = ptfile.load(self.work / "out" / "global_step3" / "mp_rank_00_model_states.pt")
        self.assertEqual(states["ds_config"]["zero_optimization"]["stage"], 1)
        self.assertEqual(states["ds_version"], "0.16.9")

    def test_configuration_in_a_file_of_its_own(self):
        for release in (MIDDLE, OLD):
            old = self.make(f"old-{release[1]}", release=release, ranks=4, config="ds.json")
            new = self.make(f"new-{release[1]}", ranks=4)
            self.run_tool("ucp-load", "--check", new, old)
            self.assertIn("ds_config is not in the files", self.stderr)

    def test_another_order_than_that_of_the_model(self):
        """Only the weights can show properties that the slices leave open."""
        def layers_swapped(experts):
            told = len(experts) // 2
            return experts[:told] + experts[told + 2:] + experts[told:told + 2]

        old = self.make(release=OLD, order=layers_swapped)
        self.refuse(old, 9, "its master weights are not at the inferred position",
                    "DeepSpeed before 0.14.5 records the positions of only some")
        shutil.rmtree(old)
        old = self.make(release=OLD, order=lambda experts: experts[::-1])
        self.refuse(old, 9, "is not in model order", "0.14.5 or newer")
        shutil.rmtree(old)
        old = self.make(release=MIDDLE, order=layers_swapped)
        new = self.make("new", order=layers_swapped)
        self.run_tool("ucp-load", "--check", new, old)

    def test_damage_is_not_taken_for_another_order(self):
        expert = "layer_1_expert_1_mp_rank_00_model_states.pt"
        for name in (self.shard(self.make(release=OLD)).name, expert):
            self.damage(self.work / "old" / "global_step3" / name)
            self.refuse(self.work / "old", 4, name + ": data/", "CRC-32")
            shutil.rmtree(self.work / "old")
            self.make(release=OLD)

    def test_sizes_that_leave_two_ways(self):
        """Of two matrices of one shape one is frozen, and no slice states which."""
        both = {"4.weight": (6, 7)}
        old = self.make(release=OLD, ep=4, ranks=4, layers=1, expert=both, frozen=("4.weight",))
        self.refuse(old, 9, "list only some of the experts' parameters", "2 selections of the following parameters")

    def test_slices_that_contradict_the_files(self):
        def more(slices):
            address = next(iter(slices.values()))
            address.state["numel"] += 1

        def unknown(slices):
            name = next(iter(slices))
            slices[name.replace("0.weight", "9.weight")] = slices.pop(name)

        def less(slices):
            slices.popitem()

        for change, release, code, words in (
                (more, OLD, 4, ("42 elements in its file, 43 in param_slice_mappings",)),
                (more, MIDDLE, 4, ("param_slice_mappings",)),
                (unknown, OLD, 4, ("9.weight", "no expert file contains it")),
                (unknown, MIDDLE, 4, ("9.weight", "its weight is in no file")),
                (less, OLD, 9, ("do not fit its sizes",)),
                (less, MIDDLE, 9, ("do not fit its sizes",))):
            with self.subTest(change=change.__name__, release=release):
                old = self.make(release=release)
                self.change(old, change)
                self.refuse(old, code, *words)
                shutil.rmtree(old)

    def test_ranks_that_tell_different_things(self):
        old = self.make(release=MIDDLE)
        shard = ptfile.load(self.shard(old, 1))
        shard["optimizer_state_dict"]["param_slice_mappings"][1].popitem()
        ptfile.save(self.shard(old, 1), shard)
        self.refuse(old, 4, "param_slice_mappings of ranks 0 and 1 differ")

    def test_a_missing_expert(self):
        for expert in (1, 3):
            old = self.make(release=OLD)
            name = f"layer_1_expert_{expert}_mp_rank_00_model_states.pt"
            (old / "global_step3" / name).unlink()
            self.refuse(old, 3, name)
            shutil.rmtree(old)

    def test_partial_checkpoints(self):
        model = {"ranks": 4, "expert": BIAS, "release": OLD}
        for iteration in (3, 4, 5):
            self.make("old", iteration, **model)
            self.save(iteration, "--k", 1, source=self.work / "old")
        self.run_tool("pec-save", "check", self.store)
        self.restore("out", "--target", "ep=1,dp=2")
        self.same("out", 5, self.report["versions"],
                  moe_checkpoint.Model(ranks=4, expert=BIAS))
        self.restore("again", "--at", 4)
        self.same("again", 4, self.report["versions"], moe_checkpoint.Model(ranks=4, expert=BIAS))


class Ranks(Old):
    """Ranks prove together what they had to infer."""

    def setUp(self):
        super().setUp()
        if Given.mpiexec is None:
            self.skipTest("no MPI launcher given")

    def test_the_number_of_ranks_does_not_show(self):
        launcher = (Given.mpiexec, "--oversubscribe", "-n", 3)
        old = self.make(release=OLD, ranks=4)
        new = self.make("new", ranks=4)
        self.run_tool("ucp-load", "--check", new, old, launcher=launcher)
        self.run_tool("ucp-load", old, self.work / "out", "--target", "ep=1", launcher=launcher)
        self.run_tool("ucp-load", "--check", new, self.work / "out")
        self.damage(self.shard(old))
        self.run_tool("ucp-load", "--check", new, old, launcher=launcher, code=4)
        self.assertIn(self.shard(old).name + ": data/", self.stderr)


if __name__ == "__main__":
    stores.main()

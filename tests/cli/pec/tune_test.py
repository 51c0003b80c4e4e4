#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save tune: numbers that follow from closed forms or from the papers, and measured bandwidths.

Usage: tune_test.py BIN
"""

import math
import subprocess

import stores
from stores import Given, Stores, environment


class Tune(Stores):
    def test_chooses_a_lossless_run(self):
        words = ["--iteration-time", 20, "--forward-backward", 6, "--snapshot-bandwidth", "200000000",
                 "--persist-bandwidth", "8000000000", "--restart-time", 30, "--plt-limit", 1e-9]
        result = self.run_tool("pec-save", "tune", *words, "--fault-rate", 0.05)
        self.assertEqual(result["best"], "gradient-log")
        replay = result["replay"]
        self.assertEqual((replay["k"], replay["expected_plt"]), (replay["k_persist"], 0))
        self.assertLess(replay["overhead_s"], result["full"]["overhead_s"])
        log = replay["log"]
        self.assertEqual(log["bytes"], 12 * 16 * 8393728 * 4)
        self.assertEqual(log["window"], replay["interval"] * math.ceil(16 / replay["k"]))
        self.assertAlmostEqual(log["stalls_s"], 1e5 * log["bytes"] / 16 / 2e8, 4)
        self.assertAlmostEqual(log["replays_s"], 5000 * log["replay_s"], 4)
        self.assertAlmostEqual(replay["overhead_s"], sum(
            (replay["stalls_s"], log["stalls_s"], log["replays_s"], replay["restarts_s"],
             replay["repeated_s"])), 3)
        self.assertIn(f"use shardwright.PartialCheckpoints(k={replay['k']}, every={replay['interval']}, "
                      "lossless=True, flags=[\"--policy\", \"gradient-log\"])", self.stdout)
        # For rare faults full checkpoints cost less.
        result = self.run_tool("pec-save", "tune", *words, "--fault-rate", 1e-4)
        self.assertEqual(result["best"], "full")
        self.assertIn("use --policy full every ", self.stdout)
        result = self.run_tool("pec-save", "tune", "--persist-bandwidth", "10MiB")
        self.assertIsNone(result["replay"])
        self.assertIn("the gradients of a rank take 256 MiB/s, storage allows 10.0 MiB/s", result["no_replay"])
        self.assertIn("no column REPLAY", self.stdout)

    def test_prints_the_model(self):
        rate, total, iteration_s, restart_s = 1e-3, 50000, 2.0, 100.0
        result = self.run_tool(
            "pec-save", "tune", "--fault-rate", rate, "--iterations", total, "--iteration-time",
            iteration_s, "--restart-time", restart_s, "--forward-backward", 1.25)
        for numbers in (result["chosen"], result["full"]):
            stall = max(0, numbers["snapshot_s"] - 1.25)
            interval = numbers["interval"]
            self.assertAlmostEqual(numbers["snapshot_s"],
                                   numbers["snapshot_bottleneck_bytes"] / 2**31, 9)
            self.assertAlmostEqual(numbers["persist_s"], numbers["bottleneck_bytes"] / 2**29, 9)
            self.assertAlmostEqual(numbers["stall_s"], stall, 9)
            self.assertGreaterEqual(interval * iteration_s, numbers["persist_s"])
            overhead = (stall * total / interval
                        + rate * total * (restart_s + interval * iteration_s / 2))
            self.assertAlmostEqual(numbers["overhead_s"], overhead, 6)
            self.assertAlmostEqual(
                numbers["stalls_s"] + numbers["restarts_s"] + numbers["repeated_s"], overhead, 6)
            self.assertAlmostEqual(numbers["overhead_per_iteration_s"],
                                   stall / interval + rate * interval * iteration_s / 2, 9)
            ettr = (1 / (1 + stall / (interval * iteration_s))
                    / (1 + (restart_s + interval * iteration_s / 2) * rate / iteration_s))
            self.assertAlmostEqual(numbers["ettr"], ettr, 9)
        self.assertEqual(result["full"]["k"], 16)
        self.assertEqual(result["full"]["expected_plt"], 0)
        by_k = result["bottleneck_bytes_by_k"]
        hides = [k for k in range(1, 17) if by_k[k - 1] <= 1.25 * 2**31]
        self.assertGreaterEqual(result["chosen"]["k"], max(hides, default=1))

    def test_compares_with_blocking_checkpoints_and_checkfreq(self):
        # Rank 0 saves two experts of both layers, and the non-expert modules.
        words = ["--nonexpert-params", "60,20x2", "--expert-params", "10", "--param-bytes", "1,2,4",
                 "--experts", 8, "--moe-layers", 2, "--ep", 4, "--dp", 8, "--fault-rate", 1e-3,
                 "--iteration-time", 2, "--forward-backward", 1.5, "--snapshot-bandwidth", "200",
                 "--persist-bandwidth", "50"]
        for zero, most in ((0, 4 * 70 + 700), (2, 4 * (10 + 60 / 2) + 100 + 75), (3, 4 * 35 + 88)):
            with self.subTest(zero=zero):
                result = self.run_tool("pec-save", "tune", *words, "--zero", zero)
                blocking, checkfreq = result["blocking"], result["checkfreq"]
                stall = most / 200 + most / 50
                hidden = most / 50 + min(most / 200, 1.5)
                self.assertEqual(blocking["bottleneck_bytes"], most)
                self.assertEqual(checkfreq["snapshot_bottleneck_bytes"], most)
                self.assertAlmostEqual(blocking["stall_s"], stall, 9)
                self.assertIn(blocking["interval"] - math.floor(math.sqrt(stall / 1e-3)), (0, 1))
                self.assertEqual((blocking["stall_reduction"], blocking["speed_up"]), (0, 1))
                self.assertAlmostEqual(checkfreq["stall_s"], max(0, most / 200 - 1.5), 9)
                interval = math.ceil(hidden / 2)
                while checkfreq["stall_s"] > 0.05 * interval * 2:
                    interval += 2
                self.assertEqual(checkfreq["interval"], interval)
                for numbers in (result["chosen"] or result["closest"], result["full"], checkfreq):
                    self.assertAlmostEqual(numbers["stall_reduction"], 1 - numbers["stall_s"] / stall, 9)
                    self.assertAlmostEqual(numbers["speed_up"], (2 + stall) / (2 + numbers["stall_s"]), 9)
                self.assertRegex(self.stdout, r"\nstall reduction +[0-9]+\.[0-9]{3} %")
        self.run_tool("pec-save", "tune", "--zero", 4, code=2)

    SMALL = ["--nonexpert-params", "60,20x2", "--expert-params", "10", "--param-bytes", "1,2,4", "--experts", 8,
             "--moe-layers", 2, "--ep", 4, "--dp", 8, "--fault-rate", 1e-3, "--snapshot-bandwidth", "200",
             "--persist-bandwidth", "50"]

    def test_compares_with_gemini(self):
        words = [*self.SMALL, "--iteration-time", 2, "--forward-backward", 1.5]
        self.assertIsNone(self.run_tool("pec-save", "tune", *words)["gemini"])
        self.assertNotIn("GEMINI", self.stdout)
        most = 4 * 70 + 700  # rank 0, as for CheckFreq
        result = self.run_tool("pec-save", "tune", *words, "--network-bandwidth", 100)
        gemini, checkfreq = result["gemini"], result["checkfreq"]
        self.assertEqual((gemini["bottleneck_bytes"], gemini["k"], gemini["expected_plt"]), (most, 8, 0))
        self.assertAlmostEqual(gemini["persist_s"], most / 100, 9)
        self.assertEqual((gemini["snapshot_s"], gemini["stall_s"]), (checkfreq["snapshot_s"], checkfreq["stall_s"]))
        self.assertIn(gemini["interval"] - math.floor(math.sqrt(gemini["stall_s"] / 1e-3)), (0, 1))
        self.assertAlmostEqual(gemini["stall_reduction"], 1 - gemini["stall_s"] / result["blocking"]["stall_s"], 9)
        self.assertRegex(self.stdout, r"FULL +(REPLAY +)?GEMINI +CHECKFREQ +BLOCKING\n")
        hidden = self.run_tool("pec-save", "tune", *words, "--interval", 1, "--network-bandwidth", 100)["gemini"]
        self.assertEqual(hidden["interval"], math.ceil((most / 100 + 1.5) / 2), "a copy ends before the next begins")

    def test_computes_the_time_of_the_passes(self):
        model = ["--gpu-flops", 1e4, "--sequence-length", 50, "--sequences", 2, "--top-k", 2, "--attention-layers", 3,
                 "--hidden-size", 16]
        result = self.run_tool("pec-save", "tune", *self.SMALL, *model)
        flops = 3 * 100 * (2 * (100 + 2 * 2 * 10) + 4 * 50 * 16 * 3)
        times = result["times"]
        self.assertAlmostEqual(times["computed"].pop("flops") / flops, 1, 12)
        self.assertAlmostEqual(times["computed"].pop("compute_s"), flops / 1e4, 6)
        self.assertEqual(times["computed"], {"reduce_s": 0, "exchange_s": 0})
        self.assertAlmostEqual(times["forward_backward_s"], flops / 1e4, 6)
        self.assertEqual(times["iteration_s"], times["forward_backward_s"])
        self.assertIn(f"computed  forward and backward pass {flops / 1e4:.3f} s: operations {flops / 1e4:.3f} s, ", self.stdout)
        # The same numbers as with the computed times as flags.
        by_flags = self.run_tool("pec-save", "tune", *self.SMALL, "--forward-backward", times["forward_backward_s"],
                                 "--iteration-time", times["iteration_s"])
        self.assertIsNone(by_flags["times"]["computed"])
        for name in ("chosen", "closest", "full", "checkfreq", "blocking"):
            self.assertEqual(result[name], by_flags[name], name)
        # Two GPUs for each of 8 ranks, one rank on each node: three of four experts are elsewhere.
        parallel = self.run_tool("pec-save", "tune", *self.SMALL, *model, "--tp", 2, "--ranks-per-node", 2, "--token-bytes", 8,
                                 "--gpu-bandwidth", 1000, "--network-bandwidth", 500, "--iteration-time", 400)
        computed = parallel["times"]["computed"]
        self.assertAlmostEqual(computed["flops"] / flops, 0.5, 12)
        self.assertAlmostEqual(computed["reduce_s"], 3 * 4 * 2 * 0.5 * 800 / 1000, 9)
        self.assertAlmostEqual(computed["exchange_s"], 2 * 4 * 2 * 0.75 * 800 / 2 / 500, 9)
        self.assertAlmostEqual(parallel["times"]["forward_backward_s"], sum(
            (computed["compute_s"], computed["reduce_s"], computed["exchange_s"])), 9)
        self.assertEqual(parallel["times"]["iteration_s"], 400)
        self.assertEqual(parallel["bottleneck_bytes_by_k"], [(b + 1) // 2 for b in result["bottleneck_bytes_by_k"]])
        self.assertEqual(parallel["blocking"]["bottleneck_bytes"], (result["blocking"]["bottleneck_bytes"] + 1) // 2)
        self.assertEqual((parallel["lost_share"], result["lost_share"]), (2 / 16, 1))

    def test_computes_the_time_of_a_store(self):
        self.save(3)
        model = stores.MODEL
        dense = sum(math.prod(shape) for shape in model.dense.values())
        expert = sum(math.prod(shape) for shape in model.expert.values())
        for k in (1, 4):
            result = self.run_tool("pec-save", "tune", self.store, "--gpu-flops", 1e9, "--sequence-length", 64, "--top-k", k)
            found = result["times"]["computed"]["flops"] / (6 * 64)
            self.assertAlmostEqual(found / (dense + model.layers * k * expert), 1, 9)
        self.run_tool("pec-save", "tune", self.store, "--gpu-flops", 1e9, "--sequence-length", 64, "--top-k", 5, code=2)
        self.assertIn("--top-k 5: a layer has 4 experts", self.stderr)

    def test_wrong_uses_of_the_computed_time(self):
        model = ["--gpu-flops", 1e4, "--sequence-length", 50]
        for words, said in ((["--sequence-length", 50], "--sequence-length requires --gpu-flops"),
                            (["--hidden-size", 50], "--hidden-size requires --gpu-flops"),
                            (["--gpu-flops", 1e4], "--gpu-flops requires --sequence-length"),
                            ([*model, "--forward-backward", 1], "--forward-backward cannot be combined with --gpu-flops"),
                            ([*model, "--attention-layers", 2], "--attention-layers requires --hidden-size"),
                            ([*model, "--network-bandwidth", 2], "requires --hidden-size or --token-bytes"),
                            ([*model, "--gpu-bandwidth", 2], "--gpu-bandwidth requires --tp above 1"),
                            ([*model, "--gpu-bandwidth", 2, "--tp", 2], "--gpu-bandwidth requires --attention-layers"),
                            ([*model, "--iteration-time", 1e-3],
                             "--iteration-time 0.001 s is shorter than the computed forward and backward pass of"),
                            (["--gpu-flops", 1e-9, "--sequence-length", 50], "takes more than 10^6 s"),
                            (["--tp", 1_000_000], "--tp 1000000: 8000000 ranks in all, at most 1000000 are supported")):
            with self.subTest(words=words):
                self.run_tool("pec-save", "tune", *self.SMALL, *words, code=2)
                self.assertIn(said, " ".join(self.stderr.split()))

    def test_at_scale(self):
        # Plans for all 4096 values of K would take minutes.
        result = self.run_tool("pec-save", "tune", "--experts", 4096, "--moe-layers", 24, "--dp", 4096,
                               "--ep", 4096)
        by_k = result["bottleneck_bytes_by_k"]
        self.assertEqual(len(by_k), 4096)
        # The largest module is on a rank without experts, then on one with an expert of each layer.
        self.assertEqual(by_k[0], 14 * 52428800)
        self.assertEqual(by_k[-1], 14 * (52428800 + 24 * 8393728))

    def test_the_published_share(self):
        # One of 16 experts with all master weights: 42 % of GPT-350M-16E.
        chosen = self.run_tool("pec-save", "tune", "--keep", "master", "--snapshot-bandwidth",
                               "1MB", "--ep", 8)["closest"]
        self.assertEqual((chosen["k"], chosen["k_persist"]), (1, 1))
        self.assertEqual(round(100 * chosen["bytes"] / chosen["full_bytes"]), 42)
        self.assertGreater(chosen["stall_s"], 0)

    def test_warns_when_nothing_is_enough(self):
        result = self.run_tool("pec-save", "tune", "--fault-rate", 0.01, "--interval", 5000,
                               "--iterations", 100000, "--snapshot-bandwidth", "100MB")
        self.assertIsNone(result["chosen"])
        self.assertEqual(result["best"], "full")
        self.assertIn("no column CHOSEN: no K is within the limit of 3.750 % lost tokens", self.stdout)
        self.assertIn(f"\nuse --policy full every {result['full']['interval']} iterations\n", self.stdout)
        result = result["closest"]
        k, interval = result["k"], result["interval"]
        self.assertFalse(result["plt_in_limit"])
        phases = math.ceil(16 / result["k_persist"])
        loss = interval * (phases - 1) * (1 - result["k_persist"] * phases / 32)
        self.assertEqual(k, result["k_persist"])
        self.assertAlmostEqual(result["expected_plt"], 0.01 * loss, 9)
        self.assertIn("expected PLT exceeds", self.stderr)

    def test_measures(self):
        folder = self.work / "where"
        folder.mkdir()
        result = self.run_tool("pec-save", "tune", "--measure", folder)
        measured, chosen = result["measured"], result["chosen"]
        self.assertEqual(measured["bytes"], 256 << 20)
        for level, bottleneck in (("persist", "bottleneck_bytes"),
                                  ("snapshot", "snapshot_bottleneck_bytes")):
            self.assertGreater(measured[f"{level}_bytes_per_s"], 1e6)
            self.assertAlmostEqual(chosen[f"{level}_s"] * measured[f"{level}_bytes_per_s"],
                                   chosen[bottleneck], delta=1)
        self.assertRegex(self.stdout, r"measured  persist .*/s, snapshot .*/s of a rank")
        self.assertEqual(self.report["bytes_written"], 256 << 20)
        self.assertIsNone(self.run_tool("pec-save", "tune")["measured"])
        for fault, code in (("write:3:kill", -9), ("write:3:enospc", 7), ("sync:1:eio", 7),
                            ("write:5:term", 75), ("unlink:1:kill", -9)):
            done = subprocess.run([Given.bin / "pec-save", "tune", "--measure", folder],
                                  env=environment() | {"SHARDWRIGHT_FAULT": fault},
                                  capture_output=True, timeout=1200, check=False)
            self.assertEqual(done.returncode, code, done.stderr)
            left = [path.stat().st_size for path in folder.iterdir()]
            # Only a kill before the file loses its name leaves it, with nothing in it.
            self.assertEqual(left, [0] if fault == "unlink:1:kill" else [], fault)
        self.run_tool("pec-save", "tune", "--measure", self.work / "nowhere", code=3)
        for flag in ("--persist-bandwidth", "--snapshot-bandwidth"):
            self.run_tool("pec-save", "tune", "--measure", folder, flag, "1GB", code=2)
            self.assertIn(f"--measure cannot be combined with {flag}", self.stderr)
        self.run_tool("pec-save", "simulate", self.work / "t.jsonl", "--measure", folder, code=2)


if __name__ == "__main__":
    stores.main()

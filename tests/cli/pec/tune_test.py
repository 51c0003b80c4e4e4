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

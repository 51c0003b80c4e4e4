#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save simulate: figures that follow from closed forms or from the papers, written files, and usage errors.

Usage: planning_test.py BIN
"""

import csv
import json
import os
import pathlib
import xml.etree.ElementTree as ElementTree

import stores
from stores import ITERATIONS, Stores

# 700 bytes in addition to the experts, 70 each: weights 1, master 2, moments 4 bytes.
SMALL = ["--nonexpert-params", "60,20x2", "--expert-params", "10", "--param-bytes", "1,2,4"]


class Planning(Stores):
    def trace(self, layers, experts, iterations, tokens=lambda i, m, e: 10):
        path = self.work / "trace.jsonl"
        with path.open("w", encoding="utf-8") as out:
            for i in range(1, iterations + 1):
                table = [[tokens(i, m, e) for e in range(experts)] for m in range(layers)]
                out.write(json.dumps({"iteration": i, "tokens": table}) + "\n")
        return path

    def faults(self, text):
        path = self.work / "faults.txt"
        path.write_text(text, encoding="utf-8")
        return path

    def simulate(self, *words, **options):
        return self.run_tool("pec-save", "simulate", *words, **options)

    def test_the_published_plt(self):
        result = self.simulate(self.trace(2, 8, 1280), "--faults", self.faults("640 # one\n"),
                               "--interval", 32, "--policy", "sequential", "--k", 2)
        self.assertEqual(len(result["rows"]), 1)
        self.assertAlmostEqual(result["rows"][0]["plt"], 0.0375, 12)
        self.assertEqual(result["rows"][0]["checkpoints"], 40)
        self.assertEqual(result["best"], 0)

    def test_too_few_faults_decide_nothing(self):
        trace = self.trace(2, 8, 200)
        result = self.simulate(trace, "--faults", 0)
        self.assertIsNone(result["best"])
        self.assertIn("0 faults and 20 checkpoints are too few, at least 3 and 5 are needed", result["no_best"])
        self.assertIn(f"\nno recommendation: {result['no_best']}\n", self.stdout)
        self.assertNotIn("harms accuracy", self.stderr)
        # Faults of a file are meant, however few they are.
        result = self.simulate(trace, "--faults", self.faults("99\n"))
        self.assertIsNone(result["no_best"])
        self.assertIn("\nleast cost with PLT up to 3.75 %: ", self.stdout)

    def test_rows_above_the_limit_are_named(self):
        words = [self.trace(2, 8, 40), "--keep", "master", "--faults", self.faults("23\n"), "--plt-limit", 0.01]
        result = self.simulate(*words, "--interval", 5, "--policy", "sequential")
        # At K = 4 half of the experts are 5 iterations old at the fault.
        self.assertAlmostEqual(result["rows"][-1]["plt"], 0.5 * 5 / 40, 12)
        self.assertIsNone(result["best"])
        self.assertEqual(result["no_best"], "every row has lost more than 1.00 % of the tokens (--plt-limit)")
        self.assertIn("more than 1.00 % of the tokens are lost (--plt-limit), which harms accuracy, in 3 of 3 rows: "
                      "sequential with K 1, sequential with K 2, sequential with K 4\n", self.stderr)
        # Also if another row is within the limit, and if the simulation is too short for a recommendation.
        result = self.simulate(*words, "--interval", 5)
        self.assertEqual(result["rows"][result["best"]]["policy"], "full")
        self.assertIn("in 12 of 13 rows: sequential with K 1, ", self.stderr)
        result = self.simulate(*words, "--interval", 10)
        self.assertIn("1 fault and 4 checkpoints are too few", result["no_best"])
        self.assertIn("in 12 of 13 rows: sequential with K 1, ", self.stderr)

    def test_every_policy_and_k(self):
        trace = self.trace(2, 8, 40, lambda i, m, e: 1 + (e * e + 3 * i + m) % 17)
        result = self.simulate(trace, *SMALL, "--interval", 5, "--faults", self.faults("23 1\n37"),
                               "--ranks-per-node", 2)
        self.assertEqual([(r["policy"], r["k"]) for r in result["rows"]],
                         [(p, k) for p in ("sequential", "load-aware", "budget", "budget-global")
                          for k in (1, 2, 4)] + [("full", 8)])
        full = 700 + 16 * 70
        self.assertEqual(result["full_bytes"], full)
        for row in result["rows"]:
            # The first checkpoint has all; iterations 21 to 23 and 36 to 37 are run again.
            self.assertEqual(row["checkpoints"], 8)
            self.assertEqual(row["bytes"], full + 7 * (700 + 2 * row["k"] * 70))
            self.assertEqual(row["repeated_iterations"], 5)
            self.assertGreaterEqual(row["bottleneck_bytes"], row["bound_bytes"])
            self.assertAlmostEqual(row["mlt_sum"], 2 * row["plt"])
            self.assertAlmostEqual(row["overhead_s"], 2 * 300 + 5 * 1.5, 6)
        last = result["rows"][-1]
        self.assertEqual((last["plt"], last["risk_max"]), (0, 0))
        for row in result["rows"][:-1]:
            self.assertGreater(row["plt"], 0)
        lines = self.stdout.splitlines()
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertTrue(any(line.split()[:2] == ["budget-global", "4"] for line in lines))

    def test_replay_beside_the_other_policies(self):
        words = [self.trace(2, 8, 40), "--expert-params", 1000, "--nonexpert-params", "100",
                 "--interval", 4, "--faults", self.faults("22 0\n31\n"), "--ranks-per-node", 2]
        result = self.simulate(*words, "--k", 2, "--gradients")
        rows = {(r["policy"], r.get("log", {}).get("rule")): r for r in result["rows"]}
        plain, row, full = rows["sequential", None], rows["gradient-log", "replay"], rows["full", None]
        self.assertGreater(plain["plt"], 0)
        self.assertEqual((row["plt"], row["mlt_sum"], row["risk_max"]), (0, 0, 0))
        for key in ("bytes", "bottleneck_bytes", "checkpoints", "repeated_iterations", "stall_s"):
            self.assertEqual(row[key], plain[key])
        # Float32 gradients from the first checkpoint on, of 12 of 16 experts, for the next checkpoint has 4; 5 iterations come
        # again. Of all experts in the intervals after faults, and where a fault leaves the agents.
        log = row["log"]
        self.assertEqual(log["bytes"], 16 * 4000 * (4 + 4 + 3) + 12 * 4000 * (36 + 5 - 11))
        self.assertEqual((log["window"], log["computed_only"]), (16, False))
        self.assertAlmostEqual(log["stall_s"], 64000 / 8 / 2**31, 12)
        self.assertEqual(row["memory_bytes"], plain["memory_bytes"] + 2 * 64000)
        self.assertEqual(full["memory_bytes"], 3 * result["full_bytes"])
        # 16 iterations of the log by every rank, those of two intervals after faults whole; experts are 0 to 12 iterations old, on average 6.
        used = 6 * 64000 / 8
        replay = (8 * 64000 + 8 * 48000 + used) / 2**29 + used / 4 / 4e8
        self.assertAlmostEqual(row["recovery_s"], 300 + replay, 9)
        self.assertEqual(plain["recovery_s"], 300)
        # A row that is only computed: 4 gradients are smaller than the state, 8 bytes of 14.
        least, printed = rows["gradient-log", "least"], rows["gradient-log", "algorithm-3"]
        self.assertEqual((least["plt"], printed["plt"]), (0, 0))
        self.assertEqual((printed["log"]["bytes"], printed["bytes"]), (0, full["bytes"]))
        self.assertEqual(least["log"]["bytes"], 9 * 4 * 16 * 2000)
        self.assertIsNone(least["recovery_s"])
        self.assertIn("* computed only", self.stdout)
        self.assertFalse(result["rows"][result["best"]].get("log", {}).get("computed_only"))
        self.assertLessEqual(max(map(len, self.stdout.splitlines())), 100)
        # The page has rows that are only computed in its table alone.
        page = self.work / "page.html"
        self.simulate(*words, "--k", 2, "--gradients", "--html", page)
        text = "".join(self.page_of(page).itertext())
        # In the chart of largest shares its point is that of sequential.
        self.assertEqual((text.count("gradient-log, least"), text.count("gradient-log, K 2")), (1, 4))
        # Flags that a lossless run rejects.
        kept = self.simulate(*words, "--k", 2, "--keep", "master")["rows"]
        self.assertNotIn("gradient-log", [r["policy"] for r in kept])
        self.assertIn("no row gradient-log: ", self.stdout)
        for more, said in ((["--keep", "moments"], "--keep"), (["--partial-start"], "must have all experts"),
                           (["--param-bytes", "2,0,4"], "float32"),
                           (["--k", 2, "--k-persist", 1], "one K"),
                           (["--gradient-budget", 3], "--gradients")):
            self.simulate(*words, "--policy", "gradient-log", *more, code=2)
            self.assertIn(said, self.stderr)

    def test_an_interval_at_which_full_checkpoints_are_smaller(self):
        trace = self.trace(2, 8, 48)
        for interval in (1, 2, 3, 4, 6):
            words = ["--expert-params", 1000, "--nonexpert-params", "0", "--interval", interval]
            rows = {r["policy"]: r for r in self.simulate(trace, *words, "--faults", 0, "--k", 1)["rows"]}
            log = self.run_tool("pec-save", "plan", "--experts", 8, "--moe-layers", 2, *words,
                                "--policy", "gradient-log")["log"]
            self.assertEqual(log["pays_up_to"], 3)  # 14 / 4 = 3.5
            # The first checkpoint is full in both.
            written = rows["gradient-log"]["bytes"] + rows["gradient-log"]["log"]["bytes"]
            self.assertEqual(written <= rows["full"]["bytes"], interval <= log["pays_up_to"], interval)

    def test_kept_components_and_two_levels(self):
        words = [self.trace(2, 8, 40), *SMALL, "--interval", 5, "--faults", 0, "--partial-start",
                 "--keep", "master", "--k", 4, "--k-persist", 2, "--policy", "sequential"]
        row = self.simulate(*words)["rows"][0]
        self.assertEqual(row["bytes"], 8 * (700 + 16 * 20 + 2 * 2 * 50))
        self.assertEqual(row["snapshot_bytes"], 8 * (700 + 16 * 20 + 2 * 4 * 50))
        self.assertEqual(row["plt"], 0)

    def test_csv_holds_the_rows(self):
        trace, out = self.trace(1, 4, 30), self.work / "rows.csv"
        words = [trace, "--faults", 0.1, "--csv", out]
        result = self.simulate(*words)
        with out.open(encoding="utf-8") as text:
            rows = list(csv.DictReader(text))
        self.assertEqual(len(rows), len(result["rows"]))
        for line, row in zip(rows, result["rows"]):
            for key in ("k", "bytes", "bottleneck_bytes", "checkpoints", "repeated_iterations"):
                self.assertEqual(int(line[key]), row[key])
            for key in ("plt", "mlt_avg", "risk_mean", "stall_s", "overhead_s"):
                self.assertAlmostEqual(float(line[key]), row[key], 5)
            self.assertEqual(line["policy"], row["policy"])
        before = out.read_bytes()
        self.simulate(*words, "--seed", 3, code=6)
        self.assertEqual(out.read_bytes(), before)
        self.simulate(*words, "--seed", 3, "--interval", 3, "--force")
        self.assertNotEqual(out.read_bytes(), before)

    def page_of(self, path):
        """The page as a tree: it is well-formed, runs nothing and asks for nothing."""
        text = path.read_text(encoding="utf-8")
        for word in ("http:", "https:", "//", "<script", "<link", "url(", "@import", "src="):
            self.assertNotIn(word, text.lower())
        self.assertIn("default-src 'none'", text)
        return ElementTree.fromstring(text)

    def check_page(self, page, result):
        """The table has the numbers of the report, and every chart a mark for each of its rows."""
        rows = page.findall(".//tbody/tr")
        self.assertEqual(len(rows), len(result["rows"]))
        for index, (cells, row) in enumerate(zip(rows, result["rows"])):
            name, *numbers = cells.findall("td")
            chosen = index == result["best"]
            self.assertEqual(cells.get("class"), "chosen" if chosen else None)
            policy = "dynamic K" if "dynamic" in row else row["policy"]
            self.assertEqual(name.text, policy + (" (chosen)" if chosen else ""))
            exact = [number.get("title") for number in numbers]
            self.assertEqual(exact[:4], [str(row[key]) for key in (
                "k", "bytes", "bottleneck_bytes", "bound_bytes")])
            for text, key in zip(exact[4:], ("plt", "mlt_sum", "risk_mean", "risk_max", "stall_s",
                                             "overhead_s")):
                self.assertAlmostEqual(float(text), row[key], 5)
            self.assertEqual(exact[10:12], [str(row.get("log", {}).get("bytes", 0)),
                                            str(row["memory_bytes"])])
            self.assertAlmostEqual(float(exact[12]), row["recovery_s"], 5)
        charts = page.findall(".//svg[@class='curves']")
        self.assertEqual(len(charts), 6)
        for chart in charts:
            for curve in chart.iter("polyline"):
                for pair in curve.get("points").split():
                    x, y = map(float, pair.split(","))
                    self.assertTrue(0 <= x <= 540 and 0 <= y <= 290, pair)
        return charts

    def test_page_shows_the_rows(self):
        trace = self.trace(2, 8, 40, lambda i, m, e: 1 + (e * e + 3 * i + m) % 17)
        out, table = self.work / "page.html", self.work / "rows.csv"
        words = [trace, *SMALL, "--interval", 5, "--faults", self.faults("23 1\n37"),
                 "--ranks-per-node", 2, "--html", out]
        result = self.simulate(*words, "--dynamic-k", 0.02, "--plt-limit", 0.3)
        self.assertNotIn("dynamic", result["rows"][result["best"]])
        charts = self.check_page(self.page_of(out), result)
        # Marks of the PLT chart: height is in proportion to the share, from the axis up.
        marks = {mark.find("title").text: mark for mark in charts[2].iter()
                 if mark.find("title") is not None and mark.tag in ("circle", "polygon")}
        ticks = [line for line in charts[2].iter("line") if line.get("class") == "axis"]
        zero = float(ticks[0].get("y1"))
        heights = []
        for row in result["rows"]:
            for text, mark in marks.items():
                name = f"{row['policy']}, K {row['k']}:"
                if mark.tag == "circle" and "dynamic" not in row and text.startswith(name):
                    heights.append((zero - float(mark.get("cy"))) / row["plt"])
        self.assertEqual(len(heights), 3)
        for height in heights:
            self.assertAlmostEqual(height / heights[0], 1, 1)
        # Two faults in the chart of tokens at risk, and the ring around the row that was chosen.
        self.assertEqual(sum(line.get("class") == "event" for line in charts[4].iter("line")), 2)
        self.assertEqual(sum(ring.get("class") == "ring" for chart in charts
                             for ring in chart.iter("circle")), 5)
        before = out.read_bytes()
        self.simulate(*words, "--csv", table, code=6)
        self.assertEqual(out.read_bytes(), before)
        self.assertFalse(table.exists())
        self.simulate(*words, "--csv", table, "--force", "--k", 2)
        self.assertNotEqual(out.read_bytes(), before)
        self.assertTrue(table.exists())

    def test_page_escapes_names(self):
        trace = self.trace(1, 4, 30)
        named = trace.rename(self.work / "<b title='x'>&amp;\"\x1b.jsonl")
        out = self.work / "page.html"
        result = self.simulate(named, "--faults", 0, "--policy", "full", "--html", out)
        page = self.page_of(out)
        self.assertEqual(len(page.findall(".//tbody/tr")), len(result["rows"]))
        self.assertIn("<b title='x'>&amp;\"\\x1b.jsonl", "".join(page.itertext()))

    def test_page_of_a_real_trace(self):
        source = pathlib.Path(__file__).resolve().parents[3]
        shared = pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED", source.parent / "shared"))
        traces = [source / "tests/data/deepspeed/routing_12x32/tokens.jsonl",
                  shared / "fixtures/routing/gpt_moe_24x32.jsonl"]
        for number, trace in enumerate(trace for trace in traces if trace.exists()):
            with self.subTest(trace):
                out = self.work / f"page{number}.html"
                result = self.simulate(trace, "--interval", 1, "--faults", 0.15, "--ranks-per-node", 8,
                                       "--dynamic-k", 0.05, "--html", out)
                self.check_page(self.page_of(out), result)

    def test_dynamic_k_doubles_as_faults_spend_its_share(self):
        # 16 experts from K = 1: four levels of 1 %. Faults cost 75, 35, 15 and 5 iterations of
        # 6400 (the closed form), so levels last 1, 2, 5 and 13 faults.
        trace = self.trace(1, 16, 6400)
        at = [400 + 250 * j for j in range(21)]
        run = lambda faults: self.simulate(
            trace, "--faults", self.faults("".join(f"{i}\n" for i in faults)), "--policy",
            "sequential", "--dynamic-k", 0.04, "--k", 1)["rows"][-1]
        row = run(at[:4])
        self.assertEqual((row["policy"], row["k"]), ("sequential", 1))
        dynamic = row["dynamic"]
        self.assertEqual(dynamic["levels"], 4)
        self.assertEqual([(p["iteration"], p["k"]) for p in dynamic["history"]],
                         [(0, 1), (at[0], 2), (at[2], 4)])
        self.assertAlmostEqual(dynamic["spent"], (75 + 2 * 35 + 15) / 6400, 9)
        self.assertAlmostEqual(dynamic["spent_of_level"], 15 / 6400, 9)
        self.assertAlmostEqual(row["plt"], dynamic["spent"], 12)
        self.assertEqual(dynamic["faults_covered"], 4 + 13)
        self.assertIn("dynamic K 1, 2 after iteration 400, 4 after iteration 900", self.stdout)
        self.assertIn("covers 17 more faults", self.stdout)
        dynamic = run(at)["dynamic"]
        self.assertEqual((dynamic["history"][-1]["k"], dynamic["faults_covered"]), (16, 0))
        # Below the limit and one fault for each level.
        self.assertLess(dynamic["spent"], 0.04 + (75 + 35 + 15 + 5) / 6400)

    def test_faults_follow_the_seed(self):
        trace = self.trace(1, 4, 60)
        runs = [self.simulate(trace, "--faults", 0.2, "--seed", seed)["faults"]
                for seed in (1, 1, 2)]
        self.assertEqual(runs[0], runs[1])
        self.assertNotEqual(runs[0], runs[2])
        self.assertEqual(self.simulate(trace, "--faults", 0)["faults"], [])
        every = self.simulate(trace, "--faults", 1, "--node-share", 0)["faults"]
        self.assertEqual(every, [{"iteration": i, "nodes": []} for i in range(1, 61)])

    def test_sizes_of_a_store(self):
        saved = self.save_series(ITERATIONS, "--tokens", self.tokens_path)
        self.assertTrue(saved)
        full = self.save(8, "--policy", "full", "--tokens", self.tokens_path)["full_bytes"]
        result = self.simulate(self.tokens_path, self.store, "--interval", 1, "--faults", 0)
        self.assertEqual(result["full_bytes"], full)
        self.assertEqual(result["moe_layers"], [0, 1])
        numbers = self.run_tool("pec-save", "tune", self.store)
        self.assertEqual(numbers["full"]["full_bytes"], full)
        self.simulate(self.trace(2, 8, 10), self.store, code=5)
        self.assertIn("layers of 8 experts", self.stderr)
        self.run_tool("pec-save", "tune", self.store, "--experts", 4, code=2)
        self.run_tool("pec-save", "tune", self.work / "nothing", code=3)

    def test_refusals(self):
        trace = self.trace(1, 4, 10)
        for words, said in (
                (["--tokens", trace], "--tokens"), (["--dry-run"], "--dry-run"),
                (["--experts", 4], "--experts"), (["--k-persist", 1], "--k-persist"),
                (["--fault-rate", 0.1], "--fault-rate"), (["--force"], "--csv or --html"),
                (["--csv", "x", "--html", "x"], "different files"),
                (["--dynamic-k", 0.1, "--policy", "load-aware"], "load-aware"),
                (["--dynamic-k", 0.1, "--k", 2, "--k-persist", 1], "--k-persist"),
                (["--dynamic-k", 0], "--dynamic-k"),
                (["--policy", "full", "--k", 2], "--k"),
                (["--policy", "sequential", "--max-age", 3], "--max-age"),
                (["--faults", "1.5"], "1.5"), (["--nonexpert-params", "3y2"], "3y2"),
                (["--param-bytes", "1,2"], "--param-bytes"), (["--ep", 3], "3")):
            with self.subTest(words=words):
                self.simulate(trace, *words, code=2)
                self.assertIn(said, self.stderr)
        self.run_tool("pec-save", "tune", "--k", 2, code=2)
        self.run_tool("pec-save", "tune", "--html", "x", code=2)
        self.run_tool("pec-save", "tune", "--interval", 1)
        self.assertIn(" every iteration\n", self.stdout)
        self.run_tool("pec-save", "tune", self.store, "more", code=2)
        self.run_tool("pec-save", self.store, self.store, "--interval", 2, code=2)
        self.assertIn('unknown flag "--interval"', self.stderr)
        self.simulate(self.work / "nothing.jsonl", code=3)

    def test_bad_faults(self):
        trace = self.trace(1, 4, 10)
        for text, line in (("3\nx\n", 2), ("5\n4\n", 2), ("# a\n\n3 0,0\n", 3), ("3 1,\n", 1),
                           ("-1\n", 1), ("3 4 5\n", 1)):
            with self.subTest(text=text):
                self.simulate(trace, "--faults", self.faults(text), code=4)
                self.assertIn(f"faults.txt: line {line}:", self.stderr)
        for text in ("11\n", "0\n", "3 7\n"):  # outside the run, no such node
            self.simulate(trace, "--faults", self.faults(text), code=2)
        self.simulate(trace, "--faults", self.faults("3\n"), "--seed", 1, code=2)


if __name__ == "__main__":
    stores.main()

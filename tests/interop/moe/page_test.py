#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a browser: it draws itself, logs nothing on the console, and sends no network requests.

Usage: page_test.py BIN
Skipped without Chromium or Chrome.
"""

import pathlib
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "cli" / "moe"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import browser  # noqa: E402
from command import CLUSTER, EXPERTS, LAYERS, LINKS, NODES, TIMES, Case, main  # noqa: E402

CHARTS = ("layers", "bars", "survival", "rounds", "ageing")

# Actions of a reader, and the resulting page.
ACT = """
const slider = document.getElementById("layer");
const told = [document.getElementById("which").textContent];
slider.value = Number(slider.value) > 0 ? 0 : 1;
slider.dispatchEvent(new win.Event("input"));
told.push(document.getElementById("which").textContent);
const heat = document.getElementById("heat-after").getContext("2d");
const canvas = document.getElementById("heat-after");
const colors = new Set();
for (const value of new Uint32Array(heat.getImageData(0, 0, canvas.width, canvas.height).data.buffer)) colors.add(value);
const ticks = (id, anchor) => [...document.querySelectorAll(`#${id} text[text-anchor=${anchor}]`)]
  .map((text) => Number(text.textContent)).filter((value) => !Number.isNaN(value));
return { told, colors: colors.size, rounds: ticks("rounds", "end"), failures: ticks("survival", "middle") };
"""

# Times and memory as the page shows them.
COSTS = """
const texts = (query) => [...document.querySelectorAll(query)].map((node) => node.textContent);
const rows = (id) => [...document.querySelectorAll(`#${id} tr`)].map((row) => [...row.children].map((cell) => cell.textContent));
const tiles = Object.fromEntries([...document.querySelectorAll(".tile")].map((tile) => [...tile.children].map((part) => part.textContent)));
const bars = [...document.querySelectorAll("#times rect")].map((bar) => ["x", "y", "height"].map((name) => Number(bar.getAttribute(name))));
return { tiles, bars, title: texts("#costs-name")[0], unit: texts("#times-unit")[0], strategies: rows("table"), memory: rows("memory"),
  shown: ["costs", "times-part", "memory-part"].filter((id) => document.getElementById(id).getBoundingClientRect().height > 0) };
"""


class Page(Case):
    def setUp(self):
        super().setUp()
        self.plan("--strategy", "lazarus", "--at", "0", "-o", "old.json")

    def page(self, *words):
        self.plan("--strategy", "lazarus", "--old", "old.json", "--faults", "1", *words, "--html", "page.html",
                  "--force")
        return self.work / "page.html"

    def browse(self, path, *words):
        return browser.browse(self.work, path, *words)

    def test_every_part_is_drawn(self):
        dom, console = self.browse(self.page())
        self.assertEqual(console, [])
        self.assertIn('data-ready="1"', dom)
        for part in CHARTS:
            drawn = re.search(rf'<svg id="{part}".*?</svg>', dom, re.S).group()
            self.assertGreater(drawn.count("<rect") + drawn.count("<circle"), 2, part)
        # Eleven strategies, five layers, and the memory of this plan and of vanilla below their headings.
        self.assertEqual(dom.count("<tr"), 12 + 6 + 3)
        self.assertIn(f"{LAYERS} layers of {EXPERTS} experts on 4 nodes", dom)

    def test_it_is_whole_on_wide_and_narrow_screens(self):
        found = browser.probed(self.work, self.page(), act=ACT)
        self.assertEqual(browser.misfits(found), {})
        for width, one in found.items():
            self.assertGreater(one["colors"], 5, width)
            self.assertNotEqual(one["told"][0], one["told"][1], width)

    def costs(self, *words):
        """The result of a run, and the parts of its page that show times and memory, for windows of 1400 pixels."""
        result = self.result(*words, "--html", "costs.html", "--force")
        found = browser.probed(self.work, self.work / "costs.html", act=COSTS)
        self.assertEqual(browser.misfits(found), {}, words)
        return result, found[browser.ROOMY]

    def test_times_and_memory_of_a_plan(self):
        result, page = self.costs("loads.jsonl", *CLUSTER, *LINKS, *TIMES, "--strategy", "hecate", "--overlap", "8")
        times, memory = result["plan"]["times"], result["plan"]["memory"]
        self.assertEqual((page["title"], page["shown"]), ("Time and memory", ["costs", "times-part", "memory-part"]))
        self.assertEqual(page["tiles"]["Speed-up over vanilla"], f"{times['speedup']:.2f} ×")
        self.assertRegex(page["tiles"]["Memory of the fullest GPU"], rf"^{memory['gpu']['bytes'] / 2**20:.0f}(\.\d+)? MiB$")
        self.assertEqual([row[0] for row in page["memory"]], ["plan", "hecate", "copies dropped after each layer", "vanilla"])
        # Per layer a bar of vanilla, and next to it a stack of the parts that are not zero.
        bars, scale = iter(page["bars"]), None
        for layer in times["layers"]:
            (x, _, height), total = next(bars), layer["seconds"] * layer["speedup"]
            scale = scale or height / total
            self.assertAlmostEqual(height, total * scale, delta=0.01)
            top = None
            for name in ("expert_seconds", "all_to_all_seconds", "exposed_seconds"):
                if layer[name] > 0:
                    beside, y, height = next(bars)
                    self.assertAlmostEqual(height, layer[name] * scale, delta=0.01)
                    self.assertGreater(beside, x)
                    self.assertTrue(top is None or abs(y + height - top) < 0.01)
                    top = y
        self.assertIsNone(next(bars, None))

    def test_times_and_memory_of_all_strategies(self):
        result, page = self.costs("compare", "loads.jsonl", *CLUSTER, *LINKS, *TIMES)
        head, *rows = page["strategies"]
        self.assertEqual(head[-4:], ["iteration", "speed-up", "memory", "plan time"])
        for row, answer in zip(rows, result["strategies"], strict=True):
            self.assertEqual((row[0], row[-3]), (answer["strategy"], f"{answer['times']['speedup']:.2f}"))
            self.assertEqual(row[-4].replace("\xa0", " "), f"{answer['times']['seconds'] * 1e3:.1f} ms")
            self.assertRegex(row[-2], " MiB$")

    def test_times_and_memory_that_were_not_computed(self):
        _, page = self.costs("loads.jsonl", *CLUSTER, "--strategy", "lazarus")
        self.assertEqual((page["title"], page["shown"]), ("Memory", ["costs", "memory-part"]))
        self.assertEqual(page["strategies"][0][-3:], ["rounds", "memory", "plan time"])
        _, page = self.costs("loads.jsonl", *CLUSTER[:6], "--strategy", "lazarus")
        self.assertEqual((page["shown"], page["memory"]), ([], []))
        self.assertEqual(page["strategies"][0][-2:], ["rounds", "plan time"])
        self.assertFalse({"Speed-up over vanilla", "Memory of the fullest GPU"} & page["tiles"].keys())

    def test_it_is_light_or_dark_as_the_reader_likes(self):
        path = self.page()
        light, dark = (browser.probed(self.work, path, *words)[1200]["page"]
                       for words in ((), ("--blink-settings=preferredColorScheme=0",)))
        brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) / 3 for color in (light, dark)]
        self.assertGreater(brightness[0], 200)
        self.assertLess(brightness[1], 60)

    def test_axes_have_round_numbers(self):
        # The busiest round moves 13 replicas; up to 31 of 40 nodes fail.
        self.write("many.json", [[100 - e for e in range(65)]])
        self.write("others.json", [[e + 36 for e in range(65)]])
        many = ["--nodes", "13", "--gpus", "1", "--slots", "17", "--strategy", "spread"]
        self.run_in("many.json", *many, "-o", "many_old.json")
        self.run_in("others.json", *many, "--old", "many_old.json", "--html", "rounds.html")
        self.write("few.json", [[5, 4, 3, 2]])
        self.run_in("few.json", "--nodes", "40", "--gpus", "1", "--slots", "4", "--failures", "31", "--html", "failures.html")
        for axis, expected in (("rounds", [0, 5, 10, 15]), ("failures", [0, 5, 10, 15, 20, 25, 30])):
            for width, found in browser.probed(self.work, self.work / f"{axis}.html", act=ACT).items():
                self.assertEqual(found[axis], expected, width)

    def test_it_asks_no_network(self):
        path = self.page()
        text = path.read_text()
        self.assertIsNone(re.search(r"(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)", text))
        log = self.work / "net.json"
        self.browse(path, f"--log-net-log={log}")
        asked = set(re.findall(r'"url":"([^"]*)"', log.read_text()))
        self.assertEqual([url for url in asked if "page.html" not in url and "://" in url and "google" not in url
                          and not url.startswith("chrome")], [])
        # The page's own policy blocks requests, and this test sees them.
        path.write_text(text.replace("</body>", '<script>fetch("http://192.0.2.1/x")</script></body>'))
        _, console = self.browse(path)
        self.assertTrue(any("Content Security Policy" in line for line in console), console)

    def test_an_error_would_be_seen(self):
        path = self.page()
        path.write_text(path.read_text().replace("fillTexts();\n", "fillTexts();\nmissing();\n", 1))
        dom, console = self.browse(path)
        self.assertNotIn('data-ready="1"', dom)
        self.assertTrue(any("missing is not defined" in line for line in console), console)

    def test_a_misfit_would_be_seen(self):
        path = self.page()
        text = path.read_text()
        for rule, worse, kind in (("main { max-width: 1440px", "main { max-width: 700px", "cut"),
                                  ("svg text { fill: var(--soft); font-size: 12px", "svg text { font-size: 40px", "clipped"),
                                  ("svg text { fill: var(--soft); font-size: 12px", "svg text { font-size: 40px", "overlapping"),
                                  (".tile b { display: block;", ".tile b { display: block; width: 900px;", "spilled"),
                                  ("main { max-width: 1440px", "main { width: 2000px", "wide")):
            self.assertIn(rule, text)
            path.write_text(text.replace(rule, worse))
            self.assertIn(kind, browser.misfits(browser.probed(self.work, path))[browser.ROOMY])

    def test_other_pages_draw_themselves_too(self):
        self.plan("--html", "fresh.html")
        self.compare("--html", "compare.html")
        self.run_in("evaluate", "old.json", "loads.jsonl", "--html", "theirs.html")
        self.write("one.json", [[5, 4, 3, 2]])
        self.run_in("one.json", "--nodes", "1", "--gpus", "1", "--slots", "4", "--html", "tiny.html")
        large = ["one.json", "--nodes", "600", "--gpus", "2", "--slots", "4"]
        self.run_in(*large, "-o", "large.json")
        self.run_in(*large, "--old", "large.json", "--html", "large.html")
        for name in ("fresh", "compare", "theirs", "tiny", "large"):
            dom, console = self.browse(self.work / f"{name}.html")
            self.assertEqual(console, [], name)
            self.assertIn('data-ready="1"', dom, name)
            self.assertEqual(browser.misfits(browser.probed(self.work, self.work / f"{name}.html")), {}, name)

    def test_pages_of_node_failures_are_whole(self):
        self.write("nodes.csv", NODES + "2000,remove,n3\n3000,remove,n2\n4000,remove,n1\n5000,add,m1\n6000,add,m2\n"
                                        "7000,remove,n0\n")
        for name, words in (("one", ["--strategy", "lazarus"]), ("all", ["--compare"])):
            self.simulate(*words, "--faults", "1", "--html", f"{name}.html")
            found = browser.probed(self.work, self.work / f"{name}.html")
            self.assertEqual(browser.misfits(found), {}, name)


if __name__ == "__main__":
    if browser.BROWSER is None:
        print("skipped: no Chromium or Chrome here")
        sys.exit(77)
    sys.argv.insert(2, "none")  # no launcher is needed
    main(__name__)

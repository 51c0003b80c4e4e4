#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a browser: it draws itself, logs nothing on the console, and sends no network requests.

Usage: page_test.py BIN
Skipped without Chromium or Chrome.
"""

import html
import json
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "cli" / "moe"))
from command import CLUSTER, EXPERTS, LAYERS, Case, main  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
QUIET = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=3000"]
CHARTS = ("layers", "bars", "survival", "rounds", "ageing")

# Actions of a reader, and the resulting page.
PROBE = """<script>
const slider = document.getElementById("layer");
const told = [document.getElementById("which").textContent];
slider.value = (Number(slider.value) + 1) % %d;
slider.dispatchEvent(new Event("input"));
told.push(document.getElementById("which").textContent);
const heat = document.getElementById("heat-after").getContext("2d");
const canvas = document.getElementById("heat-after");
const colors = new Set();
for (const value of new Uint32Array(heat.getImageData(0, 0, canvas.width, canvas.height).data.buffer)) colors.add(value);
const clipped = [];
for (const svg of document.querySelectorAll("svg")) {
  if (!svg.clientWidth) continue;
  const frame = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1) clipped.push(text.textContent);
  }
}
document.body.dataset.probe = JSON.stringify({ told, colors: colors.size, clipped,
  wide: document.documentElement.scrollWidth > innerWidth, page: getComputedStyle(document.body).backgroundColor });
</script></body>""".replace("%d", str(LAYERS))


class Page(Case):
    def setUp(self):
        super().setUp()
        self.plan("--strategy", "lazarus", "--at", "0", "-o", "old.json")

    def page(self, *words):
        self.plan("--strategy", "lazarus", "--old", "old.json", "--faults", "1", *words, "--html", "page.html",
                  "--force")
        return self.work / "page.html"

    def browse(self, path, *words, size=(1200, 2300)):
        """The page after its scripts ran, and the messages on the console."""
        done = subprocess.run([BROWSER, *QUIET, f"--user-data-dir={self.work}/profile",
                               f"--window-size={size[0]},{size[1]}", *words, "--dump-dom", path.as_uri()],
                              capture_output=True, text=True, check=False, timeout=1200)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    def probed(self, path, *words, **more):
        probe = self.work / "probe.html"
        probe.write_text(path.read_text().replace("</body>", PROBE))
        dom, console = self.browse(probe, *words, **more)
        self.assertEqual(console, [])
        return json.loads(html.unescape(re.search(r'data-probe="(.*?)"', dom).group(1)))

    def test_every_part_is_drawn(self):
        dom, console = self.browse(self.page())
        self.assertEqual(console, [])
        self.assertIn('data-ready="1"', dom)
        for part in CHARTS:
            drawn = re.search(rf'<svg id="{part}".*?</svg>', dom, re.S).group()
            self.assertGreater(drawn.count("<rect") + drawn.count("<circle"), 2, part)
        self.assertEqual(dom.count("<tr"), 12 + 6)  # eleven strategies and five layers below their headings
        self.assertIn(f"{LAYERS} layers of {EXPERTS} experts on 4 nodes", dom)

    def test_it_is_whole_on_wide_and_narrow_screens(self):
        path = self.page()
        for size in ((1600, 2000), (1200, 2300), (520, 3500)):
            found = self.probed(path, size=size)
            self.assertEqual((found["clipped"], found["wide"]), ([], False), size)
            self.assertGreater(found["colors"], 5)
            self.assertNotEqual(found["told"][0], found["told"][1])

    def test_it_is_light_or_dark_as_the_reader_likes(self):
        path = self.page()
        light = self.probed(path)["page"]
        dark = self.probed(path, "--blink-settings=preferredColorScheme=0")["page"]
        brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) / 3 for color in (light, dark)]
        self.assertGreater(brightness[0], 200)
        self.assertLess(brightness[1], 60)

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


if __name__ == "__main__":
    if BROWSER is None:
        print("skipped: no Chromium or Chrome here")
        sys.exit(77)
    sys.argv.insert(2, "none")  # no launcher is needed
    main(__name__)

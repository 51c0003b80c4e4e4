# SPDX-License-Identifier: Apache-2.0
"""Opens HTML reports in a headless browser and finds parts that do not fit, at several widths of the window."""

import html
import json
import re
import shutil
import subprocess

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
QUIET = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=3000"]
WIDTHS = (1600, 1400, 1200, 520, 400)
ROOMY = 1400  # from this width on, no table needs a scroll bar

# Each frame is a window of its own width, also below the least width of a window of the browser. The pages run no
# script that they do not contain, so the script is outside of the frames.
SHEET = """<!DOCTYPE html>
<html style="color-scheme: light dark"><body>%(frames)s<script>
function fit(win) {
  const doc = win.document, clipped = [], overlapping = [], cut = [], spilled = [], empty = [];
  const title = (node) => node.closest("section")?.querySelector("h2")?.textContent;
  for (const svg of doc.querySelectorAll("svg")) {
    if (!svg.clientWidth) continue;
    if (!svg.querySelector("rect, circle, polyline, polygon, line")) empty.push(title(svg));
    const frame = svg.getBoundingClientRect(), boxes = [];
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (!box.width) continue;
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) {
        clipped.push(text.textContent);
      }
      // Letters fill the middle of their box.
      const own = { x0: box.left, x1: box.right, y0: box.top + box.height / 4, y1: box.bottom - box.height / 4 };
      for (const [other, name] of boxes) {
        if (own.x0 < other.x1 && other.x0 < own.x1 && own.y0 < other.y1 && other.y0 < own.y1) {
          overlapping.push([title(svg), name, text.textContent]);
        }
      }
      boxes.push([own, text.textContent]);
    }
  }
  for (const part of doc.querySelectorAll(".scroll")) {
    if (part.scrollWidth > part.clientWidth + 1) cut.push(title(part));
  }
  for (const node of doc.querySelectorAll(".tile, .tile > *, p, .key, section, h1, h2")) {
    if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth) spilled.push(node.textContent.slice(0, 40));
  }
  if (!doc.querySelector("h1")?.textContent) empty.push("page");
  for (const part of doc.querySelectorAll("section")) {
    if (part.clientWidth && !part.querySelector("svg, table, canvas, p")) empty.push(title(part));
  }
  return { empty, clipped, overlapping, cut, spilled, wide: doc.documentElement.scrollWidth > win.innerWidth,
    page: win.getComputedStyle(doc.body).backgroundColor };
}
function act(win) { const document = win.document; %(act)s }
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(({ contentWindow: win }) => ({ ...act(win), ...fit(win) }));
  document.body.dataset.found = JSON.stringify(found);
});
</script></body></html>
"""


def browse(work, path, *words, size=(1200, 2300)):
    """Returns a page after its scripts ran, and the messages on the console. \\param work  a scratch folder"""
    done = subprocess.run([BROWSER, *QUIET, f"--user-data-dir={work}/profile", f"--window-size={size[0]},{size[1]}",
                           *words, "--dump-dom", path.as_uri()],
                          capture_output=True, text=True, check=False, timeout=1200)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(work, path, *words, act="return {};"):
    """Returns for each of WIDTHS what does not fit. \\param act  script that runs first and adds its own findings"""
    page = html.escape(path.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe style="width:{width}px;height:4000px;border:0" srcdoc="{page}"></iframe>' for width in WIDTHS)
    sheet = work / "sheet.html"
    sheet.write_text(SHEET % {"frames": frames, "act": act}, encoding="utf-8")
    dom, console = browse(work, sheet, *words, size=(max(WIDTHS) + 100, 2300))
    if console:
        raise AssertionError(console)
    found = json.loads(html.unescape(re.search(r'data-found="(.*?)"', dom).group(1)))
    return dict(zip(WIDTHS, found, strict=True))


def misfits(found):
    """Returns the parts of a page that do not fit, by width. \\param found  as probed returns it"""
    wrong = {}
    for width, one in found.items():
        parts = {name: one[name] for name in ("empty", "clipped", "overlapping", "spilled", "wide") if one[name]}
        if width >= ROOMY and one["cut"]:
            parts["cut"] = one["cut"]
        if parts:
            wrong[width] = parts
    return wrong

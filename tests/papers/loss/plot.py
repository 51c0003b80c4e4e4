# SPDX-License-Identifier: Apache-2.0
"""Writes charts as SVG: lines or points over two linear axes, with a legend."""

import html
import math

WIDTH, HEIGHT = 840, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 270, 40, 50  # margins; the legend is on the right
COLOURS = ("#222222", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")


def ticks(low, high):
    """Returns about five round numbers from low to high."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class Chart:
    def __init__(self, title, x_title, y_title, x_range, y_range):
        self.x_range, self.y_range, self.names = x_range, y_range, 0
        self.parts = [f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
                      'fill="none" stroke="#888"/>']
        middle = (LEFT + WIDTH - RIGHT) / 2
        self.text(middle, TOP - 15, title, "middle", 15)
        self.text(middle, HEIGHT - 12, x_title, "middle")
        self.parts.append(f'<g transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">')
        self.text(0, 0, y_title, "middle")
        self.parts.append("</g>")
        for value in ticks(*x_range):
            self.line([(value, y_range[0]), (value, y_range[1])], "#ddd")
            self.text(self.place(value, 0)[0], HEIGHT - BOTTOM + 16, f"{value:g}", "middle")
        for value in ticks(*y_range):
            self.line([(x_range[0], value), (x_range[1], value)], "#ddd")
            self.text(LEFT - 6, self.place(0, value)[1] + 4, f"{value:.6g}", "end")

    def place(self, x, y):
        """Maps a value pair to a position in the picture."""
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (y - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def text(self, x, y, words, anchor="start", size=12):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
                          f"{html.escape(words)}</text>")

    def line(self, points, colour, width=1, dashes="none"):
        """Draws a line through the points; parts outside the ranges are cut off."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.place(*point) for point in points))
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
                          f'stroke-dasharray="{dashes}" clip-path="url(#inside)"/>')

    def mark(self, x, y, colour):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.75"/>')

    def series(self, name, points, lines):
        """Adds points, connected if `lines`, and their entry of the legend."""
        colour = COLOURS[self.names % len(COLOURS)]
        y = TOP + 12 + 18 * self.names
        self.names += 1
        self.text(WIDTH - RIGHT + 32, y + 4, name)
        if lines:
            self.line(points, colour, 1.8)
            self.parts.append(f'<line x1="{WIDTH - RIGHT + 8}" x2="{WIDTH - RIGHT + 28}" y1="{y}" y2="{y}" '
                              f'stroke="{colour}" stroke-width="1.8"/>')
        else:
            for point in points:
                self.mark(*self.place(*point), colour)
            self.mark(WIDTH - RIGHT + 18, y, colour)

    def write(self, path):
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
            f'<clipPath id="inside"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
            + "\n".join(self.parts) + "\n</svg>\n", encoding="utf-8")


def around(values, least):
    """Returns a range that has all values, with a margin; at least as wide as `least`."""
    low, high = min(values), max(values)
    margin = max(0.08 * (high - low), (least - (high - low)) / 2)
    return low - margin, high + margin


def write_curves(path, uninterrupted, rows):
    """Draws validation loss by iteration: of the uninterrupted run, and of some rows of the same seed. The part in
    which the loss falls steeply is left out of the range."""
    series = [("uninterrupted", uninterrupted), *((row["name"], row["curve"]) for row in rows)]
    last = max(iteration for iteration, _ in uninterrupted)
    seen = [loss for _, curve in series for iteration, loss in curve if iteration >= last / 5]
    chart = Chart("Validation loss", "iteration", "nats per byte", (0, last), around(seen, 0.01))
    for name, curve in series:
        chart.series(name, curve, True)
    chart.write(path)


def write_plt(path, rows, limit):
    """Draws, by PLT, the final validation loss of each row minus that of the uninterrupted run of its seed."""
    differences = [row["difference"] for row in rows]
    widest = max([100 * row["plt"] for row in rows] + [100 * limit])
    chart = Chart("Validation loss at the end, minus that of the uninterrupted run", "PLT (%)", "nats per byte",
                  (0, 1.05 * widest), around([*differences, 0.0], 0.001))
    chart.line([(0, 0), (1.05 * widest, 0)], "#888")
    chart.line([(100 * limit, chart.y_range[0]), (100 * limit, chart.y_range[1])], "#888", 1, "5 4")
    chart.text(chart.place(100 * limit, 0)[0] + 4, TOP + 14, f"{100 * limit:g} %")
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append((100 * row["plt"], row["difference"]))
    for name, points in groups.items():
        chart.series(name, points, False)
    chart.write(path)

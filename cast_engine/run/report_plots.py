"""Small line charts as SVG that takes its colours from the page, so that light, dark and print need one drawing."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#010203", "#040506"
"""Stand for the page's text and rule colours."""
SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05")
"""Stand for the page's ``--s1`` ... ``--s5``."""
MARKERS, DASHES = "osD^v", ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
SIZE = (4.3, 2.5)  # inches
BOX, BOX_UNDER_LEGEND = (0.13, 0.165, 0.855, 0.8), (0.13, 0.165, 0.855, 0.71)
CLOSE = 50.0
"""Ratio of the largest to the smallest value below which a logarithmic axis gets more labels."""
DOTS = 40
"""A line of more points has no marker at each of them."""


@dataclass(frozen=True)
class Line:
    """One series. Values that are NaN are left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None  # half the height of the band around the line
    faint: Sequence[float] | None = None  # single values behind a line of means, at ``faint_x``
    faint_x: Sequence[float] | None = None


@dataclass(frozen=True)
class Chart:
    """What to draw; every line has its own colour, dash and marker."""

    key: str  # unique on the page
    title: str
    lines: Sequence[Line]
    x_label: str = "round"
    y_label: str = ""
    levels: Sequence[tuple[float, str]] = ()  # horizontal lines to compare with
    log: bool = False
    note: str = ""
    digits: int = 1  # of the numbers in words and tables
    share: bool = False  # y starts at 0


@dataclass(frozen=True)
class Drawn:
    """A chart as the page shows it."""

    key: str
    title: str
    unit: str
    svg: str
    words: str  # the chart in one sentence, for those who do not see it
    note: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def draw(chart: Chart) -> Drawn | None:
    """Draw a chart; None if it has no finite value."""
    lines = [line for line in chart.lines if any(math.isfinite(y) for y in line.y)]
    if not lines:
        return None
    header, rows = _table(chart, lines)
    svg, words = _svg(chart, lines), _words(chart, lines)
    return Drawn(chart.key, chart.title, chart.y_label, svg, words, chart.note, header, rows)


def _svg(chart: Chart, lines: Sequence[Line]) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.key,
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.edgecolor": GRID,
        "grid.color": GRID,
        "axes.unicode_minus": True,
    }
    with rc_context(style):
        figure = Figure(figsize=SIZE)
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.add_axes(BOX if len(lines) == 1 else BOX_UNDER_LEGEND)  # a layout engine takes twice the time
        axes.patch.set_visible(False)
        _lines(axes, lines)
        _frame(axes, chart, lines)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return _for_page(out.getvalue(), chart.key)


def _lines(axes: Axes, lines: Sequence[Line]) -> None:
    for i, line in enumerate(lines):
        colour, dash = SERIES[i % len(SERIES)], DASHES[i % len(DASHES)]
        if line.faint is not None:
            axes.plot(line.faint_x or line.x, line.faint, color=colour, alpha=0.35, linewidth=0.8, linestyle=dash)
        if line.error is not None:
            points = zip(line.x, line.y, line.error, strict=True)
            band = [(x, y - e, y + e) for x, y, e in points if math.isfinite(y + e)]
            x, low, high = ([point[i] for point in band] for i in range(3))
            axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
        marker = MARKERS[i % len(MARKERS)] if len(line.x) <= DOTS else None
        axes.plot(line.x, line.y, color=colour, linestyle=dash, marker=marker, markersize=3.5, lw=1.6, label=line.label)


def _frame(axes: Axes, chart: Chart, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import MaxNLocator

    if chart.log:
        _log_scale(axes, [y for line in lines for y in (*line.y, *(line.faint or ())) if y > 0])
    if chart.share:
        axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    for value, label in chart.levels:
        axes.axhline(value, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(label, (1, value), (0, -3), **place, ha="right", va="top", fontsize=8, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(axis="y", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", length=0)
    axes.set_xlabel(chart.x_label)
    if len(lines) > 1:
        above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1.01), "borderaxespad": 0}
        gaps = {"columnspacing": 1, "handlelength": 2, "handletextpad": 0.4}
        axes.legend(ncols=len(lines), frameon=False, fontsize=8.5, **above, **gaps)


def _log_scale(axes: Axes, positive: Sequence[float]) -> None:
    """Use a logarithmic scale with short plain labels; values that lie close together get labels between the tens."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not positive:
        return
    axes.set_yscale("log", nonpositive="mask")
    close = max(positive) / min(positive) < CLOSE
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if close else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def short(value: float) -> str:
    """Return for example "0.2", "5e−6" or "30"."""
    return re.sub(r"e([-+])0*", lambda m: "e−" if m[1] == "-" else "e", f"{value:.3g}")


def _for_page(svg: str, key: str) -> str:
    """Take out what belongs to a file of its own, make ids unique on the page, and take colours from the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"(url\(|href=\")#", rf"\g<1>#{key}-", svg)
    for i, colour in enumerate(SERIES):
        svg = svg.replace(colour, f"var(--s{i + 1})")
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--rule)")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<style[^>]*>.*?</style>", "<g></g>", svg, flags=re.DOTALL)
    svg = svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
    return re.sub(r"\n\s*", "\n", svg)


def _words(chart: Chart, lines: Sequence[Line]) -> str:
    parts = []
    for line in lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        (x0, y0), (x1, y1) = points[0], points[-1]
        name = f"{line.label}: " if len(lines) > 1 else ""
        first = f"{name}{_number(y0, chart)} at {chart.x_label} {x0:g}"
        parts.append(first if len(points) == 1 else f"{first}, {_number(y1, chart)} at {chart.x_label} {x1:g}")
    levels = [f"compared with {label}" for _, label in chart.levels]
    return f"{chart.title}. " + "; ".join([*parts, *levels]) + "."


def _table(chart: Chart, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    header = [chart.x_label]
    columns: list[dict[float, str]] = []
    for line in lines:
        header.append(line.label if len(lines) > 1 else chart.y_label or chart.title)
        columns.append({x: _number(y, chart) for x, y in zip(line.x, line.y, strict=True)})
        if line.error is not None:
            header.append("± SE")
            columns.append({x: _number(e, chart) for x, e in zip(line.x, line.error, strict=True)})
    xs = sorted({x for column in columns for x in column})
    return header, [[f"{x:g}", *(column.get(x, "") for column in columns)] for x in xs]


def _number(value: float, chart: Chart) -> str:
    if not math.isfinite(value):
        return "missing"
    return short(float(f"{value:.2g}")) if chart.log else f"{value:.{chart.digits}f}"

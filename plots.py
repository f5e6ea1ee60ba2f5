"""The figures: mean@n against training rollouts, for the report (SVG in the page's own colours) and as PNG files."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keys import hidden_secrets

with hidden_secrets():                  # it may start a program, to ask for fonts
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

matplotlib.rcdefaults()                 # not what a matplotlibrc of the current directory says

COLOURS = ("#3b82f6", "#f97316", "#16a34a", "#a855f7", "#e11d48", "#0d9488", "#a16207", "#db2777")  # on black and white
PHASES = {"weight": 0.08, "harness": 0.22}  # shades of ink
INK = "#7b7b7b"                             # text and axes; in the report's SVG it becomes the page's own text colour
SIZES = {"wide": (8.6, 4.2), "narrow": (3.9, 4.0)}      # inches; the second is for a phone


@dataclass(frozen=True)
class Series:
    """One line: y over x, with a band from low to high (spread over seeds) or with error bars (one run's interval)."""
    name: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]
    band: bool = True
    measured: list[bool] | None = None      # where not, a value is interpolated and gets no marker


@dataclass(frozen=True)
class Dots:
    """Single values without an interval, such as the scores of candidates."""
    name: str
    x: list[float]
    y: list[float]
    marker: str


@dataclass(frozen=True)
class Figures:
    """What one figure shows; drawn at any size."""
    y_title: str
    series: list[Series]
    dots: list[Dots]
    spans: list[tuple[float, float, str]]           # from, to, "weight" or "harness"
    spans_of: str = ""                              # whose, if there are several lines

    def draw(self, size: str) -> Figure:
        figure = Figure(figsize=SIZES[size], layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for start, end, kind in self.spans:
            axes.axvspan(start, end, color=INK, alpha=PHASES[kind], lw=0)
        handles = []
        for i, series in enumerate(self.series):
            colour, dash = COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--"
            if series.band:
                axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, lw=0)
                axes.plot(series.x, series.y, dash, color=colour, lw=2, marker="o", ms=4, markevery=series.measured)
            else:
                errors = [[y - low for y, low in zip(series.y, series.low, strict=True)],
                          [high - y for y, high in zip(series.y, series.high, strict=True)]]
                axes.errorbar(series.x, series.y, errors, color=colour, lw=2, marker="o", ms=5, capsize=3)
            handles.append(Line2D([], [], color=colour, ls=dash, lw=2, marker="o", ms=4, label=series.name))
        for dots, colour in zip(self.dots, COLOURS[len(self.series):] * 9, strict=False):
            axes.plot(dots.x, dots.y, dots.marker, color=colour, ms=4, lw=1, alpha=0.8)
            handles.append(Line2D([], [], color=colour, marker=dots.marker[0], ls="", ms=4, label=dots.name))
        kinds = dict.fromkeys(kind for _, _, kind in self.spans)
        of = f" of {self.spans_of}" if self.spans_of else ""
        handles += [Patch(color=INK, alpha=PHASES[kind], lw=0, label=f"{kind} phase{of}") for kind in kinds]
        axes.set_xlabel("training rollouts")
        axes.set_ylabel(self.y_title)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4 if size == "narrow" else 8))
        ink(axes)
        figure.legend(handles=handles, loc="outside lower center", ncols=2 if size == "narrow" else 3, frameon=False,
                      labelcolor=INK, fontsize=9)
        return figure

    def svg(self, size: str) -> str:
        return to_svg(lambda: self.draw(size), size)

    def save_png(self, path: Path) -> None:
        with matplotlib.rc_context({"font.family": "sans-serif"}):
            self.draw("wide").savefig(path, format="png", dpi=150, facecolor="white", metadata={"Software": None})


def ink(axes: Axes) -> None:
    axes.grid(color=INK, alpha=0.2)
    axes.tick_params(colors=INK, which="both")
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for name, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(name in ("left", "bottom"))


def to_svg(draw: Callable[[], Figure], prefix: str) -> str:
    """For a page: text stays text, and ink takes the colour of the text around it. `prefix`: of ids, one a figure."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix, "font.family": "sans-serif"}):
        draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()[buffer.getvalue().index("<svg"):].replace(INK, "currentColor")
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)                     # several figures on one page
    return re.sub(r'<svg ([^>]*?)width="[^"]*" ', r'<svg \1', re.sub(r'(<svg [^>]*?)height="[^"]*" ', r"\1", svg))


def front_svg(points: list[tuple[str, float, float]], front: set[str], prefix: str) -> str:
    """Scores over sampled tokens a rollout, of (name, score, tokens); those of the Pareto front named and joined."""
    def draw() -> Figure:
        figure = Figure(figsize=(5.2, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        best = sorted((tok, score, name) for name, score, tok in points if name in front)
        axes.plot([tok for _, _, tok in points], [score for _, score, _ in points], "x", color=COLOURS[1], ms=5)
        x, y = [tok for tok, _, _ in best], [score for _, score, _ in best]
        axes.step(x, y, "o-", where="post", color=COLOURS[0], ms=5)
        for tok, score, name in best:
            axes.annotate(name, (tok, score), (4, 4), textcoords="offset points", color=INK, fontsize=9)
        axes.set_xlabel("sampled tokens a rollout")
        axes.set_ylabel("score on D_harness")
        ink(axes)
        return figure
    return to_svg(draw, prefix)

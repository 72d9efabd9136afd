"""The style of all figures: size, colours, legend and file formats. Drawing needs matplotlib, importing does not."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import matplotlib.figure

Figure: TypeAlias = "matplotlib.figure.Figure"

WIDTH, HEIGHT = 8.0, 4.5  # inches: 1200 x 675 pixels at 150 dots an inch
# the palette of Okabe and Ito, which colour-blind readers can tell apart, without the yellow that white paper hides
COLORS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
# for print without colour: no two curves have the same dashes, and no two bars the same pattern
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 2)))
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--")
# goes from dark to light, also in grey
SHADES = "viridis"
_ENDINGS = (".png", ".svg")


def require_matplotlib() -> None:
    """Raise ImportError, which names the extra to install, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'rope-patch[plots]'.") from error


def new_figure(
    columns: int = 1, height: float = HEIGHT, *, share_y: bool = True, row_heights: Sequence[float] = (1,)
) -> tuple[Figure, list[Any]]:
    """An empty figure and its axes, row by row. It uses no pyplot, so it opens no window and has no global state.

    Args:
        columns: number of axes side by side.
        height: height of the figure, in inches.
        share_y: whether the axes of a row share their scale.
        row_heights: relative heights of the rows.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from cycler import cycler
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(
        len(row_heights), columns, squeeze=False, sharey="row" if share_y else False, height_ratios=list(row_heights)
    )
    all_axes = [axes for row in grid for axes in row]
    for axes in all_axes:
        axes.set_prop_cycle(cycler(color=COLORS) + cycler(linestyle=DASHES))
    return figure, all_axes


def ink_on(value: float) -> str:
    """A colour of text that is readable on the shade of `value`, where 0 is dark and 1 is light."""
    return "black" if value > 0.6 else "white"


def add_legend(figure: Figure, axes: Any, columns: int = 5) -> None:
    """Put the legend below the axes, where it hides no curve."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False)


def mark_window(axes: Any, window: int) -> None:
    """Draw a dashed line where the trained window ends, with its label above the axes."""
    axes.axvline(window, color="0.4", linestyle="--", linewidth=1)
    above = axes.secondary_xaxis("top")  # unlike free text, its tick label moves the title up
    above.set_xticks([window], [f"window: {window}"])
    above.set_xticks([], minor=True)
    above.tick_params(length=0, pad=1, labelcolor="0.4")


def draw_bars(axes: Any, groups: Sequence[str], series: Mapping[str, Iterable[float]]) -> None:
    """Draw bars side by side: one group for each name in `groups`, one colour for each label in `series`."""
    width = 0.8 / max(len(series), 1)
    for k, (label, values) in enumerate(series.items()):
        places = [i - 0.4 + width * (k + 0.5) for i in range(len(groups))]
        color, hatch = COLORS[k % len(COLORS)], HATCHES[k % len(HATCHES)]
        axes.bar(places, list(values), width, label=label, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.grid(axis="y", alpha=0.25)


def line_figure(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, marker: str | None = None, **labels: Any
) -> tuple[Figure, Any]:
    """One axes with a curve for each label.

    Args:
        curves: label -> (x, y).
        marker: matplotlib's name of the marker at each point.
        **labels: title, xlabel, ylabel and other properties of the axes.
    """
    figure, (axes,) = new_figure()
    for label, (x, y) in curves.items():
        axes.plot(x, y, label=label, linewidth=1.8, marker=marker, markersize=4)
    axes.set(**labels)
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return figure, axes


def score_figure(groups: Sequence[str], scores: Mapping[str, Iterable[float]], **labels: Any) -> Figure:
    """One axes with bars from 0 to 1; arguments as in `draw_bars` and `line_figure`."""
    figure, (axes,) = new_figure()
    draw_bars(axes, groups, scores)
    axes.set(**labels, ylim=(0, 1))
    add_legend(figure, axes)
    return figure


def drawn_label(label: str) -> str:
    """`label` escaped for matplotlib: a dollar sign would begin a formula, and legends leave out a leading _."""
    shown = label.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def compact(tokens: int) -> str:
    """A token count in short form: 512, 8K, 32K, 1.5K."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 512 == 0 else str(tokens)


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write `path`.png (150 dots an inch) and `path`.svg (same bytes for the same figure).

    `path` may already have either ending; any other text after a dot is part of the name.
    """
    path = Path(path)
    if path.suffix in _ENDINGS:
        path = path.with_suffix("")
    files = [path.with_name(path.name + ending) for ending in _ENDINGS]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files

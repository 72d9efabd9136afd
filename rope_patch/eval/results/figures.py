"""How figures look here: one place for size, colours, legend and file formats. Needs matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 8.0, 4.5  # inches; at 150 dots an inch 1200 x 675
# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is left out, as white paper hides it
COLORS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
# for readers without any colour: every curve has dashes of its own, every bar a pattern
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 2)))
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--")
# from dark to light, also in grey; no red beside green
SHADES = "viridis"
_ENDINGS = (".png", ".svg")


def require_matplotlib() -> None:
    """Raise ImportError with the extra to install unless matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'rope-patch[plots]'.") from error


def new_figure(
    columns: int = 1, height: float = HEIGHT, *, share_y: bool = True, row_heights: Sequence[float] = (1,)
) -> "tuple[Figure, list[Any]]":
    """An empty figure and its axes, row by row. Never touches pyplot, so no window and no global state.

    Args:
        columns: axes side by side.
        height: of the figure, in inches.
        share_y: whether the axes of a row have one scale.
        row_heights: of the rows, to each other.

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
    """The colour of text on the shade of a value from 0, dark, to 1, light."""
    return "black" if value > 0.6 else "white"


def add_legend(figure: "Figure", axes: Any, columns: int = 5) -> None:
    """The legend below the axes: inside, it would hide one curve or another."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False)


def mark_window(axes: Any, window: int) -> None:
    """A dashed line where the trained window ends, named above the axes, where no curve is."""
    axes.axvline(window, color="0.4", linestyle="--", linewidth=1)
    above = axes.secondary_xaxis("top")  # a title moves up for its label
    above.set_xticks([window], [f"window: {window}"])
    above.set_xticks([], minor=True)
    above.tick_params(length=0, pad=1, labelcolor="0.4")


def draw_bars(axes: Any, groups: Sequence[str], series: Mapping[str, Iterable[float]]) -> None:
    """Bars side by side: one group a name in `groups`, one colour a label in `series`."""
    width = 0.8 / max(len(series), 1)
    for k, (label, values) in enumerate(series.items()):
        places = [i - 0.4 + width * (k + 0.5) for i in range(len(groups))]
        color, hatch = COLORS[k % len(COLORS)], HATCHES[k % len(HATCHES)]
        axes.bar(places, list(values), width, label=label, color=color, hatch=hatch, edgecolor="white", linewidth=0.5)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.grid(axis="y", alpha=0.25)


def drawn_label(label: str) -> str:
    """A label as matplotlib shows it: dollar signs would begin a formula, and a leading _ keep it out of legends."""
    shown = label.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def compact(tokens: int) -> str:
    """A token count as people write it: 512, 8K, 32K, 1.5K."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 512 == 0 else str(tokens)


def save_figure(figure: "Figure", path: str | Path) -> list[Path]:
    """Write `path` with the endings .png (150 dots an inch) and .svg (same bytes for the same figure).

    Either ending may be in `path` already; what else stands behind a dot is part of the name.
    """
    path = Path(path)
    if path.suffix in _ENDINGS:
        path = path.with_suffix("")
    files = [path.with_name(path.name + ending) for ending in _ENDINGS]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files

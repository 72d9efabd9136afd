"""How figures look here: one place for size, colours, legend and file formats. Needs matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 8.0, 4.5  # inches; at 150 dots an inch 1200 x 675


def require_matplotlib() -> None:
    """Raise ImportError with the extra to install unless matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'rope-patch[plots]'.") from error


def new_figure(columns: int = 1, height: float = HEIGHT, *, share_y: bool = True) -> "tuple[Figure, list[Any]]":
    """An empty figure and its axes, from left to right. Never touches pyplot, so no window and no global state.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, sharey=share_y)[0])


def add_legend(figure: "Figure", axes: Any, columns: int = 5) -> None:
    """The legend below the axes: inside, it would hide one curve or another."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False)


def mark_window(axes: Any, window: int) -> None:
    """A dashed line where the trained window ends."""
    axes.axvline(window, color="0.4", linestyle="--", linewidth=1)
    axes.annotate(
        f"window: {window}",
        (window, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 0),
        textcoords="offset points",
        va="top",
        ha="right",
        rotation=90,
        color="0.4",
    )


def draw_bars(axes: Any, groups: Sequence[str], series: Mapping[str, Iterable[float]]) -> None:
    """Bars side by side: one group a name in `groups`, one colour a label in `series`."""
    width = 0.8 / max(len(series), 1)
    for k, (label, values) in enumerate(series.items()):
        axes.bar([i - 0.4 + width * (k + 0.5) for i in range(len(groups))], list(values), width, label=label)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.grid(axis="y", alpha=0.25)


def compact(tokens: int) -> str:
    """A token count as people write it: 512, 8K, 32K, 1.5K."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 512 == 0 else str(tokens)


def save_figure(figure: "Figure", path: str | Path) -> list[Path]:
    """Write `path` with the endings .png (150 dots an inch) and .svg (same bytes for the same figure)."""
    files = [Path(path).with_suffix(ending) for ending in (".png", ".svg")]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files

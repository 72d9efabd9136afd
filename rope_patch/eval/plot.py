"""The picture of loss by position."""

from collections.abc import Mapping
from pathlib import Path

from .loss_by_position import FIRST_POSITION, LossByPosition


def plot_loss_by_position(
    curves: Mapping[str, LossByPosition], path: str | Path, *, window: int, title: str, bin_size: int | None = None
) -> list[Path]:
    """Draw one or several curves and write `path` as .png and .svg.

    Args:
        curves: label -> result, drawn in this order.
        path: file name; its ending is replaced.
        window: trained window, in positions: a dashed line.
        title: above the axes.
        bin_size: tokens that one point of a curve averages; None means 1/64 of the longest row.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'rope-patch[plots]'.") from error
    longest = max(curve.seq_len for curve in curves.values())
    step = bin_size or max(longest // 64, 1)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, curve in curves.items():
        edges = [FIRST_POSITION, *range(FIRST_POSITION + step, curve.seq_len, step), curve.seq_len]
        bins = curve.bins(edges)
        axes.plot([(b["first"] + b["end"]) / 2 for b in bins], [b["loss"] for b in bins], label=label, linewidth=1.8)
    axes.axvline(window, color="0.4", linestyle="--", linewidth=1)
    axes.annotate(
        f"trained window: {window}",
        (window, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 0),
        textcoords="offset points",
        va="top",
        ha="right",
        rotation=90,
        color="0.4",
    )
    axes.set(title=title, xlabel="target position (tokens)", ylabel=f"loss (nats per token, mean of {step} tokens)")
    axes.set_xlim(0, longest)
    axes.grid(alpha=0.25)
    # below the axes: inside, it would hide one curve or another
    figure.legend(loc="outside lower center", ncols=len(curves), frameon=False)
    files = [Path(path).with_suffix(ending) for ending in (".png", ".svg")]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files

"""Draw docs/images/architecture.svg, the way of a batch through the code. Run: python docs/architecture.py"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
# text stays text, and the same picture is the same file
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "architecture", "font.family": "sans-serif"})

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

TARGET = Path(__file__).parent / "images" / "architecture.svg"
LANES = (  # title and colour
    ("trl_ext", "#dbe9f6"),
    ("rope_patch", "#e3f1dc"),
    ("rope_kernels", "#fbe6d4"),
    ("the model (Transformers)", "#eeeeee"),
)
WIDTH, HEIGHT = 2.55, 0.74  # of a box

BOXES = {  # name: lane, row from the top, bold line, small lines
    "rows": (0, 0, "rows of tokens", "trainer/training_set.py"),
    "step": (0, 1, "batches of a step", "trainer/trainer.py: get_batch_samples\ntrainer/step_batches.py"),
    "objective": (0, 2, "objective", "trainer/trainer.py: compute_loss\nobjectives/: Objective.loss"),
    "before": (1, 2, "before the decoder", "losses/forward_loss.py\nteacher's pass, copies of a suffix"),
    "decoder": (3, 2, "decoder", "true position_ids, masks made of them"),
    "draw": (1, 3, "draw of the view", "forward/hooks.py: DecoderEntry\nforward/sources.py, layout/, views/"),
    "index": (1, 4, "RoPE index of each token", "forward/hooks.py: RotaryEntry"),
    "rotary": (3, 4, "rotary module", "RoPE indices in, cos and sin out"),
    "watch": (1, 5, "calls of attention", "attention/: both views, groups;\nqueries and keys for relations"),
    "attention": (3, 5, "attention of each layer", "the functions in Transformers' table"),
    "relations": (1, 6, "losses of layers", "losses/relations.py"),
    "row_kl": (2, 6, "row_kl/", "relation_kl, attention_map_kl,\nrelation_mse"),
    "after": (1, 7, "losses of tokens", "losses/next_token.py, heads.py,\nlosses/consistency.py"),
    "vocabulary": (2, 8, "vocabulary/", "linear_ce_kl, linear_ce_rows"),
    "states": (3, 7, "last hidden states", ""),
    "loss": (0, 7, "loss of the batch", "objectives/, step_means.py,\ntrainer/trainer.py: training_step"),
}
ARROWS = [  # from, to, and whether something comes back
    ("rows", "step", False),
    ("step", "objective", False),
    ("objective", "before", False),
    ("before", "decoder", False),
    ("before", "draw", False),
    ("draw", "index", False),
    ("decoder", "rotary", False),
    ("index", "rotary", True),
    ("rotary", "attention", False),
    ("watch", "attention", True),
    ("watch", "relations", False),
    ("relations", "row_kl", True),
    ("relations", "after", False),
    ("attention", "states", False),
    ("states", "after", False),
    ("after", "vocabulary", True),
    ("after", "loss", False),
]


def centre(name: str) -> tuple[float, float]:
    lane, row, *_ = BOXES[name]
    return 3 * lane + 1.5, -1.05 * row


def ends(first: str, second: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow between two boxes begins and ends: below and above, or at their sides."""
    (x, y), (u, v) = centre(first), centre(second)
    if x == u:
        return (x, y - HEIGHT / 2), (u, v + HEIGHT / 2)
    side = WIDTH / 2 if u > x else -WIDTH / 2
    lower = HEIGHT / 4 if y != v else 0.0  # apart from the arrow that comes in at the middle
    return (x + side, y - lower), (u - side, v)


def box(corner: tuple[float, float], width: float, height: float, **colors: str) -> FancyBboxPatch:
    return FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.08", **colors)


def draw() -> Figure:
    """The whole picture."""
    bottom = min(centre(name)[1] for name in BOXES) - 0.6
    figure = Figure(figsize=(11.6, 9.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.1, 12.1), ylim=(bottom - 0.15, 1.05))
    axes.axis("off")
    for k, (title, color) in enumerate(LANES):
        axes.add_patch(box((3 * k + 0.1, bottom), 2.8, 0.9 - bottom, fc=color, ec="none"))
        axes.text(3 * k + 1.5, 0.65, title, ha="center", va="center", fontsize=12, fontweight="bold", color="0.25")
    for first, second, both in ARROWS:
        style = "<|-|>" if both else "-|>"
        arrow = FancyArrowPatch(
            *ends(first, second), arrowstyle=style, mutation_scale=12, color="0.25", shrinkA=0, shrinkB=0
        )
        axes.add_patch(arrow)
    for name, (_, _, title, small) in BOXES.items():
        x, y = centre(name)
        axes.add_patch(box((x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, fc="white", ec="0.4"))
        up = 0.075 * small.count("\n") + 0.1 if small else 0
        axes.text(x, y + up, title, ha="center", va="center", fontsize=9.5, fontweight="bold")
        axes.text(x, y + up - 0.12, small, ha="center", va="top", fontsize=7.6, linespacing=1.25)
    return figure


if __name__ == "__main__":
    draw().savefig(TARGET, metadata={"Date": None}, facecolor="white")

"""Write docs/methods/: a page for each view, rescaling and objective, with a drawing made by its code. Run: make docs

The words come from the docstrings (`rope-patch methods NAME` prints the same), what was found from gallery.yaml.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# text stays text, and the same picture is the same file
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gallery", "font.family": "sans-serif"})

import torch  # noqa: E402
import yaml  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from rope_patch import patch_model  # noqa: E402
from rope_patch.base.draws import DrawKey  # noqa: E402
from rope_patch.base.not_here import NOT_HERE  # noqa: E402
from rope_patch.layout.documents import Documents  # noqa: E402
from rope_patch.methods import resolve_method  # noqa: E402
from rope_patch.rescalings import Rescaling  # noqa: E402
from rope_patch.views import View  # noqa: E402
from trl_ext.cli.catalogue import Method, methods  # noqa: E402

FOLDER = Path(__file__).with_name("methods")
NOTES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("gallery.yaml").read_text(encoding="utf-8"))

GREY = "#808080"  # axes and text: legible on white and on black
COLOURS = ("#2f7ed8", "#e07b39", "#3a9d5d")
TOKENS = 128  # of the document that a view is drawn for
WINDOW = 8192  # of the model that a rescaling is drawn for
# of the results, from a page of the gallery
RESULTS = "../../research/results"
NEEDS_RESCALING = {"native-distill", "relation-distill", "hidden-distill"}  # their teacher is the native model

KINDS = {
    "rescaling": "RoPE scaling (rescalings)",
    "view": "Position IDs (views)",
    "objective": "Losses (objectives)",
}


def main() -> None:
    """Write a page and, where there is one, a drawing for each method, and the index of all."""
    FOLDER.mkdir(exist_ok=True)
    known = sorted(methods(), key=lambda method: (list(KINDS).index(method.kind), method.name))
    for method in known:
        options = NOTES[method.name]["options"]
        drawn = draw(method, options)
        (FOLDER / f"{method.name}.md").write_text(page(method, options, drawn), encoding="utf-8")
    (FOLDER / "index.md").write_text(index(known), encoding="utf-8")


def index(known: list[Method]) -> str:
    """The page that lists all methods, and their order in the side bar."""
    lines = ["# Methods", "", "One page for each method, with its formula, its paper and when to take it."]
    for kind, head in KINDS.items():
        own = [method for method in known if method.kind == kind]
        lines += ["", f"## {head}", "", "| name | when to take it |", "|---|---|"]
        lines += [f"| [`{m.name}`]({m.name}.md) | {cell(m.when)} |" for m in own]
        lines += ["", "```{toctree}", ":hidden:", f":caption: {head}", "", *(m.name for m in own), "```"]
    lines += ["", "## Names that others use", "", "| name elsewhere | here |", "|---|---|"]
    lines += [f"| {names(m.synonyms)} | [`{m.name}`]({m.name}.md) |" for m in known if m.synonyms]
    lines += [f"| {names(others.split())} | {cell(answer)} |" for others, answer in NOT_HERE.items()]
    return "\n".join(lines) + "\n"


def page(method: Method, options: dict[str, Any], drawn: str | None) -> str:
    """Formula, drawing, when to take it, five lines, options, what was found, paper."""
    formula, *rest = method.what.split("\n\n")
    note = NOTES[method.name]
    parts = [f"# {method.name}", f"> {' '.join(formula.split())}"]
    parts += [f"![{drawn}]({method.name}.svg)", f"*{drawn}*"] if drawn else []
    parts += [method.when] if method.when else []
    parts += ["## In a script", f"```python\n{example(method, options)}\n```"]
    parts += ["## In detail", *rest] if rest else []
    if method.options:
        table = ["| option | default | meaning |", "|---|---|---|"]
        table += [f"| `{o.name}` | {default(o.default)} | {cell(o.meaning)} |" for o in method.options]
        parts += ["## Options", "\n".join(table)]
    if "found" in note:
        parts += ["## What was found here", f"{note['found']} ([figures]({RESULTS}/{note['page']}))"]
    sources = [method.source, *(f"<{paper}>" for paper in method.papers)]
    parts += ["## Paper", "\n\n".join(source for source in sources if source)] if any(sources) else []
    return "\n\n".join(parts) + "\n"


def default(value: str | None) -> str:
    """A default as a cell of a table."""
    return "required" if value is None else f"`{value}`"


def names(others: Iterable[str]) -> str:
    """Names as a cell of a table."""
    return ", ".join(f"`{name}`" for name in others)


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|") or "-"


def example(method: Method, options: dict[str, Any]) -> str:
    """Five lines that use a method: on a loaded model, or as a configuration of the trainer."""
    if method.kind == "objective":
        teacher = ', rescale="yarn", rescale_args={"factor": 4.0}' if method.name in NEEDS_RESCALING else ""
        view = ', view="skip"' if method.name == "self-distill" else ""
        fields = f'output_dir="out", objective="{method.name}"{view}{teacher}'
        return f"from trl_ext import RopeSFTConfig\n\nRopeSFTConfig({fields})"
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return (
        "from transformers import AutoModelForCausalLM\n\nfrom rope_patch import patch_model\n\n"
        'model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")\n'
        f'patch_model(model, "{method.name}"{given})'
    )


def draw(method: Method, options: dict[str, Any]) -> str | None:
    """Draw a view's position IDs or a rescaling's frequencies into an SVG file.

    Returns:
        The caption; None for objectives, which have no drawing.
    """
    if method.kind == "objective":
        return None
    resolved = resolve_method(method.name, options)
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    caption = drawing_of(resolved)(axes, resolved)
    axes.tick_params(colors=GREY)
    axes.spines[:].set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(GREY)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=GREY)
    figure.savefig(FOLDER / f"{method.name}.svg", transparent=True, metadata={"Date": None})
    return caption


def drawing_of(method: View | Rescaling) -> Callable[[Axes, Any], str]:
    """What draws a method: by its scale of queries, its frequencies, or its position IDs."""
    if isinstance(method, Rescaling) and method.scales_queries:
        return draw_query_scale
    return draw_frequencies if isinstance(method, Rescaling) or method.rescales else draw_view


def draw_query_scale(axes: Axes, method: Rescaling) -> str:
    """Draw the factor of queries in four context windows."""
    positions = torch.arange(0, 4 * WINDOW, 16, dtype=torch.float64)
    axes.plot(positions, method.query_scale(positions), ".", markersize=2.5, color=COLOURS[0])
    axes.set_xlabel("position")
    axes.set_ylabel("factor of the query")
    return f"Factor of queries under `{method.name}` in a text of four context windows, {WINDOW} positions each."


def draw_view(axes: Axes, view: Any) -> str:
    """Draw the position ID of each token of three documents of `TOKENS` tokens, or in each group of layers."""
    axes.plot([0, TOKENS], [0, TOKENS], color=GREY, linewidth=1, linestyle=":")
    for label, colour, index in lines_of(view):
        axes.plot(index, ".", markersize=2.5, color=COLOURS[colour], label=label)
    axes.set_xlabel("token")
    axes.set_ylabel("position ID")
    what = "each group of layers" if view.layerwise else f"each of three documents of {TOKENS} tokens"
    return f"Position IDs under `{view.name}`, one colour for {what}. The dotted line is without a view."


def lines_of(view: Any) -> Iterator[tuple[str | None, int, torch.Tensor]]:
    """Label, colour and position IDs of each line of a view's drawing."""
    rows = 3
    t = torch.arange(TOKENS).expand(rows, TOKENS)
    one = torch.ones(rows, 1, dtype=torch.int64)
    documents = Documents(start=0 * one, length=TOKENS * one, ordinal=torch.arange(rows)[:, None])
    # a step each, so that what the documents of a step share is seen to change too
    for row in range(1 if view.layerwise else rows):
        ids = torch.where(t % 16 == 15, 13, 0)  # every sixteenth token ends a sentence
        drawn = view.draw_for(ids, t, documents, DrawKey(seed=0, step=row, sample=documents.ordinal))
        if not view.layerwise:
            yield None, row, view.rope_index(t, drawn).expand(rows, TOKENS)[row]
            continue
        for colour, (layers, part, parameters) in enumerate(view.layer_groups(4, drawn)):
            label = f"layers {', '.join(str(layer + 1) for layer in layers)} of 4"
            yield label, colour, part.rope_index(t, parameters).expand(rows, TOKENS)[row]


def draw_frequencies(axes: Axes, method: Any) -> str:
    """Draw the factor by which the frequency of each pair of dimensions changes, in a head of 64 dimensions."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32, max_position_embeddings=WINDOW, rope_theta=500000.0))
    rotary = model.model.rotary_emb
    native = rotary.inv_freq.clone()
    if isinstance(method, View):
        keys = [DrawKey(seed=0, step=step, sample=torch.zeros(1, 1, dtype=torch.int64)) for step in range(3)]
        ratios = [method.frequencies(native, method.draw(torch.tensor([[WINDOW]]), key)) / native for key in keys]
        axes.set_yscale("log")
        what = "of three optimizer steps, one colour each"
    else:
        patch_model(model, method)
        rotary(torch.zeros(1), torch.tensor([[4 * WINDOW - 1]]))  # what depends on the length is drawn at four windows
        ratios = [model.model.rotary_emb.inv_freq / native]
        axes.set_ylim(0, 1.05)
        what = "in a text of four context windows"
    for colour, ratio in zip(COLOURS, ratios, strict=False):
        axes.plot(ratio.detach().flatten(), ".-", color=colour)
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    axes.set_xlabel("pair of dimensions, from the fastest to the slowest")
    axes.set_ylabel("frequency / native frequency")
    return (
        f"The frequencies under `{method.name}`, {what}: divided by those that the model was trained with, for a head "
        f"of 64 dimensions, base 500000 and a context window of {WINDOW} tokens."
    )


if __name__ == "__main__":
    main()

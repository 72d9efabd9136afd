"""Relations of one head as pictures: native, rescaled, and restored models side by side, as LinearARD's Fig. 2.

Run: python research/experiments/relation_maps.py MODEL --text books.jsonl.xz [--restored FOLDER] [--rescale pi] [--factor 4]
         [--tokens 256] [--layer 15] [--head 0] [--out relation-maps]

For X of q, k and v after RoPE, R = softmax_row(X X^T / sqrt(d)) under the causal mask, in float64. Above each map of
another model stands its KL(R_native || R), the mean over rows. --restored is what a recipe of examples/recipes/restore
made, e.g. out/model.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from harness import DEVICE, load
from rope_patch import patch_model
from rope_patch.attention.plain import last_hidden_states
from rope_patch.eval.results.figures import new_figure, save_figure
from rope_patch.families.attention_calls import AttentionCall
from rope_patch.prompts.text import read_texts, text_rows

Maps = dict[str, torch.Tensor]


@torch.no_grad()
def relation_maps(model: Any, ids: torch.Tensor, layer: int, head: int) -> Maps:
    """R of q, k and v of one head, each [n, n] float64; k and v are those of the group that the query head is in.

    Args:
        model: a causal LM.
        ids: of one row, int64 [n].
        layer: index of the layer.
        head: index of the query head.
    """
    calls: list[AttentionCall] = []
    last_hidden_states(model, ids[None], calls.append)
    call = calls[layer]
    group = call.query.shape[1] // call.key.shape[1]
    of_head = {"q": call.query[0, head], "k": call.key[0, head // group], "v": call.value[0, head // group]}
    later = torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).triu(1)
    maps = {}
    for name, x in of_head.items():
        scores = x.double() @ x.double().T / x.shape[-1] ** 0.5
        maps[name] = scores.masked_fill(later, -torch.inf).softmax(-1)
    return maps


def distance(native: torch.Tensor, other: torch.Tensor) -> float:
    """KL(native || other) in nats, the mean over rows; rows are causal."""
    seen = torch.ones_like(native, dtype=torch.bool).tril()
    terms = torch.special.xlogy(native, native) - torch.special.xlogy(native, other)
    return terms.where(seen, 0.0).sum(-1).mean().item()


def draw(maps: Mapping[str, Maps], path: Path) -> list[Path]:
    """A row of maps for each model, by its label; the first is the native one."""
    native = next(iter(maps.values()))
    figure, panels = new_figure(3, 3.2 * len(maps), row_heights=(1,) * len(maps))
    for row, (label, found) in enumerate(maps.items()):
        for axes, (name, relation) in zip(panels[3 * row : 3 * row + 3], found.items(), strict=True):
            axes.imshow(relation.sqrt().cpu(), vmin=0, vmax=1, cmap="viridis")  # a root, so that small shares show
            far = "" if found is native else f", {distance(native[name], relation):.2f} nats"
            axes.set(title=f"{label}, {name}{far}", xticks=[], yticks=[])
    return save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", required=True, help="files of documents; the first row is read")
    parser.add_argument("--restored", help="folder of a restored checkpoint")
    parser.add_argument("--rescale", default="pi")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layer", type=int, default=-1)
    parser.add_argument("--head", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("relation-maps"))
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = text_rows(tokenizer, read_texts(args.text), seq_len=args.tokens, n_rows=1)[0].to(DEVICE)
    models = {"native": load(args.model), f"{args.rescale} {args.factor:g}x": load(args.model)}
    patch_model(list(models.values())[1], args.rescale, factor=args.factor)
    if args.restored:
        models["restored"] = load(args.restored)
    maps = {label: relation_maps(model, ids, args.layer, args.head) for label, model in models.items()}
    print(*draw(maps, args.out))


if __name__ == "__main__":
    main()

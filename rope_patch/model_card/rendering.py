"""Rendering a card with the Jinja template in this folder, with the hub's metadata at its top."""

import json
from pathlib import Path

from .facts import LOADERS, CardFacts
from .markdown import code, fenced, is_plain, text

_TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def render(facts: CardFacts, title: str) -> str:
    """The card as Markdown."""
    from huggingface_hub import ModelCardData
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    base = facts.base if facts.base is not None and facts.base.is_on_hub else None
    data = ModelCardData(
        base_model=None if base is None else base.name,
        base_model_relation=None if base is None else ("adapter" if facts.is_adapter else "finetune"),
        datasets=list(filter(is_plain, facts.datasets)) or None,
        library_name="peft" if facts.is_adapter else "transformers",
        license=(facts.base.license or None) if facts.base is not None and is_plain(facts.base.license) else None,
        pipeline_tag=LOADERS[facts.loader][1],
        tags=list(facts.tags),
    )
    # no autoescape, which is for HTML: the template passes every value of a record through a filter of `markdown`
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "figure": lambda value: "" if value is None else f"{value:.4g}",
        "text": text,
        "code": code,
        "fenced": fenced,
        "python": json.dumps,
    }
    return environment.get_template(_TEMPLATE.name).render(facts=facts, title=title, metadata=data.to_yaml())

"""RULER in a study: prompts that are made once and kept beside its checkpoints, as that takes minutes, and scores."""

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_parts import Parts
from rope_patch.checkpoints.full_disk import whole_file
from rope_patch.eval import ruler
from rope_patch.eval.measures.ruler_prompts import TASKS, RulerPrompts, ruler_prompts
from rope_patch.prompts.asking import ChatTemplate

RULER_TASKS = [task for task in TASKS if task != "ruler_qa_hotpot"]  # LinearARD's twelve


def kept_prompts(
    tokenizer: Any,
    texts: Sequence[str],
    args: argparse.Namespace,
    lengths: Sequence[int],
    hotpotqa: Path | None = None,
    chat_template: ChatTemplate = "off",
) -> RulerPrompts:
    """The prompts of --ruler, --ruler-tasks and --squad.

    Args:
        tokenizer: of the model.
        texts: held-out text to hide needles in.
        args: with these and --checkpoints, whose folder gets the prompts; None keeps none.
        lengths: of the prompts. Prompts of more lengths may be kept.
        hotpotqa: file of HotpotQA, for its task.
        chat_template: "off" for raw text, "on" for prompts in the tokenizer's chat template.
    """
    haystack = "\n".join(texts)
    # what they are made of, so that others are not taken for them
    text = hashlib.sha256(haystack.encode()).hexdigest()
    of = [Path(tokenizer.name_or_path).name, text, args.ruler, *args.ruler_tasks]
    asked = [*of, *map(str, lengths)]
    name = "ruler-prompts-chat.json" if chat_template == "on" else "ruler-prompts.json"
    file = args.checkpoints and args.checkpoints / name
    if file and file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        known = {(length, task): documents for length, task, documents in kept["prompts"]}
        cells = [(length, task) for length in lengths for task in args.ruler_tasks]
        if kept["asked"][: len(of)] == of and all(cell in known for cell in cells):
            return {cell: known[cell] for cell in cells}
    prompts = ruler_prompts(
        tokenizer,
        lengths,
        tasks=args.ruler_tasks,
        samples=args.ruler,
        haystack=haystack,
        squad=args.squad,
        hotpotqa=hotpotqa,
        chat_template=chat_template,
        progress=False,
    )
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        made = [[length, task, documents] for (length, task), documents in prompts.items()]
        with whole_file(file) as beside:
            beside.write_text(json.dumps({"asked": asked, "prompts": made}), encoding="utf-8")
    return prompts


def ruler_scores(
    model: Any,
    tokenizer: Any,
    prompts: RulerPrompts,
    parts: Parts,
    chat_template: ChatTemplate = "off",
) -> dict[str, Any]:
    """Scores of `kept_prompts`, prompt by prompt, and a reply of each task and length; what `parts` has is not redone.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        prompts: of the model.
        parts: what the run has found so far.
        chat_template: of the prompts.
    """

    def remember(key: Mapping[str, Any], find: Callable[[], Any]) -> Any:
        return parts.remember({**key, "chat": True} if chat_template == "on" else key, find)

    found = ruler(
        model,
        tokenizer,
        prompts,
        chat_template=chat_template,
        progress=False,
        remember=remember,
    )
    return {"lengths": found.lengths, "scores": found.prompt_scores, "replies": found.replies}

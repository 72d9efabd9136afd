"""A text to hide needles in, and a model that finds them."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rope_patch.prompts.needles import RetrievalPrompt, make_prompt

from .characters import CHARACTERS, character_tokenizer
from .tiny import tiny

TOKENIZER = character_tokenizer()
TEXT = "It was a dark night. The wind blew! Who was there? " * 80


def prompt(kind: Any, depth: float = 0.5, n_tokens: int = 1500, n_needles: int = 4, seed: int = 0) -> RetrievalPrompt:
    """One prompt in `TEXT`."""
    ids = TOKENIZER(TEXT)["input_ids"]
    rng = random.Random(seed)
    return make_prompt(kind, TOKENIZER, ids, n_tokens=n_tokens, depth=depth, n_needles=n_needles, rng=rng)


def lookup(knows: Callable[[str, list[str]], Sequence[str]] = lambda text, values: values) -> Any:
    """A tiny model whose replies are looked up in the prompt: all values of the keys that the question names."""
    model = tiny(vocab_size=CHARACTERS)

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any) -> torch.Tensor:
        replies = []
        for row in input_ids:
            text = TOKENIZER.decode(row)
            body, _, question = text.rpartition("\n")
            keys = dict.fromkeys(re.findall(r"[a-z]+-[a-z]+", question))
            name = re.search(r"pass key of (\w+)\?", question)
            if name:
                values = re.findall(rf"pass key of {name[1]} is (\d{{5}})", body)
            elif not keys:
                values = list(dict.fromkeys(re.findall(r"\d{5}", body)))
            else:
                # a needle is a sentence with a key and a number, in either order
                matches = {k: re.findall(rf"{k}[^.]*?(\d{{7}})|(\d{{7}})[^.]*? {k}\b", body) for k in keys}
                values = [a or b for k in keys for a, b in matches[k]]
            ordinal = re.search(r"the (first|second|third|fourth|last) [a-z]", question)
            if ordinal:
                values = [values[["first", "second", "third", "fourth", "last"].index(ordinal[1]) if ordinal[1] != "last" else -1]]  # fmt: skip  # noqa: E501
            reply = ", ".join(knows(text, values))[: generation_config.max_new_tokens]
            replies.append(TOKENIZER(reply.ljust(generation_config.max_new_tokens))["input_ids"])
        return torch.cat([input_ids, torch.tensor(replies)], dim=1)

    model.generate = generate
    return model

"""What PEFT's tests take from elsewhere: models of the Hugging Face hub, tiny and random here, and diffusers.

`fill_cache` is for the process that starts them; for theirs this module is a pytest plugin.
"""

import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

from support.characters import character_tokenizer
from support.tiny import gemma3, tiny

pytest_plugins = ["peers.patch_every_model"]

_SHAPE = {"vocab_size": 130, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
# name on the hub -> a model of the same family
STAND_INS = {
    "trl-internal-testing/tiny-random-LlamaForCausalLM": lambda: tiny("llama", **_SHAPE),
    "peft-internal-testing/tiny-dummy-qwen2": lambda: tiny("qwen2", **_SHAPE),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": gemma3,
}
_COMMIT = "0" * 40


def fill_cache(cache: Path) -> None:
    """Write every stand-in with its tokenizer below `cache`, for the variable HF_HUB_CACHE."""
    for name, build in STAND_INS.items():
        repository = cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / _COMMIT
        build().save_pretrained(snapshot)
        character_tokenizer().save_pretrained(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(_COMMIT)


class _Seen(defaultdict):
    """Names of the hub that were loaded before: all of them, since PEFT's tests go online for a name's first time."""

    def __contains__(self, name) -> bool:
        return True


def pytest_configure() -> None:
    diffusers = ModuleType("diffusers")  # imported by the tests that all kinds of models share, used for images alone
    diffusers.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
    sys.modules.setdefault("diffusers", diffusers)


def pytest_collection_finish(session) -> None:
    for module in {item.module for item in session.items}:
        module.hub_online_once.__wrapped__.__globals__["_HUB_MODEL_ACCESSES"] = _Seen(int)

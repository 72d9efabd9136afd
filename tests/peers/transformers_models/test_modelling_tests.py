"""Transformers' own modelling tests on patched models: whatever passes unpatched passes patched."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from peers.counts import Counts, read_counts, surprises
from peers.outcomes import Outcome, count, differences, run_tests
from peers.patch_every_model import COUNTS, MODE, MODES
from peers.transformers_models.refusals import REFUSALS, REFUSED_MODELS

NEEDED = ("httpx", "parameterized")  # by Transformers' tests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, NEEDED)), reason=f"Transformers' tests import {NEEDED}: pip install {' '.join(NEEDED)}"
    ),
]

# folder of Transformers' tests -> the class in it that tests models of text, and a class of models that it builds
FAMILIES = {
    "llama": ("LlamaModelTest", "LlamaForCausalLM"),
    "qwen2": ("Qwen2ModelTest", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3ModelTest", "Qwen3ForCausalLM"),
    "mistral": ("MistralModelTest", "MistralForCausalLM"),
    "gemma3": ("Gemma3TextModelTest", "Gemma3ForCausalLM"),
    "phi3": ("Phi3ModelTest", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2ModelTest", "Olmo2ForCausalLM"),
}
# Compiling takes half of the time, and tests/rope_patch has tests of it. The 24 comparisons of eager attention and SDPA
# and the two others, which train and load for seconds, say the same of each family. Tests of several processes (tp,
# fsdp, ep) start some in which nothing is patched.
LEFT_OUT = (
    "not (compil or eager_matches_sdpa_inference or training_overfit or bc_torch_dtype or test_tp_ or fsdp or test_ep_)"
)


@pytest.fixture(scope="module")
def run(
    peer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[dict[str, Outcome], Counts]]:
    """Run the tests of a family once in a mode, "" for unpatched: what came out, and how many models were patched."""
    checkout = peer_folder("transformers")
    folder = tmp_path_factory.mktemp("transformers")

    @cache
    def run(family: str, mode: str) -> tuple[dict[str, Outcome], Counts]:
        counts = folder / f"{family}-{mode}.json"
        tests = checkout / f"tests/models/{family}/test_modeling_{family}.py"
        outcomes = run_tests(
            [f"{tests}::{FAMILIES[family][0]}", "-k", LEFT_OUT],
            checkout=checkout,
            folder=folder,
            report=folder / f"{family}-{mode}.xml",
            plugin="peers.patch_every_model",
            CUDA_VISIBLE_DEVICES="",
            **{MODE: mode, COUNTS: str(counts)},
        )
        print(family, mode, count(outcomes))
        return outcomes, read_counts(counts)

    return run


# Transformers takes no linear RoPE type for Phi-3, which "same-places" would write
CASES = [(family, mode) for family in FAMILIES for mode in MODES if (family, mode) != ("phi3", "same-places")]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_what_passes_unpatched_passes_patched(run, family, mode):
    stock, unpatched = run(family, "")
    assert count(stock)["passed"] > 80, [each for each in stock.items() if each[1].kind == "failed"]
    assert not unpatched.patched
    outcomes, counts = run(family, mode)
    assert not differences(stock, outcomes, REFUSALS[mode])
    assert not surprises(counts, [FAMILIES[family][1]], REFUSED_MODELS[mode])

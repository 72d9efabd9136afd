"""PEFT's own tests of adapters on decoders, with patched models: whatever passes unpatched passes patched."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from peers.counts import Counts, read_counts, surprises
from peers.outcomes import Outcome, count, differences, run_tests
from peers.patch_every_model import COUNTS, MODE
from peers.peft_decoders.refusals import REFUSALS, REFUSED_MODELS
from peers.peft_decoders.stand_ins import fill_cache

pytestmark = pytest.mark.slow

# One model of the three, and of its 1,500 tests those that build, train, run, merge, save and load adapters, each in
# one dtype: about five minutes on a core.
SELECTED = (
    "LlamaForCausalLM and (save_pretrained or merge_layers or unload or disable or gradient_checkpointing or generate "
    "or input_embeds or weighted) "
    "and not (pickle or nan or fp16 or mixed or dtype or half_prec or pos_args or prepare_for)"
)


@pytest.fixture(scope="module")
def run(
    peer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[dict[str, Outcome], Counts]]:
    """Run the tests once in a mode, "" for unpatched: what came out, and how many models were patched."""
    checkout = peer_folder("peft")
    folder = tmp_path_factory.mktemp("peft")
    fill_cache(folder / "hub")

    @cache
    def run(mode: str) -> tuple[dict[str, Outcome], Counts]:
        counts = folder / f"{mode}.json"
        outcomes = run_tests(
            [str(checkout / "tests/test_decoder_models.py"), "-k", SELECTED],
            checkout=checkout,
            folder=folder,
            report=folder / f"{mode}.xml",
            plugin="peers.peft_decoders.stand_ins",
            CUDA_VISIBLE_DEVICES="",
            HF_HUB_CACHE=str(folder / "hub"),
            **{MODE: mode, COUNTS: str(counts)},
        )
        print(mode, count(outcomes))
        return outcomes, read_counts(counts)

    return run


@pytest.mark.parametrize("mode", ["standard", "same-places"])
def test_what_passes_unpatched_passes_patched(run, mode):
    stock, unpatched = run("")
    assert count(stock)["passed"] > 200, [each for each in stock.items() if each[1].kind == "failed"]
    assert not unpatched.patched
    outcomes, counts = run(mode)
    assert not differences(stock, outcomes, REFUSALS[mode])
    assert not surprises(counts, ["LlamaForCausalLM"], REFUSED_MODELS[mode])

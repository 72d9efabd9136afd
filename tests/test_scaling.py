"""docs/scaling.md: its tables are the script's, its sentences are the tables', and torch counts the same operations."""

import re
from pathlib import Path

import pytest
import scaling
import torch
from support.tiny import tiny
from torch.utils.flop_counter import FlopCounterMode

from trl_ext.extension import choices

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
RUNS = scaling.measured_runs()


def test_the_page_has_the_tables_of_the_files():
    assert scaling.with_tables(PAGE) == PAGE


@pytest.mark.parametrize("all_weights", [True, False], ids=["all", "inputs-alone"])
def test_operations_are_those_that_torch_counts(all_weights):
    """Of a checkpointed decoder without its head, whose eager attention multiplies whole squares, twice in backward."""
    model = tiny(attention="eager").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    embedded = model.get_input_embeddings()(torch.randint(3, 101, (1, 48))).detach().requires_grad_()
    model.requires_grad_(all_weights)
    with FlopCounterMode(display=False) as counter:
        model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state.sum().backward()
    config, n = model.config, 48
    queries = config.num_attention_heads * config.head_dim
    head = 2 * (4 if all_weights else 3) * config.vocab_size * config.hidden_size
    of_layers = scaling.flops_per_token(config, 0, all_weights=all_weights) - head
    squares = (1 + 1 + 2) * 4 * config.num_hidden_layers * queries * n
    # some versions of Transformers multiply positions and frequencies as matrices
    assert counter.get_total_flops() == pytest.approx(n * (of_layers + squares), rel=1e-4)
    causal = scaling.flops_per_token(config, n, all_weights=all_weights) - of_layers - head
    assert causal == (1 + 1 + 2.5) / (1 + 1 + 2) * squares / 2


def test_sentences_are_of_the_runs():
    speeds = [scaling.achieved(run) / 1e12 for run in RUNS if run["run"] == "clm"]
    assert len(speeds) == 7
    assert f"come to {min(speeds):.0f} to {max(speeds):.0f} trillion a second" in PAGE
    assert f"their mean, {scaling.speed(RUNS) / 1e12:.0f}." in PAGE
    for objective, words in (
        ("self-distill", "for self-distillation"),
        ("self-distill sequential", "with one view after the other"),
        ("relation-distill", "for relation distillation"),
    ):
        assert f"{scaling.cost(RUNS, objective):.2f} {words}" in " ".join(PAGE.split())
    for shape, all_weights, words in (("qwen3-4b", True, "23,000"), ("llama-3-8b", False, "35,000")):
        config = scaling.config_of(shape)
        rest, one = (scaling.flops_per_token(config, n, all_weights=all_weights) for n in (0, 1))
        assert words in PAGE and int(words.replace(",", "")) == round(rest / (one - rest), -3)
    of_rows = [
        scaling.predicted(RUNS, "llama-3-8b", row, "clm", all_weights=True) * scaling.HOUR / 1e6
        for row in (scaling.TARGET, 32768)
    ]
    assert f"reads {of_rows[0]:.1f} million tokens" in PAGE and f"{of_rows[1]:.0f} million of rows of 32768" in PAGE
    assert round(of_rows[1] / of_rows[0]) == 14


def test_the_arithmetic_is_within_a_tenth_of_every_run():
    differences = [int(found) for found in re.findall(r"\| ([+-]\d+) % \|", scaling.step_table(RUNS))]
    assert len(differences) == 16 and max(map(abs, differences)) < 10


def test_tokens_of_extend_are_its_rows():
    text = " ".join(PAGE.split())
    million = [f"{choices._ROWS * length / 1e6:.1f} million" for length in (8192, choices._LONGEST_ROW)]
    assert f"trains on {choices._ROWS} rows unless it is told otherwise: {million[0]} tokens in rows of 8192" in text
    assert f"{million[1]} in rows of {choices._LONGEST_ROW}." in text

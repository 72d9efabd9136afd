"""Checkpoints of this package, run by the programs that serve them, beside Transformers."""

from pathlib import Path

import pytest
from serving.checkpoints import (
    FAMILIES,
    RESCALINGS,
    load,
    logits_of,
    rows_of,
    takes,
    tiny_model,
    write_checkpoint,
)
from serving.expected import EXPECTED, expected_of
from serving.outcomes import TOLERANCE, difference, outcomes_of
from serving.programs import PROGRAMS
from serving.table import END, START, table

from rope_patch import native_rope, patch_model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=lambda program: program.name)
def test_program_serves_as_expected(program, family, tmp_path):
    if program.missing:
        pytest.skip(program.missing)
    outcomes = outcomes_of(program, family, tmp_path)
    kinds = {cell: outcome.kind for cell, outcome in outcomes.items()}
    assert kinds == expected_of(program.name, family), {cell: str(outcome) for cell, outcome in outcomes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_give_transformers_the_logits_of_the_patched_model(family, tmp_path):
    for number, rescaling in enumerate(name for name in RESCALINGS if takes(family, name)):
        model = tiny_model(family)
        if (method := RESCALINGS[rescaling]) is not None:
            patch_model(model, method[0], **method[1])
        patched = logits_of(model, rows_of(rescaling))
        for form, checkpoint in write_checkpoint(tmp_path / str(number), family, rescaling).items():
            loaded = logits_of(load(checkpoint), rows_of(rescaling))
            for row, logits in patched.items():
                assert abs(loaded[row] - logits).max() == 0, (form, rescaling, row)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rescaling_moves_the_logits_by_more_than_the_tolerance(family):
    """A program that dropped the rescaling would otherwise pass for right."""
    for rescaling in (name for name in RESCALINGS if takes(family, name) and RESCALINGS[name] is not None):
        name, options = RESCALINGS[rescaling]
        model = patch_model(tiny_model(family), name, **options)
        patched = logits_of(model, rows_of(rescaling))["long"]
        with native_rope(model):
            native = logits_of(model, rows_of(rescaling))["long"]
        assert abs(patched - native).max() / native.std() > 5 * TOLERANCE, rescaling


@pytest.mark.parametrize("family", ["Gemma3", "Phi3"])
def test_what_a_family_does_not_take_is_refused(family):
    why = (
        "Leave that option out"
        if family == "Gemma3"
        else "Transformers does not accept these RoPE parameters for model type 'phi3'"
    )
    refused = [method for name, method in RESCALINGS.items() if not takes(family, name)]
    assert refused
    for name, options in refused:
        with pytest.raises(ValueError, match=why):
            patch_model(tiny_model(family), name, **options)


def test_every_cell_has_an_expectation():
    assert set(EXPECTED) == set(PROGRAMS)
    for program in PROGRAMS:
        for family in FAMILIES:
            rescalings = {rescaling for _, rescaling in expected_of(program, family)}
            assert rescalings == {name for name in RESCALINGS if takes(family, name)}, (program, family)


def test_docs_have_the_table_of_what_is_expected():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert table() == page.partition(START)[2].partition(END)[0]


def test_a_wrong_rescaling_counts_as_wrong():
    """The measure itself: native logits under the name of YaRN's are wrong, YaRN's own are right."""
    model = patch_model(tiny_model("Llama"), "yarn", factor=4.0)
    rows = rows_of("`yarn`")
    yarn = logits_of(model, rows)["long"]
    with native_rope(model):
        native = logits_of(model, rows)["long"]
    assert difference(yarn, yarn) == 0 and difference(native, yarn) > TOLERANCE

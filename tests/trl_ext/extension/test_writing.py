"""How long a model's own texts take: steps that are timed, counted by batches."""

import pytest

from trl_ext.extension import writing
from trl_ext.extension.facts import ModelFacts
from trl_ext.extension.writing import seconds_a_step, seconds_of_writing


@pytest.fixture
def facts(folder):
    return lambda name: ModelFacts.of(str(folder / name))


def test_a_batch_of_chats_is_written_to_its_end_for_the_few_that_are_kept(facts):
    """Eight chats of a CPU give 8 x 85 tokens in as many steps as half a window has room for, here 400."""
    assert seconds_of_writing(facts("base"), "cpu", "chats", 2 * 680, 0.5) == 2 * 400 * 0.5
    assert seconds_of_writing(facts("base"), "cpu", "own_texts", 3200, 0.5) == 400 * 0.5


@pytest.mark.parametrize("name", ["base", "sliding"])
def test_steps_are_timed_on_as_many_layers_as_are_small_enough(name, facts, monkeypatch):
    built = []
    cut = writing._with_layers
    monkeypatch.setattr(writing, "_with_layers", lambda *given: built.append(cut(*given)) or built[-1])
    model = facts(name)
    assert 0 < seconds_a_step(model, "cpu") < 10
    monkeypatch.setattr(writing, "_WEIGHTS", 1)
    assert 0 < seconds_a_step(model, "cpu") < 10
    assert [config.num_hidden_layers for config in built] == [model.config.num_hidden_layers, 1]
    types = getattr(built[1], "layer_types", None)
    assert types is None or len(types) == 1 < len(model.config.layer_types)

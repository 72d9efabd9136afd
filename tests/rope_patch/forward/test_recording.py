"""The record of drawn positions holds what rotary modules got, document by document."""

import copy

import pytest
import torch
from datasets import Dataset
from support.tiny import tiny, tokens
from support.training import trainer

from rope_patch import patch_model, record_positions, rope_view
from rope_patch.views import LongRecipe, Mix, PerLayer, PosAug, Skip, Uniform

POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])


def given_to_rope(model):
    """A list that gets the positions that rotary modules are called with, one entry a call."""
    seen = []
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: (seen.append(position_ids), forward(x, position_ids))[1]
    return seen


@pytest.mark.parametrize(
    "view", [Skip(), PosAug(), LongRecipe(99, sentence_ends=range(3, 40)), Mix([Skip(), PosAug(2)])]
)
@torch.no_grad()
def test_positions_of_a_packed_batch_are_those_that_rope_got(view):
    model = tiny()
    seen = given_to_rope(model)
    with record_positions(model) as drawn, rope_view(model, view, seed=5):
        model(tokens(2, 12), position_ids=POSITIONS)
        model(tokens(2, 12), position_ids=POSITIONS)
    for step, positions in enumerate(seen):
        cut = [positions[0, :5], positions[0, 5:], positions[1, :9], positions[1, 9:]]
        of_step = [one for one in drawn if one.step == step]
        assert [one.document for one in of_step] == [0, 1, 2, 3] and {one.view for one in of_step} == {view.name}
        assert all(one.positions.equal(expected) for one, expected in zip(of_step, cut, strict=True))
        assert {one.layers for one in of_step} == {(0, 1, 2)}
    assert len(drawn) == 8 and not drawn[0].positions.equal(drawn[4].positions)


@pytest.mark.parametrize("left", [True, False])
@torch.no_grad()
def test_padding_is_left_out_and_parameters_give_the_positions(left):
    model = patch_model(tiny(), Skip(skip=Uniform(1, 999)), when="always")
    mask = torch.tensor([[1] * 12, [0] * 4 + [1] * 8 if left else [1] * 8 + [0] * 4])
    with record_positions(model) as drawn:
        model(tokens(2, 12), attention_mask=mask)
    model(tokens(2, 12))
    assert [len(one.positions) for one in drawn] == [12, 8]
    for one in drawn:
        split, skip = one.parameters["split"], one.parameters["skip"]
        assert one.positions.tolist() == [t if t < split else t + skip for t in range(len(one.positions))]


@torch.no_grad()
def test_forwards_at_true_positions_and_decoded_tokens_are_not_recorded():
    model = tiny()
    with record_positions(model) as drawn:
        model(tokens(1, 8))
        with rope_view(model, "standard"):
            model(tokens(1, 8))
        assert drawn == []
        with rope_view(model, Skip()):
            model.generate(tokens(1, 8), max_new_tokens=4, do_sample=False)
    assert len(drawn) == 1 and len(drawn[0].positions) == 8


@torch.no_grad()
def test_layers_that_draw_apart_have_records_of_their_own():
    model = tiny()
    with record_positions(model) as drawn, rope_view(model, PerLayer(Skip(skip=Uniform(1, 999)))):
        model(tokens(2, 12))
    assert [one.layers for one in drawn] == [(i,) for i in range(3) for _ in range(2)]
    assert len({one.parameters["skip"] for one in drawn}) == 6
    with record_positions(model) as drawn, rope_view(model, PerLayer(Skip(), layers=[1])):
        model(tokens(2, 12))
    assert [one.layers for one in drawn] == [(1,), (1,)]


@torch.no_grad()
def test_blocks_nest_and_leave_the_model_as_it_was():
    model = tiny()
    before = dict(model.model.__dict__)
    with record_positions(model) as outer, rope_view(model, Skip()):
        model(tokens(2, 12))
        with record_positions(model) as inner:
            copy.deepcopy(model)(tokens(2, 12))
            model(tokens(2, 12))
    assert len(outer) == 4 and len(inner) == 2 and outer[2].positions.equal(inner[0].positions)
    assert model.model.__dict__.keys() == before.keys()


@pytest.mark.parametrize("objective", ["clm", "self-distill"])
def test_a_trainer_draws_for_its_steps_and_documents(objective, tmp_path):
    data = Dataset.from_dict({"input_ids": [[5 + i] * (20 + i) for i in range(8)]})
    run = trainer(
        tmp_path, train_dataset=data, view="skip", objective=objective, max_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    with record_positions(run.model) as drawn:
        run.train()
    assert [(one.step, one.document) for one in drawn] == [(step, i) for step in range(2) for i in range(4)]
    logged = [entry["view/skip"] for entry in run.state.log_history if "view/skip" in entry]
    for step in range(2):
        skips = [one.parameters["skip"] for one in drawn if one.step == step]
        assert logged[step] == pytest.approx(sum(skips) / 4)


@pytest.mark.slow  # compiles
@torch.no_grad()
def test_compiled_forwards_are_recorded():
    torch._dynamo.reset()
    model = patch_model(tiny(), Skip(skip=Uniform(1, 999)), when="always")
    run = torch.compile(model, backend="eager")
    run(tokens(2, 12))
    with record_positions(model) as drawn:
        run(tokens(2, 12))
    assert [one.step for one in drawn] == [1, 1]
    one = drawn[0]
    assert one.positions[-1] - 11 == (one.parameters["skip"] if one.parameters["split"] < 12 else 0)

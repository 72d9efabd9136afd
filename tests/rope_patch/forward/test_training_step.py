"""Loops that are no trainer's: the step of a draw is that of the optimizer over the model's parameters."""

import gc
from copy import deepcopy

import pytest
import torch
from accelerate import Accelerator
from support.tiny import VOCAB, tiny
from transformers import Trainer, TrainerCallback, TrainingArguments

from rope_patch import patch_model
from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import document_numbers, locate_documents
from rope_patch.patch import view_source
from rope_patch.views import Skip, Uniform

VIEW = Skip(skip=Uniform(1, 2**20))
ROWS = torch.randint(3, VOCAB, (4, 1, 12), generator=torch.Generator().manual_seed(0))


def expected(step, ids, seed=3):
    """What the view draws for a document at an optimizer step, by its definition."""
    documents = locate_documents(1, ids.shape[1], ids.device, None, None)
    t = torch.arange(ids.shape[1])[None]
    key = DrawKey(seed, step, document_numbers(ids, t, documents), progress=torch.ones((), dtype=torch.float64))
    return int(VIEW.draw_for(ids, t, documents, key)["skip"])


def drawn(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    return loss, int(view_source(model).last.parameters["skip"])


def made(optimizer_class=torch.optim.AdamW):
    model = patch_model(tiny(), VIEW, seed=3).train()
    return model, optimizer_class(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_micro_batches_of_a_step_draw_for_it(optimizer_class):
    model, optimizer = made(optimizer_class)
    for step in range(3):
        for ids in ROWS[:2]:
            loss, skip = drawn(model, ids)
            assert skip == expected(step, ids)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_accelerate_draws_by_optimizer_step_and_goes_on_after_resuming(tmp_path):
    def loop(steps, resume=False):
        model, optimizer = made()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resume:
            accelerator.load_state(tmp_path)
        found = []
        for i in range(2 * steps):
            with accelerator.accumulate(model):
                loss, skip = drawn(model, ROWS[i % 4])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(skip)
        accelerator.save_state(tmp_path)
        accelerator.free_memory()
        return found

    assert loop(2) == [expected(i // 2, ROWS[i]) for i in range(4)]
    assert loop(1, resume=True) == [expected(2, ROWS[i]) for i in range(2)]


def test_an_optimizer_that_comes_later_is_counted_from_its_first_step():
    model = patch_model(tiny(), VIEW, seed=3).train()
    first, second = (drawn(model, ROWS[0])[1] for _ in range(2))
    assert first != second, "without an optimizer every forward is a step"
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    drawn(model, ROWS[0])[0].backward()
    optimizer.step()
    assert [drawn(model, ROWS[0])[1] for _ in range(2)] == [expected(1, ROWS[0])] * 2


def test_a_second_optimizer_takes_over_and_a_copy_of_the_model_has_its_own():
    model, optimizer = made()
    drawn(model, ROWS[0])[0].backward()
    for _ in range(3):
        optimizer.step()
    copied = deepcopy(model)
    other = torch.optim.AdamW(copied.parameters(), lr=1e-3)
    assert drawn(model, ROWS[1])[1] == expected(3, ROWS[1])
    assert drawn(copied, ROWS[1])[1] == expected(0, ROWS[1])
    drawn(copied, ROWS[1])[0].backward()
    other.step()
    assert (drawn(model, ROWS[1])[1], drawn(copied, ROWS[1])[1]) == (expected(3, ROWS[1]), expected(1, ROWS[1]))
    second = torch.optim.SGD(model.parameters(), lr=1e-3)
    second.step()
    assert drawn(model, ROWS[1])[1] == expected(1, ROWS[1])


def stepped(model, optimizer, step):
    """Whether a loop draws for `step` in its next step."""
    loss, skip = drawn(model, ROWS[0])
    loss.backward()
    optimizer.step()
    return skip == expected(step, ROWS[0])


def test_a_state_that_is_loaded_says_the_step_of_the_parameter_that_was_stepped_most():
    model, _ = made()
    rare, *others = model.parameters()
    optimizer = torch.optim.AdamW([rare, *others], lr=1e-3)
    assert stepped(model, optimizer, 0)
    for step in range(1, 4):
        rare.requires_grad_(False)  # as an expert's that no token goes to
        optimizer.zero_grad()
        assert stepped(model, optimizer, step)
    saved = optimizer.state_dict()

    resumed, _ = made()
    again = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    again.load_state_dict(deepcopy(saved))
    assert stepped(resumed, again, 4) and stepped(resumed, again, 5)
    again.load_state_dict(deepcopy(saved))  # as of a run that goes back
    assert stepped(resumed, again, 4)


def test_a_state_may_be_loaded_after_steps_that_only_made_it():
    """As `torch.distributed.checkpoint` does, which steps an optimizer without a state."""
    model, optimizer = made()
    assert all(stepped(model, optimizer, step) for step in range(3))
    resumed, again = made()
    for parameter in resumed.parameters():
        parameter.grad = torch.zeros_like(parameter)
    again.step()
    again.load_state_dict(optimizer.state_dict())
    assert stepped(resumed, again, 3)


def test_each_parameter_may_have_an_optimizer():
    model, _ = made()
    optimizers = [torch.optim.SGD([p], lr=1e-3) for p in model.parameters()]
    for step in range(3):
        loss, skip = drawn(model, ROWS[0])
        assert skip == expected(step, ROWS[0])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def test_a_loop_does_not_stay_at_the_step_of_a_trainer_that_broke_off(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise InterruptedError

    model, _ = made()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    data = [{"input_ids": row[0], "labels": row[0]} for row in ROWS] * 8
    with pytest.raises(InterruptedError):
        Trainer(model=model, args=args, train_dataset=data, callbacks=[Stop()]).train()
    gc.collect()  # the trainer's optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert all(stepped(model, optimizer, step) for step in range(3))


def test_a_clock_that_the_loop_sets_is_left_alone():
    model, optimizer = made()
    view_source(model).clock.set_step(40)
    for _ in range(2):
        loss, skip = drawn(model, ROWS[0])
        assert skip == expected(40, ROWS[0])
        loss.backward()
        optimizer.step()

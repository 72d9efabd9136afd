"""RopeSFTTrainer with objective clm: TRL's own numbers, keyed draws, exact resume, errors."""

import itertools
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset, Features, Value
from peft import LoraConfig
from safetensors import SafetensorError
from support.tiny import WINDOW, tiny
from support.training import documents, logged, tokenizer, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from rope_patch import describe, load_adapter, patch_model
from rope_patch.patch import view_source
from rope_patch.views import Cyclic, PosAug, Skip, Standard, Step, Uniform
from trl_ext import RopeSFTConfig, RopeSFTTrainer

BATCHES = {"padded": {}, "packed": {"packing": True}}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")


def weights(run):
    return {n: p.detach().clone() for n, p in run.model.named_parameters()}


def test_packed_documents_draw_one_by_one_and_views_stay_inside(tmp_path):
    """A packed row under a fixed skip is the mean over its documents, each skipped at its own start."""
    from support import oracle

    data = documents(6)
    run = trainer(tmp_path, train_dataset=data, packing=True, per_device_train_batch_size=1, max_steps=1,
                  view="skip", view_args={"split": 5, "skip": 30}, learning_rate=0.0)  # fmt: skip
    model = tiny()
    total, count = 0.0, 0
    batch = next(iter(run.get_train_dataloader()))
    ids, positions = batch["input_ids"][0], batch["position_ids"][0]
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
    assert len(starts) > 2
    for begin, end in itertools.pairwise(starts):
        document = ids[begin:end][None]
        t = torch.arange(end - begin)
        index = torch.where(t >= 5, t + 30, t)[None]
        logits = oracle.logits(
            oracle.weights_of(model), model.config, document, index, oracle.causal(end - begin)[None]
        )
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], document[0, 1:], reduction="sum")
        total, count = total + losses.item(), count + end - begin - 1
    run.train()
    assert logged(run, "loss")[0]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_one_alpha_per_optimizer_step(tmp_path):
    seen = []

    class Watched(RopeSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            seen.append(view_source(self.model).last.parameters["alpha"].item())
            return result

    run = trainer(tmp_path, Watched, view="posaug", gradient_accumulation_steps=2, max_steps=2)
    run.train()
    steps = [seen[:2], seen[2:]]
    assert all(len(set(step)) == 1 for step in steps) and len(set(seen)) == 2
    assert [entry["view/alpha"] for entry in logged(run, "view/")] == pytest.approx([step[0] for step in steps])
    other = trainer(tmp_path, view="posaug", view_seed=7, max_steps=1)
    other.train()
    assert logged(other, "view/")[0]["view/alpha"] != pytest.approx(seen[0])


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_resume_is_exact(peft, tmp_path):
    options = {"view": "skip", "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "rescale": "yarn",
               "rescale_args": {"factor": 2.0}, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}  # fmt: skip

    def fresh():
        torch.manual_seed(0)
        return trainer(tmp_path, peft_config=lora() if peft else None, **options)

    whole = fresh()
    whole.train()
    resumed = fresh()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    names = ("loss", "view/split", "view/skip")
    assert logged(resumed, *names) == logged(whole, *names)
    assert all(torch.equal(p, weights(whole)[n]) for n, p in weights(resumed).items())


THREE_STEPS = {"view": "posaug", "max_steps": 3, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def of_three_steps(tmp_path_factory):
    """A folder with the checkpoints of THREE_STEPS, which no test changes, and the weights at the end."""
    folder = tmp_path_factory.mktemp("three")
    whole = trainer(folder, **THREE_STEPS)
    whole.train()
    return folder, weights(whole)


def test_a_run_that_goes_on_from_its_last_step_takes_no_other(of_three_steps):
    # as one that was killed between its last checkpoint and the result
    folder, whole = of_three_steps
    again = trainer(folder, **THREE_STEPS)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and again.state.epoch < 1, "rows are left"
    assert all(torch.equal(p, whole[n]) for n, p in weights(again).items())


def test_a_run_that_was_killed_while_it_saved_goes_on_from_the_checkpoint_before(of_three_steps, tmp_path):
    options, (folder, whole) = THREE_STEPS, of_three_steps
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-2/optimizer.pt").unlink()
    (tmp_path / "checkpoint-2/trainer_state.json").unlink()
    shutil.rmtree(tmp_path / "checkpoint-3")
    again = trainer(tmp_path, **options)
    begun = []
    again.training_step, step = (
        lambda *a, **k: begun.append(again.state.global_step) or step(*a, **k),
        again.training_step,
    )
    again.train(resume_from_checkpoint=True)
    assert begun == [1, 2] and all(torch.equal(p, whole[n]) for n, p in weights(again).items())
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path / "other", **options).train(resume_from_checkpoint=True)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_is_named_with_the_checkpoint_to_go_on_from(of_three_steps, tmp_path, monkeypatch):
    options, file = THREE_STEPS, "optimizer.pt"  # which nothing reads here: /dev/full has no end
    parts = tmp_path / "parts"

    def fill(step):
        (parts / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
        (parts / f"checkpoint-{step}" / file).unlink(missing_ok=True)
        (parts / f"checkpoint-{step}" / file).symlink_to("/dev/full")

    fill(1)
    unwritten = f"{parts}/checkpoint-{{}} could not be written, on a disk with .* GB free: .* Free some space, and run "
    with pytest.raises(OSError, match=unwritten.format(1) + "the same again: no checkpoint is whole yet.$"):
        trainer(parts, **options).train()
    (parts / "checkpoint-1" / file).unlink()
    fill(2)
    go_on = f"the same again: .* go on from {parts}/checkpoint-1, .* resume_from_checkpoint='{parts}/checkpoint-1'.$"
    with pytest.raises(OSError, match=unwritten.format(2) + go_on):
        trainer(parts, **options).train()
    (parts / "checkpoint-2" / file).unlink()
    again = trainer(parts, **options)
    again.train(resume_from_checkpoint=True)
    assert all(torch.equal(p, of_three_steps[1][n]) for n, p in weights(again).items())
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(again.model, "save_pretrained", Mock(side_effect=full))
    with pytest.raises(OSError, match=f"^{parts} could not be written, .* go on from {parts}/checkpoint-3, "):
        again.save_model()


def test_a_run_that_was_killed_in_its_first_save_is_told_to_begin_anew(tmp_path):
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, **options).train()
    (tmp_path / "checkpoint-1/trainer_state.json").unlink()
    with pytest.raises(ValueError, match="no whole checkpoint: .* Leave resume_from_checkpoint out"):
        trainer(tmp_path, **options).train(resume_from_checkpoint=True)


def test_evaluation_runs_under_true_positions(tmp_path):
    held_out = documents(4, seed=9)
    plain = trainer(tmp_path, eval_dataset=held_out)
    viewed = trainer(tmp_path, eval_dataset=held_out, view="nope")
    assert plain.evaluate()["eval_loss"] == viewed.evaluate()["eval_loss"]


def test_rates_and_draws_are_logged(tmp_path):
    run = trainer(tmp_path, view="skip", max_steps=2)
    run.train()
    assert all({"view/split", "view/skip"} <= set(entry) for entry in logged(run, "view/"))
    assert all(entry["tokens_per_second"] > 0 for entry in logged(run, "tokens_per_second")[1:])


def test_the_rescaled_model_is_what_is_saved(tmp_path):
    run = trainer(tmp_path / "run", rescale="pi", rescale_args={"factor": 4.0}, view="posaug", max_steps=1)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    ids = torch.randint(3, 90, (1, 30))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert reloaded.config.max_position_embeddings == 4 * WINDOW
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, run.model.eval()(ids).logits)


def test_every_checkpoint_of_an_adapter_carries_its_rope(tmp_path):
    run = trainer(tmp_path, rescale="yarn", rescale_args={"factor": 2.0}, view="skip", peft_config=lora(), max_steps=2,
                  save_strategy="steps", save_steps=1)  # fmt: skip
    run.train()
    ids = torch.randint(3, 90, (1, 30))
    run.save_model(str(tmp_path / "last"))
    with torch.no_grad():
        assert torch.equal(load_adapter(tiny(), tmp_path / "last").eval()(ids).logits, run.model.eval()(ids).logits)
    assert all((tmp_path / f"checkpoint-{step}" / "rope_patch.json").is_file() for step in (1, 2))


def test_abf_promises_the_rows_that_it_is_trained_on(tmp_path):
    run = trainer(tmp_path, rescale="abf", rescale_args={"theta": 1e6}, max_length=3 * WINDOW)
    assert run.model.config.max_position_embeddings == 3 * WINDOW


def test_a_patched_model_keeps_its_patches(tmp_path):
    model = patch_model(patch_model(tiny(), "yarn", factor=2.0), "posaug", seed=5)
    run = trainer(tmp_path, model=model)
    assert view_source(run.model).view == PosAug() and view_source(run.model).clock.seed == 5
    assert describe(trainer(tmp_path, model=model, view="skip").model).view == repr(Skip())
    assert describe(model).rescaling == "yarn (factor 2.0)"


def test_the_view_of_one_trainer_is_not_that_of_the_next(tmp_path):
    """A stage of plain next-token training behind one under a view, in one process."""
    model = trainer(tmp_path, view="skip").model
    second = trainer(tmp_path, model=model)
    assert describe(second.model).view == repr(Standard())
    assert describe(trainer(tmp_path, model=patch_model(model, "cyclic")).model).view == repr(Cyclic())


LONGCE = {"longce": {"short_context": 8, "stride": 4}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shifted_attention": 1.5}, r"must be a share in \(0, 1\)"),
        ({"shifted_attention": 0.25, "max_length": None}, "needs a max_length"),
        ({"shifted_attention": 0.01}, "needs a max_length of which 0.01 is 2 tokens or more, got 64"),
        ({"shifted_attention": 0.25, "objective": "self-distill", "view": "skip"}, "is for next-token training"),
        (
            {"shifted_attention": 0.25, "objective_args": LONGCE},
            "is for next-token training",
        ),
        (
            {"view": "compose", "view_args": {"views": [{"view": "pose", "target": 65}, {"view": "posaug"}]}},
            "got target=65",
        ),
        (
            {"view": "per-layer", "view_args": {"view": {"view": "cream", "target": 65}, "layers": "top"}},
            "got target=65",
        ),
        ({"view": "mix", "view_args": {"views": ["standard", {"view": "pose", "target": 65}]}}, "got target=65"),
    ],
)
def test_what_cannot_be_trained_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options)


def test_a_patch_that_fails_leaves_the_model_as_it_came(tmp_path):
    model = tiny()
    before = model.config.to_dict()["rope_parameters"]
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        trainer(tmp_path, model=model, rescale="dynamic-ntk", rescale_args={"factor": 2.0}, view="skip")
    assert model.config.rope_parameters == before and not describe(model).patched


def test_a_collator_that_drops_document_borders_is_refused(tmp_path):
    run = trainer(tmp_path, view="skip", packing=True)
    inner = run.data_collator
    run.data_collator = lambda rows: {k: v for k, v in inner(rows).items() if k in ("input_ids", "labels")}
    with pytest.raises(ValueError, match="data_collator must keep position_ids when rows hold several documents"):
        run.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"view": "skip", "view_args": {"split": 500}},
            "split must be below the number of tokens in the sequence, got split=500",
        ),
        ({"view": "cream", "view_args": {"target": 23}}, "documents of 24 tokens reach beyond target=23"),
        ({"view": "rpe", "view_args": {"max_index": 23}}, "documents of 24 tokens have no 24 different indices"),
        (
            {"view": "cream", "view_args": {"target": 23}, "packing": True, "max_length": 60},
            "documents of 24 tokens reach beyond target=23",
        ),
        (
            {"view": "skip", "objective": "self-distill", "objective_args": {"teacher": "native"}},
            "teacher='native' reads documents of at most 23 tokens, its context window, got one of 24",
        ),
    ],
    ids=["split", "target", "max-index", "packed", "native-teacher"],
)
def test_one_document_that_is_too_long_stops_a_run_before_its_first_step(options, message, tmp_path):
    rows = Dataset.from_list([{"input_ids": [*range(3, 3 + n)]} for n in [12] * 40 + [24]])
    model = tiny(max_position_embeddings=23)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, model=model, train_dataset=rows, **options)


def test_documents_that_are_cut_to_max_length_are_short_enough(tmp_path):
    rows = Dataset.from_list([{"input_ids": [5] * 24}] * 4)
    options = {"max_length": 23, "long_documents": "split"}
    trainer(tmp_path, train_dataset=rows, view="cream", view_args={"target": 23}, **options)
    trainer(tmp_path, train_dataset=rows, view="pose", view_args={"target": 64, "window": 16})  # which cuts them itself


def test_relations_of_documents_beyond_the_window_are_warned_of(tmp_path, caplog):
    options = {"objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 2.0}}
    rows = Dataset.from_list([{"input_ids": [5] * (WINDOW + 1)}] * 4)
    with caplog.at_level("WARNING"):
        trainer(tmp_path, train_dataset=rows, **options, max_length=WINDOW)
        assert "beyond its window" not in caplog.text
        trainer(tmp_path, train_dataset=rows, **options, max_length=None)
    assert f"documents have up to {WINDOW + 1} tokens, beyond its window of {WINDOW}" in caplog.text


def test_an_empty_dataset_is_refused_and_a_text_may_have_another_name(tmp_path):
    rows = Dataset.from_list([{"story": "w3 w4 w5"}] * 4)
    args = RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="train_dataset must have at least one row"):
        RopeSFTTrainer(tiny(), args, train_dataset=rows.select([]), processing_class=tokenizer())
    trainer(tmp_path, train_dataset=rows, dataset_text_field="story", processing_class=tokenizer())


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_a_text_column_may_hold_any_kind_of_string(kind, tmp_path):
    rows = Dataset.from_dict({"text": ["w3 w4 w5"] * 4}, features=Features({"text": Value(kind)}))
    made = trainer(tmp_path, train_dataset=rows, processing_class=tokenizer())
    assert [len(row["input_ids"]) for row in made.train_dataset] == [4] * 4, "three words and the end of a text"


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_a_checkpoint_of_another_rope_is_not_resumed(peft, tmp_path):
    def fresh(**options):
        return trainer(tmp_path, peft_config=lora() if peft else None, max_steps=1, **options)

    fresh(rescale="yarn", rescale_args={"factor": 2.0}, save_strategy="steps", save_steps=1).train()
    for other in ({}, {"rescale": "yarn", "rescale_args": {"factor": 4.0}}):
        with pytest.raises(ValueError, match="checkpoint-1 was trained with RoPE .*'yarn'.*, and this model has"):
            fresh(**other).train(resume_from_checkpoint=True)


def test_the_folder_of_an_adapter_is_no_model(tmp_path):
    """Transformers would load base and adapter, and without their rescaling."""
    run = trainer(
        tmp_path / "run",
        rescale="yarn",
        rescale_args={"factor": 2.0},
        peft_config=LoraConfig(target_modules=["q_proj"]),
    )
    run.model.peft_config["default"].base_model_name_or_path = "base"
    run.save_model(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"model: .*adapter is an adapter of base, not a model\. `rope-patch export"):
        RopeSFTTrainer(str(tmp_path / "adapter"), train_dataset=documents())


def test_each_trainer_of_one_model_has_its_own_autocast(tmp_path):
    """accelerate wraps a model once, and TRL's forward would be put over that wrapper."""
    model, seen = tiny(), []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    for bf16 in (False, True, True, False):
        trainer(tmp_path, model=model, max_steps=1, bf16=bf16).train()
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(("n_steps", "first"), [(3, 2), (1, 0)])
def test_a_curriculum_goes_by_the_steps_of_the_run_and_comes_to_its_end(n_steps, first, tmp_path):
    late = {"alpha": Step(Uniform(1 / 8, 8), until=0.99)}
    run = trainer(tmp_path, view="posaug", view_args=late, max_steps=n_steps, gradient_accumulation_steps=2)
    run.train()
    alphas = [entry["view/alpha"] for entry in logged(run, "view/alpha")]
    assert [alpha != 1 for alpha in alphas] == [step >= first for step in range(n_steps)]


@pytest.mark.parametrize(("granularity", "batch"), [("step", "packed"), ("sample", "padded")])
def test_rpe_trains_padded_and_packed(granularity, batch, tmp_path):
    options = {"view": "rpe", "view_args": {"max_index": 200, "granularity": granularity}, "max_steps": 1}
    run = trainer(tmp_path, **options, **BATCHES[batch])
    run.train()
    assert logged(run, "loss") and not any(name.startswith("view/") for name in run.state.log_history[0])


class Inputs(TrainerCallback):
    """What the model is given in training, and the draws."""

    def __init__(self, run):
        self.seen, self.run = [], run
        run.model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, model, args, kwargs):
        self.seen.append((self.run.state.global_step, kwargs["input_ids"].clone()))


def test_pose_cuts_rows_to_its_window_anew_in_each_epoch(tmp_path):
    data = documents(2, longest=24)
    pose = {"view": "pose", "view_args": {"target": 64, "window": 8}}
    options = {"train_dataset": data, "max_steps": 3, "per_device_train_batch_size": 2, "shuffle_dataset": False}
    run = trainer(tmp_path, **pose, **options)
    inputs = Inputs(run)
    run.train()
    originals = [set(row) for row in data["input_ids"]]
    rows = [tuple(row.tolist()) for _, ids in inputs.seen for row in ids]
    assert len(rows) == 6 and all(len(row) == 8 for row in rows)
    assert len(set(rows)) > 2, "two documents, cut anew in each of three epochs"
    assert all(any(set(row) <= original for original in originals) for row in rows)
    assert all(entry["view/skip_1"] >= 0 for entry in logged(run, "view/skip_1"))
    # resuming cuts the same, and so do micro-steps
    again = trainer(tmp_path, **pose, **{**options, "per_device_train_batch_size": 1}, gradient_accumulation_steps=2)
    others = Inputs(again)
    again.train()
    assert sorted(tuple(row.tolist()) for _, ids in others.seen for row in ids) == sorted(rows)
    for mine, theirs in zip(logged(again, "loss"), logged(run, "loss"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_pose_cuts_no_packed_rows(tmp_path):
    run = trainer(tmp_path, view="pose", view_args={"target": 64, "window": 8})
    packed = trainer(tmp_path, packing=True)
    run.data_collator, run.train_dataset = packed.data_collator, packed.train_dataset
    with pytest.raises(ValueError, match="view 'pose' with window=.* cuts one document a row"):
        run.train()


@pytest.mark.parametrize("objective", ["clm", "hidden-distill", "native-distill"])
def test_a_window_of_pose_cuts_rows_of_objectives_too(objective, tmp_path):
    """As if the rows had come so."""
    options = {"objective": objective, "rescale": "pi", "rescale_args": {"factor": 2.0}, "view": "pose"}
    options |= {"max_steps": 1, "per_device_train_batch_size": 2}
    if objective == "hidden-distill":
        options["objective_args"] = {"short_to_long": 1.0}
    run = trainer(tmp_path, train_dataset=documents(2), view_args={"target": 64, "window": 8}, **options)
    inputs = Inputs(run)
    run.train()
    (rows,) = {tuple(map(tuple, ids.tolist())) for _, ids in inputs.seen}
    cut = Dataset.from_dict({"input_ids": [list(row) for row in rows]})
    again = trainer(
        tmp_path, train_dataset=cut, view_args={"target": 64}, train_sampling_strategy="sequential", **options
    )
    again.train()
    assert logged(again, "loss") == logged(run, "loss") and logged(run, "loss")[0]["loss"] > 0


def test_a_saved_tokenizer_names_the_window_that_was_trained_for(tmp_path):
    processing_class = tokenizer()
    processing_class.model_max_length = WINDOW
    run = trainer(tmp_path, processing_class=processing_class, rescale="ntk", rescale_args={"factor": 8.0})
    run.save_model(str(tmp_path / "saved"))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").model_max_length == 4 * WINDOW
    assert processing_class.model_max_length == WINDOW, "the user's own stays"

"""Views under trainers that are not ours: at learning rate 0 the loss is what it is without a view."""

import json
import math
import os
import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.launched import run_ranks
from support.tiny import VOCAB, tiny, tokens
from support.training import documents, logged, tokenizer, trainer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer

from rope_patch import RopeViewCallback, patch_model, rope_view, unpatch_model
from rope_patch.adapters.sidecar import read_sidecar
from rope_patch.forward import view_callback
from rope_patch.patch import view_source
from rope_patch.views import Linear, PosAug, Skip, Standard, Uniform

LN2 = math.log(2)

COMMON = {
    "max_steps": 2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "learning_rate": 0.0,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
}


def words(n, seed):
    ids = torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def pairs(n=8):
    """Preference pairs whose two replies are not equally long."""
    return Dataset.from_list(
        [
            {"prompt": words(6, i), "chosen": " " + words(9, 50 + i), "rejected": " " + words(5, 90 + i)}
            for i in range(n)
        ]
    )


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def saved(tmp_path):
    """A folder with the tiny model, from which trainers load their reference."""
    tiny().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def made(trainer_class, config_class, model, tmp_path, data, peft=False, extra=(), **options):
    args = config_class(output_dir=str(tmp_path / "run"), **{**COMMON, **options})
    return trainer_class(
        model=model, args=args, train_dataset=data, processing_class=tokenizer(),
        peft_config=lora() if peft is True else peft or None, **dict(extra),
    )  # fmt: skip


def preference_data(kind):
    if kind == "dpo":
        return pairs()
    rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": True} for r in pairs(4)]
    return Dataset.from_list(
        rows + [{**row, "completion": " " + words(4, i), "label": False} for i, row in enumerate(rows)]
    )


PREFERENCES = {"dpo": (DPOTrainer, DPOConfig, LN2), "kto": (KTOTrainer, KTOConfig, 0.5)}


@pytest.mark.parametrize(("kind", "peft"), [("dpo", False), ("dpo", True), ("kto", False)])
def test_policy_and_reference_draw_alike(kind, peft, saved, tmp_path):
    trainer_class, config_class, begins_at = PREFERENCES[kind]
    model = patch_model(patch_model(load(saved), "yarn", factor=2.0), "skip", skip=Uniform(1, 64))
    data = preference_data(kind)
    run = made(trainer_class, config_class, model, tmp_path, data, peft, {"eval_dataset": data})
    run.train()
    assert run.evaluate()["eval_loss"] == pytest.approx(begins_at, abs=1e-4)
    losses = [entry["loss"] for entry in logged(run, "loss")]
    assert losses == pytest.approx([begins_at] * 2, abs=1e-4)
    assert view_source(run.model).last is not None and not view_source(run.model).clock.is_set


def test_a_reference_model_has_the_view_in_its_trainer_alone(saved, tmp_path):
    ids = tokens(2, 20)
    first = made(DPOTrainer, DPOConfig, patch_model(load(saved), "skip", skip=Uniform(1, 64)), tmp_path, pairs())
    first.train()
    reference = first.ref_model
    assert first.model.training  # as Trainer leaves it
    with torch.no_grad():
        assert torch.equal(reference(input_ids=ids).logits, load(saved)(input_ids=ids).logits)
    for model in (load(saved), patch_model(load(saved), "skip", skip=Uniform(1, 32))):
        run = made(DPOTrainer, DPOConfig, model, tmp_path, pairs(), extra={"ref_model": reference}, max_steps=1)
        run.train()
        assert [entry["loss"] for entry in logged(run, "loss")] == pytest.approx([LN2], abs=1e-4)


def test_a_former_reference_model_trains_under_its_view(saved, tmp_path):
    model, options = patch_model(load(saved), "skip", skip=Uniform(1, 64)), {"max_steps": 1}
    run = made(DPOTrainer, DPOConfig, model, tmp_path, pairs(), **options)
    run.train()
    run.model.eval()
    decoder = run.ref_model.get_decoder()  # what accelerate has put around it runs the original, also in a copy
    ids = tokens(2, 20)
    for one in (deepcopy(decoder), patch_model(decoder, "skip", skip=Uniform(1, 64))):
        with torch.no_grad():
            trained = one.train()(input_ids=ids).last_hidden_state
            assert not torch.allclose(trained, load(saved).model(input_ids=ids).last_hidden_state, atol=1e-2)


def test_a_view_is_in_force_under_the_callback(saved, tmp_path):
    """The policy's log-probabilities are others than without it: the loss above is not that of true positions."""
    seen = []
    for view in (Standard(), Skip(skip=Uniform(1, 64))):
        run = made(DPOTrainer, DPOConfig, patch_model(load(saved), view), tmp_path, pairs(), seed=3)
        run.train()
        seen.append(logged(run, "logps/chosen"))
    assert all(abs(a["logps/chosen"] - b["logps/chosen"]) > 1e-2 for a, b in zip(*seen, strict=True))


def reward_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        num_labels=1,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("kind", ["dpo", "reward", "cpo"])
def test_the_halves_of_a_batch_of_pairs_draw_alike(kind, saved, tmp_path):
    if kind != "reward":
        classes = {"dpo": (DPOTrainer, DPOConfig), "cpo": (CPOTrainer, CPOConfig)}
        run = made(*classes[kind], patch_model(load(saved), "skip", skip=Uniform(1, 64)), tmp_path, pairs())
    else:
        rows = [{"chosen": words(12, i), "rejected": words(9, i + 40)} for i in range(8)]
        model = patch_model(reward_model(), "skip", skip=Uniform(1, 64))
        run = made(RewardTrainer, RewardConfig, model, tmp_path, Dataset.from_list(rows))
    seen, source = [], view_source(run.model)
    run.model.model.register_forward_hook(lambda *_: seen.append(source.last.parameters["skip"].flatten().tolist()))
    run.train()
    assert len(seen) == 2 and all(skips[:2] == skips[2:] and skips[0] != skips[1] for skips in seen)


@pytest.mark.parametrize("shared", [True, False])
def test_both_rows_of_a_pair_draw_by_the_chosen_one(shared):
    model = patch_model(tiny(), "skip", skip=Uniform(1, 64)).train()
    clock = view_source(model).clock
    chosen, rejected = tokens(3, 20), tokens(3, 20)
    clock.set_step(5, pairs=shared)
    model(input_ids=torch.cat([chosen, rejected]))
    drawn = view_source(model).last.parameters["skip"].flatten()
    assert torch.equal(drawn[:3], drawn[3:]) is shared and len(set(drawn[:3].tolist())) == 3


def mixed_rewards(completions, **kwargs):
    return [float(sum(map(ord, c)) % 7) for c in completions]


POLICIES = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def sampled(kind, model, tmp_path, **options):
    trainer_class, config_class = POLICIES[kind]
    args = config_class(
        output_dir=str(tmp_path / "run"), num_generations=2, max_completion_length=6, beta=0.1,
        **{**COMMON, "gradient_accumulation_steps": 2, **options},
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": words(6, i)} for i in range(8)])
    return trainer_class(
        model=model, args=args, train_dataset=prompts, processing_class=tokenizer(), reward_funcs=mixed_rewards
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_replies_and_losses_are_those_without_a_view(kind, saved, tmp_path):
    entries = []
    for view in (None, Skip(skip=Uniform(1, 64))):
        model = patch_model(load(saved), "yarn", factor=2.0)
        torch.manual_seed(0)
        run = sampled(kind, model if view is None else patch_model(model, view), tmp_path)
        run.train()
        entries.append(logged(run, "loss", "kl", "reward", "entropy"))
    plain, viewed = entries
    for a, b in zip(plain, viewed, strict=True):
        assert b["reward"] == a["reward"]  # the same replies
        assert abs(b["entropy"] - a["entropy"]) > 1e-3  # of the policy that learns: under a draw
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
        assert b["kl"] == pytest.approx(0, abs=1e-5) and a["kl"] == pytest.approx(0, abs=1e-5)


class Draws(TrainerCallback):
    """Keeps what each forward of training has drawn, by the tokens of its documents."""

    def __init__(self, model):
        self.found = {}
        self.source = view_source(model)
        self.step = 0
        model.get_decoder().register_forward_hook(self.note, with_kwargs=True)

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = state.global_step

    def note(self, decoder, args, kwargs, output):
        mask = kwargs.get("attention_mask")
        skips = self.source.last.parameters["skip"].flatten().tolist()
        for i, skip in enumerate(skips):
            ids = kwargs["input_ids"][i] if mask is None else kwargs["input_ids"][i][mask[i].bool()]
            self.found[self.step, tuple(ids.tolist())] = skip


def plain_run(tmp_path, model=None, rows=16, callbacks=None, **options):
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in documents(rows, longest=12)]
    model = patch_model(tiny(), "skip", skip=Uniform(1, 64), seed=3) if model is None else model
    settings = {**COMMON, "max_steps": 4, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2, **options}
    run = Trainer(
        model=model, args=TrainingArguments(output_dir=str(tmp_path / "plain"), **settings),
        train_dataset=Dataset.from_list(data), callbacks=callbacks,
    )  # fmt: skip
    draws = Draws(model)
    run.add_callback(draws)
    return run, draws


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plain run whose trainer found the view by itself, with checkpoints at steps 2 and 4; its draws."""
    run, draws = plain_run(tmp_path_factory.mktemp("plain"))
    run.train()
    return run, draws.found


def test_draws_are_per_step_and_document_and_come_back_on_resuming(trained, tmp_path):
    run, found = trained
    accumulated, others = plain_run(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    accumulated.train()
    assert others.found == found and len(found) == 8 and len(set(found.values())) > 4
    resumed, again = plain_run(tmp_path)
    resumed.train(resume_from_checkpoint=str(Path(run.args.output_dir) / "checkpoint-2"))
    assert again.found == {key: skip for key, skip in found.items() if key[0] >= 2}


def test_the_callback_may_be_given_and_the_model_patched_after_its_trainer_was_made(trained, tmp_path):
    found, draws = trained
    model = tiny()
    args = TrainingArguments(output_dir=str(tmp_path), **{**COMMON, "max_steps": 4, "learning_rate": 1e-3})
    explicit = Trainer(model=model, args=args, train_dataset=found.train_dataset, callbacks=[RopeViewCallback()])
    patch_model(model, "skip", skip=Uniform(1, 64), seed=3)
    explicit.add_callback(others := Draws(model))
    explicit.train()
    assert others.found == draws
    for run in (found, explicit):
        assert sum(isinstance(c, RopeViewCallback) for c in run.callback_handler.callbacks) == 1


def test_the_same_document_draws_anew_in_another_step(tmp_path):
    run, draws = plain_run(tmp_path, rows=2)
    run.train()
    by_document = {}
    for (_, ids), skip in draws.found.items():
        by_document.setdefault(ids, []).append(skip)
    assert len(by_document) == 2 and all(len(set(skips)) > 2 for skips in by_document.values())


def test_a_curriculum_goes_by_the_progress_of_the_trainer(tmp_path):
    model = patch_model(tiny(), "posaug", alpha=Linear(Uniform(1 / 8, 8), start=[0.5, 2]))
    run = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path), **COMMON),
        train_dataset=Dataset.from_list([{"input_ids": [5] * 9, "labels": [5] * 9}] * 4),
    )
    seen = []
    model.register_forward_hook(lambda *_: seen.append(view_source(model).clock.progress.item()))
    run.train()
    assert seen == [0.0, 1.0]


FIXED = Skip(split=12, skip=40)


def rows_of(*lengths):
    return [{"input_ids": row, "labels": row} for row in (tokens(1, n)[0].tolist() for n in lengths)]


def fixed_run(tmp_path, data, model, **options):
    settings = {**COMMON, "per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", **options}
    args = TrainingArguments(output_dir=str(tmp_path), **settings)
    return Trainer(model=model, args=args, train_dataset=data)


def test_a_batch_may_end_before_a_fixed_split_that_other_documents_reach(tmp_path):
    seen, model = [], patch_model(tiny(), FIXED)
    model.register_forward_hook(lambda *_: seen.append(int(view_source(model).last.documents.length.max())))
    fixed_run(tmp_path, Dataset.from_list(rows_of(9, 20, 7)), model, max_steps=3).train()
    assert seen == [9, 20, 7]


def test_a_fixed_split_behind_all_documents_is_refused_whatever_an_earlier_run_had(tmp_path):
    model = patch_model(tiny(), FIXED)
    fixed_run(tmp_path, Dataset.from_list(rows_of(9, 20, 7)), model).train()
    short = rows_of(9, 10, 11)
    for data in (Dataset.from_list(short), short):  # of a list nobody knows how long its rows are
        with pytest.raises(ValueError, match="split must be below .* got split=12"):
            fixed_run(tmp_path, data, model).train()
    streamed = Dataset.from_list(short).to_iterable_dataset()
    viewed = trainer(tmp_path, model=model, train_dataset=streamed)
    with pytest.raises(ValueError, match="split must be below .* got split=12"):
        viewed.train()


SHORT_FIRST = {
    "dpo": [{"prompt": "w5", "chosen": words(n, n), "rejected": words(3, n)} for n in (4, 30)],
    "rejected": [{"prompt": "w5", "chosen": words(3, n), "rejected": words(n, n)} for n in (4, 30)],
    "kto": [
        {"prompt": words(3, n), "completion": " " + words(n, n), "label": label}
        for n, label in ((3, True), (4, False), (30, True), (4, False))
    ],
    "reward": [{"chosen": words(n, n), "rejected": words(3, n)} for n in (4, 30)],
    "sft": [{"text": words(n, n)} for n in (4, 30)],
}


@pytest.mark.parametrize("kind", SHORT_FIRST)
def test_each_trainer_knows_how_long_its_documents_are(kind, saved, tmp_path):
    trainers = {"reward": (RewardTrainer, RewardConfig), "sft": (SFTTrainer, SFTConfig), "kto": PREFERENCES["kto"][:2]}
    trainer_class, config_class = trainers.get(kind, PREFERENCES["dpo"][:2])
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2 if kind == "kto" else 1}

    model = patch_model(reward_model() if kind == "reward" else load(saved), FIXED)
    data = Dataset.from_list(SHORT_FIRST[kind])
    run = made(trainer_class, config_class, model, tmp_path, data, **options)
    assert 30 <= view_callback._checked_length(run, FIXED) <= 40
    run.args.max_length = 10
    assert view_callback._checked_length(run, FIXED) == 0, "the split is beyond every document"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_trainer_draws_as_an_eager_one(backend, tmp_path):
    """The hooks are traced there, and traced code cannot look for the trainer: Dynamo asks while it traces."""
    torch._dynamo.reset()
    options = {"torch_compile": True, "torch_compile_backend": backend, "max_steps": 3, "save_strategy": "no"}
    seen = []
    for compiled in ({**options, "torch_compile": False, "torch_compile_backend": None}, options):
        run, _ = plain_run(tmp_path, **compiled)
        run.train()
        seen.append([entry["loss"] for entry in logged(run, "loss")])
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)


def test_the_reference_of_a_compiled_policy_gets_the_rescaling(saved, tmp_path):
    torch._dynamo.reset()
    tiny(num_hidden_layers=1).save_pretrained(saved)
    model = patch_model(patch_model(load(saved), "yarn", factor=2.0), "standard")
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1}
    run = made(DPOTrainer, DPOConfig, model, tmp_path, pairs(), **options)
    run.train()
    assert [entry["loss"] for entry in logged(run, "loss")] == pytest.approx([LN2], abs=1e-4)


def test_the_clock_of_a_run_that_broke_off_is_not_taken_for_that_of_the_next(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise InterruptedError

    model = patch_model(tiny(), "skip", skip=Uniform(1, 64))
    run, _ = plain_run(tmp_path, model)
    run.add_callback(Stop())
    with pytest.raises(InterruptedError):
        run.train()
    assert view_source(model).clock.is_set
    again, draws = plain_run(tmp_path, model)
    again.train()
    assert {step for step, _ in draws.found} == {0, 1, 2, 3} and len(set(draws.found.values())) > 4
    assert not view_source(model).clock.is_set


def test_ranks_without_a_clock_are_refused(monkeypatch):
    model = patch_model(tiny(), "skip", skip=Uniform(1, 64))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model(input_ids=tokens(1, 20))  # true positions
    with pytest.raises(ValueError, match=r"all 2 ranks would draw alike.*set_step\(step\)"):
        model.train()(input_ids=tokens(1, 20))
    view_source(model).clock.set_step(0)
    model(input_ids=tokens(1, 20))


def test_a_reference_of_other_frequencies_is_refused(saved, tmp_path):
    model = patch_model(load(saved), "yarn", factor=2.0)
    other = patch_model(load(saved), "yarn", factor=4.0)
    for reference, options in ((other, {}), (load(saved), {"precompute_ref_log_probs": True})):
        run = made(DPOTrainer, DPOConfig, model, tmp_path, pairs(), extra={"ref_model": reference}, **options)
        with pytest.raises(ValueError, match=r"ref_model must have the RoPE.*patch_model\(trainer.ref_model"):
            run.train()


def test_a_reference_has_the_rescaling_in_an_evaluation_before_training_too(saved, tmp_path):
    model = patch_model(load(saved), "yarn", factor=2.0)
    run = made(DPOTrainer, DPOConfig, model, tmp_path, pairs(), extra={"eval_dataset": pairs()})
    assert run.evaluate()["eval_loss"] == pytest.approx(LN2, abs=1e-4)


def test_what_would_draw_apart_is_refused(saved, tmp_path):
    def model(*args, **options):
        return patch_model(load(saved), *args, **options)

    with pytest.raises(ValueError, match="has no view"):
        made(
            SFTTrainer, SFTConfig, load(saved), tmp_path, documents(), extra={"callbacks": [RopeViewCallback()]}
        ).train()
    with pytest.raises(ValueError, match="precompute_ref_log_probs=True"):
        made(DPOTrainer, DPOConfig, model("skip"), tmp_path, pairs(), precompute_ref_log_probs=True).train()


STEPS = {"use_vllm": False, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 1}


@pytest.mark.parametrize(
    ("name", "options", "view", "message"),
    [
        ("GRPOTrainer", {"num_iterations": 2}, Skip(), r"steps_per_generation \* num_iterations, got 2 and 2 \* 2"),
        ("GRPOTrainer", {"use_vllm": True}, Skip(), "use_vllm=True are not supported"),
        ("RLOOTrainer", {}, PosAug(granularity="micro-batch"), "choose granularity"),
        ("OnlineDPOTrainer", {}, Skip(), "views under OnlineDPOTrainer are not supported"),
    ],
)
def test_trainers_whose_forwards_would_draw_apart_are_refused(name, options, view, message):
    run = type(name, (), {"__module__": "trl.trainer"})()
    run.args, run.accelerator = SimpleNamespace(**{**STEPS, **options}), SimpleNamespace()
    with pytest.raises(ValueError, match=message):
        view_callback._require_supported(run, view)


def test_compiled_forwards_draw_by_tokens_too():
    model, ids = patch_model(tiny(num_hidden_layers=1), "skip", skip=Uniform(1, 64)).train(), tokens(4, 16)
    source = view_source(model)
    source.clock.set_step(5, pairs=True)
    compiled, eager = torch.compile(model, backend="eager"), []
    for run in (model, compiled):
        run(input_ids=ids)
        eager.append(source.last.parameters["skip"].clone())
    source.clock.set_step(6, pairs=True)
    compiled(input_ids=ids)
    assert torch.equal(*eager) and not torch.equal(source.last.parameters["skip"], eager[0])


def test_prompts_as_embeddings_have_no_tokens_to_draw_by():
    model = patch_model(tiny(), "skip", skip=Uniform(1, 64)).train()
    view_source(model).clock.set_step(0)
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.randn(1, 9, 32))


def test_documents_are_known_by_their_tokens_alone():
    """Packed, padded on either side, alone: the same draws; another token, another order: others."""
    model = patch_model(tiny(), "skip", skip=Uniform(1, 2**20)).train()
    source = view_source(model)
    source.clock.set_step(7)

    def drawn(ids, **inputs):
        model(input_ids=ids, **inputs)
        skip = source.last.parameters["skip"]
        return skip.expand(ids.shape)

    a, b = tokens(1, 11), tokens(1, 8)
    alone = drawn(a)[0, 0].item(), drawn(b)[0, 0].item()
    packed = drawn(torch.cat([a, b], 1), position_ids=torch.cat([torch.arange(11), torch.arange(8)])[None])
    pad = torch.zeros(1, 3, dtype=torch.int64)
    for padded, mask in (
        (torch.cat([b, pad], 1), [1] * 8 + [0] * 3),
        (torch.cat([pad, b], 1), [0] * 3 + [1] * 8),
    ):
        both = drawn(torch.cat([a, padded]), attention_mask=torch.tensor([[1] * 11, mask]))
        assert (both[0, 0].item(), both[1, 0].item()) == alone
    assert (packed[0, 0].item(), packed[0, -1].item()) == alone
    assert drawn(a.flip(1))[0, 0].item() != alone[0] and drawn(torch.cat([a, a], 1))[0, 0].item() != alone[0]


@pytest.mark.parametrize("cached", [True, False])
def test_generation_in_training_mode_is_at_true_positions(cached):
    plain, model = tiny(), patch_model(tiny(), "skip", skip=Uniform(1, 64))
    prompt = tokens(2, 12)
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": cached}
    expected = plain.train().generate(prompt, **options)
    assert torch.equal(model.train().generate(prompt, **options), expected)
    with torch.no_grad():  # a reference's forward, which is none of generation, draws
        assert not torch.allclose(model(prompt).logits, plain(prompt).logits, atol=1e-3)


@pytest.mark.parametrize("when", ["block", "always"])
def test_a_cache_goes_on_with_its_draws_in_training_mode(when):
    model, ids, view = tiny().train(), tokens(2, 16), Skip(skip=Uniform(1, 64))
    if when == "always":
        patch_model(model, view, when="always")
    with torch.no_grad(), nullcontext() if when == "always" else rope_view(model, view):
        positions = []
        hook = model.model.rotary_emb.register_forward_pre_hook(
            lambda module, args, kwargs: positions.append(kwargs["position_ids"]), with_kwargs=True
        )
        cache = model(ids[:, :10], use_cache=True).past_key_values
        for t in range(10, 16):
            model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        hook.remove()
        filled, *decoded = positions
        assert (filled[:, 9] != 9).any()
        assert torch.equal(torch.cat(decoded, 1), filled[:, 9:10] + torch.arange(1, 7))


def test_the_trainers_view_ends_with_its_training(saved, tmp_path):
    run = trainer(
        tmp_path / "sft", model=load(saved), view="skip", peft_config=lora(), eval_dataset=documents(4, seed=9)
    )
    run.train()
    assert view_source(run.model) is None
    evaluated = run.evaluate()["eval_loss"]
    run.save_model()
    assert read_sidecar(tmp_path / "sft")["view"]["method"] == "skip"
    assert view_source(run.model) is None and math.isfinite(evaluated)
    after = made(DPOTrainer, DPOConfig, run.model.merge_and_unload(), tmp_path, pairs(), peft=True, max_steps=1)
    after.train()
    assert [entry["loss"] for entry in logged(after, "loss")] == pytest.approx([LN2], abs=1e-4)


def test_self_distillation_measures_its_kl_after_training_too(tmp_path):
    run = trainer(
        tmp_path, view="skip", objective="self-distill", peft_config=lora(), eval_dataset=documents(4, seed=9),
        learning_rate=0.0,
    )  # fmt: skip
    before = run.evaluate()["eval_kl"]
    run.train()
    assert run.evaluate()["eval_kl"] == pytest.approx(before, rel=1e-5) and before > 1e-3
    assert view_source(run.model) is None


def test_a_view_that_the_user_put_on_stays_with_a_clock_that_is_free(tmp_path):
    model = patch_model(tiny(), "skip", skip=Uniform(1, 64))
    source = view_source(model)
    run = trainer(tmp_path, model=model)
    run.train()
    assert view_source(model) is source and not source.clock.is_set


def test_a_model_that_was_unpatched_meanwhile_is_not_trained_as_another(tmp_path):
    run = trainer(tmp_path, view="skip")
    unpatch_model(run.model)
    with pytest.raises(ValueError, match="was unpatched after this trainer was made"):
        run.train()


TWO_RANKS = """
import json, os, sys
import test_view_callback as tests
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
run, draws = tests.plain_run(tests.Path(sys.argv[1]), gradient_accumulation_steps=2 // world, save_strategy="no")
run.train()
found = [[step, ids, skip] for (step, ids), skip in draws.found.items()]
tests.Path(sys.argv[1], f"draws-{world}-{rank}.json").write_text(json.dumps(found))
if world > 1:
    tests.torch.distributed.destroy_process_group()
    os._exit(0)  # threads of process groups can abort the process at its exit
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_draw_as_one_does_for_the_same_documents(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    root = Path(__file__).parents[3]
    ours = [str(root), str(root / "kernels"), str(root / "tests"), str(Path(__file__).parent)]
    paths = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    for launch in ([], ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29518"]):
        command = [sys.executable, *launch, str(script), str(tmp_path)]
        done = run_ranks(command, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    alone, first, second = (
        {(step, tuple(ids)): skip for step, ids, skip in json.loads((tmp_path / f"draws-{name}.json").read_text())}
        for name in ("1-0", "2-0", "2-1")
    )
    assert {**first, **second} == alone and len(first) + len(second) == len(alone) == 16
    assert len(set(alone.values())) > 8

"""objective="self-distill" in the trainer: normalisation over a step, evaluation, what is logged, resuming, errors."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import oracle
from support.tiny import tiny
from support.training import WAYS, documents, logged, trainer
from transformers import MixtralConfig, MixtralForCausalLM
from trl import SFTConfig, SFTTrainer

from rope_patch.losses import ViewConsistency, self_distillation_counts, self_distillation_loss
from rope_patch.patch import view_source
from rope_patch.views import Skip, Uniform
from trl_ext.objectives import OBJECTIVES

SelfDistillObjective = OBJECTIVES["self-distill"]

SELF = {"objective": "self-distill", "view": "skip", "view_args": {"skip": Uniform(1, 40)}}
STEP = {"max_steps": 1, "learning_rate": 0.0, "train_sampling_strategy": "sequential", **SELF}


def by_length():
    """Documents in the order in which packing puts them into a row, so that they have the same draws."""
    rows = sorted(documents(4)["input_ids"], key=len, reverse=True)
    return Dataset.from_dict({"input_ids": rows})


@pytest.fixture(scope="module")
def one_batch(tmp_path_factory):
    """A function that logs the step of all documents in one batch, once for each set of options."""
    steps = {}

    def step(**objective_args):
        key = str(objective_args)
        if key not in steps:
            run = trainer(
                tmp_path_factory.mktemp("one"), train_dataset=by_length(), objective_args=objective_args, **STEP,
                **WAYS["padded"],
            )  # fmt: skip
            run.train()
            (steps[key],) = logged(run, "loss", "grad_norm", "num_tokens", "ce", "kl")
        return steps[key]

    return step


@pytest.mark.parametrize(
    ("way", "objective_args"),
    [
        ("checkpointed", {}),
        ("packed", {"reduction": "token"}),
        ("padding-free", {"reduction": "uniform"}),
        ("accumulated", {"kl_longce": {"short_context": 6, "stride": 4, "cap": 1.5}, "kl_top": 0.5}),
    ],
    ids=["checkpointed-sequence", "packed-token", "padding-free-uniform", "accumulated-weighed"],
)
def test_a_step_is_one_mean_however_it_is_batched(way, objective_args, one_batch, tmp_path):
    """Draws are keyed by document, so every way of batching the same documents in the same order has one loss."""
    run = trainer(tmp_path, train_dataset=by_length(), objective_args=objective_args, **STEP, **WAYS[way])
    run.train()
    (step,) = logged(run, "loss", "grad_norm", "num_tokens", "ce", "kl")
    assert step == pytest.approx(one_batch(**objective_args), rel=1e-4)
    assert step["loss"] == pytest.approx(step["ce"] + step["kl"], rel=1e-4), "what is logged makes up the loss"
    assert objective_args == {} or step["kl"] != pytest.approx(one_batch()["kl"], rel=1e-2)


@pytest.mark.parametrize("reduction", ["sequence", "token"])
@pytest.mark.parametrize("way", ["padded", "packed", "padding-free", "mixed", "checkpointed"])
def test_a_loop_of_ones_own_has_the_same_step(way, reduction, monkeypatch, tmp_path):
    """In the trainer's micro-batches; a fixed view, as the trainer draws by the place of a document in the step."""
    batches, loss = [], SelfDistillObjective.loss

    def watched(self, model, inputs, *others):
        batches.append(inputs)
        return loss(self, model, inputs, *others)

    monkeypatch.setattr(SelfDistillObjective, "loss", watched)
    options = {**STEP, "view_args": {"split": 5, "skip": 9}, "objective_args": {"reduction": reduction}, **WAYS[way]}
    run = trainer(tmp_path, train_dataset=documents(4), **options)
    run.train()
    model = tiny().train()
    drawn = {"view": Skip(split=5, skip=9), "step": 0, "consistency": ViewConsistency(reduction=reduction)}
    counts = sum(self_distillation_counts(model, batch, **drawn) for batch in batches)
    losses = [self_distillation_loss(model, batch, **drawn, counts=counts) for batch in batches]
    sum(losses).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    (step,) = logged(run, "loss", "grad_norm")
    assert step == pytest.approx({"loss": sum(losses).item(), "grad_norm": norm}, rel=1e-5)


@pytest.mark.parametrize("passes", ["auto", "sequential"])
def test_a_family_whose_own_loss_takes_no_count_is_divided_no_further(passes, one_batch, tmp_path):
    """Gemma 3 and others say so by a class attribute; Trainer then divides losses by the micro-steps."""
    model = tiny()
    model.accepts_loss_kwargs = False
    options = {"model": model, "train_dataset": by_length(), "objective_args": {"passes": passes}}
    run = trainer(tmp_path, **options, **STEP, **WAYS["accumulated"])
    run.train()
    (step,) = logged(run, "loss", "grad_norm", "num_tokens", "ce", "kl")
    assert step == pytest.approx(one_batch(), rel=1e-4)


def test_without_the_kl_it_is_the_plain_loss(tmp_path):
    data = documents(4)
    options = {"train_dataset": data, "max_steps": 2, "per_device_train_batch_size": 4}
    ours = trainer(tmp_path, **options, **SELF, objective_args={"kl_weight": 0.0})
    ours.train()
    plain = trainer(tmp_path, SFTTrainer, SFTConfig, **options)
    plain.train()
    for mine, theirs in zip(logged(ours, "loss", "entropy"), logged(plain, "loss", "entropy"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_evaluation_is_plain_cross_entropy_with_the_kl_beside_it(tmp_path):
    data = documents(6)
    ours = trainer(tmp_path, eval_dataset=data, **SELF)
    plain = trainer(tmp_path, SFTTrainer, SFTConfig, eval_dataset=data)
    mine, theirs = ours.evaluate(), plain.evaluate()
    assert mine["eval_loss"] == pytest.approx(
        theirs["eval_loss"], rel=2e-2
    )  # a mean over batches there, over tokens here
    assert mine["eval_kl"] > 0 and ours.evaluate()["eval_kl"] == mine["eval_kl"], "evaluation draws the same each time"


def test_the_kl_brings_the_view_to_true_positions(tmp_path):
    """Against the same run without it: cross-entropy falls in both."""
    data = documents(4)
    options = {"max_steps": 16, "train_dataset": data, "eval_dataset": data, **SELF}
    results = {}
    for weight in (0.0, 5.0):
        run = trainer(tmp_path, **options, objective_args={"kl_weight": weight})
        before = run.evaluate()
        run.train()
        results[weight] = run.evaluate()
        assert results[weight]["eval_loss"] < 0.5 * before["eval_loss"]
    assert results[5.0]["eval_kl"] < 0.5 * results[0.0]["eval_kl"]


def test_what_is_logged(tmp_path):
    view = {"view": "skip", "view_args": {"split": 7, "skip": 30}}
    run = trainer(tmp_path, max_steps=1, **{**SELF, **view}, objective_args={"view_clm": 1.0})
    run.train()
    names = ("kl", "ce", "view", "entropy", "mean_token_accuracy", "num_tokens")
    (entry,) = logged(run, *names)
    expected = {"kl", "ce", "entropy", "mean_token_accuracy", "view/split", "view/skip", "num_tokens", "view_ce"}
    assert expected <= set(entry)
    assert entry["view_ce"] > 0 and entry["view_ce"] != entry["ce"]
    # documents of 12 to 24 tokens: nothing of their first quarter lies behind token 7
    assert {f"kl/depth_{i}of4" for i in range(1, 5)} - set(entry) == {"kl/depth_1of4"}


@pytest.mark.parametrize(("teacher", "passes"), [("self", "sequential"), ("native", "auto")])
def test_the_kl_by_skip_is_that_of_moved_rows_alone(teacher, passes, tmp_path):
    """A native teacher is compared in all rows, those before a document's split among them."""
    factor, batches = 4.0, []
    options = {"train_dataset": documents(4), "max_steps": 1, "learning_rate": 0.0, **WAYS["padded"], **SELF}
    options |= {"rescale": "pi", "rescale_args": {"factor": factor}}
    run = trainer(tmp_path, **options, objective_args={"teacher": teacher, "passes": passes})
    run.model.register_forward_pre_hook(lambda *call: batches.append(call[2]["input_ids"]), with_kwargs=True)
    source = view_source(run.model)
    run.train()
    model = tiny()
    weights, frequencies = oracle.weights_of(model), oracle.default_frequencies(model.config)

    def predicted(ids, index, frequencies):
        see = oracle.causal(len(ids))[None]
        logits = oracle.logits(weights, model.config, ids[None], index[None], see, frequencies)
        return logits[0, :-1].log_softmax(-1).detach()

    rows = {}
    drawn = source.last.parameters
    splits, skips = drawn["split"].flatten().tolist(), drawn["skip"].flatten().tolist()
    for row, split, skip in zip(batches[0], splits, skips, strict=True):
        ids = row[row > 0]  # without padding
        t = torch.arange(len(ids))
        p = predicted(ids, torch.where(t >= split, t + skip, t), frequencies / factor)
        q = predicted(ids, t, frequencies if teacher == "native" else frequencies / factor)
        kl = (p.exp() * (p - q)).sum(-1)
        assert split > 1 and (kl[1:split].min() > 1e-3) == (teacher == "native"), "rows that are not to count"
        rows.setdefault(f"kl/skip_{1 + 4 * (skip - 1) // 40}of4", []).append(kl[split:])
    expected = {name: torch.cat(logits).mean().item() for name, logits in rows.items()}
    assert logged(run, "kl/skip") == [pytest.approx(expected, rel=1e-4)]


def test_lora_and_resuming(tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"peft_config": config, "max_steps": 3, "save_strategy": "steps", "save_steps": 2, **SELF}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    again = trainer(tmp_path / "whole", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(again, "loss", "kl")[2:] == logged(whole, "loss", "kl")[2:]


def test_labels_of_completions_count_alone(tmp_path):
    rows = [{"prompt": "w3 w4 w5 w6 w7", "completion": "w8 w9 w10 w11 w12 w13"}] * 4
    run = trainer(tmp_path, max_steps=1, train_dataset=Dataset.from_list(rows), per_device_train_batch_size=4, **SELF)
    run.train()
    counts = run._step_counts
    assert counts["compared"] == 4 and counts["labels"] in (4 * 6, 4 * 7)  # with or without a closing token


@pytest.mark.parametrize(("way", "adapters"), [("checkpointed", True), ("padding-free", False)])
def test_a_native_teacher_however_a_step_is_batched(way, adapters, tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    options = {"train_dataset": documents(4), "peft_config": config if adapters else None, **STEP}
    options |= {"rescale": "pi", "rescale_args": {"factor": 4.0}}
    runs = []
    for each in ("padded", way):
        torch.manual_seed(0)  # of the adapters
        run = trainer(tmp_path, objective_args={"teacher": "native"}, **options, **WAYS[each])
        run.train()
        runs += logged(run, "loss", "kl", "grad_norm")
    assert runs[0]["kl"] > 0.1
    for name in ("loss", "grad_norm"):
        assert runs[1][name] == pytest.approx(runs[0][name], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"view": "standard", "view_args": None},
            "objective 'self-distill' compares a view with true positions: give view='skip'",
        ),
        (
            {"objective_args": {"longce": {"short_context": 24}}, "objective": "clm"},
            "short_context must be below the length of the longest document, got 24 and documents of at most 24",
        ),
        (
            {"objective_args": {"kl_longce": {"short_context": 24}}},
            "got 24 and documents of at most 24 tokens: all of their tokens would weigh 1.* leave kl_longce out",
        ),
        ({"objective_args": {"teacher": "native"}, "view": "standard", "view_args": None}, "same RoPE"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "Set gradient_checkpointing_kwargs={'use_reentrant': False}",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_training(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **{**SELF, **options})


def dft(model, dataset):
    """-p ln p of each label with p held fixed, and -ln p, by plain Transformers in float64: means over all labels."""
    exact = copy.deepcopy(model).double().eval()
    rows = [torch.tensor(ids) for ids in dataset["input_ids"]]
    log_p = torch.cat([exact(ids[None]).logits.log_softmax(-1)[0, :-1].gather(-1, ids[1:, None]) for ids in rows])
    return (-log_p.exp().detach() * log_p).mean(), -log_p.mean(), exact


@pytest.mark.parametrize("passes", ["auto", "sequential"])
def test_its_next_token_loss_can_be_that_of_dft(passes, tmp_path):
    data, model = documents(4), tiny()
    expected, plain, _ = dft(model, data)
    options = {"train_dataset": data, "eval_dataset": data, "max_steps": 1, "per_device_train_batch_size": 4}
    options |= {"loss_type": "dft", "learning_rate": 0.0, "per_device_eval_batch_size": 4, **SELF}
    run = trainer(tmp_path, model=model, **options, objective_args={"passes": passes})
    run.train()
    (entry,) = logged(run, "loss", "weighted_ce", "ce", "kl")
    assert entry["weighted_ce"] == pytest.approx(expected.item(), rel=1e-5)
    assert entry["ce"] == pytest.approx(plain.item(), rel=1e-5)
    assert entry["loss"] == pytest.approx(entry["weighted_ce"] + entry["kl"], rel=1e-5) and entry["kl"] > 0
    assert run.evaluate()["eval_loss"] == pytest.approx(plain.item(), rel=1e-5), "evaluation weighs all alike"


def test_gradients_of_dft_are_those_of_its_formula(tmp_path):
    data, model = documents(4), tiny()
    expected, _, exact = dft(model, data)
    expected.backward()
    before = [weight.detach().clone() for weight in model.parameters()]
    options = {
        "train_dataset": data,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "objective_args": {"kl_weight": 0.0},
        **SELF,
    }
    run = trainer(tmp_path, model=model, loss_type="dft", optim="sgd", learning_rate=1.0, **options)
    run.train()
    for was, now, weight in zip(before, model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close((was - now).double(), weight.grad, rtol=1e-4, atol=1e-6)


def test_a_loss_that_balances_experts_is_left_out_on_request_alone(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"train_dataset": documents(4), "per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 0.0}
    losses = []
    for coefficient, passes in ((None, "auto"), (0.0, "auto"), (0.0, "two")):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(vocab_size=101, num_key_value_heads=2, num_local_experts=4, **shape))
        more = {"router_aux_loss_coef": coefficient, "objective_args": {"passes": passes}}
        if coefficient is None:
            with pytest.raises(ValueError, match="set router_aux_loss_coef=0.0"):
                trainer(tmp_path, model=model, **options, **SELF, **more)
            continue
        run = trainer(tmp_path, model=model, **options, **SELF, **more)
        run.train()
        losses += logged(run, "loss", "grad_norm")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("control", ["dropout", "attention_noise"])
def test_controls_are_measured_and_their_noise_goes_on_where_a_run_was_left(control, tmp_path):
    data = documents(4)
    options = {"objective": "self-distill", "objective_args": {"control": {"kind": control}}}
    options |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "train_dataset": data}
    sets = {"all": data, "once": data.select([0]), "twice": data.select([0, 0])}
    whole = trainer(tmp_path, eval_dataset=sets, per_device_eval_batch_size=1, **options)
    whole.train()
    assert all(entry["kl"] > 0 for entry in logged(whole, "kl"))
    metrics = whole.evaluate()
    assert metrics["eval_twice_kl"] != pytest.approx(metrics["eval_once_kl"], rel=1e-3), "each document has other noise"
    plain = trainer(tmp_path, SFTTrainer, SFTConfig, model=whole.model, eval_dataset=data)
    assert metrics["eval_all_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=2e-2)
    again = trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert logged(again, "loss", "kl")[1:] == logged(whole, "loss", "kl")[1:]


PACKED = {"per_device_train_batch_size": 1, "packing": True, "max_length": 96}
ACCUMULATED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
LONGCE = {"objective_args": {"longce": {"short_context": 6, "stride": 4}}}
VIEW_LOSS = {"objective_args": {"view_clm": 0.5, "rows": "query_in_suffix", "reduction": "token"}}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("passes", "options"),
    [
        ("sequential", {"peft_config": LORA, "gradient_checkpointing": True}),
        ("sequential", {**ACCUMULATED, **LONGCE}),
        ("sequential", {**PACKED, **VIEW_LOSS}),
        ("two", {**PACKED, **LONGCE}),
        ("two", {"objective_args": {"kl_weight": 0.0, "view_clm": 1.0}, "gradient_checkpointing": True}),
    ],
    ids=["lora-checkpointed", "accumulated-longce", "packed-view-loss", "packed-longce", "view-loss-alone"],
)
def test_passes_change_neither_loss_nor_weights(passes, options, tmp_path):
    """Weights after steps of SGD are sums of gradients."""
    runs = []
    for chosen in ("auto", passes):
        settings = {"per_device_train_batch_size": 4, **options}
        settings["objective_args"] = {**options.get("objective_args", {}), "passes": chosen}
        torch.manual_seed(0)
        run = trainer(tmp_path, train_dataset=documents(4), max_steps=2, optim="sgd", **SELF, **settings)
        run.train()
        names = ("loss", "grad_norm", "ce", "kl", "view_ce", "entropy", "mean_token_accuracy", "token_weight")
        runs.append((logged(run, *names), [p.detach() for p in run.model.parameters()]))
    (expected, weights), (actual, others) = runs
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=1e-6, nan_ok=True)
    for mine, theirs in zip(others, weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", [LONGCE, PACKED], ids=["longce", "packed"])
def test_draws_that_would_copy_too_much_run_one_view_after_the_other(way, tmp_path, monkeypatch):
    """Both ways occur in the run, by what each batch would copy, and gradients are those of one way."""
    seen, weights, ask = [], [], SelfDistillObjective._takes_two_calls

    def watched(objective, read):
        apart = ask(objective, read)
        if objective._max_copies < 1:
            first = objective.forward_loss.changes.next_first(read)
            copied = ((read.t >= first) & read.valid).sum(1) / read.t.shape[1]
            seen.append((bool(copied.max() > 0.6), apart))
        return apart

    monkeypatch.setattr(SelfDistillObjective, "_takes_two_calls", watched)
    for args in ({}, {"max_copies": 0.6}):
        options = {**ACCUMULATED, **way}
        options["objective_args"] = {**options.get("objective_args", {}), **args}
        torch.manual_seed(0)
        run = trainer(tmp_path, train_dataset=documents(8), max_steps=3, optim="sgd", **SELF, **options)
        run.train()
        weights.append([p.detach() for p in run.model.parameters()])
    assert {apart for _, apart in seen} == {True, False}
    assert all(much == apart for much, apart in seen)
    for mine, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

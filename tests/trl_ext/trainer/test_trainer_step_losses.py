"""Losses of a step and of an evaluation, and what is logged of them, against sums over documents in float64."""

import functools
import itertools

import pytest
import torch
from datasets import Dataset
from support import oracle
from support.tiny import VOCAB, tiny
from support.training import logged, trainer

from rope_patch.patch import view_source
from rope_patch.views import Skip, Uniform

SPLIT, SKIP = 20, 10
FIXED = {"objective": "self-distill", "view": "skip", "view_args": {"split": SPLIT, "skip": SKIP}}
DRAWN = {"objective": "self-distill", "view": "skip", "view_args": {"skip": Uniform(1, 40)}}
LENGTHS = [60, 10, 21, 30, 3, 2, 12, 45]  # of 21 the view moves the last token alone, behind which nothing is predicted
WAYS = {
    "padded": {"per_device_train_batch_size": 8},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "one by one": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "padding-free": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "padding_free": True,
        "max_length": None,
    },
    "packed": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "packing": True},
}


def rows(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def dataset(texts):
    return Dataset.from_list([{"input_ids": row} for row in texts])


@functools.cache
def untrained():
    """Weights in float64 and config of the model that a trainer begins with."""
    model = tiny()
    return oracle.weights_of(model), model.config


def by_document(texts, draws):
    """(cross-entropies, KL of each query), float64, of each document under its (split, skip)."""
    weights, config = untrained()

    def log_predictions(ids, index):
        see = oracle.causal(len(ids))[None]
        return oracle.logits(weights, config, ids[None], index[None], see)[0, :-1].log_softmax(-1).detach()

    losses = []
    for text, (split, skip) in zip(texts, draws, strict=True):
        ids = torch.tensor(text)
        t = torch.arange(len(ids))
        q = log_predictions(ids, t)
        p = log_predictions(ids, torch.where(t >= split, t + skip, t))
        ce = -q.gather(1, ids[1:, None]).squeeze(1)
        losses.append((ce, (p.exp() * (p - q)).sum(-1)))
    return losses


def expected(texts, draws, reduction="sequence", counts=lambda length: length > 2):
    """(ce, kl) of a mean over these documents; `counts` says of which lengths the view can change a prediction."""
    losses = by_document(texts, draws)
    ce = torch.cat([ce for ce, _ in losses]).mean().item()
    sums, divisor = 0.0, 0
    for text, (split, _), (_, kl) in zip(texts, draws, losses, strict=True):
        if not counts(len(text)):
            continue
        behind = len(text) - split
        total = kl[split:].sum().item()
        sums += total / behind if reduction == "sequence" else total
        divisor += {"sequence": 1, "token": behind, "uniform": len(text)}[reduction]
    return ce, sums / divisor


@pytest.mark.parametrize(
    ("way", "reduction"),
    [
        ("padded", "token"),
        ("accumulated", "sequence"),
        ("one by one", "uniform"),
        ("padding-free", "token"),
        ("packed", "uniform"),
    ],
)
def test_documents_that_end_before_a_fixed_split_are_no_part_of_the_kl(way, reduction, tmp_path, caplog):
    texts = rows()
    run = trainer(
        tmp_path, train_dataset=dataset(texts), max_steps=1, learning_rate=0.0,
        objective_args={"kl_weight": 0.7, "reduction": reduction}, **FIXED, **WAYS[way],
    )  # fmt: skip
    assert "5 of 8 documents, 48 of 183 tokens, add nothing to the KL" in caplog.text
    run.train()
    (entry,) = logged(run, "loss", "ce", "kl")
    ce, kl = expected(texts, [(SPLIT, SKIP)] * len(texts), reduction, counts=lambda length: length > SPLIT + 1)
    assert entry["ce"] == pytest.approx(ce, rel=1e-5) and entry["kl"] == pytest.approx(kl, rel=1e-4)
    assert entry["loss"] == pytest.approx(entry["ce"] + 0.7 * entry["kl"], rel=1e-6)


def test_rows_before_a_short_document_do_not_hide_it(tmp_path):
    """One long document alone, and with seven that the view leaves alone: the same KL."""
    runs = []
    for lengths in ([60], [60] + 7 * [10]):
        texts = rows(lengths)
        options = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": len(texts)}
        run = trainer(tmp_path, train_dataset=dataset(texts), **options, **FIXED)
        run.train()
        runs += logged(run, "kl")
    assert runs[1]["kl"] == pytest.approx(runs[0]["kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([10, 21, 2], FIXED),
        ([2, 2], DRAWN),
    ],
    ids=["fixed", "drawn"],
)
def test_a_set_without_anything_to_compare_is_refused_before_training(lengths, options, tmp_path):
    with pytest.raises(ValueError, match=f"train_dataset must have documents in which .* got {len(lengths)} of at"):
        trainer(tmp_path, train_dataset=dataset(rows(lengths)), **options)


def test_a_native_teacher_compares_every_document_with_a_prediction(tmp_path):
    """One of 10 tokens, which the view leaves alone, differs from the model as it was pretrained all the same."""
    runs = []
    for lengths in ([10], [10, 1]):
        options = {"rescale": "pi", "rescale_args": {"factor": 4.0}, "objective_args": {"teacher": "native"}}
        options |= {"max_steps": 1, "learning_rate": 0.0, **DRAWN}
        run = trainer(tmp_path, train_dataset=dataset(rows(lengths)), **options)
        run.train()
        runs += logged(run, "kl", "loss")
    assert runs[0]["kl"] > 0.01
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)


def watch_draws(run):
    """List that each forward adds its documents' (length, split, skip) to."""
    source, drawn = view_source(run.model), []
    bind = source.bind

    def watched(batch):
        bound = bind(batch)
        ordinal = bound.documents.ordinal.flatten()
        first = [int((ordinal == i).nonzero()[0]) for i in range(int(ordinal.max()) + 1)]
        columns = [bound.documents.length, bound.parameters["split"], bound.parameters["skip"]]
        drawn.extend(zip(*(column.flatten()[first].tolist() for column in columns), strict=True))
        return bound

    source.bind = watched
    return drawn


@pytest.mark.parametrize(
    ("way", "passes"),
    [("padded", "sequential"), ("accumulated", "auto"), ("one by one", "sequential"), ("padding-free", "auto")],
)
def test_what_is_logged_of_ragged_rows_adds_up_to_the_loss(way, passes, tmp_path):
    texts = rows()
    run = trainer(
        tmp_path, train_dataset=dataset(texts), max_steps=2, learning_rate=0.0, shuffle_dataset=False,
        objective_args={"kl_weight": 0.7, "passes": passes, "view_clm": 0.3}, **DRAWN, **WAYS[way],
    )  # fmt: skip
    drawn = watch_draws(run)
    run.train()
    by_length = {len(text): text for text in texts}
    for i, entry in enumerate(logged(run, "loss", "ce", "kl", "view_ce", "view/skip", "mean_token_accuracy")):
        own = drawn[8 * i : 8 * i + 8]
        assert sorted(length for length, _, _ in own) == sorted(LENGTHS)
        ce, kl = expected([by_length[length] for length, _, _ in own], [pair for _, *pair in own])
        assert entry["ce"] == pytest.approx(ce, rel=1e-5) and entry["kl"] == pytest.approx(kl, rel=1e-4)
        made_of = entry["ce"] + 0.7 * entry["kl"] + 0.3 * entry["view_ce"]
        assert entry["loss"] == pytest.approx(made_of, rel=1e-6)
        assert entry["view/skip"] == pytest.approx(sum(skip for *_, skip in own) / 8)


@pytest.mark.parametrize("objective", ["clm", "self-distill"])
def test_weighted_cross_entropy_is_logged_as_the_loss_has_it(objective, tmp_path):
    options = {**DRAWN, "objective": objective}
    options |= {"objective_args": {"longce": {"short_context": 6, "stride": 4}}, "max_steps": 1, "learning_rate": 0.0}
    run = trainer(tmp_path, train_dataset=dataset(rows()), **options, **WAYS["accumulated"])
    run.train()
    for entry in logged(run, "loss", "ce", "weighted_ce", "kl"):
        assert entry["loss"] == pytest.approx(entry["weighted_ce"] + entry.get("kl", 0.0), rel=1e-6)
        assert entry["weighted_ce"] != pytest.approx(entry["ce"], rel=1e-3)


def test_relations_of_a_step_are_logged_as_the_loss_has_them(tmp_path):
    options = {"objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}}
    options |= {"objective_args": {"logit_kl": {"weight": 0.5, "last": 5}}, "max_steps": 1, "learning_rate": 0.0}
    run = trainer(tmp_path, train_dataset=dataset(rows()), **options, **WAYS["accumulated"])
    run.train()
    for entry in logged(run, "loss", "relation/"):
        made_of = sum(entry[f"relation/{x}"] for x in "qkv") + 0.5 * entry["relation/logit_kl"]
        assert entry["loss"] == pytest.approx(made_of, rel=1e-6)


def test_a_step_without_a_label_has_loss_0_as_with_trl(tmp_path):
    for options in (DRAWN, {"objective": "clm"}):
        run = trainer(
            tmp_path, train_dataset=dataset(rows([1, 30])), dataset_kwargs={"skip_prepare_dataset": True},
            per_device_train_batch_size=1, max_steps=2, **options,
        )  # fmt: skip
        run.train()
        losses = [entry["loss"] for entry in logged(run, "loss")]
        assert min(losses) == 0.0 < max(losses) < float("inf")


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_an_evaluation_weighs_each_label_and_document_alike(batch_size, tmp_path):
    texts = rows()
    options = {"train_dataset": dataset(rows([40])), "per_device_eval_batch_size": batch_size, **DRAWN}
    run = trainer(tmp_path, eval_dataset=dataset(texts), **options)
    drawn = watch_draws(run)
    metrics = run.evaluate()
    assert [length for length, _, _ in drawn] == LENGTHS
    ce, kl = expected(texts, [pair for _, *pair in drawn])
    assert metrics["eval_ce"] == pytest.approx(ce, rel=1e-5) and metrics["eval_kl"] == pytest.approx(kl, rel=1e-4)


def test_a_part_that_is_not_a_number_is_logged_as_such(tmp_path, caplog):
    run = trainer(tmp_path, eval_dataset=dataset(rows([30, 20, 12])), **DRAWN, per_device_eval_batch_size=1)
    call, seen = run._objective.loss, []

    def broken(*args):
        loss, parts = call(*args)
        seen.append(loss)
        return (loss, parts) if len(seen) > 1 else (loss * torch.nan, {**parts, "ce": (loss * torch.nan, 29)})

    run._objective.loss = broken
    metrics = run.evaluate()
    assert metrics["eval_ce"] != metrics["eval_ce"] and metrics["eval_kl"] > 0
    assert "the loss of an evaluation batch is nan" in caplog.text


def test_a_view_that_weighs_nothing_is_not_run_in_training(tmp_path):
    """The control arm: next-token training under true positions, with the KL measured in evaluation."""
    texts = dataset(rows([40, 30, 20, 12]))
    options = {"train_dataset": texts, "eval_dataset": texts, "max_steps": 2, "per_device_train_batch_size": 2}
    ours = trainer(tmp_path, **options, **DRAWN, objective_args={"kl_weight": 0.0})
    drawn, tokens = watch_draws(ours), []
    layer = ours.model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args, kwargs: tokens.append(args[0].shape[1]), with_kwargs=True)
    ours.train()
    assert not drawn and max(tokens) == 40, "neither copies nor a second pass"
    assert all(not {"kl", "view/skip"} & set(entry) for entry in ours.state.log_history)
    plain = trainer(tmp_path, **options)
    plain.train()
    for mine, theirs in zip(logged(ours, "loss"), logged(plain, "loss"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert ours.evaluate()["eval_kl"] > 0 and drawn


def test_the_view_of_these_tests_is_the_papers():
    t = torch.arange(25)
    drawn = {"split": torch.tensor(SPLIT), "skip": torch.tensor(SKIP)}
    assert Skip().rope_index(t, drawn).tolist() == [*range(20), *range(30, 35)]


class _Stop(Exception):
    pass


def _breaks_off(run, error, at):
    """Let a forward of the model raise `error` once, the `at`-th time that its last layer attends."""
    calls = itertools.count(1)

    def hook(*_):
        if next(calls) == at:
            raise error

    run.model.model.layers[-1].self_attn.o_proj.register_forward_pre_hook(hook)


LOGGED = ("loss", "ce", "kl", "entropy", "mean_token_accuracy", "view/")


def test_a_step_that_broke_off_leaves_nothing_in_the_log_of_the_next_training(tmp_path):
    """In its second micro-batch, before the weights have changed. TRL and the view have counted the first by then."""
    options = {**DRAWN, "objective": "clm", "max_steps": 2, "train_dataset": dataset(rows()), **WAYS["accumulated"]}
    whole, broken = (trainer(tmp_path, **options) for _ in range(2))
    whole.train()
    _breaks_off(broken, _Stop(), at=2)
    with pytest.raises(_Stop):
        broken.train()
    broken.train()
    assert logged(broken, *LOGGED) == logged(whole, *LOGGED)


def test_a_smaller_batch_size_that_was_found_has_a_log_of_its_own(tmp_path):
    options = {**DRAWN, "max_steps": 2, "train_dataset": dataset(rows()), "gradient_accumulation_steps": 2}
    found = trainer(tmp_path, per_device_train_batch_size=4, auto_find_batch_size=True, **options)
    _breaks_off(found, torch.OutOfMemoryError("CUDA out of memory."), at=2)
    found.train()
    assert found._train_batch_size < 4
    given = trainer(tmp_path, per_device_train_batch_size=found._train_batch_size, **options)
    given.train()
    assert logged(found, *LOGGED) == logged(given, *LOGGED)

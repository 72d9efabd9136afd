"""The window of a model, the target of a view and the rows of a run are compared before the first step."""

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text import BOS, framing
from support.tiny import WINDOW, tiny
from support.training import documents, trainer

from rope_patch import patch_model
from rope_patch.base.draws import DrawKey
from rope_patch.layout.documents import locate_documents
from rope_patch.patch import view_source
from rope_patch.views import VIEWS, Compose, EndPrompt, LongRecipe, PoSE, Skip, Uniform
from trl_ext.data.cut_rows import cut_rows

TARGETS = {
    "pose": ("pose", {}),
    "endprompt": ("endprompt", {"cue_tokens": 3}),
    "longrecipe": ("longrecipe", {"sentence_ends": [5]}),
    "cream": ("cream", {}),
}


def with_target(name, target):
    view, options = TARGETS[name]
    return {"view": view, "view_args": {**options, "target": target}}


FAR = {"skip": Uniform(1, 1000)}


@pytest.mark.parametrize(("name", "rescale"), zip(TARGETS, ["pi", "yarn", "ntk", "llama3"], strict=True))
def test_a_target_beyond_the_rescaled_window_is_refused_with_the_factor_to_take(name, rescale, tmp_path):
    model = tiny()
    two, sixteen = (4, 32) if rescale == "ntk" else (2, 16)  # factors for so many windows
    options = {"rescale": rescale, "rescale_args": {"factor": float(two)}}
    message = f"target of view '{name}' .* window of 128 positions, got target=1024. Set factor .* at least {sixteen},"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, model=model, **with_target(name, 1024), **options)
    assert model.config.max_position_embeddings == WINDOW, "the model is as it came"
    trainer(tmp_path, **with_target(name, 128), **options)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_beyond_the_window_of_a_model_without_rescaling_is_refused(name, tmp_path):
    message = "window of 64 positions, got target=65. Rescale the model by a factor of at least 2, e.g. rescale='yarn'"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **with_target(name, WINDOW + 1))
    trainer(tmp_path, **with_target(name, WINDOW))


def test_a_view_that_the_model_came_with_is_compared_too(tmp_path):
    with pytest.raises(ValueError, match="target of view 'pose'"):
        trainer(tmp_path, model=patch_model(tiny(), PoSE(target=65)))
    patched = patch_model(patch_model(tiny(), "yarn", factor=2.0), PoSE(target=128))
    trainer(tmp_path, model=patched)


def test_a_new_base_promises_the_target_and_the_rows(tmp_path):
    run = trainer(tmp_path, **with_target("cream", 1024), rescale="abf", rescale_args={"theta": 1e6})
    assert run.model.config.max_position_embeddings == 1024
    long = Dataset.from_dict({"input_ids": [[5] * 300] * 4})
    run = trainer(tmp_path, train_dataset=long, max_length=None, rescale="abf", rescale_args={"theta": 1e6})
    assert run.model.config.max_position_embeddings == 300
    short = {"theta": 1e6, "max_position_embeddings": 512}
    with pytest.raises(ValueError, match="Set rescale_args max_position_embeddings to at least 1024"):
        trainer(tmp_path, **with_target("cream", 1024), rescale="abf", rescale_args=short)


@pytest.mark.parametrize(
    ("view", "reach"),
    [
        ({"view": "skip", "view_args": FAR}, 23 + 1000),
        ({"view": "skip", "view_args": FAR, "rescale": "yarn", "rescale_args": {"factor": 2.0}}, 1023),
        ({"view": "skip", "view_args": FAR, "rescale": "abf", "rescale_args": {"theta": 1e6}}, 1023),
        ({"view": "posaug"}, 8 * 23),
        ({"view": "rpe", "view_args": {"max_index": 512}}, 511),
        ({"view": "dilation", "view_args": {"factor": Uniform(0.5, 4.0)}}, 4 * 23),
    ],
    ids=["skip", "skip-yarn", "skip-abf", "posaug", "rpe", "dilation"],
)
def test_views_that_are_meant_to_go_beyond_the_window_say_so_in_one_line(view, reach, caplog, tmp_path):
    data = Dataset.from_dict({"input_ids": [[*range(3, 27)]] * 8})
    trainer(tmp_path, train_dataset=data, **view)
    (line,) = [r.getMessage() for r in caplog.records if "shows RoPE indices" in r.getMessage()]
    assert f"shows RoPE indices up to {reach}, beyond the model's window" in line


@pytest.mark.parametrize("view", [{}, {"view": "skip", "view_args": {"skip": Uniform(1, 40)}}, {"view": "cyclic"}])
def test_a_run_within_the_window_says_nothing(view, caplog, tmp_path):
    trainer(tmp_path, **view)
    assert "window" not in caplog.text


def test_rows_beyond_the_window(caplog, tmp_path):
    data = Dataset.from_dict({"input_ids": [[5] * 200] * 4})
    yarn = {"rescale": "yarn", "rescale_args": {"factor": 2.0}}
    with pytest.raises(ValueError, match="max_length must not .* window of 128 .* has 200 tokens. Set factor .* 4,"):
        trainer(tmp_path, train_dataset=data, max_length=200, **yarn)
    trainer(tmp_path, train_dataset=data, max_length=128, **yarn)
    trainer(tmp_path, train_dataset=documents(), max_length=4096, **yarn)  # documents are short
    trainer(tmp_path, train_dataset=data, max_length=200, rescale="dynamic-ntk", rescale_args={"factor": 2.0})
    pose = {"view": "pose", "view_args": {"target": 128, "window": 32}}
    trainer(tmp_path, train_dataset=data, max_length=200, **pose, **yarn)  # which reads 32 tokens of each
    assert "tokens, beyond the model's window" not in caplog.text
    trainer(tmp_path, train_dataset=data, max_length=200)
    assert caplog.text.count("documents of rows have up to 200 tokens, beyond the model's window of 64, and no") == 1


VIEW_OPTIONS = {
    "skip": {"skip": Uniform(1, 37)},
    "cyclic": {},
    "chunk-permute": {"blocks": 5},
    "dilation": {"factor": Uniform(0.5, 3.0)},
    "posaug": {"alpha": Uniform(0.125, 4.0), "granularity": "sample"},
    "endprompt": {"target": 90, "cue_tokens": 2, "placement": "random"},
    "pose": {"target": 90, "chunks": 3},
    "longrecipe": {"target": 90, "sentence_ends": [3, 4, 5]},
    "cream": {"target": 90},
    "random-base": {},
    "rpe": {"max_index": 70, "granularity": "sample"},
    "nope": {},
    "standard": {},
    "mix": {"views": ["standard", {"view": "skip", "skip": Uniform(1, 37)}, {"view": "pose", "target": 90}]},
}


def largest_index(view, n, seed):
    """By the draws themselves."""
    documents = locate_documents(1, n, torch.device("cpu"), None, None)
    key = DrawKey(seed, torch.tensor(0), documents.ordinal)
    ids = torch.randint(3, 12, (1, n), generator=torch.Generator().manual_seed(seed))
    t = torch.arange(n)[None]
    return float(view.rope_index(t, view.draw_for(ids, t, documents, key)).max())


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(sorted(VIEW_OPTIONS)), n=st.integers(2, 40), seed=st.integers(0, 2**20))
def test_no_draw_goes_beyond_the_reach_of_a_view(name, n, seed):
    view = VIEWS[name](**VIEW_OPTIONS[name])
    assert largest_index(view, n, seed) <= view.reach(n)
    if not view.rescales and name not in ("nope", "standard", "mix"):  # which stand alone
        both = Compose([view, Skip(skip=Uniform(1, 9))])
        assert largest_index(both, n, seed) <= both.reach(n)


def test_the_reach_is_the_largest_index():
    for view, n, reach in [
        (Skip(split=3, skip=5), 10, 14),
        (PoSE(target=64), 10, 63),
        (EndPrompt(target=64, cue_tokens=1), 10, 63),
        (EndPrompt(target=64, cue_tokens=0), 10, 9),
        (LongRecipe(target=64, sentence_ends=[5]), 10, 63),
        (Compose([Skip(split=3, skip=5), VIEWS["posaug"](2.0)]), 10, 28),
    ]:
        assert view.reach(n) == reach
    assert largest_index(EndPrompt(target=64, cue_tokens=1), 10, 0) == 63


@pytest.mark.parametrize("template", ["$A", "<bos> $A"])
def test_pose_reads_whole_books_over_the_epochs(template, tmp_path):
    book = " ".join(f"w{3 + i % 90}" for i in range(70))
    run = trainer(
        tmp_path, train_dataset=Dataset.from_dict({"text": [book]}), view="pose", rescale="pi",
        rescale_args={"factor": 2.0}, view_args={"target": 128, "window": 8}, max_length=24, long_documents="split",
        processing_class=framing(template), dataloader_pin_memory=False,
    )  # fmt: skip
    (batch,) = [run.data_collator([run.train_dataset[i] for i in range(len(run.train_dataset))])]
    seen, n_rows = set(), len(run.train_dataset)
    for step in range(150):
        cut = dict(batch)
        assert cut_rows(view_source(run.model).view, cut, DrawKey(0, torch.tensor(step), torch.arange(n_rows)[:, None]))
        assert cut["input_ids"].shape == (n_rows, 8)
        if template != "$A":
            assert (cut["input_ids"][:, 0] == BOS).all(), "a row that is cut begins as a text does"
        seen |= set(cut["input_ids"].flatten().tolist())
    assert seen >= set(range(3, 73)), "each word of the book is read"


YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
POSE = {"view": "pose", "view_args": {"target": 64}}
UNREADABLE = {
    "native-distill": ({"objective": "native-distill", **YARN}, "the teacher, .* at most 64 tokens, .* got one of 100"),
    "native teacher": (
        {"objective": "self-distill", "objective_args": {"teacher": "native"}, **YARN},
        "teacher='native' reads documents of at most 64 tokens, its context window, got one of 100",
    ),
    "view": ({"objective": "self-distill", **POSE}, "view 'pose': documents of 100 tokens reach beyond target=64"),
    "alternating": (
        {"objective": "self-distill", "objective_args": {"restore": {"every": 2}}, **YARN, **POSE},
        "view 'pose': documents of 100 tokens reach beyond target=64",
    ),
}


def of_lengths(*lengths):
    return Dataset.from_dict({"input_ids": [[5 + i % 90 for i in range(n)] for n in lengths]})


@pytest.mark.parametrize("case", UNREADABLE)
def test_evaluation_documents_that_cannot_be_read_are_refused_before_the_first_step(case, tmp_path):
    options, message = UNREADABLE[case]
    options = {"max_length": None, **options}
    with pytest.raises(ValueError, match=f"^eval_dataset: {message}"):
        trainer(tmp_path, eval_dataset=of_lengths(20, 100), **options)
    with pytest.raises(ValueError, match=rf"^eval_dataset\['long'\]: {message}"):
        trainer(tmp_path, eval_dataset={"short": of_lengths(20), "long": of_lengths(100)}, **options)
    trainer(tmp_path, eval_dataset=of_lengths(100).to_iterable_dataset(), **options)
    run = trainer(tmp_path, eval_dataset=of_lengths(20, 60), **options)
    assert run.evaluate()["eval_loss"] > 0


def test_evaluation_documents_of_a_view_that_is_always_on_are_looked_at_too(tmp_path):
    model = patch_model(tiny(), "pose", target=64, when="always")
    with pytest.raises(ValueError, match="^eval_dataset: view 'pose': documents of 100 tokens reach beyond"):
        trainer(tmp_path, model=model, eval_dataset=of_lengths(100), max_length=None)


READABLE = {
    "true positions": POSE,
    "a view of training alone": {"objective": "native-distill", **YARN, "view": "pose", "view_args": {"target": 50}},
    "weights of training alone": {"objective_args": {"longce": {"short_context": 15, "stride": 2}}},
    "a split behind all": {"objective": "self-distill", "view": "skip", "view_args": {"split": 15, "skip": 20}},
}


@pytest.mark.parametrize("case", READABLE)
def test_evaluation_documents_that_can_be_read_are_not_refused(case, tmp_path):
    lengths = {"true positions": (100,), "a view of training alone": (60,)}.get(case, (12, 10))
    run = trainer(tmp_path, eval_dataset=of_lengths(*lengths), max_length=None, **READABLE[case])
    assert run.evaluate()["eval_loss"] > 0

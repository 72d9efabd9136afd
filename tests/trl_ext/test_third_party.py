"""A view and a rescaling from outside of the package get all that ours get: text, cutting, refusals, reach."""

import re
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
import torch
from datasets import Dataset
from support.tiny import WINDOW, tiny
from support.training import documents, logged, tokenizer, trainer

from rope_patch import describe, patch_model
from rope_patch.methods import resolve_rescaling, resolve_view
from rope_patch.patch import view_source
from rope_patch.rescalings import RESCALINGS, Rescaling
from rope_patch.views import VIEWS, Compose, Mix, PerLayer, Skip, Standard, Uniform, View
from trl_ext import RopeSFTConfig
from trl_ext.runs.method_record import require_same_method

CUE = "w90 w91 w92"
CUE_IDS = [90, 91, 92]
STOP = 9


@dataclass(frozen=True)
class FarEnd(View):
    """r(t) = t but for the last b tokens of a document of n, which are read as if at the end of `far` positions.

    Of documents longer than `most` the first tokens and the last one are read. Tokens behind the first `stop` of a
    training text are left out.
    """

    far: int
    end_tokens: int
    stop: int
    most: int | None = None

    synonyms = ("distant-end",)
    cue_option = "end_tokens"
    from_text = MappingProxyType({"stop": 0})

    @classmethod
    def prepare_text(cls, options, text):
        stop = text.tokenizer.convert_tokens_to_ids(f"w{STOP}")
        stopped = text.dataset.map(lambda row: {"text": row["text"].partition(f" w{STOP}")[0]})
        prepared, dataset = super().prepare_text(options, replace(text, dataset=stopped))
        return {**prepared, "stop": stop}, dataset

    @property
    def cuts(self):
        return None if self.most is None else f"most={self.most}"

    def kept(self, length):
        return length if self.most is None else length.clamp(max=self.most)

    def cut(self, length, key):
        if self.most is None or int(length.max()) <= self.most:
            return None
        first = torch.arange(self.most, device=length.device).expand(len(length), -1)
        return torch.where(first == self.kept(length) - 1, length - 1, first)

    def check_run(self, args):
        if args.neftune_noise_alpha:
            raise ValueError("view 'far-end' reads embeddings without noise: leave out neftune_noise_alpha.")

    def check_length(self, length):
        if length > self.far:
            raise ValueError(f"view 'far-end': documents of {length} tokens reach beyond far={self.far}.")

    def why_control(self):
        return None if self.end_tokens > 1 else f"end_tokens={self.end_tokens} leaves no label behind a gap"

    def conditions(self):
        return ["far must lie beyond documents"]

    @property
    def draws_by_forward(self):
        return True

    def can_change(self, length):
        return (length > self.end_tokens) & (length < self.far)

    def targets(self):
        return [(self.name, self.far)]

    def largest_skip(self, length):
        return self.far - length

    def reach(self, length, last=None):
        return self.far - 1 if last is None else last + self.far - length

    def draw(self, length, key):
        return {"split": length - self.end_tokens, "skip": self.far - length}

    def rope_index(self, t, parameters):
        return torch.where(t >= parameters["split"], t + parameters["skip"], t)


@dataclass(frozen=True)
class Stretch(Rescaling):
    """theta'_j = theta_j / times, which promises no window unless one is given."""

    times: float
    window: int | None = None

    synonyms = ("elastic",)

    def rope_parameters(self, native):
        if native.rope_type != "default":
            raise ValueError(f"rescaling 'stretch' starts from plain RoPE parameters, got {native.rope_type!r}.")
        return {"rope_type": "linear", "factor": float(self.times)}

    def target_window(self, native_window):
        return self.window

    @property
    def wants_window(self):
        return self.window is None

    def with_window(self, window):
        return replace(self, window=window) if self.wants_window else self

    def remedy(self, window, required):
        return f"Set window in rescale_args to {required} positions instead of {window}"


@dataclass(frozen=True)
class Halved(Rescaling):
    """theta'_j = theta_j / 2, of defaults alone."""

    def rope_parameters(self, native):
        return {"rope_type": "linear", "factor": 2.0}

    def target_window(self, native_window):
        return 2 * native_window


@pytest.fixture(autouse=True)
def registered():
    VIEWS.register("far-end")(FarEnd)
    RESCALINGS.register("stretch")(Stretch)
    RESCALINGS.register("halved")(Halved)
    yield
    del VIEWS["far-end"], RESCALINGS["stretch"], RESCALINGS["halved"]


TEXTS = Dataset.from_dict({"text": [" ".join(f"w{10 + i}" for i in range(n)) for n in (8, 12, 15, 20)] * 2})
FAR = {"view": "far-end", "view_args": {"far": 60}}
GIVEN = {"view": "far-end", "view_args": {"far": 60, "end_tokens": 3, "stop": STOP}}


def far_end(**options):
    return FarEnd(**{"far": 60, "end_tokens": 3, "stop": STOP, **options})


@pytest.fixture
def as_given(monkeypatch):
    """For data sets of token ids, whose text is not to be prepared."""
    monkeypatch.setattr(FarEnd, "prepare_text", classmethod(lambda cls, options, text: (options, text.dataset)))


def test_its_text_preparation_makes_the_training_set_and_options(tmp_path):
    texts = Dataset.from_dict({"text": [f"{text} w{STOP} w70 w71" for text in TEXTS["text"]]})
    run = trainer(tmp_path, train_dataset=texts, cue=CUE, max_steps=1, **FAR)
    bodies = [row[:-4] for row in run.train_dataset["input_ids"]]
    assert all(row[-3:] == CUE_IDS for row in run.train_dataset["input_ids"])
    assert bodies == [tokenizer()(text)["input_ids"] for text in TEXTS["text"]], "what is behind the stop is left out"
    assert run.args.view_args == {"far": 60, "end_tokens": 3, "stop": STOP}
    assert view_source(run.model).view == far_end()
    run.train()
    assert view_source(run.model) is None and len(logged(run, "loss")) == 1
    assert run._record.method["view_args"] == far_end().options()


def test_the_callers_configuration_stays(tmp_path):
    options = {"max_length": 64, "long_documents": "split", "cue": CUE, **FAR}
    args = RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    assert args.make_view() == far_end(end_tokens=1, stop=0), "stand-ins, until there are texts"
    run = trainer(tmp_path, train_dataset=TEXTS, cue=CUE, **FAR)
    assert run.args.view_args["stop"] == STOP and args.view_args == {"far": 60}


def test_its_cue_weighs_what_it_is_told(tmp_path):
    losses = {}
    options = {"train_dataset": TEXTS, "cue": CUE, "max_steps": 1, "learning_rate": 0.0, **FAR}
    for weight in (0.0, 0.5, 1.0):
        run = trainer(tmp_path, objective_args={"cue_weight": weight}, **options)
        run.train()
        losses[weight] = logged(run, "loss")[0]["loss"]
    assert losses[0.5] == pytest.approx((losses[0.0] + losses[1.0]) / 2, rel=1e-4) and losses[0.0] != losses[1.0]


def test_errors_about_cues_name_it_beside_ours(tmp_path):
    with pytest.raises(ValueError, match="cue goes with view='endprompt' or view='far-end'"):
        trainer(tmp_path, cue=CUE)
    with pytest.raises(ValueError, match="cue goes with .*, whose end_tokens it sets"):
        trainer(tmp_path, cue=CUE, **GIVEN)
    with pytest.raises(ValueError, match="cue_weight .* weighs the tokens of view='endprompt' or view='far-end'"):
        trainer(tmp_path, objective_args={"cue_weight": 0.5})


def test_its_rows_are_cut_in_training_alone(as_given, caplog, tmp_path):
    data = Dataset.from_list([{"input_ids": list(range(3, 3 + n))} for n in (30, 20, 6, 12)])
    view = {"view": "far-end", "view_args": {**GIVEN["view_args"], "most": 8}}
    run = trainer(tmp_path, train_dataset=data, eval_dataset=data, per_device_train_batch_size=4, max_steps=1, **view)
    assert "of longer rows view 'far-end' reads another part each epoch (most=8)" in caplog.text
    seen = []
    run.model.model.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    run.train()
    (batch,) = seen
    rows = sorted([i for i in row.tolist() if i] for row in batch)
    assert rows == sorted([[*range(3, 10), last] for last in (32, 22, 14)] + [[*range(3, 9)]])
    run.evaluate()
    assert max(batch.shape[1] for batch in seen[1:]) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True}, "view 'far-end' with most=8 cuts one document a row: switch packing and padding_free off"),
        ({"objective": "self-distill"}, "view 'far-end' with most=8 cuts rows in training alone, and 'self-distill'"),
        ({"neftune_noise_alpha": 0.1}, "view 'far-end' reads embeddings without noise"),
        ({"view_args": {"near": 1}}, "Unknown option 'near' of view 'far-end'"),
        ({"view_args": {}}, "view 'far-end' needs far"),
        ({"view": "distant-end", "view_args": {}}, "Unknown view 'distant-end'. Did you mean 'far-end'?"),
        ({"rescale": "elastic"}, "Unknown rescaling 'elastic'. Did you mean 'stretch'?"),
    ],
)
def test_what_it_refuses_stops_before_a_model_is_loaded(options, message):
    view = {"view": "far-end", "view_args": {**GIVEN["view_args"], "most": 8}}
    with pytest.raises(ValueError, match=re.escape(message)):
        RopeSFTConfig(**{"max_length": 64, "use_cpu": True, "bf16": False, **view, **options})


def test_what_it_refuses_of_a_run_holds_where_the_model_brings_it(tmp_path):
    model = patch_model(tiny(), far_end())
    with pytest.raises(ValueError, match="reads embeddings without noise"):
        trainer(tmp_path, model=model, neftune_noise_alpha=0.1)


@pytest.mark.parametrize("around", [lambda v: Compose([v]), lambda v: Mix([Standard(), v]), lambda v: PerLayer(v, [0])])
def test_a_view_around_it_answers_as_it_does(around):
    view = around(far_end())
    assert view.targets() == [("far-end", 60)] and view.draws_by_forward and not view.reads_tokens
    assert "far must lie beyond documents" in view.conditions()
    with pytest.raises(ValueError, match="without noise"):
        view.check_run(RopeSFTConfig(use_cpu=True, bf16=False, neftune_noise_alpha=0.1))
    assert not around(Skip(skip=Uniform(1, 9))).draws_by_forward


def test_documents_that_it_cannot_take_or_change_are_refused(as_given, caplog, tmp_path):
    twelve = Dataset.from_list([{"input_ids": row["input_ids"][:12]} for row in documents(8)])
    options = {"train_dataset": twelve, "view": "far-end"}
    with pytest.raises(ValueError, match="view 'far-end': documents of 12 tokens reach beyond far=11"):
        trainer(tmp_path, view_args={**GIVEN["view_args"], "far": 11}, **options)
    with pytest.raises(ValueError, match="changes no distance .* Of this view: far must lie beyond documents. Change"):
        trainer(tmp_path, view_args={**GIVEN["view_args"], "far": 12}, **options)
    with pytest.raises(ValueError, match="changes no distance|can change a prediction"):
        trainer(tmp_path, view_args={**GIVEN["view_args"], "far": 12}, objective="self-distill", **options)
    trainer(tmp_path, view_args={**GIVEN["view_args"], "end_tokens": 1}, **options)
    assert "view 'far-end' is a control: end_tokens=1 leaves no label behind a gap, so this trains as" in caplog.text


def test_how_far_it_reaches_is_compared_with_the_window(as_given, caplog, tmp_path):
    beyond = {"view": "far-end", "view_args": {**GIVEN["view_args"], "far": 100}}
    with pytest.raises(ValueError, match="target of view 'far-end' .* window of 64 positions, got target=100. Rescale"):
        trainer(tmp_path, **beyond)
    run = trainer(tmp_path, **beyond, rescale="stretch", rescale_args={"times": 2.0})
    assert run.model.config.max_position_embeddings == 100, "a rescaling that wants a window promises the target"
    assert describe(run.model).rope_parameters["factor"] == 2.0
    with pytest.raises(ValueError, match="got target=100. Set window in rescale_args to 100 positions instead of 80"):
        trainer(tmp_path, **beyond, rescale="stretch", rescale_args={"times": 2.0, "window": 80})
    far = {**beyond, "view_args": {**beyond["view_args"], "far": 500}}
    with pytest.raises(ValueError, match="Choose rescale_args of 'halved' whose window holds 500 positions, or lower"):
        trainer(tmp_path, **far, rescale="halved")
    assert "shows RoPE indices" not in caplog.text


def test_rows_beyond_the_window_of_its_rescaling(caplog, tmp_path):
    data = Dataset.from_dict({"input_ids": [[5] * 300] * 4})
    run = trainer(tmp_path, train_dataset=data, max_length=None, rescale="stretch", rescale_args={"times": 8.0})
    assert run.model.config.max_position_embeddings == 300
    with pytest.raises(ValueError, match="has 300 tokens. Choose rescale_args of 'halved'"):
        trainer(tmp_path, train_dataset=data, max_length=None, rescale="halved")
    assert patch_model(tiny(), "stretch", times=2.0).config.max_position_embeddings == WINDOW
    assert "The config still has max_position_embeddings=64" in caplog.text


def test_its_rescaling_says_what_it_cannot_start_from():
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny(rope_parameters={**llama3, "original_max_position_embeddings": WINDOW})
    with pytest.raises(ValueError, match="rescaling 'stretch' starts from plain RoPE parameters, got 'llama3'"):
        patch_model(model, Stretch(times=2.0))
    assert not describe(model).patched


def test_self_distillation_logs_how_far_it_moved_tokens(as_given, tmp_path):
    run = trainer(tmp_path, objective="self-distill", max_steps=1, **GIVEN)
    run.train()
    (first,) = logged(run, "kl/skip")
    assert set(first) == {"kl/skip_4of4"}, "all of them by the largest skip"
    assert first["kl/skip_4of4"] > 0


def test_a_checkpoint_of_other_options_is_not_resumed(as_given, tmp_path):
    run = trainer(tmp_path, **GIVEN)
    run.save_model()
    require_same_method(run._record.method, tmp_path)
    other = trainer(tmp_path / "other", view="far-end", view_args={**GIVEN["view_args"], "far": 50})
    with pytest.raises(ValueError, match="trained with view_args.far=60, and this run has view_args.far=50"):
        require_same_method(other._record.method, tmp_path)


@pytest.mark.parametrize("name", ["cue", "cuts", "prepare_text"])
def test_an_option_with_the_name_of_a_method_is_refused(name):
    with pytest.raises(TypeError, match=f"Wrong has an option '{name}', which is a method of View"):
        type("Wrong", (View,), {"__annotations__": {name: int}})


def test_names_lead_to_it():
    assert resolve_view("far-end", GIVEN["view_args"]) == far_end()
    assert resolve_rescaling("stretch", {"times": 2}) == Stretch(2)

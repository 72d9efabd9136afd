"""A checkpoint of another method is not resumed; one of the same method is, and so is one without a record."""

import json
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from support.tiny import tiny
from support.training import logged, tokenizer, trainer
from trl import SFTConfig, SFTTrainer

from rope_patch import load_adapter, patch_model
from rope_patch.views import Discrete, PosAug, Uniform, View
from rope_patch.views.base import as_recipe
from trl_ext import RopeSFTConfig
from trl_ext.runs.method_record import RECORD_NAME, record_of, require_same_method, training_method

SKIP = {"view": "skip", "view_args": {"skip": Uniform(1, 40)}}
SELF = {"objective": "self-distill", **SKIP}
RELATION = {"objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 2.0}}
COMPOSE = {"views": [{"view": "skip", "skip": Uniform(1, 8)}, {"view": "posaug", "alpha": Discrete([1, 2])}]}
CUE = {"view": "endprompt", "cue": "word", "processing_class": tokenizer(), "rescale": "pi"}
CUE |= {"rescale_args": {"factor": 2.0}, "view_args": {"target": 128}}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")


def saved(folder, **options):
    """A run of one step with its checkpoint, `folder/checkpoint-1`."""
    run = trainer(folder, **{"max_steps": 1, **options}, save_strategy="steps", save_steps=1)
    run.train()
    return run


def resumed(folder, **options):
    run = trainer(folder, **{"max_steps": 2, **options})
    run.train(resume_from_checkpoint=True)
    return run


def method(model_view=None, **options):
    """The method of a run with these options; `model_view` is one that the model came with."""
    args = RopeSFTConfig(**{"output_dir": "out", "use_cpu": True, "bf16": False, "max_length": 64, **options})
    seed = args.seed if args.view_seed is None else args.view_seed
    return training_method(args, args.make_view() if model_view is None else model_view, seed)


def recorded(folder, method):
    """`folder/checkpoint-1` with the record of a method."""
    checkpoint = folder / "checkpoint-1"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / RECORD_NAME).write_text(json.dumps(record_of(method, {})))
    return checkpoint


OTHERS = [
    (SKIP, {"view": "cyclic"}, "view='skip', and", "view='cyclic'."),
    (SKIP, {**SKIP, "view_args": {"skip": Uniform(1, 20)}}, "'high': 40}", "'high': 20}."),
    (SKIP, {"view": "skip"}, "view_args.skip={'law': 'uniform', 'low': 1, 'high': 40}", "'low': 1}."),
    (
        {"view": "compose", "view_args": COMPOSE},
        {"view": "compose", "view_args": {"views": COMPOSE["views"][::-1]}},
        "view_args.views=[{'view': 'skip', 'split': {'law': 'uniform', 'low': 0}",
        "view_args.views=[{'view': 'posaug'",
    ),
    ({**SKIP, "seed": 3}, {**SKIP, "seed": 4}, "view_seed=3", "view_seed=4"),
    (SKIP, SELF, "objective='clm'", "objective='self-distill'"),
    (
        SELF,
        {**SELF, "objective_args": {"reduction": "token", "direction": "forward"}},
        "objective_args.direction='reverse', objective_args.reduction='sequence'",
        "objective_args.direction='forward', objective_args.reduction='token'",
    ),
    (
        {**SELF, "objective_args": {"restore": {"every": 2}}},
        {**SELF, "objective_args": {"restore": {"every": 3, "v": 0.5}}},
        "objective_args.restore.v=1.0, objective_args.restore.every=2",
        "objective_args.restore.v=0.5, objective_args.restore.every=3",
    ),
    (
        RELATION,
        {**RELATION, "objective_args": {"logit_kl": {"weight": 0.5}}},
        "objective_args.logit_kl=None",
        "objective_args.logit_kl={'weight': 0.5",
    ),
    (
        {},
        {"trainable": "qkv", "shifted_attention": 0.25, "long_documents": "split"},
        "trainable='all', long_documents='truncate', shifted_attention=None",
        "trainable='qkv', long_documents='split', shifted_attention=0.25",
    ),
]


@pytest.mark.parametrize(("before", "now", "was", "given"), OTHERS, ids=[case[3].partition("=")[0] for case in OTHERS])
def test_a_checkpoint_of_another_method_is_not_resumed(before, now, was, given, tmp_path):
    checkpoint = recorded(tmp_path, method(**before))
    with pytest.raises(ValueError, match="Give the values that it was trained with, or start a new run") as error:
        require_same_method(method(**now), checkpoint)
    first, _, second = str(error.value).partition(", and this run has ")
    assert "checkpoint-1 was trained with " in first and was in f"{first}, and" and given in second


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_adapters_and_whole_models_have_the_record_in_every_checkpoint(peft, tmp_path):
    options = {**SKIP, "rescale": "yarn", "rescale_args": {"factor": 2.0}, "peft_config": lora() if peft else None}
    run = saved(tmp_path, **options)
    run.save_model(str(tmp_path / "last"))
    for folder in ("checkpoint-1", "last"):
        assert json.loads((tmp_path / folder / RECORD_NAME).read_text())["view_args"]["skip"]["high"] == 40
    other = trainer(tmp_path, **{**options, "view_args": {"skip": Uniform(1, 20)}}, max_steps=2)
    with pytest.raises(ValueError, match="'high': 40}, and this run has view_args.skip=.*'high': 20}"):
        other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 0 and not other.state.log_history, "it stopped before the first step"
    assert resumed(tmp_path, **options).state.global_step == 2


def test_a_cue_is_compared_by_its_text_and_its_tokens(tmp_path):
    checkpoint = recorded(tmp_path, trainer(tmp_path, **CUE)._record.method)
    require_same_method(trainer(tmp_path, **{**CUE, "cue": "End."})._record.method, checkpoint)
    other = trainer(tmp_path, **{**CUE, "cue": "w3", "objective_args": {"cue_weight": 0.1}})._record.method
    wanted = "objective_args.cue_weight=1.0, view_args.cue_tokens=2, cue='End.', and this run has "
    wanted += "objective_args.cue_weight=0.1, view_args.cue_tokens=1, cue='w3'"
    with pytest.raises(ValueError, match=wanted):
        require_same_method(other, checkpoint)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (SKIP, {"view": "skip", "view_args": '{"skip": {"law": "uniform", "low": 1, "high": 40}}', "view_seed": 42}),
        (
            {"view": "posaug", "view_args": {"alpha": Discrete((1.0, 2.0))}},
            {"view": "posaug", "view_args": {"alpha": Discrete([1, 2]), "granularity": "step"}},
        ),
        ({"view": "compose", "view_args": COMPOSE}, {"view": "compose", "view_args": json.dumps(as_recipe(COMPOSE))}),
        ({"seed": 3, "data_seed": 1}, {"seed": 4, "data_seed": 1, "view_args": {}}),
        (
            {**SELF, "objective_args": {"passes": "two", "kl_longce": {"short_context": 6}}},
            {
                **SELF,
                "objective_args": '{"kl_weight": 1, "teacher": "self", "kl_longce": {"short_context": 6, "cap": 5}}',
            },
        ),
        (
            {**RELATION, "objective_args": {"layers": (0, 2)}},
            {**RELATION, "objective_args": {"layers": [0, 2], "q": 1, "logit_kl": None}, "teacher_offload": True},
        ),
        (SKIP, {**SKIP, "learning_rate": 1e-4, "max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}),
    ],
    ids=["json", "tuples", "compose", "seed-without-draws", "passes", "relations", "of-trl"],
)
def test_the_same_method_written_in_another_way_goes_on(before, now, tmp_path, caplog):
    require_same_method(method(**now), recorded(tmp_path, method(**before)))
    assert not caplog.text


def test_a_view_that_the_model_came_with_counts_like_one_of_the_config(tmp_path):
    checkpoint = recorded(
        tmp_path, trainer(tmp_path, model=patch_model(tiny(), PosAug(Uniform(1, 4)), seed=7))._record.method
    )
    with pytest.raises(ValueError, match="view='posaug', and this run has view='standard'"):
        require_same_method(method(), checkpoint)
    require_same_method(method(PosAug(Uniform(1, 4)), view_seed=7), checkpoint)


@dataclass(frozen=True)
class Stretch(View):
    """A user's view, with an option that JSON does not have."""

    name = "stretch"
    by: Fraction

    def draw(self, length, key):
        return {}

    def rope_index(self, t, parameters):
        return t * float(self.by)


def test_a_view_of_ones_own_is_compared_too(tmp_path):
    checkpoint = recorded(tmp_path, method(Stretch(Fraction(3, 2))))
    with pytest.raises(ValueError, match="view_args.by='Fraction\\(3, 2\\)', and this run has view_args.by='Fraction"):
        require_same_method(method(Stretch(Fraction(2))), checkpoint)
    require_same_method(method(Stretch(Fraction(6, 4))), checkpoint)


def test_a_checkpoint_of_plain_trl_is_resumed_with_a_warning(tmp_path, caplog):
    saved(tmp_path, trainer_class=SFTTrainer, config_class=SFTConfig)
    with caplog.at_level("WARNING"):
        assert resumed(tmp_path, view="cyclic").state.global_step == 2
    assert caplog.text.count(f"checkpoint-1 has no {RECORD_NAME}") == 1


def test_a_record_of_another_version_is_compared_where_both_have_a_field(tmp_path):
    checkpoint = recorded(tmp_path, method(**SKIP))
    file = checkpoint / RECORD_NAME
    record = json.loads(file.read_text())
    del record["shifted_attention"], record["view_args"]["split"]
    file.write_text(json.dumps({**record, "of_a_later_version": 3}))
    require_same_method(method(**SKIP), checkpoint)
    file.write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(ValueError, match=f"{RECORD_NAME} must be of format 1, .* Update rope-patch to read it"):
        require_same_method(method(**SKIP), checkpoint)


def test_a_new_run_starts_from_the_weights_of_the_checkpoint(tmp_path):
    """The way out that the error names."""
    options = {**SKIP, "rescale": "pi", "rescale_args": {"factor": 2.0}, "peft_config": lora()}
    first = saved(tmp_path / "first", **options)
    model = load_adapter(tiny(), tmp_path / "first" / "checkpoint-1", is_trainable=True)
    trained = {name: p for name, p in first.model.named_parameters() if p.requires_grad}
    second = trainer(tmp_path / "second", model=model, view="cyclic", max_steps=1)
    weights = dict(second.model.named_parameters())
    assert trained and all(torch.equal(p, weights[name]) for name, p in trained.items())
    assert second.model.config.rope_parameters == first.model.config.rope_parameters
    second.train()
    assert logged(second, "loss")


def test_every_field_of_ours_is_compared_or_may_change():
    """A field that is added later is to be thought of here."""
    may_change = {"teacher_offload", "long_rows"}
    by_rescaling = {"rescale", "rescale_args"}  # require_same_rope
    ours = {f.name for f in fields(RopeSFTConfig)} - {f.name for f in fields(SFTConfig)}
    assert method(**SKIP).keys() == ours - may_change - by_rescaling


def test_a_push_while_training_goes_on_has_the_rope_of_the_adapter(tmp_path, monkeypatch):
    pushed = []

    class Hub:
        def upload_folder(self, folder_path, **kwargs):
            pushed.append({path.name for path in Path(folder_path).iterdir()})

    # the one that this version of Transformers calls
    monkeypatch.setattr("transformers.trainer.hf_api", Hub, raising=False)
    monkeypatch.setattr("transformers.trainer.upload_folder", Hub().upload_folder, raising=False)
    run = saved(tmp_path, rescale="yarn", rescale_args={"factor": 2.0}, peft_config=lora())
    ours = {"adapter_model.safetensors", "adapter_config.json", "rope_patch.json", "rope_patch_training.json"}
    for is_done in (False, True):  # of another push
        run.hub_model_id, run.push_in_progress = "owner/model", SimpleNamespace(is_done=lambda done=is_done: done)
        run._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
        if not is_done:
            assert pushed == [] and not any((tmp_path / name).exists() for name in ours)
    assert ours <= pushed[0]
    load_adapter(tiny(), tmp_path)


def test_a_run_without_adapters_does_not_begin_in_the_folder_of_one(tmp_path):
    trainer(tmp_path, peft_config=lora(), max_steps=1).save_model()
    run = trainer(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="has an adapter, which Transformers would apply to this model's weights"):
        run.train()
    assert run.state.global_step == 0

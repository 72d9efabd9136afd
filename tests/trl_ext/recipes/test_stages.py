"""A recipe of two stages: what comes out of it, interrupted at every border, and what is refused before it begins."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.cards import card_in, run_code
from support.characters import CHARACTERS, character_tokenizer
from support.hub import publish, use_cache
from support.launched import run_ranks
from support.marks import needs_ranks
from support.tiny import WINDOW, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import load_adapter
from rope_patch.export import writing
from rope_patch.model_card import read_runs
from trl_ext import train_recipe
from trl_ext.recipes import fine_tuning as module
from trl_ext.recipes.stages import read_stages

TEXT = "It was a dark night. The wind blew! Who was there? " * 20
BOOKS = [{"text": TEXT}, {"text": "short"}, {"text": TEXT[7:500]}]
DISTIL = {"name": "distil", "objective": "relation-distill", "max_steps": 3, "max_length": 60}
EXTEND = {"name": "extend", "objective": "clm", "max_steps": 2, "max_length": 120}
ADAPTERS = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "k_proj", "v_proj"]}
WEIGHTS = {"lora": {**ADAPTERS, "dtype": "bfloat16"}, "qkv": {"trainable": "qkv", "dtype": "float32"}}
QKV = {"q_proj", "k_proj", "v_proj"}


def write_model(folder):
    tiny(vocab_size=CHARACTERS, dtype=torch.bfloat16).save_pretrained(folder / "tiny")
    character_tokenizer().save_pretrained(folder / "tiny")
    (folder / "books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in BOOKS))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path)


def recipe(folder, name="out", weights="lora", **options):
    return {
        "model_name_or_path": str(folder / "tiny"),
        "datasets": [{"path": "json", "data_files": str(folder / "books.jsonl")}],
        "long_documents": "full-rows",
        "rescale": "pi",
        "rescale_args": {"factor": 4.0},
        "output_dir": str(folder / name),
        "per_device_train_batch_size": 2,
        "save_steps": 1,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "stages": [DISTIL, EXTEND],
        **WEIGHTS[weights],
        **options,
    }


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def alike(folder, other):
    one, two = weights_of(folder), weights_of(other)
    return all(torch.equal(one[name], two[name]) for name in one)


STILL = {**EXTEND, "name": "still", "max_steps": 1, "learning_rate": 0.0}
STAGES = [DISTIL, EXTEND, STILL]
ONE = {**EXTEND, "name": "one", "max_steps": 1}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A function that gives the run of all stages of a value of `WEIGHTS`, with the dtypes that it trained in."""
    made = {}

    def run(weights):
        if weights in made:
            return made[weights]
        folder = write_model(tmp_path_factory.mktemp(weights))
        trained, base = set(), set()
        step = module.RopeSFTTrainer.training_step

        def looking(self, model, *args, **kwargs):
            for parameter in model.parameters():
                (trained if parameter.requires_grad else base).add(parameter.dtype)
            return step(self, model, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.RopeSFTTrainer, "training_step", looking)
            result = train_recipe(recipe(folder, weights=weights, stages=STAGES))
        made[weights] = SimpleNamespace(folder=folder, made=result, trained=trained, base=base, weights=weights)
        return made[weights]

    return run


@pytest.fixture(params=WEIGHTS)
def whole(request, run_of):
    return run_of(request.param)


def test_the_result_is_a_plain_rescaled_checkpoint_in_the_dtype_that_came(whole):
    assert whole.made.folder == whole.folder / "out" / "model"
    assert {name: (one.steps, one.tokens) for name, one in whole.made.stages.items()} == {
        "distil": (3, 3 * 2 * 60),
        "extend": (2, 2 * 2 * 120),
        "still": (1, 2 * 120),
    }
    config = json.loads((whole.made.folder / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 4.0 and config["rope_parameters"]["rope_type"] == "linear"
    assert config["max_position_embeddings"] == 4 * WINDOW, "rescaled once"
    assert config["dtype"] == "bfloat16" and (whole.made.folder / "tokenizer.json").is_file()
    size = (whole.made.folder / "model.safetensors").stat().st_size
    assert size == pytest.approx((whole.folder / "tiny" / "model.safetensors").stat().st_size, rel=0.05)


def test_weights_are_trained_in_float32(whole):
    assert whole.trained == {torch.float32}
    assert whole.base == {torch.bfloat16 if whole.weights == "lora" else torch.float32}
    before, after = weights_of(whole.folder / "tiny"), weights_of(whole.made.folder)
    assert {name.split(".")[-2] for name in after if not torch.equal(after[name], before[name])} == QKV


def test_a_stage_begins_from_what_the_one_before_left(whole):
    def left_by(stage):
        if whole.weights == "qkv":
            return weights_of(whole.folder / "out" / stage)
        base = AutoModelForCausalLM.from_pretrained(whole.folder / "tiny", dtype=torch.float32)
        return load_adapter(base, whole.folder / "out" / stage).merge_and_unload().state_dict()

    name = "model.layers.0.self_attn.q_proj.weight"
    distilled, extended, still = (left_by(stage)[name] for stage in ("distil", "extend", "still"))
    assert torch.equal(still, extended) and not torch.equal(extended, distilled)
    begin = weights_of(whole.folder / "tiny")[name]
    assert (extended - distilled).norm() < (extended - begin).norm(), "and not from the beginning"


def test_the_card_tells_of_all_stages(whole, monkeypatch):
    card = card_in(whole.made.folder)
    first, second = card.text.partition("### Stage 2")[::2]
    assert "`relation-distill`" in first and "| Optimizer steps | 3 |" in first
    assert "`clm`" in second and "| Optimizer steps | 2 |" in second
    for stage, length in ((first, 60), (second, 120)):
        assert f"| Rows | {len(TEXT) // length + 493 // length} |" in stage
    assert first.count("`pi` (factor 4.0)") == 1 and "then `pi`" not in card.text
    assert "`tiny`, a model in a local folder" in first and str(whole.folder) not in card.content
    assert "2604.00004" in second and "2306.15595" in second
    assert [one["objective"] for one in read_runs(whole.made.folder)] == ["relation-distill", "clm", "clm"]
    assert run_code(whole.made.folder, monkeypatch)["model"].config.rope_parameters["rope_type"] == "linear"


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("weights", [pytest.param("lora", marks=pytest.mark.slow), "qkv"])
def test_a_run_that_is_stopped_anywhere_ends_with_the_same_result(weights, folder, run_of, monkeypatch):
    whole = run_of(weights)
    save, step = module.RopeSFTTrainer._save_rng_state, module.RopeSFTTrainer.training_step
    extended = []

    def stopped(owner, name, replacement, stages=STAGES):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="same command resumes in .*parts."):
            patch.setattr(owner, name, replacement)
            train_recipe(recipe(folder, "parts", weights, stages=stages))

    def save_first(self, to):
        return save(self, to) if self.state.global_step == 1 else stop()

    def second_step_of_extend(self, *given):
        extended.append(self.args.max_length == 120)
        return stop() if sum(extended) == 2 else step(self, *given)

    # nothing is kept of it: the next one may have other settings
    stopped(module.RopeSFTTrainer, "training_step", stop, [{**DISTIL, "max_steps": 9}, EXTEND, STILL])
    # in the second checkpoint, behind its weights; settings of a stage that is not begun may still change
    stopped(module.RopeSFTTrainer, "_save_rng_state", save_first, [DISTIL, {**EXTEND, "max_steps": 7}, STILL])
    assert list((folder / "parts/distil/checkpoint-2").glob("*.safetensors"))
    stopped(module, "free_memory", stop)  # between the stages
    stopped(module.RopeSFTTrainer, "training_step", second_step_of_extend)
    with monkeypatch.context() as patch:  # in the export, by a kill, which removes nothing
        patch.setattr(writing.shutil, "rmtree", lambda *_, **__: None)
        stopped(writing.ShardWriter, "finish", stop)
    (left,) = (folder / "parts").glob(".model-unfinished-*")
    assert (left / "model/config.json").is_file() and not (folder / "parts/model").exists()
    made = train_recipe(recipe(folder, "parts", weights, stages=STAGES))
    assert alike(made.folder, whole.made.folder) and made.stages == whole.made.stages
    assert sorted(os.listdir(made.folder)) == sorted(os.listdir(whole.made.folder))
    assert sorted(os.listdir(folder / "parts")) == sorted(os.listdir(whole.folder / "out"))
    monkeypatch.setattr(module.RopeSFTTrainer, "training_step", stop)
    assert train_recipe(recipe(folder, "parts", weights, stages=STAGES)) == made


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a run of one stage."""
    folder = write_model(tmp_path_factory.mktemp("done"))
    train_recipe(recipe(folder, weights="qkv", stages=[ONE]))
    return folder


def test_another_run_in_the_same_folder_is_refused(done, monkeypatch):
    """A run that was done gave its old result at once, one that was stopped would have trained on both."""
    monkeypatch.setattr(module.RopeSFTTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    assert train_recipe(recipe(done, weights="qkv", stages=[ONE])).folder == done / "out" / "model"
    other = "holds a run with other settings: "
    with pytest.raises(ValueError, match=other + r"stage one: rescale_args .*4.0.* there and .*2.0.* here. Use anot"):
        train_recipe(recipe(done, weights="qkv", stages=[ONE]), rescale_args={"factor": 2.0})
    with pytest.raises(ValueError, match=other + r"stages \['one'\] there and \['one', 'extend'\] here"):
        train_recipe(recipe(done, weights="qkv", stages=[ONE, EXTEND]))
    books, model = done / "books.jsonl", done / "tiny" / "config.json"
    before = books.read_bytes()
    books.write_bytes(before.replace(b"short", b"other"))
    with pytest.raises(ValueError, match=other + "text of one changed. Use another output_dir"):
        train_recipe(recipe(done, weights="qkv", stages=[ONE]))
    books.write_bytes(before)
    model.write_text(model.read_text() + "\n")
    with pytest.raises(ValueError, match="the model in .*tiny is not the one .* config.json changed. .* output_dir"):
        train_recipe(recipe(done, weights="qkv", stages=[ONE]))
    with pytest.raises(ValueError, match="model is there already, and this recipe would export to it"):
        train_recipe(recipe(done, weights="qkv", stages=[{**ONE, "name": "new"}]))


@pytest.mark.parametrize(
    ("options", "weights", "message"),
    [
        (
            {"stages": [DISTIL, {**EXTEND, "max_stepps": 1}]},
            "lora",
            "Unknown key 'max_stepps' of stage extend of the rec",
        ),
        (
            {"stages": [DISTIL, {**EXTEND, "lora_r": 8}]},
            "lora",
            "lora_r in stage extend of the recipe is for all stages",
        ),
        (
            {"stages": [DISTIL, {**EXTEND, "output_dir": "x"}]},
            "lora",
            "output_dir in stage extend .* is for all stages",
        ),
        (
            {"stages": [DISTIL, DISTIL]},
            "lora",
            "the name of stage 2 in the recipe must be a name for a folder, of no oth",
        ),
        ({"stages": [{**DISTIL, "name": "model"}]}, "lora", "which is that of the result, got 'model'"),
        ({"stages": [{**DISTIL, "name": "../a"}]}, "lora", "must be a name for a folder"),
        ({"stages": {"distil": DISTIL}}, "lora", "stages in the recipe must be a list of mappings, .* got {'distil'"),
        ({"stages": []}, "lora", r"stages in the recipe must be a list of mappings, .* got \[\]"),
        ({"export": {"windows": 64}}, "lora", "export in the recipe must be a mapping with check or window, .* got"),
        ({"resume_from_checkpoint": "x"}, "lora", "resume_from_checkpoint is for a recipe without stages"),
        ({"trust_remote_code": True}, "lora", "leave trust_remote_code out, or write a recipe for each stage"),
        (
            {"dtype": "bfloat16"},
            "qkv",
            "dtype='bfloat16': without adapters the weights .* Set dtype: float32, .* use_peft",
        ),
        ({"dtype": "auto"}, "qkv", "dtype='auto': without adapters the weights"),
        # the weights of stage 1 would teach
        (
            {"stages": [DISTIL, {**EXTEND, "objective": "native-distill"}]},
            "qkv",
            "extend: the teacher of objective 'native-distill'",
        ),
        (
            {
                "stages": [
                    DISTIL,
                    {
                        **EXTEND,
                        "objective": "self-distill",
                        "view": "skip",
                        "objective_args": {"restore": {"every": 2}},
                    },
                ]
            },
            "qkv",
            "which would teach instead: set use_peft: true",
        ),
        (
            {"stages": [DISTIL, {**EXTEND, "objective": "native-distill"}]},
            "lora",
            "extend: max_length must be within the",
        ),
        ({"stages": [{**DISTIL, "max_length": WINDOW + 1}]}, "qkv", "distil: .* window of 64 positions, .* got 65"),
    ],
)
def test_what_would_go_wrong_is_refused_before_a_model_is_loaded(options, weights, message, folder, monkeypatch):
    monkeypatch.setattr(module, "RopeSFTTrainer", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=message):
        train_recipe(recipe(folder, weights=weights, **options))
    assert not (folder / "out").exists()


def test_parts_of_a_model_are_not_exported(folder, monkeypatch):
    monkeypatch.setattr("trl_ext.recipes.stages.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="use ZeRO-2, or a recipe for each stage"):
        train_recipe(recipe(folder))
    assert not (folder / "out").exists()


def test_a_stage_has_the_keys_of_the_recipe_under_its_own_and_flags_win(folder):
    given = recipe(folder, stages=[{"seed": 1}, {"max_length": 9}, {"name": "third", "rescale_args": {"factor": 2.0}}])
    stages = read_stages(given, ["--weight-decay", "0.5"], max_length=32)
    assert [stage.name for stage in stages] == ["stage-1", "stage-2", "third"]
    assert [stage.folder for stage in stages] == [folder / "out" / stage.name for stage in stages]
    assert [stage.training.seed for stage in stages] == [1, 42, 42]
    assert {stage.training.max_length for stage in stages} == {32} and stages[0].training.weight_decay == 0.5
    # a rescaling of all is applied once, one of a stage on top
    assert [stage.training.rescale_args for stage in stages] == [{"factor": 4.0}, None, {"factor": 2.0}]
    assert [stage.training.rescale for stage in stages] == ["pi", None, "pi"]
    (alone,) = read_stages({**given, "stages": None, "max_length": 32})
    assert alone.name == "" and alone.folder == folder / "out"


def test_adapters_of_a_quantised_base_are_trained_in_float32_too(folder, monkeypatch):
    """TRL makes them bfloat16, which would round steps of 2e-5 away."""
    pytest.importorskip("bitsandbytes")
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny(vocab_size=CHARACTERS, **shape).save_pretrained(folder / "tiny")
    trained = set()
    step = module.RopeSFTTrainer.training_step

    def looking(self, model, *args, **kwargs):
        trained.update(p.dtype for p in model.parameters() if p.requires_grad)
        return step(self, model, *args, **kwargs)

    monkeypatch.setattr(module.RopeSFTTrainer, "training_step", looking)
    quantized = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "dtype": "float32"}
    made = train_recipe(recipe(folder, stages=[{**ONE, "learning_rate": 0.1}], **quantized))
    assert trained == {torch.float32}
    before, after = weights_of(folder / "tiny"), weights_of(made.folder)
    changed = {name.split(".")[-2] for name in after if not torch.equal(after[name], before[name])}
    assert changed == QKV, "merged into unquantised weights"


@pytest.mark.parametrize("weights", [pytest.param("lora", marks=pytest.mark.slow), "qkv"])
def test_a_branch_is_the_commit_that_it_was_when_the_run_was_begun(weights, folder, run_of, monkeypatch):
    """Also if it is gone since."""

    def write(to):
        for kind in ("model", "tokenizer"):
            source = AutoModelForCausalLM if kind == "model" else AutoTokenizer
            source.from_pretrained(folder / "tiny").save_pretrained(to)

    use_cache(monkeypatch, folder / "hub")
    publish(folder / "hub", "owner/base", main=write, later=write)
    on_hub = recipe(folder, "parts", weights, model_name_or_path="owner/base", stages=STAGES)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "free_memory", stop)  # behind the first stage
        train_recipe(on_hub)
    branch = folder / "hub/models--owner--base/refs/main"
    commit = branch.read_text()
    branch.unlink()
    assert json.loads((folder / "parts/recipe.json").read_text())["hub_model"]["model_commit"] == commit
    made = train_recipe(on_hub)
    assert alike(made.folder, run_of(weights).made.folder)
    assert f"at revision `{commit}`, trained" in (made.folder / "README.md").read_text()
    with pytest.raises(ValueError, match="stage distil: model_revision not set there and 'later' here"):
        train_recipe(on_hub, model_revision="later")


@pytest.mark.slow
@needs_ranks
def test_two_ranks_train_like_one(folder):
    one = {"per_device_train_batch_size": 1, "ddp_find_unused_parameters": False}
    (folder / "two.yaml").write_text(json.dumps(recipe(folder, "two", "qkv", **one)))
    tests = Path(__file__).parents[2]
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "trl_ext", "train", "two.yaml"]
    done = run_ranks(
        [sys.executable, "-m", *launch],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests.parent / 'kernels'}",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = train_recipe(recipe(folder, "one", "qkv"))
    assert sorted(os.listdir(folder / "two")) == sorted(os.listdir(folder / "one"))
    two = weights_of(folder / "two" / "model")
    for name, weight in weights_of(alone.folder).items():
        torch.testing.assert_close(two[name], weight, rtol=1e-2, atol=1e-4)


def test_each_stage_is_planned(folder):
    (folder / "recipe.yaml").write_text(json.dumps(recipe(folder, weights="qkv")))
    first, second = module.plan_recipe(["--config", str(folder / "recipe.yaml")], [1]).split("\n\nextend:\n")
    assert first.startswith("distil:\n") and first != f"distil:\n{second}" and not (folder / "out").exists()

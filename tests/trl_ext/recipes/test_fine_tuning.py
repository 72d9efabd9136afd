"""From a recipe to a run: what is held out, where the text comes from, and what is refused before a model is loaded."""

import json
import lzma

import numpy as np
import pytest
from support.tiny import tiny
from support.training import tokenizer

from trl_ext.recipes import dataset
from trl_ext.recipes import fine_tuning as module
from trl_ext.recipes.fine_tuning import fine_tune_recipe, plan_recipe


class Stop(Exception):
    """Once the data are made."""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe on a tiny model and lines of text, with more lines behind it."""
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    (tmp_path / "text.txt").write_text("\n".join(f"line {i}" for i in range(40)))

    def write(more="", text="datasets: [{path: text, data_files: text.txt}]"):
        head = "model_name_or_path: model\nmax_steps: 1\nbf16: false\nuse_cpu: true\noutput_dir: run\nreport_to: none\n"
        (tmp_path / "recipe.yaml").write_text(f"{head}{text}\n{more}\n")
        return ["--config", "recipe.yaml"]

    return write


@pytest.fixture
def trained(monkeypatch):
    """What the trainer is given in place of training."""
    seen = {}

    def take(**given):
        seen.update(given)
        raise Stop

    monkeypatch.setattr(module, "RopeSFTTrainer", take)
    return seen


def held_out(trained, state, arguments):
    np.random.seed(state)  # the generator that `datasets` splits with
    with pytest.raises(Stop):
        fine_tune_recipe(arguments)
    return list(trained["eval_dataset"]["text"])


def test_the_same_documents_are_held_out_whatever_was_drawn_before(recipe, trained):
    arguments = recipe("eval_strategy: steps\neval_steps: 1\ntest_split_size: 0.25")
    first = held_out(trained, 1, arguments)
    assert len(first) == 10
    assert held_out(trained, 2, arguments) == first
    assert held_out(trained, 2, [*arguments, "--seed", "7"]) != first


def test_a_data_set_of_the_hub_is_named_alone(recipe, trained, monkeypatch):
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return {"train": "rows", "test": "others"}

    monkeypatch.setattr(dataset, "load_dataset", load)
    with pytest.raises(Stop):
        fine_tune_recipe(recipe(text="dataset_name: someone/books\ndataset_config: long"))
    assert asked == [("someone/books", {"name": "long", "streaming": False})]
    assert trained["train_dataset"] == "rows" and trained["eval_dataset"] is None


@pytest.mark.parametrize(
    ("more", "text", "message"),
    [
        ("", "", "the recipe must name the text to train on.*neither is given"),
        ("dataset_name: someone/books", None, "the recipe must name the text to train on.*both are given"),
        (
            "eval_strategy: steps",
            None,
            "eval_strategy needs a split 'test' and the text has train: set test_split_size",
        ),
        (
            "eval_steps: 5\neval_packing: false\ntest_split_size: 0.5",
            None,
            "eval_steps and eval_packing and test_split_size would have no effect: add eval_strategy: steps or epoch",
        ),
        (
            "load_best_model_at_end: true\nsave_strategy: 'no'",
            None,
            "load_best_model_at_end would have no effect: add eval_strategy: steps",
        ),
        (
            "",
            "datasets: [{path: json, data_files: empty.jsonl}]",
            "the text in empty.jsonl cannot be read: a file of it is empty",
        ),
        (
            "dataset_train_split: all",
            None,
            "dataset_train_split must be one of train, the splits of the text, got 'all'",
        ),
        ("lora_r: 8\nuse_dora: true", None, "lora_r and use_dora would have no effect: add use_peft: true"),
        ("resume_from_checkpoint: run/checkpoint-7", None, "got run/checkpoint-7: there is no readable trainer_st"),
        (
            "resume_from_checkpoint: checkpoint-8",
            None,
            "got checkpoint-8: there is no readable",
        ),
        (
            "",
            "datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}]",
            "the text in a.jsonl, b.jsonl cannot be",
        ),
        (
            "",
            "datasets: [{path: json, data_files: bad.jsonl}]",
            "the text in bad.jsonl cannot be read: JSON parse error",
        ),
        (
            "",
            "datasets: [{path: json, data_files: latin.jsonl}]",
            "the text in latin.jsonl cannot be read: .*[Ii]nvalid UTF8",
        ),
        (
            "",
            "datasets: [{path: json, data_files: cut.jsonl.xz}]",
            "the text in cut.jsonl.xz cannot be read: Compressed file ended before",
        ),
        (
            "eval_strategy: epoch\ntest_split_size: 0.5",
            "dataset_name: folder",
            "test_split_size is read with datasets, and has no effect on",
        ),
        ("streaming: true", "dataset_name: folder", "streaming is read with datasets"),
        ("dataset_streaming: true", None, "dataset_streaming is read with dataset_name, and has no effect on datasets"),
        ("dataset_config: en", None, "dataset_config is read with dataset_name"),
        (
            "eval_strategy: epoch\nstreaming: true\ntest_split_size: 0.5",
            None,
            "test_split_size needs the whole dataset",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_model_is_loaded(more, text, message, recipe, trained, tmp_path):
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "fine"}) + "\nnot JSON\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(b'{"text": "fine"}\n' * 9)[:-9])
    arguments = recipe(more) if text is None else recipe(more, text)
    with pytest.raises(ValueError, match=message):
        fine_tune_recipe(arguments)
    assert not trained


def test_a_folder_without_a_name_is_refused_before_the_text_is_read(recipe):
    """The empty path is the folder that the user is in; a shell's variable without a value gives it."""
    with pytest.raises(ValueError, match="output_dir must name a folder, got an empty name"):
        fine_tune_recipe([*recipe("", "datasets: [{path: json, data_files: not_there.jsonl}]"), "--output-dir", ""])


def test_fields_of_evaluations_without_one_are_refused_before_the_text_is_read_and_in_a_dry_run(recipe):
    arguments = recipe("eval_steps: 5", "datasets: [{path: json, data_files: not_there.jsonl}]")
    for run in (fine_tune_recipe, lambda given: plan_recipe(given, [1])):
        with pytest.raises(ValueError, match="eval_steps would have no effect: add eval_strategy"):
            run(arguments)


def test_without_a_gpu_the_flags_for_a_cpu_are_named(recipe, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    with pytest.raises(ValueError, match="there is no GPU that torch can see. `--use-cpu true --bf16 false` trains on"):
        fine_tune_recipe([*recipe(), "--use-cpu", "false", "--bf16", "true"])


def test_a_folder_that_cannot_be_written_shows_before_a_model_is_loaded(recipe, trained):
    with pytest.raises(OSError, match="no file can be written in text.txt/run: Not a directory. Name another folder."):
        fine_tune_recipe([*recipe(), "--output-dir", "text.txt/run"])
    assert not trained


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--output-dir", "model"],
            "output_dir is the folder of model_name_or_path, model, which would be overwritten",
        ),
        (["--output-dir", "./run/../model"], "output_dir is the folder of model_name_or_path"),
    ],
)
def test_what_would_train_nothing_or_overwrite_the_model_is_refused(flags, message, recipe, trained, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        fine_tune_recipe([*recipe(), *flags])
    assert not trained and sorted({*before, "recipe.yaml"}) == sorted(path.name for path in tmp_path.iterdir())


def test_a_recipe_without_16_bits_trains_so_whatever_a_launcher_says(recipe, trained, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(Stop):
        fine_tune_recipe(recipe())
    assert trained["args"].mixed_precision == "no" and not trained["args"].bf16

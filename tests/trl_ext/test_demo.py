"""The demo from end to end on a tiny model: its files, resuming, Ctrl-C, errors."""

import json
import sys
import warnings

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from support.training import tokenizer
from transformers import AutoModelForCausalLM

import trl_ext.demo.run as demo_run
from trl_ext import cli
from trl_ext.demo import corpus
from trl_ext.demo.reload_check import logits_after_reload

SIZES = ["--measure-length", "160", "--measure-rows", "2", "--train-length", "32", "--batch-size", "2", "--steps", "4"]


@pytest.fixture
def model_folder(tmp_path):
    """A tiny model with a character tokenizer, so that any text works."""
    folder = tmp_path / "tiny"
    tiny(vocab_size=CHARACTERS).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def short_library(tmp_path, monkeypatch):
    """Six files instead of thousands."""
    folder = tmp_path / "library"
    folder.mkdir()
    for i in range(6):
        (folder / f"file{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * (30 - i))
    files = sorted(folder.iterdir())
    monkeypatch.setattr(corpus, "standard_library_files", lambda: files)


def demo(folder, model, *extra):
    return cli.main(["demo", "--output-dir", str(folder), "--model", str(model), "--device", "cpu", *SIZES, *extra])


def test_demo_leaves_figures_pictures_and_a_model_that_loads(tmp_path, model_folder, short_library, capsys):
    out = tmp_path / "out"
    with warnings.catch_warnings(record=True) as warned:
        assert demo(out, model_folder, "--control") == 0
    assert not [str(w.message) for w in warned if issubclass(w.category, FutureWarning)]
    figures = json.loads((out / "demo.json").read_text())
    assert set(figures["results"]) == {"before", "control", "after"}
    assert figures["window"] == 64 and figures["train_tokens"] == 4 * 2 * 32
    assert figures["largest_logit_difference_after_reload"] == 0
    assert figures["results"]["before"]["in_distribution_penalty_percent"] == 0
    for name in ("loss_by_position.png", "loss_by_position.svg", "adapter/rope_patch.json", "model/config.json"):
        assert (out / name).stat().st_size > 0
    AutoModelForCausalLM.from_pretrained(out / "model")
    printed = capsys.readouterr().out
    assert "training rows are short and few" in printed and str(out / "loss_by_position.png") in printed
    assert "ten minutes" not in printed and "{'" not in printed.replace("{'max_skip'", ""), "a promise, or a raw log"


def test_a_second_run_repeats_nothing(tmp_path, model_folder, short_library, monkeypatch, capsys):
    out = tmp_path / "out"
    assert demo(out, model_folder) == 0
    first = json.loads((out / "demo.json").read_text())
    for name in ("loss_by_position", "_train"):
        monkeypatch.setattr(demo_run, name, lambda *args, **kwargs: pytest.fail("done again"))
    capsys.readouterr()
    assert demo(out, model_folder) == 0
    assert json.loads((out / "demo.json").read_text())["results"] == first["results"]
    said = "Done by an earlier run, and not done again: measuring before, training after, measuring after."
    assert said in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path, model_folder, short_library, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert demo(whole, model_folder) == 0
    step = demo_run.RopeSFTTrainer.training_step
    calls = []

    def stopping(self, *args, **kwargs):
        calls.append(self.state.global_step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_run.RopeSFTTrainer, "training_step", stopping)
        assert demo(parts, model_folder) == 130
    assert f"the same command goes on in {parts}" in capsys.readouterr().err
    assert demo(parts, model_folder) == 0
    a, b = (json.loads((d / "demo.json").read_text())["results"]["after"] for d in (whole, parts))
    assert a == b


def test_settings_of_another_run_are_not_mixed_in(tmp_path, model_folder, short_library, capsys):
    assert demo(tmp_path / "out", model_folder) == 0
    assert demo(tmp_path / "out", model_folder, "--seed", "5") == 2
    assert (
        "holds a run with other settings: seed 0 there and 5 here. Use another --output-dir." in capsys.readouterr().err
    )


def test_a_missing_package_is_said_with_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "trl_ext.demo.run")
    monkeypatch.setitem(sys.modules, "peft", None)
    assert cli.main(["demo", "--output-dir", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert "the demo needs peft: pip install 'rope-patch[demo]'." in capsys.readouterr().err


def test_a_model_that_does_not_exist_takes_no_folder(tmp_path, model_folder, short_library, capsys):
    assert demo(tmp_path / "out", tmp_path / "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err
    assert demo(tmp_path / "out", model_folder) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--view", "skp"], "Unknown view 'skp'. Did you mean 'skip'"),
        (["--view", "yarn"], "'yarn' is a rescaling; a view is one of"),
        (["--rescale", "yarn"], "rescaling 'yarn' needs factor"),
        (["--steps", "0"], "--steps must be at least 1, got 0."),
        (["--learning-rate", "-1"], "--learning-rate must be above 0, got -1.0."),
        (["--view", "skip", "--view-args", '{"max": 1}'], "Unknown option 'max' of view 'skip'"),
    ],
)
def test_a_wrong_argument_ends_before_anything_is_written(arguments, message, tmp_path, capsys):
    assert cli.main(["demo", "--output-dir", str(tmp_path / "out"), "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--measure-length", "60"], "--measure-length must reach beyond the 64 positions"),
        (["--rescale", "abf", "--rescale-args", '{"theta": -1}'], "theta"),
        (["--view", "skip", "--view-args", '{"max_skip": 99999999}'], "max_skip must be in [1, 16777216]"),
    ],
)
def test_what_does_not_fit_the_model_shows_before_anything_is_measured(
    arguments, message, tmp_path, model_folder, short_library, monkeypatch, capsys
):
    monkeypatch.setattr(demo_run, "loss_by_position", lambda *_, **__: pytest.fail("measured"))
    assert demo(tmp_path / "out", model_folder, *arguments) == 2
    assert message in capsys.readouterr().err


def test_rows_of_the_demo_begin_as_a_text(short_library):
    from tokenizers import processors

    begins = character_tokenizer()
    begins.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    texts = corpus.build(begins, measure_length=64, measure_rows=2, train_length=32, train_rows=6, seed=0)
    for rows in (texts.held_out, texts.train):
        assert (rows[:, 0] == 1).all() and (rows[:, 1:] != 1).all()


def test_a_skip_reaches_what_is_measured():
    from trl_ext.cli.console import _parser, _settings

    def view_args(*arguments, has_gpu=True):
        return _settings(_parser().parse_args(["demo", *arguments]), has_gpu).view_args

    assert view_args("--view", "skip") == {"max_skip": 32768 - 4096}
    assert view_args("--view", "skip", "--measure-length", "16384", "--train-length", "2048") == {"max_skip": 14336}
    assert view_args("--view", "skip", "--view-args", '{"max_skip": 7}') == {"max_skip": 7}
    assert view_args("--view", "cyclic", has_gpu=False) == view_args() == {}


def test_a_json_argument_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--view-args", "[1]"])
    assert "must be a JSON object such as" in capsys.readouterr().err


def test_the_view_may_be_any_and_a_rescaling_may_be_under_it(tmp_path, model_folder, short_library):
    extra = ["--view", "cyclic", "--rescale", "yarn", "--rescale-args", '{"factor": 4.0}']
    assert demo(tmp_path / "out", model_folder, *extra) == 0
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert saved.config.rope_parameters["rope_type"] == "yarn" and saved.config.max_position_embeddings == 256


def test_reload_really_cannot_import_this_package(tmp_path):
    folder = tmp_path / "model"
    tiny().save_pretrained(folder)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(logits_after_reload(folder, ids, "cpu", torch.float32), tiny()(ids).logits)
    (tmp_path / "broken").mkdir()
    with pytest.raises(RuntimeError, match="reloading .* in a new process failed"):
        logits_after_reload(tmp_path / "broken", ids, "cpu", torch.float32)


def test_held_out_files_are_not_trained_on(short_library):
    texts = corpus.build(tokenizer(), measure_length=8, measure_rows=2, train_length=4, train_rows=3, seed=0)
    assert texts.held_out.shape == (2, 8) and texts.train.shape == (3, 4)
    assert texts.held_out_files == ("file0.py", "file2.py")


def test_help_needs_no_torch():
    import subprocess

    code = (
        "import sys; from trl_ext.cli import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")

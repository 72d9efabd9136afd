"""`rope-patch eval` and `rope-patch probe` on a tiny model, and the callback during training."""

import errno
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import training
from support.characters import CHARACTERS, character_tokenizer, chat_tokenizer
from support.packages import installed
from support.tiny import WINDOW, tiny, tokens
from tokenizers import normalizers
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch.eval
from rope_patch import patch_model
from rope_patch.eval import MEASURES
from rope_patch.views import Uniform
from trl_ext import cli
from trl_ext.cli.measure import _default_length
from trl_ext.cli.model_spec import ModelSpec

TEXT = "It was a dark night. The wind blew! Who was there? " * 40


@pytest.fixture
def folder(tmp_path):
    tiny(vocab_size=CHARACTERS).save_pretrained(tmp_path / "tiny")
    character_tokenizer().save_pretrained(tmp_path / "tiny")
    for k in range(3):
        (tmp_path / f"text{k}.txt").write_text(TEXT)
    return tmp_path


def run(folder, command, *arguments):
    texts = [str(folder / f"text{k}.txt") for k in range(3)]
    return cli.main([command, *arguments, "--text", *texts, "--device", "cpu", "--rows", "2"])


def test_eval_writes_a_report_and_prints_the_summary(folder, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    declares = tiny(vocab_size=CHARACTERS, max_position_embeddings=4 * WINDOW)  # a config that a rescaling has left
    declares.save_pretrained(folder / "declares")
    models = ["--model", f"native={folder / 'tiny'}", "--model", f"declares={folder / 'declares'}"]
    models += ["--model", f"pi={folder / 'tiny'}@pi:factor=4"]
    report = folder / "report"
    arguments = [*models, "--report", str(report), "--length", "500", "--lengths", "400", "--trials", "1"]
    arguments += ["--cliff", "--passkey"]
    with monkeypatch.context() as context:
        context.setattr(rope_patch.eval, "write_report", full)
        assert run(folder, "eval", *arguments) == 2
    out, errors = capsys.readouterr()
    assert f"eval: {folder}/report could not be written, on a disk with " in errors
    assert "passkey, 400: 0.000 as written" in out
    for name in ("cliff", "passkey"):  # measured already
        monkeypatch.setitem(MEASURES, name, replace(MEASURES[name], run=lambda _: pytest.fail("measured")))
    assert run(folder, "eval", *arguments) == 0
    out = capsys.readouterr().out
    assert "native" in out and "rise of the loss beyond the window" in out and f"Report: {report}/report.html" in out
    assert "\npi won: " in out and "\npi lost: " in out
    assert f"compared over one context window: {WINDOW} positions, the context window of native." in out
    stored = json.loads((report / "results.json").read_text())
    assert list(stored["results"]) == ["cliff", "passkey"]
    assert stored["settings"]["model pi"].endswith("@pi:factor=4")
    windows = {label: result["window"] for label, result in stored["results"]["cliff"].items()}
    assert windows["native"] == windows["pi"] == WINDOW, "the trained window, not the promised one"
    assert "no loss beyond is measured" not in out
    assert run(folder, "eval", *arguments, "--window", "499") == 0
    out = capsys.readouterr().out
    assert "compared over one context window: 499 positions." in out
    assert "Sequences of 500 tokens end within it, so no loss beyond is measured: give a longer" in out


def sparse(folder):
    """A model whose queries choose their keys, in "sparse"."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    sizes |= {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "num_key_value_heads": 4}
    save(folder / "sparse", "deepseek_v32", **sizes, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)


def save(folder, family, **config):
    shape = {"vocab_size": CHARACTERS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 48, "max_position_embeddings": WINDOW, "pad_token_id": 0}
    made = AutoConfig.for_model(family, **shape, **config)
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def test_attention_of_a_model_with_sinks_is_measured(folder):
    rope = {"rope_type": "default", "rope_theta": 10000.0}  # by default it is YaRN's
    sizes = {"head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 8}
    save(folder / "sinks", "gpt_oss", **sizes, rope_parameters=rope)
    arguments = ["--report", str(folder / "report"), "--length", "300", "--attention"]
    assert run(folder, "eval", "--model", str(folder / "sinks"), *arguments) == 0
    stored = json.loads((folder / "report/results.json").read_text())["results"]
    of_sliding = sum(stored["attention"]["sinks"]["mass"][0])
    assert 0.5 < of_sliding < 0.95, "the sink takes about one of nine weights"
    assert math.isfinite(stored["entropy"]["sinks"]["beyond"])


def test_attention_that_cannot_be_recomputed_is_refused_before_any_model_is_measured(folder, capsys, monkeypatch):
    sparse(folder)
    monkeypatch.setattr(ModelSpec, "load", lambda *_: pytest.fail("a model is loaded"))
    models = ["--model", f"native={folder / 'tiny'}", "--model", str(folder / "sparse")]
    for measures in ([], ["--cliff", "--attention"]):
        assert run(folder, "eval", *models, "--report", str(folder / "report"), "--length", "600", *measures) == 2
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert "--model sparse: DeepseekV32ForCausalLM chooses or compresses the keys" in told
        assert "Leave the measures attention and entropy out: `rope-patch eval` runs those that are named" in told
    monkeypatch.setattr(ModelSpec, "twin", lambda *_: pytest.fail("nothing asks for it"))
    _, plan = plan_of(monkeypatch, folder, *models, "--length", "600", "--cliff")
    assert plan.measures == ("cliff",)


def plan_of(monkeypatch, folder, *arguments):
    """What `eval` would measure."""
    import rope_patch.eval as evaluation

    seen = []

    class Stop(Exception):
        pass

    def measure(models, tokenizer, texts, plan, cache, checkpoints):
        seen.append((list(models), plan))
        raise Stop

    monkeypatch.setattr(evaluation, "run_suite", measure)
    with pytest.raises(Stop):
        run(folder, "eval", "--report", str(folder / "report"), *arguments)
    return seen[0]


def test_the_help_of_eval_explains_measures_and_settings(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--passkey [^-]*five-digit number", text) and re.search(r"--squad SQUAD SQuAD's JSON file", text)


def test_a_measure_of_another_package_has_its_flags(folder, capsys):
    code = Path(__file__).parents[2].joinpath("support/two_hop.py").read_text()
    with installed(folder / "site", "of_two_hop", code, measures=["two-hop"]):
        with pytest.raises(SystemExit):
            cli.main(["eval", "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "--two-hop variable tracking: assignments that" in text and "--hops HOPS assignments after the" in text
        models = ["--model", f"native={folder / 'tiny'}", "--model", f"pi={folder / 'tiny'}@pi:factor=4"]
        lengths = ["--length", "500", "--lengths", "300", "--trials", "6"]
        report = ["--report", str(folder / "report")]
        assert run(folder, "eval", *models, *report, *lengths, "--two-hop", "--hops", "3") == 0
    out = capsys.readouterr().out
    assert "two-hop, 300: 0.000, over 6 prompts" in out and "\nWon:  nothing beyond chance." in out
    stored = json.loads((folder / "report/results.json").read_text())
    assert [c["measure"] for c in stored["regressions"]["cells"]] == ["two-hop"]
    assert len(stored["results"]["two-hop"]["pi"]["replies"]) == 4


def test_lengths_go_from_a_sixteenth_of_the_window_on(folder, monkeypatch, capsys):
    wide = tiny(vocab_size=CHARACTERS, max_position_embeddings=16384)
    wide.save_pretrained(folder / "wide")
    character_tokenizer().save_pretrained(folder / "wide")
    models = ["--model", f"mine={folder / 'tiny'}", "--model", f"native={folder / 'wide'}"]
    labels, plan = plan_of(monkeypatch, folder, *models, "--passkey", "--length", "50000")
    assert plan.lengths == (1024, 2048, 4096, 8192, 16384, 32768, 50000) and plan.window == 16384
    assert labels == ["native", "mine"], "the others are compared with native, wherever it stands"
    assert "left out" not in capsys.readouterr().out
    narrow = ["--model", f"native={folder / 'tiny'}"]
    _, plan = plan_of(monkeypatch, folder, *narrow, "--passkey", "--ruler", "--length", "5000")
    assert plan.lengths == (512, 1024, 2048, 4096, 5000) and plan.ruler_lengths == (4096, 5000)
    out = capsys.readouterr().out
    assert "Prompts of 4, 8, 16, 32, 64, 128, 256 tokens are left out: passkey needs" in out
    assert "512, 1024, 2048 tokens are left out: ruler needs 4096. --lengths names others." in out
    _, plan = plan_of(monkeypatch, folder, *narrow, "--passkey", "--lengths", "300", "400", "--ruler")
    assert plan.lengths == (300, 400) and plan.ruler_lengths is None
    _, plan = plan_of(monkeypatch, folder, *narrow, "--passkey", "--lengths", "400", "300", "400")
    assert plan.lengths == (400, 300), "each once"


def test_tasks_of_lm_eval_are_named_with_commas(folder, monkeypatch):
    models = ["--model", f"native={folder / 'tiny'}", "--lengths", "400"]
    _, plan = plan_of(monkeypatch, folder, *models, "--lm-eval", "mmlu,niah_single_1,gsm8k", "--lm-eval-data", "x")
    assert plan.measures == ("ruler", "lm-eval") and plan.lm_eval == ("mmlu", "gsm8k")
    assert plan.ruler_tasks == ("niah_single_1",) and plan.lm_eval_data == "x"


def test_options_are_read_by_what_stands_for_a_measure(folder, monkeypatch):
    models = ["--model", f"native={folder / 'tiny'}", "--lengths", "400"]
    _, plan = plan_of(monkeypatch, folder, *models, "--trials", "3")
    assert plan.trials == 3, "retrieval is among what runs by default"
    _, plan = plan_of(monkeypatch, folder, *models, "--lm-eval", "niah_single_1", "--ruler-samples", "5")
    assert plan.ruler_samples == 5
    _, plan = plan_of(monkeypatch, folder, *models[:2], "--lm-eval", "mmlu", "--limit", "4")
    assert plan.limit == 4


def test_a_seed_gives_other_prompts_and_the_gain_may_have_the_papers_definition(folder):
    def measured(*arguments):
        command = ["--model", str(folder / "tiny"), "--report", str(folder / "report"), "--length", "600"]
        assert run(folder, "eval", *command, *arguments) == 0
        return {k: r["tiny"] for k, r in json.loads((folder / "report/results.json").read_text())["results"].items()}

    passkeys = ["--passkey", "--lengths", "400", "--trials", "1"]
    both = measured(*passkeys, "--gain", "paper")
    assert both["gain"]["kind"] == "paper" and both["gain"]["total"] != both["gain"]["exact"]
    exact = measured("--gain")["gain"]
    assert exact["kind"] == "exact" and exact["total"] == exact["exact"] == both["gain"]["exact"]
    hashes = [measured(*passkeys, "--seed", seed)["passkey"]["prompt_hashes"] for seed in ("0", "7")]
    assert hashes[0] == both["passkey"]["prompt_hashes"] != hashes[1]


def test_models_of_one_label_are_compared_as_one(folder, capsys):
    paths = [f"{folder / 'tiny'}@pi:factor={factor}" for factor in (2, 4)]
    models = [f"--model=native={folder / 'tiny'}", *(f"--model=ours={path}" for path in paths)]
    assert run(folder, "eval", *models, "--report", str(folder / "report"), "--length", "300", "--cliff") == 0
    assert "\nWon:  " in capsys.readouterr().out, "two models are compared, so that none is named"
    stored = json.loads((folder / "report/results.json").read_text())
    assert list(stored["results"]["cliff"]) == ["native", "ours#1", "ours#2"]
    assert stored["settings"]["model ours#2"].endswith("@pi:factor=4")
    cells = stored["regressions"]["cells"]
    assert cells and {(cell["label"], cell["runs"]) for cell in cells} == {("ours", 2)}
    page = (folder / "report/report.html").read_text()
    assert ", mean of 2 models</td>" in page and '<th class="n">ours#2</th>' in page


@pytest.fixture
def other(folder):
    """A second model whose tokenizer has the same tokens and reads some as others."""
    tiny(vocab_size=CHARACTERS).save_pretrained(folder / "other")
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(folder / "other")
    return folder / "other"


def test_models_with_other_tokenizers_are_refused_before_one_is_loaded(folder, other, monkeypatch, capsys):
    monkeypatch.setattr(ModelSpec, "load", lambda *_: pytest.fail("loaded"))
    models = ["--model", f"mine={other}", "--model", f"native={folder / 'tiny'}", "--model", f"again={other}"]
    assert run(folder, "eval", *models, "--report", str(folder / "report"), "--length", "200", "--cliff") == 2
    said = capsys.readouterr().err
    assert "the tokenizers of native and mine make different tokens of a text. Measure each in its" in said


def test_models_with_other_chat_templates_are_refused_where_they_are_asked(folder, other, monkeypatch, capsys):
    for name, end in (("tiny", "<assistant>"), ("other", "<model>")):
        tokenizer = chat_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template.replace("<assistant>", end)
        tokenizer.save_pretrained(folder / name)
    models = ["--model", f"native={folder / 'tiny'}", "--model", f"mine={other}", "--lengths", "400"]
    assert run(folder, "eval", *models, "--report", str(folder / "report"), "--passkey") == 2
    assert "those of native and mine differ. --chat-template off asks both in raw text." in capsys.readouterr().err
    plan_of(monkeypatch, folder, *models, "--passkey", "--chat-template", "off")
    plan_of(monkeypatch, folder, *models[:4], "--cliff")


def test_a_model_without_a_tokenizer_is_given_the_first_ones_tokens(folder, monkeypatch, capsys):
    tiny(vocab_size=CHARACTERS).save_pretrained(folder / "bare")
    models = ["--model", f"native={folder / 'tiny'}", "--model", f"mine={folder / 'bare'}"]
    plan_of(monkeypatch, folder, *models, "--cliff")
    assert "mine has no tokenizer and is measured with that of native." in capsys.readouterr().out
    rescaled = ["--model", f"native={folder / 'tiny'}", "--model", f"pi={folder / 'tiny'}@pi:factor=4"]
    real, loaded = ModelSpec.load_tokenizer, []
    monkeypatch.setattr(ModelSpec, "load_tokenizer", lambda spec: loaded.append(spec.label) or real(spec))
    plan_of(monkeypatch, folder, *rescaled, "--cliff")
    assert loaded == ["native"], "a folder is read once"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["eval", "--report", "taken/report"], "no file can be written in taken/report"),
        (["probe", "--plot", "taken/picture"], "no file can be written in taken"),
        (
            ["probe", "--length", "60"],
            f"--length must be longer than the context window of {WINDOW} positions, got 60.",
        ),
    ],
)
def test_what_cannot_be_written_shows_before_a_model_is_loaded(command, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "taken").write_text("a file")
    monkeypatch.setattr(ModelSpec, "load", lambda *_: pytest.fail("loaded"))
    assert run(folder, *command, "--model", "tiny") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["eval"], ["probe", "--plot", "picture"]])
def test_a_missing_matplotlib_shows_before_a_model_is_loaded(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(ModelSpec, "load", lambda *_: pytest.fail("loaded"))
    assert run(folder, *command, "--model", "tiny") == 2
    assert "plots need matplotlib: pip install 'rope-patch[plots]'." in capsys.readouterr().err


def test_the_core_package_names_the_command_line(monkeypatch, capsys):
    from rope_patch.__main__ import main

    assert main([]) == 0 and "python -m trl_ext" in capsys.readouterr().out
    assert main(["eval", "--model", "x"]) == 2 and "python -m trl_ext" in capsys.readouterr().err


def test_eval_loads_adapters_with_their_rope(folder):
    from peft import LoraConfig, get_peft_model

    base = ModelSpec.parse(str(folder / "tiny")).load("cpu", torch.float32)
    patched = patch_model(base, "yarn", factor=4.0)
    peft_model = get_peft_model(patched, LoraConfig(target_modules=["q_proj"]))
    torch.nn.init.normal_(peft_model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    rows = tokens(1, 40)
    with torch.no_grad():
        expected = peft_model.eval()(rows).logits
    peft_model.save_pretrained(folder / "adapter")
    spec = ModelSpec.parse(f"x={folder / 'adapter'}")
    assert _default_length(spec) == 4 * WINDOW, "an adapter's window is that of its base model"
    loaded = spec.load("cpu", torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows).logits, expected)
    assert spec.load_tokenizer()("ab")["input_ids"] == [97, 98]


def test_an_adapter_of_others_is_told_its_rope(folder):
    from peft import LoraConfig, get_peft_model

    base = ModelSpec.parse(str(folder / "tiny")).load("cpu", torch.float32)
    peft_model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    peft_model.save_pretrained(folder / "plain")
    rows = tokens(1, 40)
    for early in (ModelSpec.check, lambda spec: spec.load("cpu", torch.float32)):
        with pytest.raises(ValueError, match="was saved without rope_patch.json.*Name it: .*plain@native"):
            early(ModelSpec.parse(f"{folder / 'plain'}"))
    with torch.no_grad():
        native = ModelSpec.parse(f"{folder / 'plain'}@native").load("cpu", torch.float32)
        torch.testing.assert_close(native(rows).logits, peft_model(rows).logits)
        rescaled = ModelSpec.parse(f"{folder / 'plain'}@pi:factor=2").load("cpu", torch.float32)
        torch.testing.assert_close(rescaled(rows).logits, patch_model(peft_model, "pi", factor=2.0)(rows).logits)


def test_probe_refuses_a_rescaling_beside_its_own(folder, capsys):
    assert run(folder, "probe", "--model", f"{folder / 'tiny'}@pi:factor=4") == 2
    said = capsys.readouterr().err
    assert "leave out @pi and what follows" in said and f"--model {folder / 'tiny'}@pi:factor=4` compares" in said


def test_probe_prints_where_the_window_ends(folder, capsys):
    picture = folder / "picture"
    arguments = ["--model", str(folder / "tiny"), "--length", "256", "--plot", str(picture)]
    assert run(folder, "probe", *arguments) == 0
    assert f"predicts next to nothing, also within the {WINDOW} positions" in capsys.readouterr().out, "random weights"
    assert picture.with_suffix(".png").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=b@pi:factor", "'factor' has no value"),
        ("a=b@", r"named as \[LABEL=\]PATH"),
        ("=b", r"named as \[LABEL=\]PATH"),
        ("", r"named as \[LABEL=\]PATH"),
        ("a=", r"named as \[LABEL=\]PATH"),
        ("@pi:factor=4", r"named as \[LABEL=\]PATH"),
        ("a=b@pii:factor=4", "Did you mean 'pi'"),
        ("a=b@pi:factor=-1", "factor"),
    ],
)
def test_models_named_wrongly_are_refused(text, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ModelSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "label", "path", "method"),
    [
        (".", "here", ".", None),
        (".@pi:factor=4", "here", ".", "pi"),
        ("lr=1/m", "m", "lr=1/m", None),
        ("link", "link", "link", None),
        ("a=lr=1/m@pi:factor=4", "a", "lr=1/m", "pi"),
        ("owner/model", "model", "owner/model", None),
        ("owner/model@pi:factor=4", "model", "owner/model", "pi"),
    ],
)
def test_a_model_is_named_by_label_path_and_rescaling(text, label, path, method, tmp_path, monkeypatch):
    here = tmp_path / "around" / "here"
    (here / "lr=1/m").mkdir(parents=True)
    (here / "link").symlink_to(here / "lr=1")
    monkeypatch.chdir(here)
    spec = ModelSpec.parse(text)
    assert (spec.label, spec.path, spec.method) == (label, path, method)


def test_what_rows_are_too_short_for_is_left_out_and_told_unless_it_is_named(folder, monkeypatch, capsys):
    models = ["--model", str(folder / "tiny"), "--window", "400"]
    _, plan = plan_of(monkeypatch, folder, *models, "--length", "401", "--lengths", "600")
    assert "gain" not in plan.measures and "entropy" not in plan.measures and "cliff" in plan.measures
    out = capsys.readouterr().out
    assert "gain is left out: it needs rows of 513 tokens, and --length is 401." in out and "entropy is left out" in out
    _, plan = plan_of(monkeypatch, folder, *models, "--length", "401", "--attention")
    assert plan.measures == ("attention",)
    monkeypatch.undo()
    assert run(folder, "eval", *models, "--report", str(folder / "report"), "--length", "401", "--gain") == 2
    assert "gain needs rows of at least 513 tokens, and length is 401" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny", "--model", "x/../tiny"], "labels must differ, got tiny twice: name models as LABEL=PATH."),
        (["--model", "x=tiny", "--model", "x=tiny"], "--model x is what others are compared with, so it must be one"),
        (["--model", "tiny", "--trials", "0"], "--trials must be an integer of at least 1, got 0"),
        (["--model", "tiny", "--length", "0"], "--length must be an integer of at least 1, got 0"),
        (["--model", "tiny", "--model", "nowhere/model"], "--model: nowhere/model is no folder with a"),
        (["--model", "tiny", "--cliff", "--length", "9000"], "the texts give 0 rows of 9000 tokens; 2 are needed"),
        (["--model", "tiny", "--short", "--short-data", "nowhere"], "there is no file or folder nowhere"),
    ],
)
def test_bad_arguments_end_with_a_message(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    assert run(folder, "eval", *arguments, "--report", "made") == 2
    assert message in capsys.readouterr().err
    assert not (folder / "made").exists()


def test_the_callback_logs_the_curve_where_the_trainer_logs(tmp_path):
    from rope_patch.eval import loss_by_position
    from trl_ext.trainer.callbacks import LossByPositionCallback

    model = tiny()
    rows = tokens(2, 2 * WINDOW)
    run_dir = tmp_path / "run"
    trainer = training.trainer(run_dir, model=model, view="skip", view_args={"skip": Uniform(1, 64)}, max_steps=5)
    trainer.add_callback(LossByPositionCallback(trainer, rows, every=2))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "long/cliff" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 5]
    curve = loss_by_position(trainer.model, rows, progress=False)
    assert logged[-1]["long/loss_in_window"] == pytest.approx(curve.in_window(WINDOW), rel=1e-5)
    assert logged[-1]["long/cliff"] == pytest.approx(curve.cliff(WINDOW), abs=1e-5)
    assert logged[0]["long/loss_in_window"] != logged[-1]["long/loss_in_window"]
    assert trainer.model.training
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        LossByPositionCallback(trainer, rows, every=0)
    with pytest.raises(ValueError, match=f"seq_len >= {WINDOW + 2}"):
        LossByPositionCallback(trainer, tokens(1, WINDOW))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_callback_leaves_the_entries_of_training_as_they_are(every, tmp_path):
    from trl_ext.trainer.callbacks import LossByPositionCallback

    options = {"objective": "self-distill", "view": "skip", "view_args": {"skip": Uniform(1, 32)}}
    runs = [training.trainer(tmp_path, max_steps=6, logging_steps=2, **options) for _ in range(2)]
    runs[0].add_callback(LossByPositionCallback(runs[0], tokens(2, 2 * WINDOW), every=every))
    for run in runs:
        run.train()
    entries, alone = (
        [{name: x for name, x in entry.items() if name != "tokens_per_second"} for entry in training.logged(run, "")]
        for run in runs
    )
    assert [entry["step"] for entry in alone] == [2, 4, 6]
    assert entries == alone and {"learning_rate", "ce", "kl", "mean_token_accuracy", "view/skip"} <= set(entries[0])
    own = [entry for entry in runs[0].state.log_history if "long/cliff" in entry]
    assert [entry["step"] for entry in own] == list(range(every, 7, every))
    assert set(own[0]) == {"long/loss_in_window", "long/loss_beyond", "long/cliff", "epoch", "step"}

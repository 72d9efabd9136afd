"""`rope-patch export` from the command line."""

import json

import pytest
from peft import LoraConfig, get_peft_model
from support.tiny import tiny
from support.training import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import patch_model
from rope_patch.adapters.sidecar import SIDECAR_NAME
from rope_patch.export import PROGRAMS
from trl_ext.cli import main
from trl_ext.cli.export import TARGETS


@pytest.mark.slow  # in fast tests rope_patch.export does so, and the demo by the command
def test_the_command_writes_a_checkpoint_and_says_how_to_serve_it(tmp_path, capsys):
    patch_model(tiny(), "yarn", factor=4.0).save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--target", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert "logits differ by" in printed and f"vllm serve {tmp_path / 'out'} --max-model-len 256" in printed
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]["rope_type"] == "yarn"


def test_no_folder_is_left_of_one_in_others_after_a_refusal(tmp_path, capsys):
    patch_model(tiny(), "dynamic-ntk", factor=4.0).save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--output", str(tmp_path / "runs" / "1" / "out"), "--no-check"]
    assert main([*command, "--target", "sglang"]) == 2
    assert "sglang would serve this model wrong" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "runs").mkdir()
    assert main([*command, "--target", "sglang"]) == 2
    assert (tmp_path / "runs").is_dir() and not any((tmp_path / "runs").iterdir())
    assert main(command) == 0
    assert (tmp_path / "runs" / "1" / "out" / "config.json").is_file()


def test_a_rescaling_behind_the_model_is_applied_first(tmp_path, capsys):
    tiny().save_pretrained(tmp_path / "model")
    command = ["export", f"{tmp_path / 'model'}@ntk:factor=8", "--output", str(tmp_path / "out"), "--no-check"]
    assert main(command) == 0
    patched = patch_model(tiny(), "ntk", factor=8.0).config
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_parameters"] == patched.rope_parameters
    assert written["max_position_embeddings"] == patched.max_position_embeddings


def test_an_adapter_that_is_rescaled_takes_the_tokenizer_beside_it(tmp_path):
    """Its training may have added tokens; the base model's are another's."""
    tiny(vocab_size=102).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    own = tokenizer()
    own.add_tokens("<added>")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    own.save_pretrained(tmp_path / "adapter")
    for named, added in ((["--tokenizer", str(tmp_path / "base")], False), ([], True)):
        out = tmp_path / f"out-{added}"
        rescaled = f"{tmp_path / 'adapter'}@ntk:factor=8"
        assert main(["export", rescaled, "--output", str(out), "--no-check", *named]) == 0
        assert ("<added>" in AutoTokenizer.from_pretrained(out).get_vocab()) is added


def test_native_is_refused_where_the_adapter_says_its_rope(tmp_path, capsys):
    """As in `eval` and `probe`: it was given, and would have no effect."""
    tiny().save_pretrained(tmp_path / "base")
    base = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "yarn", factor=4.0)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / SIDECAR_NAME).is_file()
    assert main(["export", f"{tmp_path / 'adapter'}@native", "--output", str(tmp_path / "out"), "--no-check"]) == 2
    assert "Leave @native out" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{}", "adapter_config.json names no base model (base_model_name_or_path)"),
        ("{", "adapter_config.json is no JSON: Expecting property name"),
    ],
)
def test_an_adapter_without_a_base_is_one_line(tmp_path, capsys, config, says):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(config)
    for rescaling in ("", "@ntk:factor=4"):
        assert main(["export", f"{tmp_path / 'adapter'}{rescaling}", "--output", str(tmp_path / "out")]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path, capsys):
    tiny().save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path)]
    assert main(command) == 2
    assert "tokenizer must name a folder or hub id with a tokenizer's files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_rescaling_that_the_program_reads_wrong_is_refused(tmp_path, capsys):
    tiny().save_pretrained(tmp_path / "model")
    rescaled = f"{tmp_path / 'model'}@dynamic-ntk:factor=4"
    assert main(["export", rescaled, "--output", str(tmp_path / "out"), "--target", "sglang"]) == 2
    assert "sglang would serve this model wrong" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("{folder}@nkt:factor=8", "Did you mean 'ntk'"),
        ("{folder}@ntk", "factor"),
        ("{folder}@", "got '{folder}@'."),
        ("{folder}@ntk:factor", "got '{folder}@ntk:factor', where 'factor' has no value."),
        ("{folder}-2@ntk:factor=8", "MODEL_OR_ADAPTER"),
    ],
)
def test_another_form_is_one_line(tmp_path, capsys, model, says):
    tiny().save_pretrained(tmp_path / "model")
    named = model.format(folder=tmp_path / "model")
    assert main(["export", named, "--output", str(tmp_path / "out")]) == 2
    assert says.format(folder=tmp_path / "model") in capsys.readouterr().err


def test_the_targets_are_those_of_the_package():
    assert tuple(PROGRAMS) == TARGETS

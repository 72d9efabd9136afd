"""The card of an exported checkpoint carries on what the record of its training says."""

import json
import shutil

import pytest
import torch
from support.cards import card_in, run_code
from support.tiny import WINDOW, tiny
from support.training import tokenizer, trainer
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import load_adapter, patch_model
from rope_patch.model_card import read_runs


def export(model, folder, **options):
    return rope_patch.export(model, folder, **{"check": False, **options})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint that the trainer made of one in a folder whose path no card may tell."""
    tmp_path = tmp_path_factory.mktemp("training")
    tiny().save_pretrained(tmp_path / "secret" / "base")
    run = trainer(
        tmp_path / "trained",
        model=AutoModelForCausalLM.from_pretrained(tmp_path / "secret" / "base"),
        max_steps=1,
        rescale="yarn",
        rescale_args={"factor": 4.0},
        view="pose",
        view_args={"target": 200},
    )
    run.train()
    run.save_model()
    return tmp_path / "trained"


def report(folder, **settings):
    folder.mkdir()
    summary = [{"figure": "cliff", "values": {"native": 3.25, "mine": 0.125}}]
    (folder / "results.json").write_text(json.dumps({"settings": settings, "summary": summary}))
    return folder


def test_training_is_carried_on(trained, tmp_path, monkeypatch):
    export(trained, tmp_path / "out", target="vllm")
    card = card_in(tmp_path / "out")
    for told in ("`base`, a model in a local folder", "`pose` (target 200", "`yarn` (factor 4.0)", "2309.10400"):
        assert told in card.text
    assert "secret" not in card.content and str(trained.parent) not in card.content
    assert f"\nvllm serve . --max-model-len {4 * WINDOW}\n" in card.text and "## Evaluation" not in card.text
    assert read_runs(tmp_path / "out") == read_runs(trained)
    assert run_code(tmp_path / "out", monkeypatch)["model"].config.max_position_embeddings == 4 * WINDOW


def test_figures_of_a_report_are_in_the_card(trained, tmp_path):
    given = report(tmp_path / "report", dtype="bfloat16", **{"model mine": f"mine={trained}"})
    export(trained, tmp_path / "out", report=given)
    text = card_in(tmp_path / "out").text
    assert "| cliff | 3.25 | 0.125 |" in text and "This model is `mine`." in text and "dtype bfloat16" in text
    shutil.copytree(trained, tmp_path / "measured")
    report(tmp_path / "measured" / "rope-patch-report")
    export(tmp_path / "measured", tmp_path / "again")
    assert "| cliff | 3.25 | 0.125 |" in card_in(tmp_path / "again").text


def test_a_report_that_is_not_there_stops_before_anything_is_written(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match="report: there is no"):
        export(trained, tmp_path / "out", report=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_a_model_in_memory_has_a_card_of_its_rope_alone(tmp_path, monkeypatch):
    model = patch_model(tiny(), "yarn", factor=4.0, attention_factor=1.7)
    export(model, tmp_path / "out", target="sglang")
    card = card_in(tmp_path / "out")
    assert "## Training" not in card.text and "`yarn` (factor 4.0, attention_factor 1.7)" in card.text
    assert "in the weights of the queries, for sglang" in card.text
    (parameters,) = [line for line in card.text.splitlines() if "`rope_parameters`" in line]
    assert "attention_factor" not in parameters  # as config.json has it
    run_code(tmp_path / "out", monkeypatch)  # without a tokenizer, which there is none of


def test_an_adapter_is_a_whole_model_then(tmp_path, monkeypatch):
    from peft import LoraConfig

    tiny().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    run = trainer(
        tmp_path / "adapter",
        model=AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        max_steps=1,
        rescale="ntk",
        rescale_args={"factor": 2.0},
        peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    run.train()
    run.save_model()
    export(tmp_path / "adapter", tmp_path / "out")
    card = card_in(tmp_path / "out")
    assert card.data.library_name == "transformers" and "load_adapter" not in card.text
    assert card.text.count("`ntk` (factor 2.0)") == 1 and "LoRA of rank 4 on q_proj" in card.text
    ids = torch.tensor([[1, 5, 7, 9]])
    loaded = run_code(tmp_path / "out", monkeypatch)["model"]
    torch.testing.assert_close(loaded(ids).logits, run.model.eval()(ids).logits)
    adapted = load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    export(adapted, tmp_path / "of_model")
    assert read_runs(tmp_path / "of_model") == read_runs(tmp_path / "out") == read_runs(tmp_path / "adapter") != []
    assert card_in(tmp_path / "of_model").text.count("`ntk` (factor 2.0)") == 1


def test_what_no_folding_mends_is_named_wrong(tmp_path):
    export(patch_model(tiny(), "yarn", factor=4.0, beta_fast=16.0), tmp_path / "out", target="vllm")
    text = card_in(tmp_path / "out").text
    assert "- llama.cpp takes beta_fast 32 and beta_slow 1 whatever the checkpoint says" in text
    assert "# llama.cpp" not in text


def test_what_folding_mends_goes_through_export(tmp_path):
    export(patch_model(tiny(), "yarn", factor=4.0, attention_factor=1.7), tmp_path / "out", target="vllm")
    text = card_in(tmp_path / "out").text
    assert "rope-patch export . --output served --target sglang" in text
    assert "\nvllm serve . " in text


def test_a_family_that_was_not_tested_is_named(tmp_path):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Olmo2ForCausalLM(Olmo2Config(**shape, vocab_size=50, max_position_embeddings=WINDOW))
    export(model, tmp_path / "out")
    assert "This one was not tested" in card_in(tmp_path / "out").text


def test_every_method_of_a_paper_cites_it():
    own = {"standard", "compose", "mix"}
    for registry in (rope_patch.VIEWS, rope_patch.RESCALINGS):
        for name, kind in registry.items():
            assert bool(kind.cites) == (name not in own), name
            for entry in kind.cites:
                assert entry.startswith("@misc{") and entry.count("{") == entry.count("}"), name

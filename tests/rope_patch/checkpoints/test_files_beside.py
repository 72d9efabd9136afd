"""Tokenizer and license go where the weights go."""

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.characters import character_tokenizer
from support.hub import publish, use_cache
from support.tiny import tiny
from transformers import AutoModelForCausalLM

from rope_patch import export, patch_model
from rope_patch.checkpoints.files_beside import copy_license, copy_tokenizer, tokenizer_files
from trl_ext import RopeSFTConfig, RopeSFTTrainer

TERMS = {"LICENSE": "terms", "Notice.txt": "note", "USE_POLICY.md": "policy"}


def written(folder, terms=TERMS):
    tiny(vocab_size=200).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    for name, text in terms.items():
        (folder / name).write_text(text)
    return folder


def terms_in(folder):
    found = {file.name: file.read_text() for file in folder.iterdir() if file.name.lower().startswith(("l", "n", "u"))}
    return found | {file.name: file.read_text() for file in folder.glob("base-*")}


def test_no_source_is_not_the_folder_that_one_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(written(tmp_path))
    (tmp_path / "out").mkdir()
    assert tokenizer_files("") == [] and not copy_tokenizer([("", None)], tmp_path / "out")
    copy_license([("", None)], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_licenses_of_all_sources_are_copied_and_none_is_written_over(tmp_path):
    for name, terms in (
        ("one", {"LICENSE": "a", "license_extra": "b"}),
        ("two", {"LICENSE": "c", "COPYING": "d"}),
        ("three", {"LICENSE": "e"}),
    ):
        (tmp_path / name).mkdir()
        for file, text in terms.items():
            (tmp_path / name / file).write_text(text)
    (tmp_path / "out").mkdir()
    for _ in range(2):  # the second time nothing is new
        names = ("one", "two", "one", "nowhere", "three")
        copy_license([(str(tmp_path / name), None) for name in names], tmp_path / "out")
        copied = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
        of_first_two = {"LICENSE": "a", "license_extra": "b", "base-LICENSE": "c", "COPYING": "d"}
        assert copied == of_first_two | {"base-base-LICENSE": "e"}
    copy_license([(str(tmp_path / "one"), None)], tmp_path / "one")  # saved where it came from
    assert (tmp_path / "one" / "LICENSE").read_text() == "a"


def test_an_export_has_the_license_of_its_model_and_of_an_adapters_base(tmp_path):
    base = written(tmp_path / "base")
    export(base, tmp_path / "of_folder", check=False)
    assert terms_in(tmp_path / "of_folder") == TERMS
    model = AutoModelForCausalLM.from_pretrained(base)
    export(patch_model(model, "yarn", factor=2.0), tmp_path / "of_model", tokenizer=base, check=False)
    assert terms_in(tmp_path / "of_model") == TERMS
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "LICENSE").write_text("the adapter's")
    export(tmp_path / "adapter", tmp_path / "of_adapter", check=False)
    assert terms_in(tmp_path / "of_adapter") == TERMS | {"LICENSE": "the adapter's", "base-LICENSE": "terms"}


def training_of(base, folder):
    args = RopeSFTConfig(
        output_dir=str(folder), max_steps=1, max_length=16, use_cpu=True, bf16=False, report_to=[],
        rescale="pi", rescale_args={"factor": 2.0}, disable_tqdm=True,
    )  # fmt: skip
    return RopeSFTTrainer(str(base), args, train_dataset=Dataset.from_dict({"text": ["a text", "another"]}))


@pytest.mark.parametrize("on_hub", [False, True], ids=["folder", "hub"])
def test_what_was_trained_has_the_license_of_what_it_was_trained_from(on_hub, tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path / "hub")
    publish(tmp_path / "hub", "owner/base", main=written)
    trainer = training_of("owner/base" if on_hub else written(tmp_path / "base"), tmp_path / "run")
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    assert terms_in(tmp_path / "trained") == ({} if on_hub else TERMS)
    export(tmp_path / "trained", tmp_path / "out", check=False)
    assert terms_in(tmp_path / "out") == TERMS


@pytest.mark.parametrize(
    "name",
    [
        "vocab.txt", "LICENSE", "chat_template.jinja", "additional_chat_templates/a.jinja", "rope_patch_training.json",
        "generation_config.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("through", ["file", "folder"])
def test_a_link_out_of_the_folder_is_refused_by_name(name, through, tmp_path):
    """Who made the folder may not read what it leads to: that must not be in a folder that is published."""
    folder = written(tmp_path / "model", {})
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text('{"objective": "not for others"}')
    (folder / name).parent.mkdir(exist_ok=True)
    if through == "folder":
        (folder / "way").symlink_to(secret)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / "way" / "file" if through == "folder" else secret / "file")
    says = rf"model/{name} is a link out of its folder, to .*secret/file"
    with pytest.raises(ValueError, match=says):
        export(folder, tmp_path / "out", check=False)
    assert tokenizer_files(folder), "which reads them where they are, and copies none"
    if name in ("LICENSE", "rope_patch_training.json"):
        with pytest.raises(ValueError, match=says):  # and not when it saves
            training_of(folder, tmp_path / "run")
    assert not (tmp_path / "out").exists()


def test_links_within_the_folder_and_those_of_the_hubs_cache_are_followed(tmp_path):
    folder = written(tmp_path / "model", {"terms.txt": "terms"})
    (folder / "LICENSE").symlink_to("terms.txt")
    (tmp_path / "named").symlink_to(folder)
    export(tmp_path / "named", tmp_path / "of_folder", check=False)
    assert terms_in(tmp_path / "of_folder") == {"LICENSE": "terms"}
    repository = tmp_path / "models--owner--base"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "blobs").mkdir()
    snapshot = written(repository / "snapshots" / "0123")
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(repository / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    export(snapshot, tmp_path / "of_hub", check=False)
    assert terms_in(tmp_path / "of_hub") == TERMS and (tmp_path / "of_hub" / "tokenizer.json").is_file()

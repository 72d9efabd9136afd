"""Two stages in one call, interrupted at every border, and what comes out of them."""

import functools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.cards import card_in, run_code
from support.characters import CHARACTERS, character_tokenizer
from support.hub import move, publish, use_cache
from support.launched import run_ranks
from support.marks import needs_ranks
from support.tiny import WINDOW, tiny
from tokenizers import processors
from transformers import AutoModelForCausalLM

import trl_ext.recipes.restoration as module
from rope_patch import patch_model
from rope_patch.export import writing
from rope_patch.model_card import read_runs
from trl_ext import RopeSFTConfig, restore
from trl_ext.recipes.restoration import cut_into_rows

TEXT = "It was a dark night. The wind blew! Who was there? " * 20
SMALL = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "save_steps": 1, "use_cpu": True, "bf16": False,
    "report_to": [], "disable_tqdm": True, "learning_rate": 1e-3, "warmup_steps": 0,
}  # fmt: skip
STAGES = {"distil": {**SMALL, "max_steps": 3, "max_length": 60}, "extend": {**SMALL, "max_steps": 2, "max_length": 120}}
DOCUMENTS = Dataset.from_list([{"text": TEXT}, {"text": "short"}, {"text": TEXT[7:500]}])


@pytest.fixture
def folder(tmp_path):
    return with_model(tmp_path)


def with_model(folder):
    tiny(vocab_size=CHARACTERS).save_pretrained(folder / "tiny")
    character_tokenizer().save_pretrained(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A function that gives what `run` makes with these options; each is made once, and no test writes there."""

    @functools.cache
    def made(peft=True, skip_extension=False):
        return run(with_model(tmp_path_factory.mktemp("done")), peft=peft, skip_extension=skip_extension)

    return made


def run(folder, name="out", peft=True, model=None, **options):
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM") if peft else None
    arguments = {"rescale": "pi", "rescale_args": {"factor": 4.0}, "peft_config": config, **STAGES}
    if peft:
        arguments["dtype"] = "float32"
    return restore(model or folder / "tiny", DOCUMENTS, folder / name, **{**arguments, **options})


def logits(folder):
    ids = torch.arange(40, 110)[None]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(ids).logits


def test_rows_are_cut_from_each_document_on_its_own():
    tokenizer = character_tokenizer()
    made, coverage = cut_into_rows(DOCUMENTS, tokenizer, 100)
    rows = made["input_ids"]
    assert len(rows) == len(TEXT) // 100 + 493 // 100 and {len(row) for row in rows} == {100}
    assert tokenizer.decode(rows[0]) == TEXT[:100] and tokenizer.decode(rows[len(TEXT) // 100]) == TEXT[7:107]
    left = len(TEXT) % 100 + 5 + 493 % 100
    total = len(TEXT) + 5 + 493
    assert coverage == (
        f"{total:,} tokens of 3 documents give {len(rows)} rows of 100; {left} tokens ({left / total:.1%}) are in no "
        "row: ends of documents, and documents too short for one (1)."
    )
    with pytest.raises(ValueError, match="no document has 9000 tokens"):
        cut_into_rows(DOCUMENTS, tokenizer, 9000)
    with pytest.raises(ValueError, match="a column `text`, got a"):
        cut_into_rows(Dataset.from_list([{"a": "b"}]), tokenizer, 4)


def test_every_row_begins_as_the_tokenizer_begins_a_text():
    tokenizer = character_tokenizer()
    plain = tokenizer(TEXT)["input_ids"]
    frame(tokenizer)
    made, coverage = cut_into_rows(DOCUMENTS, tokenizer, 100)
    rows = made["input_ids"]
    assert all(row[0] == tokenizer.bos_token_id and len(row) == 100 for row in rows)
    assert not any(tokenizer.bos_token_id in row[1:] for row in rows)
    of_text = rows[: len(TEXT) // 99]
    assert [i for row in of_text for i in row[1:]] == plain[: 99 * len(of_text)], "nothing lost, nothing twice"
    assert f"; {len(TEXT) % 99 + 5 + 493 % 99} tokens" in coverage


def frame(tokenizer):
    """Let it put <bos> before each text."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )


def test_what_is_left_out_is_told_before_training(folder, monkeypatch):
    said = []
    monkeypatch.setattr(module.logger, "warning", said.append)
    monkeypatch.setattr(module, "_train", lambda *args: pytest.fail("told too late") if len(said) < 2 else stop())

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder)
    n = len(TEXT) // 60 + 493 // 60
    assert f"distil: {len(TEXT) + 498:,} tokens of 3 documents give {n} rows of 60" in said[0]
    assert f"3 steps read 6 rows, {6 / n:.2g} times as many." in said[0] and said[1].startswith("extend: ")


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def changed(folder):
    before, after = weights(folder.parents[1] / "tiny"), weights(folder)
    return {name.split(".")[-2] for name, value in after.items() if not torch.equal(value, before[name])}


@pytest.mark.slow
def test_q_k_and_v_are_trained_in_both_stages(folder):
    """As in the paper, sections 3.4 and 4.1; all weights if asked."""
    qkv = {"q_proj", "k_proj", "v_proj"}
    still = {**STAGES["extend"], "learning_rate": 0.0}
    assert changed(run(folder, "one", peft=False, extend=still).folder) == qkv
    assert changed(run(folder, "both", peft=False).folder) == qkv
    everything = {name: {**fields, "trainable": "all"} for name, fields in STAGES.items()}
    assert changed(run(folder, "all", peft=False, **everything).folder) > {*qkv, "gate_proj", "embed_tokens", "norm"}
    with pytest.raises(ValueError, match="extend: trainable='qkv' is for training without adapters: name target_mod"):
        run(folder, "lora", extend={**STAGES["extend"], "trainable": "qkv"})
    assert not (folder / "lora").exists()


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("peft", [True, False], ids=["lora", "qkv"])
def test_weights_are_trained_in_float32_and_saved_as_they_came(peft, own, folder, monkeypatch):
    tiny(vocab_size=CHARACTERS, dtype=own).save_pretrained(folder / "tiny")
    trained, base = set(), set()
    step = module.RopeSFTTrainer.training_step

    def looking(self, model, *args, **kwargs):
        for parameter in model.parameters():
            (trained if parameter.requires_grad else base).add(parameter.dtype)
        return step(self, model, *args, **kwargs)

    monkeypatch.setattr(module.RopeSFTTrainer, "training_step", looking)
    restored = run(folder, peft=peft, **({"dtype": None} if peft else {}))
    assert trained == {torch.float32} and base == {torch.bfloat16 if peft else torch.float32}
    assert AutoModelForCausalLM.from_pretrained(restored.folder).dtype == own
    assert json.loads((restored.folder / "config.json").read_text())["dtype"] == str(own).removeprefix("torch.")
    size = (restored.folder / "model.safetensors").stat().st_size
    assert size == pytest.approx((folder / "tiny" / "model.safetensors").stat().st_size, rel=0.05)
    assert changed(restored.folder) == {"q_proj", "k_proj", "v_proj"}


def test_adapters_of_a_quantised_base_are_trained_in_float32_too(folder, monkeypatch):
    """TRL makes them bfloat16, which would round steps of 2e-5 away."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny(vocab_size=CHARACTERS, hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder / "tiny")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    trained = set()
    step = module.RopeSFTTrainer.training_step

    def looking(self, model, *args, **kwargs):
        trained.update(p.dtype for p in model.parameters() if p.requires_grad)
        return step(self, model, *args, **kwargs)

    monkeypatch.setattr(module.RopeSFTTrainer, "training_step", looking)
    restored = run(folder, quantization_config=settings)
    assert trained == {torch.float32}
    assert changed(restored.folder) == {"q_proj", "k_proj", "v_proj"}, "merged into unquantised weights"


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float16", "auto"], ids=str)
def test_weights_in_16_bits_are_not_trained(dtype, folder):
    with pytest.raises(ValueError, match="dtype=.*: without adapters the weights .* Leave dtype out, .* peft_config"):
        run(folder, peft=False, dtype=dtype)
    with pytest.raises(ValueError, match="dtype must be None, 'auto' or a floating point dtype .*, got 'float31'"):
        run(folder, peft=False, dtype="float31")
    with pytest.raises(ValueError, match="dtype is an argument of restore: take it out of model_init_kwargs"):
        run(folder, peft=False, model_init_kwargs={"dtype": dtype})
    assert not (folder / "out").exists()


@pytest.mark.parametrize("peft", [True, False])
def test_a_model_whose_weights_are_not_whole_is_not_restored(peft, folder):
    file = folder / "tiny" / "model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tiny lack model.norm.weight of the .* would get random ones"):
        run(folder, peft=peft)
    assert not list((folder / "out").iterdir())
    save_file(weights | {"model.norm.weight": norm}, file, metadata={"format": "pt"})
    assert run(folder, peft=peft, skip_extension=True).folder.is_dir(), "whole, the model goes to the same folder"


@pytest.mark.parametrize("moment", ["_make_objective", "training_step", "_save_checkpoint"])
def test_a_run_that_fails_before_it_saves_anything_is_begun_with_other_options_in_the_same_folder(
    moment, folder, monkeypatch
):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(module.RopeSFTTrainer, moment, full)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            run(folder, skip_extension=True)
    assert not list((folder / "out").iterdir())
    smaller = {**STAGES["distil"], "per_device_train_batch_size": 1}
    assert run(folder, skip_extension=True, distil=smaller).distil.steps == 3


def test_a_run_that_has_saved_something_keeps_its_record(folder, monkeypatch):
    stop_behind_first_step(monkeypatch, lambda: run(folder, skip_extension=True))
    with pytest.raises(ValueError, match="holds a run with other settings: rescale_args: factor 4.0 there and 2.0"):
        run(folder, skip_extension=True, rescale_args={"factor": 2.0})


def test_too_little_memory_is_not_taken_for_damaged_weights(folder, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        run(folder)


def test_rows_beyond_the_window_of_the_teacher_are_refused_before_a_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    longer = {**STAGES["distil"], "max_length": WINDOW + 1}
    native = {"objective": "self-distill", "objective_args": {"teacher": "native"}}
    for objective in ({}, {"objective": "hidden-distill"}, {"objective": "native-distill"}, native):
        with pytest.raises(ValueError, match=r"window of 64 positions .* got 65. Give distil={'max_length': 64}"):
            run(folder, distil={**longer, **objective})
    assert not (folder / "out").exists()


@pytest.mark.parametrize("peft", [True, False], ids=["lora", "full"])
def test_the_result_is_a_plain_rescaled_checkpoint(done, peft):
    restored = done(peft)
    assert restored.distil.tokens == 3 * 2 * 60 and restored.extend.tokens == 2 * 2 * 120
    assert restored.tokens == 360 + 480 and restored.folder.parts[-2:] == ("out", "model")
    config = json.loads((restored.folder / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 4.0 and config["rope_parameters"]["rope_type"] == "linear"
    rescaled = patch_model(tiny(vocab_size=CHARACTERS), "pi", factor=4.0)
    with torch.no_grad():
        before = rescaled(torch.arange(40, 110)[None]).logits
    assert not torch.allclose(logits(restored.folder), before), "it was trained"
    assert (restored.folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("peft", [False, True])
def test_the_card_tells_of_both_stages(done, peft, monkeypatch):
    result = done(peft)
    card = card_in(result.folder)
    first, second = card.text.partition("### Stage 2")[::2]
    assert first.lstrip().startswith("# out\n"), "the folder that the user named"
    assert "`relation-distill`" in first and "| Optimizer steps | 3 |" in first
    assert "`clm`" in second and "| Optimizer steps | 2 |" in second
    assert "| Documents |" not in card.text, "three of them were cut into the rows of both stages"
    for stage, length in ((first, 60), (second, 120)):
        assert f"| Rows | {len(TEXT) // length + 493 // length} |" in stage
    assert "`pi` (factor 4.0)" in first and first.count("`pi` (factor 4.0)") == 1
    assert "`tiny`, a model in a local folder" in first and str(result.folder.parents[1]) not in card.content
    assert "2604.00004" in second and "2306.15595" in second
    assert [one["objective"] for one in read_runs(result.folder)] == ["relation-distill", "clm"]
    assert run_code(result.folder, monkeypatch)["model"].config.rope_parameters["rope_type"] == "linear"


def test_an_interrupted_run_goes_on_to_the_same_result(folder, done, monkeypatch):
    whole = done()
    step, calls, stop_at = module.RopeSFTTrainer.training_step, [], [2, 6]

    def stopping(self, *args, **kwargs):
        calls.append(self.args.max_steps)
        if len(calls) in stop_at:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(module.RopeSFTTrainer, "training_step", stopping)
    for _ in stop_at:  # within the first stage, then within the second
        with pytest.raises(KeyboardInterrupt):
            run(folder, "parts")
    restored = run(folder, "parts")
    assert calls == [3, 3, 3, 3, 2, 2, 2], "no step that was saved is done again"
    assert torch.equal(logits(restored.folder), logits(whole.folder))
    seconds = json.loads((folder / "parts" / "seconds.json").read_text())
    assert seconds == {"distil": restored.distil.seconds, "extend": restored.extend.seconds}, "of all parts of a stage"
    assert restored.distil.loss == whole.distil.loss and restored.extend.tokens == whole.extend.tokens
    calls.clear()
    assert run(folder, "parts") == restored and not calls


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
def test_a_run_that_was_killed_while_it_saved_goes_on(is_there, folder, done, monkeypatch):
    """Of what a killed process has begun to write nothing is taken for whole, and nothing is left."""
    whole = done(skip_extension=True)
    with monkeypatch.context() as patch:
        patch.setattr(module.RopeSFTTrainer, "_save_rng_state", stop)  # behind the weights, before the trainer's state
        with pytest.raises(KeyboardInterrupt):
            run(folder, "parts", skip_extension=True)
    assert (folder / "parts/distil/checkpoint-1/adapter_model.safetensors").is_file()
    if is_there:  # of the user, e.g. the mount of a larger disk
        (folder / "parts/model").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "widen_tokenizer", stop)
        patch.setattr(writing.shutil, "rmtree", lambda *_, **__: None)  # a process that is killed removes nothing
        with pytest.raises(KeyboardInterrupt):
            run(folder, "parts", skip_extension=True)
    (left,) = (folder / "parts").rglob(".model-unfinished-*")
    assert (left / "model/config.json").is_file() and not (folder / "parts/model/config.json").exists()
    restored = run(folder, "parts", skip_extension=True)
    assert torch.equal(logits(restored.folder), logits(whole.folder))
    assert sorted(os.listdir(restored.folder)) == sorted(os.listdir(whole.folder))
    assert sorted(os.listdir(folder / "parts")) == sorted(os.listdir(whole.folder.parent))


def stop(*_):
    raise KeyboardInterrupt


OF_A_RANK = """
import os, shutil, sys
from pathlib import Path

import test_restoration
from transformers import PreTrainedModel

rank, folder, write = os.environ["RANK"], Path(sys.argv[1]), Path.write_text
changed = []


def telling(what, change, *places):
    def tell_and_change(*args, **kwargs):
        paths = [Path(args[place]) for place in places]
        if all(path.is_relative_to(folder) for path in paths):
            changed.append(" ".join([what, *(str(path.relative_to(folder)) for path in paths)]))
        return change(*args, **kwargs)

    return tell_and_change


Path.write_text = telling("wrote", write, 0)
Path.rename = telling("renamed", Path.rename, 0, 1)
PreTrainedModel.save_pretrained = telling("saved", PreTrainedModel.save_pretrained, 1)
shutil.rmtree = telling("removed", shutil.rmtree, 0)
one = {"per_device_train_batch_size": 1, "ddp_find_unused_parameters": False}
stages = {name: {**options, **one} for name, options in test_restoration.STAGES.items()}
result = test_restoration.run(folder, "two", peft=False, **stages)
is_there = (result.folder / "model.safetensors").is_file()
write(folder / f"rank{rank}.txt", "\\n".join([f"{result.folder.name} {result.tokens} {is_there}", *changed]))
"""


@pytest.mark.slow
@needs_ranks
def test_two_ranks_restore_like_one_and_the_first_one_writes(folder):
    (folder / "rank.py").write_text(OF_A_RANK)
    killed = folder / "two/.model-unfinished-killed/model"
    killed.mkdir(parents=True)
    (killed / "config.json").write_text("{}")
    tests = Path(__file__).parents[2]
    paths = [tests.parent, tests.parent / "kernels", tests, Path(__file__).parent]
    done = run_ranks(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            "rank.py",
            str(folder),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = run(folder, "one", peft=False)
    first, second = ((folder / f"rank{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert first[0] == f"model {alone.tokens} True"
    assert second == first[:1], "the other one waits for the result, and writes, renames and removes nothing"
    files = {f"wrote two/{name}.json.new" for name in ("restore", "distil", "extend", "seconds")}
    assert files <= {re.sub(r"\.\d+\.new$", ".new", line) for line in first}, "each gets its name when it is whole"
    of_result = [line for line in first if "unfinished" in line or " two/model" in line]
    unfinished = of_result[1].split()[-1].removesuffix("/model")
    assert re.fullmatch(r"two/\.model-unfinished-\w+", unfinished) and not unfinished.endswith("killed")
    assert of_result[:2] == ["removed two/.model-unfinished-killed", f"saved {unfinished}/model"]
    assert of_result[-2:] == [f"renamed {unfinished}/model two/model", f"removed {unfinished}"]
    assert all(line.startswith(f"wrote {unfinished}/model/") for line in of_result[2:-2])
    assert sorted(os.listdir(folder / "two")) == sorted(os.listdir(folder / "one"))
    torch.testing.assert_close(logits(folder / "two" / "model"), logits(alone.folder), rtol=1e-4, atol=1e-4)


def test_stage_two_starts_from_stage_one(folder, done):
    alone = done(skip_extension=True)
    still = run(folder, "still", extend={**STAGES["extend"], "learning_rate": 0.0})
    assert alone.extend is None and not torch.equal(logits(alone.folder), logits(folder / "tiny"))
    torch.testing.assert_close(logits(still.folder), logits(alone.folder))


def test_another_run_in_the_folder_and_wrong_options_are_refused(folder):
    run(folder, skip_extension=True)
    with pytest.raises(ValueError, match="rescale_args: factor 4.0 there and 2.0 here. Use another"):
        run(folder, skip_extension=True, rescale_args={"factor": 2.0})
    with pytest.raises(
        ValueError, match="Unknown field 'max_stepps' of distil, .* RopeSFTConfig. Did you mean 'max_steps'"
    ):
        run(folder, "other", distil={"max_stepps": 4})
    with pytest.raises(ValueError, match="Unknown rescaling 'pii'. Did you mean 'pi'"):
        run(folder, "other", rescale="pii")
    with pytest.raises(ValueError, match="rescale_args must be a dict such as .*, got 'factor=4'"):
        run(folder, "other", rescale_args="factor=4")
    with pytest.raises(
        ValueError, match="model must be a hub id or the folder of a checkpoint, .*got LlamaForCausalLM"
    ):
        restore(tiny(), None, folder / "other", rescale="pi", rescale_args={"factor": 2.0})
    with pytest.raises(ValueError, match="no document has 5000 tokens"):
        run(folder, "other", extend={**STAGES["extend"], "max_length": 5000})
    assert not (folder / "other").exists()


def test_other_text_or_another_model_in_the_same_folder_is_refused(folder, monkeypatch):
    """A run that was done gave its old result at once, one that was stopped would have trained on both texts."""
    done = run(folder, skip_extension=True)
    with monkeypatch.context() as patch:
        patch.setattr(module.RopeSFTTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
        assert run(folder, skip_extension=True) == done
        patch.setattr(sys.modules[__name__], "DOCUMENTS", Dataset.from_list([{"text": TEXT + "More."}]))
        with pytest.raises(ValueError, match="settings: contents of the documents changed. Use another output_dir"):
            run(folder, skip_extension=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "tiny")
    model.model.norm.weight.data += 1
    model.save_pretrained(folder / "tiny")
    with pytest.raises(ValueError, match="the model in .*tiny is another .* model.safetensors changed. .* output_dir"):
        run(folder, skip_extension=True)


@pytest.mark.parametrize("asked", [{"revision": "dev"}, {}], ids=["dev", "none"])
@pytest.mark.parametrize("peft", [pytest.param(True, marks=pytest.mark.slow), False], ids=["lora", "qkv"])
def test_a_branch_is_the_commit_that_it_was_when_the_run_was_begun(peft, asked, folder, done, monkeypatch):
    whole = done(peft)
    hub = {"model": "owner/base", "model_init_kwargs": asked}
    branch = asked.get("revision", "main")
    use_cache(monkeypatch, folder / "hub")
    publish(folder / "hub", "owner/base", **{branch: written(folder), "later": written(folder, shift=1.0)})
    stop_behind_first_step(monkeypatch, lambda: run(folder, "parts", peft=peft, **hub))
    commit = move(folder / "hub", "owner/base", branch, to="later")
    assert json.loads((folder / "parts/restore.json").read_text())["model_commit"] == commit
    restored = run(folder, "parts", peft=peft, **hub)
    assert torch.equal(logits(restored.folder), logits(whole.folder)), "and not those of later"
    assert f"at revision `{commit}`, trained" in (restored.folder / "README.md").read_text()
    if peft:
        for stage in STAGES:
            adapter = json.loads((folder / "parts" / stage / "final/adapter_config.json").read_text())
            assert adapter["revision"] == commit
    with pytest.raises(ValueError, match=f"model_revision {asked.get('revision')!r} there and 'later' here. Use anot"):
        run(folder, "parts", peft=peft, model="owner/base", model_init_kwargs={"revision": "later"})


def written(folder, shift=0.0):
    """A function that writes the model of `folder`, with other weights, into the cache of the hub."""

    def write(to):
        shutil.copytree(folder / "tiny", to, dirs_exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(to)
        embedding = model.get_input_embeddings().weight
        embedding.data += shift * torch.randn(embedding.shape)
        model.save_pretrained(to)

    return write


def stop_behind_first_step(monkeypatch, begin):
    def stopping(self, *args, **kwargs):
        return stop() if self.state.global_step else step(self, *args, **kwargs)

    step = module.RopeSFTTrainer.training_step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.RopeSFTTrainer, "training_step", stopping)
        begin()


@pytest.mark.parametrize(
    ("options", "peft", "text"),
    [
        ({"distil": {"rescale": "ntk", "rescale_args": {"factor": 2.0}}}, True, "distil: rescale is for both stages"),
        ({"extend": {"rescale_args": {"factor": 2.0}}}, True, "extend: rescale_args is for both stages"),
        ({"distil": {"output_dir": "elsewhere"}}, True, "output_dir is for both stages, which restore makes below"),
        ({"distil": {"resume_from_checkpoint": "x"}}, True, "resume_from_checkpoint is for both stages, as the same"),
        ({"distil": [1]}, True, r"distil must be a dict of fields of RopeSFTConfig, got \[1\]"),
        ({"skip_extension": True, "extend": {"max_stepss": 1}}, True, "Unknown field 'max_stepss' of extend"),
        # the weights of stage 1 would teach
        ({"extend": {"objective": "native-distill"}}, False, "extend: objective 'native-distill' learns from the mod"),
        (
            {"extend": {"objective": "self-distill", "view": "skip", "objective_args": {"restore": {"every": 2}}}},
            False,
            "which would teach in its place: give peft_config",
        ),
        ({"extend": {"objective": "native-distill"}}, True, "extend: max_length must be within the window of 64"),
    ],
)
def test_what_both_stages_share_is_asked_before_the_first(options, peft, text, folder, monkeypatch):
    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    stages = {
        name: {**STAGES[name], **given} if isinstance(given := options.get(name, {}), dict) else given
        for name in STAGES
    }
    with pytest.raises(ValueError, match=text):
        config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if peft else None
        arguments = {"rescale": "pi", "rescale_args": {"factor": 4.0}, "peft_config": config, **options, **stages}
        restore(folder / "tiny", DOCUMENTS, folder / "out", **arguments)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_gpu_the_fields_for_a_cpu_are_named(stage, folder, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    stages = {name: {**STAGES[name], "use_cpu": name != stage, "bf16": name == stage} for name in STAGES}
    said = "no GPU that torch can see. use_cpu true and bf16 false, both in distil and in extend, train on the CPU"
    with pytest.raises(ValueError, match=said):
        restore(folder / "tiny", DOCUMENTS, folder / "out", rescale="pi", rescale_args={"factor": 4.0}, **stages)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("steps", "rows", "read"), [(3, 10, 10), (2, 10, 8), (4, 10, 14), (5, 10, 18), (6, 10, 20), (3, 12, 12), (1, 3, 3)]
)
def test_the_last_rows_of_an_epoch_count_as_they_are(steps, rows, read):
    config = RopeSFTConfig(
        output_dir="out", use_cpu=True, bf16=False, per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    assert module._rows_read(config, steps, rows) == read


def test_parts_of_a_model_are_not_exported(folder, monkeypatch):
    monkeypatch.setattr("trl_ext.recipes.restoration.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="use ZeRO-2, or a RopeSFTTrainer for each stage"):
        run(folder, "other")
    assert not (folder / "other").exists()

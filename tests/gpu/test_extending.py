"""`extend` on two GPUs, and by QLoRA on one and on two: what it trains is what one GPU trains."""

import json
import os
from importlib.util import find_spec

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.ranks import ROOT
from support.tiny import tiny
from transformers import AutoModelForCausalLM

from trl_ext import extend
from trl_ext.extension import measuring

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
TEXT = "It was a dark night. The wind blew! Who was there? "
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that extends a tiny model with some options, and gives its weights before and after."""
    folder = tmp_path_factory.mktemp("extend")
    torch.manual_seed(0)
    tiny(vocab_size=CHARACTERS, **SHAPE).save_pretrained(folder / "base")
    character_tokenizer().save_pretrained(folder / "base")
    lines = [json.dumps({"text": f"Book {k}. " + TEXT * 400}) for k in range(20)]
    (folder / "books.jsonl").write_text("\n".join(lines) + "\n")

    def weights(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()

    def train(name, **options):
        given = {"rows": 16, "rows_per_step": 4, "short": 0.0, "shares": {"text": 1.0}, "prompts": 2, **options}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "report", lambda results, folder, *_: folder / "report.html")
            folders = [str(ROOT), str(ROOT / "kernels")]
            patch.setenv("PYTHONPATH", os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]))
            done = extend(
                folder / "base", to=2048, data=folder / "books.jsonl", output=folder / name, lengths=(1000, 2000),
                learning_rate=1e-3, device=DEVICE, **given,
            )  # fmt: skip
        return weights(folder / "base"), weights(done.model)

    return train


@pytest.fixture(scope="module")
def on_one(trained):
    return trained("one")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_gpus_train_and_measure_like_one(engine, trained, on_one):
    before, expected = on_one
    _, made = trained(engine, devices=2, accelerate_config=engine)
    moved, apart = (sum((of[name] - expected[name]).abs().sum() for name in before) for of in (before, made))
    assert apart < moved / 4, "products in bfloat16 round, and Adam makes much of gradients near 0"


@needs_bitsandbytes
@pytest.mark.parametrize("options", [{}, {"devices": 2}, {"devices": 2, "accelerate_config": "fsdp2"}], ids=str)
def test_qlora_is_merged_into_the_weights_as_they_came(options, trained):
    before, made = trained("-".join(["qlora", *map(str, options.values())]), train="qlora", lora_rank=8, **options)
    changed = {name.split(".")[-2] for name in made if not torch.equal(made[name], before[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}

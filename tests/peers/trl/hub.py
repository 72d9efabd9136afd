"""Stand-ins for what TRL's tests load from the hub, in a folder from which names of the hub are paths.

Run: python -m peers.trl.hub CHECKOUT FOLDER, with tests/ on the path.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, set_seed

from . import language_models, vision_models
from .tokenizer import Vocabulary

ORGANIZATION = "trl-internal-testing"
TEST_SHARE = 0.1  # of a dataset: what TRL's scripts take


def build(checkout: Path, folder: Path) -> None:
    """Write datasets, tokenizers and tiny random models into `folder`, from the scripts of a checkout of TRL."""
    scripts = sorted((checkout / "scripts").glob("generate_*_dataset.py"))
    set_seed(0)
    build_datasets(scripts, folder)
    vocabulary = Vocabulary.trained_on(scripts)
    for name, (model, processor) in language_models.stand_ins(vocabulary).items():
        save(model, processor, folder / ORGANIZATION / name)
    model, tokenizer = language_models.with_own_code(vocabulary, checkout)
    save(model, tokenizer, folder / ORGANIZATION / "tiny-RemoteForCausalLM")
    vocabulary.tokenizer("qwen3").save_pretrained(folder / "Qwen/Qwen3-4B")
    for name, make in vision_models.STAND_INS.items():
        try:
            model, processor = make(vocabulary)
        except ImportError as error:  # torchvision, without which TRL's own trainer fails the same tests
            print(f"left out {name}: {error}")
            continue
        save(model, processor, folder / ORGANIZATION / name)


def build_datasets(scripts: list[Path], folder: Path) -> None:
    """Run TRL's scripts that upload its datasets, with the upload going to `folder`."""

    def push_to_hub(self: Dataset | DatasetDict, repo_id: str, config_name: str = "default", **_: object) -> None:
        self.save_to_disk(str(folder / repo_id / config_name))

    Dataset.push_to_hub = DatasetDict.push_to_hub = push_to_hub
    np.random.seed(0)  # images are noise
    for script in scripts:
        name = script.stem.removeprefix("generate_").removesuffix("_dataset").replace("_", "-")
        load_script(script).main(TEST_SHARE, True, f"{ORGANIZATION}/{name}")


def load_script(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(model: PreTrainedModel, processor: object, folder: Path) -> None:
    """Save in bfloat16, as TRL's are, with weights large enough that a few steps change every one of them."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    model.to(torch.bfloat16).save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))

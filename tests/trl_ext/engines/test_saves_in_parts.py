"""What engines that shard weights save is a plain checkpoint, or becomes one by a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.marks import needs_deepspeed, needs_ranks
from support.ranks import ADAPTERS, SELF, run_on_ranks
from support.tiny import tiny
from support.training import tokenizer
from transformers import AutoModelForCausalLM

from rope_patch import export, load_adapter
from trl_ext import cli

pytestmark = [pytest.mark.slow, needs_ranks]
ENGINES = [
    pytest.param("fsdp2", 1, id="fsdp2"),
    pytest.param("fsdp2", 2, id="ring"),
    pytest.param("zero3", 1, id="zero3", marks=needs_deepspeed),
]
YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
RUN = {**SELF, **YARN, "max_steps": 2, "save_strategy": "steps", "save_steps": 2, "saves": True}
KINDS = {"all": {}, "adapters": {"adapters": ADAPTERS}}
Weights = dict[str, torch.Tensor]


def trained(folder: Path, engine: str, shared: int) -> dict[str, dict[str, Weights]]:
    """Weights in memory after training on two ranks, by how they are saved, "gathered" or "in-parts", and by kind.

    Each run is in the folder of these two names, with a checkpoint of its last step.
    """
    tiny().save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    cases = {
        f"{way}/{kind}": {
            **RUN,
            **options,
            "in_parts": way == "in-parts",
            "model": str(folder / "base"),
            "output_dir": str(folder / way / kind),
        }
        for way in ("gathered", "in-parts")
        for kind, options in KINDS.items()
    }
    results = run_on_ranks(folder, cases, 2, engine, shared)
    return {way: {kind: results[f"{way}/{kind}"]["weights"] for kind in KINDS} for way in ("gathered", "in-parts")}


def require_saved(folders: dict[str, Path], weights: dict[str, Weights], base: Path) -> None:
    """Fail unless the checkpoints in `folders`, by kind, load and export to the weights that were in memory."""
    loaded = AutoModelForCausalLM.from_pretrained(folders["all"])
    assert loaded.config.rope_parameters["rope_type"] == "yarn"
    require_equal(dict(loaded.named_parameters()), weights["all"])
    adapted = load_adapter(AutoModelForCausalLM.from_pretrained(base), folders["adapters"])
    of_adapters = {name: weight for name, weight in weights["adapters"].items() if "lora_" in name}
    assert len(of_adapters) == 2 * len(ADAPTERS["target_modules"]) * loaded.config.num_hidden_layers
    require_equal(dict(adapted.named_parameters()), of_adapters)
    for kind, model in {"all": loaded, "adapters": adapted.merge_and_unload()}.items():
        out = folders[kind] / "exported"
        export(folders[kind], out, check=False)
        exported = AutoModelForCausalLM.from_pretrained(out)
        assert exported.config.rope_parameters["rope_type"] == "yarn"
        for name, weight in model.named_parameters():
            torch.testing.assert_close(exported.get_parameter(name), weight, rtol=0, atol=1e-6, msg=name)


def require_equal(actual: dict[str, torch.nn.Parameter], expected: Weights) -> None:
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


@pytest.mark.parametrize(("engine", "shared"), ENGINES)
def test_what_ranks_save_loads_as_a_plain_checkpoint(tmp_path, capsys, engine, shared):
    """At the end, and on the way; of what is in parts after the command that `rope-patch export` names."""
    weights = trained(tmp_path, engine, shared)
    in_parts = {tmp_path / "in-parts" / kind / "checkpoint-2" for kind in KINDS}
    if engine == "zero3":  # DeepSpeed gathers weights of adapters always, and others where its config says so
        in_parts = {tmp_path / "in-parts/all", tmp_path / "in-parts/all/checkpoint-2"}
    for folder in in_parts:
        make_plain(folder, capsys)
    for way in weights:
        for step in ("checkpoint-2", "."):
            folders = {kind: tmp_path / way / kind / step for kind in KINDS}
            require_saved(folders, weights[way], tmp_path / "base")


def make_plain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run what `rope-patch export` says of a checkpoint in parts."""
    capsys.readouterr()
    assert cli.main(["export", str(folder), "--output", str(folder.parent / "unwritten")]) == 2
    said = capsys.readouterr().err
    assert "in parts" in said and said.count("\n") == 1
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(said.split("`")[1], shell=True, check=True, env={**os.environ, "PATH": path})

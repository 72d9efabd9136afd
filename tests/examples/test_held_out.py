"""What the script holds out does not depend on what was drawn before: on ranks, and when a run goes on."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "sft.py"


class Stop(Exception):
    """Once the data are made."""


def held_out(tmp_path, monkeypatch, state, *arguments):
    spec = importlib.util.spec_from_file_location("sft_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    seen = []

    def take(eval_dataset, **kwargs):
        seen.extend(eval_dataset["text"])
        raise Stop

    monkeypatch.setattr(script, "RopeSFTTrainer", take)
    monkeypatch.setattr("sys.argv", ["sft.py", "--config", str(tmp_path / "recipe.yaml"), *arguments])
    np.random.seed(state)  # the generator that `datasets` splits with
    with pytest.raises(Stop):
        script.main()
    return seen


def test_the_same_documents_are_held_out_whatever_was_drawn_before(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("\n".join(f"line {i}" for i in range(40)))
    (tmp_path / "recipe.yaml").write_text(
        "model_name_or_path: nowhere\nmax_steps: 1\nbf16: false\nuse_cpu: true\neval_strategy: steps\neval_steps: 1\n"
        f"test_split_size: 0.25\noutput_dir: {tmp_path / 'run'}\n"
        f"datasets:\n- path: text\n  data_files: {{train: {tmp_path / 'text.txt'}}}\n"
    )
    first = held_out(tmp_path, monkeypatch, 1)
    assert len(first) == 10
    assert held_out(tmp_path, monkeypatch, 2) == first
    assert held_out(tmp_path, monkeypatch, 2, "--seed", "7") != first

"""Methods of the extension are settings of the trainer, and each is trained, measured and tabulated."""

import json

import extension
import numpy as np
import pytest
import result_lines
import token_text
from support.characters import character_tokenizer
from support.tiny import tiny

from trl_ext import RopeSFTConfig


def test_methods_of_the_extension_are_settings_of_the_trainer(tmp_path):
    for target in (32768, 65536):
        for name, method in extension.every_method(8192, target, 9).items():
            if method.fields is not None:
                RopeSFTConfig(
                    output_dir=str(tmp_path), max_length=method.row, bf16=False, use_cpu=True, **method.fields
                )
            assert method.read == (target if name == "full length" else 8192)
    assert extension.methods(8192, 65536, 9)["endprompt"].row == 8192 - 9


@pytest.mark.slow
def test_every_method_of_the_extension_is_trained_and_measured(tmp_path, monkeypatch):
    tokenizer = character_tokenizer()
    for saved in (tiny(vocab_size=len(tokenizer), max_position_embeddings=1024), tokenizer):
        saved.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(32, 127, 9000), 2).astype(token_text.DTYPE) for _ in range(3)]
    for split in ("train", "val"):
        token_text.write_parts(tmp_path, split, documents, 10**6, None)
    (tmp_path / "tokens.json").write_text(json.dumps({"separator": 2, "vocabulary": len(tokenizer)}))
    sizes = "--window 1024 --targets 2048 --schedules pi --seeds 0 --tokens 8192 --step-tokens 2048 --at-once 2048"
    measured = "--val-rows 2 --val-length 2048 --lengths 1024 2048 --learning-rate 1e-3"
    options = ["--override", '{"warmup_steps": 0}', "--out", str(tmp_path / "out.jsonl")]
    combinations = list(extension.combinations(1024, 2048))
    for last in ([], ["--arms", *combinations], ["--cost", "1", "--arms", "endprompt", "full length"]):
        command = [
            "extension",
            str(tmp_path / "model"),
            str(tmp_path),
            *sizes.split(),
            *measured.split(),
            *options,
            *last,
        ]
        monkeypatch.setattr("sys.argv", command)
        extension.main()
    runs = result_lines.read_lines(tmp_path / "out.jsonl")
    methods = [*extension.methods(1024, 2048, 9), *combinations]
    here = [r for r in runs if r["kind"] == "quality" and r["schedule"] == "pi"]
    assert [r["method"] for r in here] == methods
    curves = {r["method"]: json.dumps(r["loss_by_position"]) for r in here}
    assert len(set(curves.values())) == len(methods), curves
    assert {r["method"] for r in runs if r["kind"] == "cost"} == {"endprompt", "full length"}
    assert all(set(r["teacher_forced"]["multikey"]) == {"1024", "2048"} for r in here)
    assert "2048 by pi" in extension.summary(runs)
    assert "| passkey teacher-forced 2048 | multikey teacher-forced 1024 |" in extension.summary(runs)
    files = extension.plot(runs, tmp_path / "figure.png", 1024)
    assert all(file.stat().st_size > 10_000 for file in files)


def test_what_the_native_model_was_not_asked_at_is_a_dash():
    """It is measured once, and the next targets may be farther away."""
    shared = {"kind": "quality", "gpu": None, "seed": 0, "learning_rate": None, "short": None, "short_mean": None}
    shared["loss_by_position"] = [{"first": 64, "end": 2048, "loss": 3.0}]

    def line(method, schedule, lengths):
        shares = dict.fromkeys(lengths, 1.0)
        figures = {"passkey": shares, "teacher_forced": {"passkey": shares, "multikey": shares}}
        return {**shared, "method": method, "schedule": schedule, "target": 2048, "tokens": 0, **figures}

    table = extension.summary([line("native", None, ["1024"]), line("none", "pi", ["1024", "2048"])])
    assert "| native | 0.0 | - | 1 | 3.000 | 1.00 | - | 1.00 | - | 1.00 | - | - | - |" in table

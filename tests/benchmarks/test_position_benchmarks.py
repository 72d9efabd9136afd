"""What the benchmarks of position methods rest on: token files, rows, slices of time, and what they print."""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.characters import character_tokenizer
from support.tiny import tiny

from trl_ext import RopeSFTConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import extension
import posaug_from_scratch as scratch
import result_lines
import token_text

VOCABULARY = 50


@pytest.fixture
def tokens(tmp_path):
    """A folder of token files: documents of 700, 701, ... tokens in several parts."""
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(1, VOCABULARY, 700 + k), 0).astype(token_text.DTYPE) for k in range(6)]
    token_text.write_parts(tmp_path, "train", documents, 1500, 4000)
    token_text.write_parts(tmp_path, "val", documents[:3], 1500, None)
    (tmp_path / "tokens.json").write_text(json.dumps({"separator": 0, "vocabulary": VOCABULARY}))
    return tmp_path, documents


def test_token_files_give_back_their_documents(tokens):
    folder, documents = tokens
    assert len(list(folder.glob("train-*.u16.xz"))) == 2
    np.testing.assert_array_equal(token_text.read_stream(folder, "train"), np.concatenate(documents)[:4000])
    for found, written in zip(token_text.read_documents(folder, "val"), documents, strict=False):
        np.testing.assert_array_equal(found, written[:-1])
    assert [len(d) for d in token_text.read_documents(folder, "train")][-2:] == [
        704,
        4000 - 705 - 704 - 703 - 702 - 701,
    ]


def test_first_rows_are_of_documents_long_enough(tokens):
    folder, documents = tokens
    rows = token_text.first_rows(folder, "val", 701, 2)
    np.testing.assert_array_equal(rows, [documents[1][:701], documents[2][:701]])
    with pytest.raises(ValueError, match="2 documents of 701 tokens"):
        token_text.first_rows(folder, "val", 701, 3)


def test_rows_hold_each_token_once_an_epoch():
    stream = torch.arange(1000, dtype=torch.int16)
    rows = scratch.Rows(stream, 32, seed=0)
    epochs = [rows.of(k * rows.a_epoch, rows.a_epoch) for k in range(2)]
    for epoch in epochs:
        assert epoch.shape == (30, 33) and epoch[:, :-1].unique().numel() == 30 * 32
        assert torch.equal(epoch[:, 1:], epoch[:, :-1] + 1)
    assert not torch.equal(*epochs)
    across = scratch.Rows(stream, 32, seed=0).of(28, 4)
    assert torch.equal(across, torch.cat([epochs[0][28:], epochs[1][:2]]))
    assert not torch.equal(scratch.Rows(stream, 32, seed=1).of(0, 30), epochs[0])


def test_rows_read_ids_beyond_15_bits():
    ids = np.array([1, 40000, 65535, 2] * 3, dtype=token_text.DTYPE)
    rows = scratch.Rows(torch.from_numpy(ids.view("<i2").copy()), 4, seed=0)
    assert set(rows.of(0, 1).flatten().tolist()) == {1, 40000, 65535, 2}


def settings(**changes):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "head_dim": 8}
    given = {"tokens": 4 * 96 * 4, "batch": 4, "micro_batch": 2, "window": 96, "state": None, "eager": True}
    given |= {"log_steps": 1, "override": shape, "val_rows": (7 * torch.arange(400) % VOCABULARY).view(2, 200)}
    return argparse.Namespace(**given | changes)


class After(result_lines.Deadline):
    """Time is up after some steps."""

    def __init__(self, steps):
        self.steps = steps

    def leaves(self, seconds):
        self.steps -= 1
        return self.steps >= 0


@pytest.mark.parametrize("arm", ["baseline", "step 1/16..16", "independent"])
def test_a_run_that_was_cut_off_goes_on_as_if_it_was_not(arm, tmp_path):
    stream = torch.randint(1, VOCABULARY, (2000,), dtype=torch.int16)
    whole = scratch.Run(arm, 42, settings(), stream, VOCABULARY)
    assert whole.train(result_lines.Deadline(None))
    first = scratch.Run(arm, 42, settings(state=tmp_path), stream, VOCABULARY)
    assert not first.train(After(3))
    second = scratch.Run(arm, 42, settings(state=tmp_path), stream, VOCABULARY)
    assert second.step == 3 and second.train(result_lines.Deadline(None))
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.log == whole.log
    assert second.finish()["cliff"] == whole.finish()["cliff"] and not list(tmp_path.iterdir())


def test_arms_of_a_seed_differ_in_their_views_alone():
    stream = torch.randint(1, VOCABULARY, (2000,), dtype=torch.int16)
    begin, end = {}, {}
    for arm in scratch.arms(96):
        run = scratch.Run(arm, 42, settings(tokens=4 * 96 * 3), stream, VOCABULARY)
        begin[arm] = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
        assert run.train(result_lines.Deadline(None))
        end[arm] = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    for arm in set(begin) - {"baseline"}:
        assert torch.equal(begin[arm], begin["baseline"])
    for one, other in itertools.combinations(end, 2):
        assert not torch.equal(end[one], end[other]), (one, other)


def test_the_summary_says_which_orderings_hold():
    def line(arm, seed, in_window, cliff):
        told = {"arm": arm, "seed": seed, "in_window": in_window, "cliff": cliff, "gain": -cliff, "window": 32}
        told |= {"parameters": 1, "tokens": 1, "epochs": 1.0, "spans": [1, 64], "gpu": "none", "peak_gib": 0.0}
        return told | {"tokens_per_second": None}

    lines = [line("baseline", s, 4.0, 2.0) for s in (1, 2)]
    lines += [line("uniform", 1, 4.04, 0.1), line("uniform", 2, 4.2, 0.4), line("rpe", 1, 4.4, 0.1)]
    text = scratch.summary(lines)
    assert "| uniform | 2 | 4.120 ± 0.080 | 3.00 ± 2.00 | 0.250 ± 0.150 |" in text
    for row in (
        "cliff: uniform < baseline | 1.07 < 2.28 | 2 of 2 seeds",
        "penalty: uniform < rpe | 1.4 % < 14.3 % | 1 of 1 seeds",
        "cliff: top < bottom | 1.50 < 2.36 | not run",
        "cliff of uniform at most a tenth of the baseline's | 0.060 and 1.915 | 1 of 2 seeds",
        "penalty of uniform at most 2 % | 1.8 % | 1 of 2 seeds",
    ):
        assert f"| {row} |" in text


def test_parts_share_all_runs():
    runs = list(range(7))
    assert sorted(sum((result_lines.share(runs, f"{k}/3") for k in range(3)), [])) == runs
    for wrong in ("3/3", "1", "-1/2", "a/b"):
        with pytest.raises(ValueError, match="--part must be K/N"):
            result_lines.share(runs, wrong)


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
    told = ["--override", '{"warmup_steps": 0}', "--out", str(tmp_path / "out.jsonl")]
    combinations = list(extension.combinations(1024, 2048))
    for last in ([], ["--methods", *combinations], ["--cost", "1", "--methods", "endprompt", "full length"]):
        command = ["extension", str(tmp_path / "model"), str(tmp_path), *sizes.split(), *measured.split(), *told, *last]
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
    files = extension.plot(runs, 1024, tmp_path / "figure.png")
    assert all(file.stat().st_size > 10_000 for file in files)


def test_what_the_native_model_was_not_asked_at_is_a_dash():
    """It is measured once, and the next targets may be farther away."""
    shared = {"kind": "quality", "gpu": None, "seed": 0, "learning_rate": None, "short": None, "short_mean": None}
    shared["loss_by_position"] = [{"first": 64, "end": 2048, "loss": 3.0}]

    def line(method, schedule, lengths):
        shares = dict.fromkeys(lengths, 1.0)
        asked = {"passkey": shares, "teacher_forced": {"passkey": shares, "multikey": shares}}
        return {**shared, "method": method, "schedule": schedule, "target": 2048, "tokens": 0, **asked}

    table = extension.summary([line("native", None, ["1024"]), line("none", "pi", ["1024", "2048"])])
    assert "| native | 0.0 | - | 1 | 3.000 | 1.00 | - | 1.00 | - | 1.00 | - | - | - |" in table

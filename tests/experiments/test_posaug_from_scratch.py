"""PosAug from scratch: rows, runs that go on, arms that differ in their views alone, and what is printed."""

import argparse
import itertools
import json

import numpy as np
import posaug_from_scratch as scratch
import pytest
import result_lines
import token_text
import torch

VOCABULARY = 50


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
    values = {"tokens": 4 * 96 * 4, "batch": 4, "micro_batch": 2, "window": 96, "state": None, "eager": True}
    values |= {"log_steps": 1, "override": shape, "val_rows": (7 * torch.arange(400) % VOCABULARY).view(2, 200)}
    return argparse.Namespace(**values | changes)


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
    whole = scratch.Training(arm, 42, settings(), stream, VOCABULARY)
    assert whole.train(result_lines.Deadline(None))
    first = scratch.Training(arm, 42, settings(state=tmp_path), stream, VOCABULARY)
    assert not first.train(After(3))
    second = scratch.Training(arm, 42, settings(state=tmp_path), stream, VOCABULARY)
    assert second.step == 3 and second.train(result_lines.Deadline(None))
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.log == whole.log
    assert second.finish()["cliff"] == whole.finish()["cliff"] and not list(tmp_path.iterdir())


def test_arms_of_a_seed_differ_in_their_views_alone():
    stream = torch.randint(1, VOCABULARY, (2000,), dtype=torch.int16)
    begin, end = {}, {}
    for arm in scratch.arms(96):
        run = scratch.Training(arm, 42, settings(tokens=4 * 96 * 3), stream, VOCABULARY)
        begin[arm] = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
        assert run.train(result_lines.Deadline(None))
        end[arm] = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    for arm in set(begin) - {"baseline"}:
        assert torch.equal(begin[arm], begin["baseline"])
    for first, second in itertools.combinations(end, 2):
        assert not torch.equal(end[first], end[second]), (first, second)


def test_the_summary_says_which_orderings_hold():
    def line(arm, seed, in_window, cliff):
        entry = {"arm": arm, "seed": seed, "in_window": in_window, "cliff": cliff, "gain": -cliff, "window": 32}
        entry |= {"parameters": 1, "tokens": 1, "epochs": 1.0, "spans": [1, 64], "gpu": "none", "peak_gib": 0.0}
        return entry | {"tokens_per_second": None}

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


def test_runs_are_done_once_and_tabled(tmp_path, monkeypatch, capsys):
    documents = [np.append(np.arange(700) % 40 + 1 + k, 0).astype(token_text.DTYPE) for k in range(4)]
    for split in ("train", "val"):
        token_text.write_parts(tmp_path, split, documents, 10**6, None)
    (tmp_path / "tokens.json").write_text(json.dumps({"separator": 0, "vocabulary": VOCABULARY}))
    out, shape = tmp_path / "out.jsonl", json.dumps(settings().override)
    sizes = "--window 96 --batch 4 --micro-batch 2 --tokens 768 --length 200 --spans 2 --eager --seeds 1".split()
    command = [
        "scratch",
        str(tmp_path),
        *sizes,
        "--override",
        shape,
        "--arms",
        "baseline",
        "uniform",
        "--out",
        str(out),
    ]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", command)
        scratch.main()
    lines = result_lines.read_lines(out)
    assert [(line["arm"], line["seed"], line["tokens"]) for line in lines] == [
        ("baseline", 1, 768),
        ("uniform", 1, 768),
    ]
    assert lines[1]["view"] == ["posaug", {}] and {"seconds", "gpu", "versions", "cliff"} <= lines[1].keys()
    monkeypatch.setattr("sys.argv", ["scratch", "--table", str(out)])
    capsys.readouterr()
    scratch.main()
    assert "| uniform | 1 |" in capsys.readouterr().out

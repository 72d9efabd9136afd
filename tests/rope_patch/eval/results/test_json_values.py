"""Figures that are no numbers: what is written is JSON, and comes back as it was."""

import json
import math

import pytest
import torch

from rope_patch.eval import (
    AnswerPositionAccuracy,
    ContextGain,
    EntropyRatio,
    LossByPosition,
    ShortText,
    ViewKL,
    write_report,
)
from rope_patch.eval.results.json_values import holds_floats, json_values
from rope_patch.model_card import EvalFigures


def refused(name):
    raise AssertionError(f"{name} is not JSON")


def strictly_read(text):
    return json.loads(text, parse_constant=refused)


def curve(broken_from=None):
    loss = torch.full((2048,), 2.0, dtype=torch.float64)
    loss[0] = torch.nan
    if broken_from is not None:
        loss[broken_from:] = torch.nan
    blocks = torch.cat([torch.zeros(1, dtype=torch.float64), loss[1:]]).unflatten(0, (-1, 64)).mean(-1)
    return LossByPosition(loss, 1, 1024, (tuple(blocks.tolist()),), "same")


def equal(one, other):
    """Whether both are alike, NaN being like NaN and infinity: JSON has one null for them."""
    return json_values(one) == json_values(other)


@pytest.mark.parametrize(
    "result",
    [
        ContextGain("exact", 512, [512, 600, 700], [0.5, math.nan], math.nan, 1, math.nan),
        EntropyRatio(64, math.nan, math.inf, 0.5, math.nan, [1.0, math.nan], 1),
        ShortText({"piqa": math.nan}, {"piqa": {"acc": math.nan}}, {"piqa": 2}, {"piqa": [math.nan, 1.0]}),
        ViewKL("reverse", 64, 32, [0, 8], [0.0, math.nan], 1),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_come_back_from_json_that_strict_parsers_read(result):
    read = type(result).from_dict(strictly_read(json.dumps(result.to_dict())))
    assert equal(vars(read), vars(result))
    assert "None" not in str(vars(read)), "where there can only be a number it is NaN again, which counts on"


def test_what_may_be_unknown_stays_so():
    curve = {"kind": "single", "length": 400, "accuracy": [None], "count": [0], "mid_third_gap": None}
    assert AnswerPositionAccuracy.from_dict(AnswerPositionAccuracy([curve]).to_dict()).curves == [curve]
    assert holds_floats(dict[str, list[float]]) and not holds_floats(list[float | None]) and not holds_floats(int)


def test_a_curve_comes_back_with_the_positions_that_are_no_number():
    broken = curve(broken_from=1500)
    read = LossByPosition.from_dict(strictly_read(json.dumps(broken.to_dict())))
    torch.testing.assert_close(read.loss, broken.loss, equal_nan=True)
    assert equal(read.blocks, broken.blocks) and read.blocks[0][0] == broken.blocks[0][0]
    assert math.isnan(read.cliff()) and read.in_window() == 2.0


def test_a_report_of_a_model_that_computes_nan_is_json(tmp_path):
    results = {"cliff": {"native": curve(), "broken": curve(broken_from=1500)}}
    write_report(results, tmp_path, title="t", settings={}, window=1024)
    stored = strictly_read((tmp_path / "results.json").read_text())
    lost = next(cell for cell in stored["regressions"]["cells"] if cell["name"] == "loss 1280..2047")
    assert lost["outcome"] == "below" and lost["mean"] is lost["low"] is lost["difference"] is None
    read = LossByPosition.from_dict(stored["results"]["cliff"]["broken"])
    torch.testing.assert_close(read.loss, results["cliff"]["broken"].loss, equal_nan=True)
    figures = EvalFigures.read(tmp_path, None)
    (cliff,) = (values for name, values in figures.rows if "rise" in name)
    assert cliff[0] == 0.0 and math.isnan(cliff[1]), "and not unknown"
    (penalty,) = (values for name, values in figures.rows if "penalty" in name)
    assert penalty[0] is None, "the first model has none"

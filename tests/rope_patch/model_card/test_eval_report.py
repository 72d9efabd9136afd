"""Figures come from the report that was named, or from one that measured this checkpoint."""

import json

import pytest

from rope_patch.model_card import EvalFigures

SUMMARY = [
    {"figure": "cliff", "values": {"native": 3.25, "mine": 0.125}},
    {"figure": "recovery ratio, short text (%)", "values": {"mine": 98.5}},
]


def stored(folder, **more):
    folder.mkdir(parents=True)
    settings = {"text": "/home/somebody/books.jsonl", "prompts": "20 of each length", "dtype": "bfloat16", "seed": 0}
    settings |= more
    (folder / "results.json").write_text(json.dumps({"settings": settings, "summary": SUMMARY}))
    return folder


def test_figures_of_all_models_are_read(tmp_path):
    figures = EvalFigures.read(stored(tmp_path / "report"), None)
    assert figures.labels == ("native", "mine") and figures.own is None
    assert figures.rows[0] == ("cliff", (3.25, 0.125))
    assert figures.rows[1] == ("recovery ratio, short text (%)", (None, 98.5))
    assert figures.conditions == (("prompts", "20 of each length"), ("dtype", "bfloat16"))  # and no path
    assert EvalFigures.read(tmp_path / "report" / "results.json", None) == figures


def test_the_label_of_the_checkpoint_is_known_by_its_folder(tmp_path):
    (tmp_path / "model").mkdir()
    report = stored(tmp_path / "report", **{"model native": "native=base", "model mine": f"mine={tmp_path / 'model'}"})
    assert EvalFigures.read(report, tmp_path / "model").own == "mine"
    assert EvalFigures.read(report, tmp_path / "other").own is None
    summary = {"summary": [{"figure": "loss", "values": {"ours#1": 3.0, "ours#2": 2.0}}]}
    settings = {"model ours#1": "ours=elsewhere", "model ours#2": f"ours={tmp_path / 'model'}"}
    (report / "results.json").write_text(json.dumps({"settings": settings, **summary}))
    assert EvalFigures.read(report, tmp_path / "model").own == "ours#2"


def test_a_report_beside_the_checkpoint_counts_if_it_measured_it(tmp_path):
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    stored(tmp_path / "rope-patch-report", **{"model mine": str(tmp_path / "model")})
    assert EvalFigures.beside(tmp_path / "model").own == "mine"
    assert EvalFigures.beside(tmp_path / "other") is None
    stored(tmp_path / "other" / "rope-patch-report")
    assert EvalFigures.beside(tmp_path / "other").own is None  # inside it, a report is about it


def test_what_is_no_report_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no .*results.json. Name the folder"):
        EvalFigures.read(tmp_path, None)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="is not what `rope-patch eval` writes"):
        EvalFigures.read(tmp_path, None)

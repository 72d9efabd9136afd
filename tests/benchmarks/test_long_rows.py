"""The benchmark of long rows on a CPU: it writes the lines that it writes on a GPU, of a tiny model."""

import json
import sys
from dataclasses import replace

import long_rows
import pytest


@pytest.mark.slow
def test_every_case_writes_a_line(tmp_path, monkeypatch):
    out = tmp_path / "long_rows.jsonl"
    cases = ["clm:65536", "clm:65536:on", "self-distill:131072:on", "trl:65536"]
    arguments = ["long_rows.py", "--shape", "tiny", "--layers", "1", "--out", str(out), "--cases", *cases]
    monkeypatch.setattr(sys, "argv", arguments)
    long_rows.main()
    facts, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert facts["layers"] == 1
    assert [line["case"] for line in lines] == cases
    for line in lines:
        assert line["tokens_per_second"] == pytest.approx(line["length"] / long_rows.TINY / line["seconds"])


def test_a_case_that_fails_writes_why_and_the_others_go_on(tmp_path, monkeypatch):
    args = long_rows.argparse.Namespace(shape="tiny", layers=None, steps=1, until=1e12, out=tmp_path / "lines.jsonl")

    def run(case, args):
        if case.method == "clm":
            raise long_rows.torch.OutOfMemoryError("no room. And more")
        return {"tflops": 1.0}

    monkeypatch.setattr(long_rows, "run", run)
    long_rows.worker([long_rows.Case.of("clm:65536"), long_rows.Case.of("trl:65536")], args)
    first, second = [json.loads(line) for line in args.out.read_text().splitlines()]
    assert first["out_of_memory"] == "no room" and second["tflops"] == 1.0


@pytest.mark.parametrize("text", ["clm", "other:64", "clm:64:off", "trl:64:on"])
def test_other_cases_are_refused(text):
    with pytest.raises(long_rows.argparse.ArgumentTypeError, match=text):
        long_rows.Case.of(text)


@pytest.mark.parametrize(("long_rows_on", "checkpoints"), [("", 1), (":on", 0)], ids=["device", "host"])
def test_what_the_layers_that_are_left_out_would_add_is_written(tmp_path, long_rows_on, checkpoints):
    args = long_rows.argparse.Namespace(shape="tiny", layers=1, lora=4, steps=1)
    config, case = long_rows.config_of(args), long_rows.Case.of(f"clm:64{long_rows_on}")
    trainer = long_rows.make_trainer(case, 64, args, long_rows.build(config), str(tmp_path), long_rows.Watch())
    plan = replace(trainer.memory_plan, offloaded_layers=1 - checkpoints)  # a CPU's plan offloads none
    line = long_rows.memory(trainer.model, config, plan, 64)
    projections = 2 * 64 * 64 + 2 * 64 * 32  # q and o, k and v
    adapters = 4 * (128 + 96 + 96)  # rank times input and output features of q, k and v
    weights = 4 * (projections + adapters + 3 * 64 * 128 + 2 * 64)  # with the MLP and two norms, in float32
    added = weights + checkpoints * 4 * 64 * 64  # the input of a layer: 64 tokens of 64 features
    assert line["peak_gib_with_2_layers"] - line["peak_gib"] == pytest.approx(added / 2**30)

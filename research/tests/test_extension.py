"""Methods of the extension are settings of the trainer, and each is trained, measured and tabulated."""

import json

import numpy as np
import pytest
from support.characters import beginning_tokenizer, character_tokenizer
from support.tiny import tiny

import extension
import extension_arms
import keeping_questions
import result_lines
import token_text
from trl_ext import RopeSFTConfig
from trl_ext.config import LONG_DOCUMENTS

CUES = {"sentence": 9, "word": 2, "end-of-turn": 1}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Runs the study on a tiny model of characters, and gives the lines of a file."""
    tokenizer = character_tokenizer()
    for saved in (tiny(vocab_size=len(tokenizer), max_position_embeddings=1024), tokenizer):
        saved.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(32, 127, 9000), 2).astype(token_text.DTYPES["u16"]) for _ in range(3)]
    for split in ("train", "val"):
        token_text.write_parts(tmp_path, split, documents, 10**6, None)
    (tmp_path / "tokens.json").write_text(json.dumps({"separator": 2, "vocabulary": len(tokenizer)}))
    sizes = "--window 1024 --targets 2048 --schedules pi --tokens 8192 --step-tokens 2048 --at-once 2048"
    measured = "--val-rows 2 --val-length 2048 --lengths 1024 2048 --learning-rate 1e-3"
    options = [*sizes.split(), *measured.split(), "--override", '{"warmup_steps": 0}']

    def study(out, *more):
        command = ["extension", str(tmp_path / "model"), str(tmp_path), *options, "--out", str(tmp_path / out), *more]
        monkeypatch.setattr("sys.argv", command)
        extension.main()
        return result_lines.read_lines(tmp_path / out)

    study.folder = tmp_path
    return study


def test_all_that_is_read_begins_as_the_tokenizer_begins_a_text(study, monkeypatch):
    begin, kept = [1], []
    beginning_tokenizer().save_pretrained(study.folder / "model")
    monkeypatch.setattr(extension, "carry_out", lambda runs, args, shown: kept.append(args))
    study("out.jsonl", "--prompts", "8", "--choosing-rows", "1")
    (args,) = kept
    rows = [*args.rows(1024)["input_ids"], *args.val_rows.tolist(), *args.choosing.tolist()]
    asked = [question.shared for questions in args.asked.values() for question in questions]
    exams = [exam.ids for by_length in args.needles.values() for exams in by_length.values() for exam in exams]
    assert len(args.rows(1024)) == 3 * (9000 // 1023) and {len(ids) for ids in rows} == {1024, 2048}
    assert asked and exams and all(ids[:1] == begin and 1 not in ids[1:] for ids in (*rows, *asked, *exams))


def test_methods_of_the_extension_are_settings_of_the_trainer(tmp_path):
    for target in (32768, 65536):
        for name, method in extension_arms.every_method(8192, target, CUES).items():
            if method.fields is not None:
                options = {**LONG_DOCUMENTS, "max_length": method.row, **method.fields}
                RopeSFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, **options)
            assert method.read == (target if name == "full length" else 8192)
    known = extension_arms.every_method(8192, 65536, CUES)
    assert [known[name].row for name in ("endprompt", "cue word", "cue end-of-turn")] == [8192 - 9, 8192 - 2, 8192 - 1]
    moved = {name: known[name].fields["view_args"]["cue_tokens"] for name in known if name.startswith("last")}
    assert moved == {f"last {b}": b for b in (1, 11, 20, 64, 512)}
    assert all("cue" not in known[name].fields and known[name].row == 8192 for name in moved)


@pytest.mark.slow
def test_every_method_of_the_extension_is_trained_and_measured(study):
    combinations = list(extension_arms.combinations(1024, 2048))
    for more in ([], ["--arms", *combinations], ["--cost", "1", "--arms", "endprompt", "full length"]):
        runs = study("out.jsonl", "--seeds", "0", *more)
    methods = [*extension_arms.methods(1024, 2048, 9), *combinations]
    here = [r for r in runs if r["kind"] == "quality" and r["schedule"] == "pi"]
    assert [r["method"] for r in here] == methods
    curves = {r["method"]: json.dumps(r["loss_by_position"]) for r in here}
    assert len(set(curves.values())) == len(methods), curves
    assert {r["method"] for r in runs if r["kind"] == "cost"} == {"endprompt", "full length"}
    assert all(set(r["teacher_forced"]["multikey"]) == {"1024", "2048"} for r in here)
    assert "2048 by pi" in extension.summary(runs)
    assert "| passkey teacher-forced 2048 | multikey teacher-forced 1024 |" in extension.summary(runs)
    files = extension.plot(runs, study.folder / "figure.png", 1024)
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


@pytest.mark.slow
def test_a_run_that_is_cut_off_in_training_goes_on_to_the_same_model(study, monkeypatch):
    monkeypatch.setattr(keeping_questions, "TAIL", 160)  # a token a character
    arms = [
        "--arms",
        "native",
        "last 20",
        "--seeds",
        "0",
        "--choosing-rows",
        "1",
        "--prompts",
        "8",
        "--lengths",
        "1600",
    ]
    (_, whole) = study("whole.jsonl", *arms, "--rates", "1e-3")
    kept = [*arms, "--checkpoints", str(study.folder / "kept")]
    begin, save, measure = extension.Steps.on_step_begin, extension.Steps.on_step_end, extension.measure
    steps = []

    def cut(self, args, state, *given, **more):
        save(self, args, state, *given, **more)
        if state.global_step == 3:
            raise KeyboardInterrupt

    def counted(self, args, state, *given, **more):
        steps.append(state.global_step)
        begin(self, args, state, *given, **more)

    monkeypatch.setattr(extension.Steps, "on_step_end", cut)
    with pytest.raises(KeyboardInterrupt):
        study("cut.jsonl", *kept, "--best", str(study.folder / "whole.jsonl"))
    (run,) = (study.folder / "kept").iterdir()
    assert [f.name for f in (run / "only").glob("checkpoint-*")] == ["checkpoint-2"]

    # the next one goes on with its third step, and is cut off behind its training
    monkeypatch.setattr(extension.Steps, "on_step_end", save)
    monkeypatch.setattr(extension.Steps, "on_step_begin", counted)
    monkeypatch.setattr(extension, "measure", cut)
    with pytest.raises(SystemExit):
        study("cut.jsonl", *kept, "--best", str(study.folder / "whole.jsonl"))
    monkeypatch.setattr(extension, "measure", measure)
    monkeypatch.setattr(extension, "train", None)
    (_, again) = study("cut.jsonl", *kept, "--best", str(study.folder / "whole.jsonl"))
    assert steps == [2, 3]
    assert again["learning_rate"] == whole["learning_rate"] == 1e-3 and again["steps"] == 4
    assert again["choice"] == pytest.approx(whole["choice"], rel=1e-5)
    assert [b["loss"] for b in again["loss_by_position"]] == pytest.approx(
        [b["loss"] for b in whole["loss_by_position"]], rel=1e-5
    )
    assert [(c["test"], c["length"], len(c["scores"])) for c in again["asked"]] == [
        ("passkey", 1600, 8),
        ("keys", 1600, 8),
    ]
    assert not list((study.folder / "kept").iterdir())


def test_differences_from_the_control_are_paired_by_prompts_and_seeds():
    def line(method, seed, keys, rate=1e-3):
        figures = {"passkey": {"2048": 1.0}, "teacher_forced": {"passkey": {"2048": 1.0}, "multikey": {"2048": 1.0}}}
        of_all = {"kind": "quality", "gpu": None, "schedule": "yarn", "target": 2048, "tokens": 5, "short_mean": 0.5}
        bins = [{"first": 64, "end": 2048, "loss": 3.0}]
        asked = [{"test": "keys", "length": 2048, "scores": keys}]
        scores = {"piqa": [1.0, 0.0], "boolq": [float(rate is None)]}
        key = {"method": method, "seed": seed, "learning_rate": rate, "short": {}, "loss_by_position": bins}
        return {**of_all, **figures, **key, "asked": asked, "short_scores": scores}

    one, two, none = [0] * 7 + [1], [0] * 6 + [1, 1], [0] * 8
    lines = [line("b=0", 0, none), line("b=0", 1, one), line("last 20", 0, one), line("last 20", 1, two)]
    lines += [line("last 20", 2, [1] * 8), line("none", 0, one, None)]  # a seed that the control lacks
    compared = extension.summary(lines).split('Scores above "b=0"')[1]
    _, above, written = compared.split("\n\n")
    rows = {text.split(" | ")[0]: text.split(" | ") for text in above.splitlines()}
    # of each prompt the mean over seeds 0 and 1: the last is 0.5 more, the one before it 0.5
    assert rows["| last 20"][1:3] == ["0.001", "2"] and rows["| last 20"][3].startswith("+0.125 (")
    assert rows["| none"][3].startswith("+0.062 (") and rows["| none"][4].startswith("+0.500 (")
    assert "| b=0 | 0.001 | 2 | 0.06 | 0.50 / 0.00 / 0.00 / 0.00 / 0.00 / 0.00 / 0.00 / 0.00 |" in written

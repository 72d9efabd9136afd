"""The page and the figure of RULER are what their file holds."""

import json
import re

from support.pages import RESULTS

from result_parts import Parts
from ruler_results import (
    NAMES,
    add,
    beside,
    by_length,
    by_task,
    in_chat,
    lengths_of,
    load,
    mean_score,
    of_gemma,
    plot,
    scores,
    written,
)

RUNS = load()


def test_the_page_has_the_tables_of_the_file():
    page = (RESULTS / "ruler.md").read_text()
    for table in (by_length(RUNS), beside(RUNS), in_chat(RUNS), by_task(RUNS), *of_gemma()):
        assert table in page
    for same in RUNS.values():
        for n in lengths_of(RUNS):
            assert all(len(scores(run, n)) in (0, 13 * (20 if n < 65536 else 10)) for run in same)
    whole = [run for arm, same in RUNS.items() for run in (same[:1] if arm == "pose" else same)]
    assert all(len(scores(run, n)) == 13 * 20 for run in whole for n in (4096, 8192, 16384, 32768))
    assert {len(RUNS[arm]) for arm in RUNS if arm.startswith(("skills", "keep"))} == {3}


def test_within_its_window_the_extended_model_loses_nothing():
    for table in (by_length(RUNS), by_task(RUNS)):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        column = next((k for k, head in enumerate(rows[0]) if head.startswith("extended by rope-patch")), None)
        cells = (
            next(r for r in rows if r[0] == "extended by rope-patch")
            if column is None
            else [r[column] for r in rows[2:]]
        )
        assert len(cells) > 10 and not any(re.search(r"\d\*", cell) for cell in cells)


def test_what_is_measured_later_stands_beside_what_there_is(tmp_path):
    def line(arm, seed, score, lengths, form="ruler", **more):
        cells = {task: [[score] * 20] * len(lengths) for task in RUNS["native"][0]["ruler"]["scores"]}
        return {"arm": arm, "seed": seed, form: {"lengths": lengths, "scores": cells, "replies": ["no"]}, **more}

    given, later = tmp_path / "given.jsonl", tmp_path / "later.jsonl"
    short_text = RUNS["native"][0]["short_text"]
    pose = {
        **line("pose", 7, 0.5, [4096, 65536]),
        **{name: RUNS["pose"][0][name] for name in ("own", "loss_by_position")},
    }
    lines = [line("native", 0, 0.0, [65536]), line("native", 0, 0.25, [8192], "ruler_chat"), pose]
    lines += [line("skills", seed, 0.5, [8192, 65536]) for seed in (0, 1)]
    lines += [{"arm": "skills-lora-slow", "seed": 0, "short_text": short_text}]
    given.write_text("".join(json.dumps(one) + "\n" for one in lines))
    add(given, later)
    assert "replies" not in later.read_text().partition("own")[0]
    runs = load(later)
    assert lengths_of(runs) == [4096, 8192, 16384, 32768, 65536]
    assert scores(runs["skills"][0], 8192) == scores(RUNS["skills"][0], 8192), "measured before"
    table = by_length(runs)
    rows = {line.split(" | ")[0]: line.split(" | ") for line in table.splitlines()}
    means = [mean_score(RUNS, "skills", n) for n in (4096, 8192, 16384, 32768)]
    assert rows["| extended by rope-patch"][2:7] == [f"{mean:.3f}" for mean in [*means, 0.5]]
    assert rows["| the same by LoRA"][6:8] == ["-", rows["| as it came"][7]]
    assert [len(runs["pose"]), mean_score(runs, "pose", 65536)] == [2, 0.5]
    assert in_chat(runs).splitlines()[2] == f"| as it came | {mean_score(runs, 'native', 8192):.3f} | 0.250 |"
    assert plot(runs, tmp_path / "figure")
    assert table in written((RESULTS / "ruler.md").read_text(), [table])


def test_of_a_run_that_was_cut_off_the_lengths_are_added_at_which_all_tasks_were_asked(tmp_path):
    given, later = tmp_path / "given.parts.jsonl", tmp_path / "later.jsonl"
    tasks = sorted(RUNS["native"][0]["ruler"]["scores"])

    def ask(parts, length, score, of=tasks, **chat):
        for task in of:
            parts.get(json.dumps({"task": task, "length": length, **chat}), lambda: {"scores": [score] * 20})

    parts = Parts(given, {"arm": "skills", "seed": 1, "question_seed": 0})
    parts.begin()
    ask(parts, 65536, 1.0)
    parts.begin()  # trained anew
    parts.get("training", lambda: {"train_seconds": 5.0})
    ask(parts, 65536, 0.25)
    ask(parts, 8192, 0.5, chat=True)
    ask(parts, 32768, 0.5, tasks[1:], chat=True)
    Parts(given, {"arm": "skills", "seed": 2, "question_seed": 0}).begin()
    add(given, later)
    (line,) = map(json.loads, later.read_text().splitlines())
    assert [line["arm"], line["seed"], line["train_seconds"]] == ["skills", 1, 5.0]
    assert line["ruler"]["lengths"] == [65536] and line["ruler_chat"]["lengths"] == [8192]
    assert scores(line, 65536) == [0.25] * 260 and scores(line, 8192, form="ruler_chat") == [0.5] * 260
    of_new_seed = line | {"seed": 7}  # no losses yet
    (row,) = (
        r for r in by_length({**RUNS, "skills": [*RUNS["skills"], of_new_seed]}).splitlines() if NAMES["skills"] in r
    )
    assert row.split(" | ")[1] == str(len(RUNS["skills"]) + 1)


def test_a_second_model_has_tables_of_its_own_once_it_is_measured(tmp_path):
    later, tasks = tmp_path / "gemma.jsonl", sorted(RUNS["native"][0]["ruler"]["scores"])
    assert of_gemma(later) == []
    measured = {"native": {0: (0.5, 0.0)}, "yarn": {0: (0.25, 0.25)}, "skills": {0: (0.5, 0.25), 1: (0.75, 0.5)}}
    for arm, seeds in measured.items():
        for seed, of_lengths in seeds.items():
            given = tmp_path / f"{arm}-{seed}.parts.jsonl"
            parts = Parts(given, {"arm": arm, "seed": seed, "question_seed": 0})
            for length, score in zip((32768, 131072), of_lengths, strict=True):
                for task in tasks:
                    parts.get(
                        json.dumps({"task": task, "length": length}), lambda score=score: {"scores": [score] * 10}
                    )
            edges = (64, 32768, 131072)
            bins = [{"first": a, "end": b, "loss": 3.0 + seed} for a, b in zip(edges, edges[1:], strict=False)]
            parts.get("losses", lambda bins=bins: bins)
            parts.get("own", lambda: {"kl": 0.015})
            add(given, later)
    whole, tasks_of = (table.splitlines() for table in of_gemma(later))
    assert whole[0] == "| Gemma-3-270M | seeds | 32K | 128K | loss to 32K | loss 32K to 128K | KL |"
    assert whole[2:] == [
        "| as it came | 1 | 0.500 | 0.000 | 3.000 | 3.000 | 0.015 |",
        "| YaRN 4x, untrained | 1 | 0.250* | 0.250 | 3.000 | 3.000 | 0.015 |",
        "| extended by rope-patch | 2 | 0.625 | 0.375 | 3.500 ± 0.500 | 3.500 ± 0.500 | 0.015 ± 0.000 |",
    ]
    assert len(tasks_of) == 15 and tasks_of[-1] == "| vt | 0.50 / 0.00 | 0.25* / 0.25 | 0.62 / 0.38 |"

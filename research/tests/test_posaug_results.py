"""Tables of PosAug from scratch, with figures by hand."""

from posaug_results import summary, tables

OF_ALL = {"window": 32, "parameters": 1, "tokens": 1, "epochs": 1.0, "spans": [2, 64], "gpu": "none", "peak_gib": 0.0}


def line(arm, seed, in_window, cliff, **more):
    figures = {"in_window": in_window, "cliff": cliff, "gain": -cliff, "tokens_per_second": None}
    return {"arm": arm, "seed": seed, **OF_ALL, **figures, **more}


def test_the_summary_says_which_orderings_hold():
    lines = [line("baseline", s, 4.0, 2.0) for s in (1, 2)]
    lines += [line("uniform", 1, 4.04, 0.1), line("uniform", 2, 4.2, 0.4), line("rpe", 1, 4.4, 0.1)]
    text = summary(lines)
    assert "| uniform | 2 | 4.120 ± 0.080 | 3.00 ± 2.00 | 0.250 ± 0.150 |" in text
    for row in (
        "cliff: uniform < baseline | 1.07 < 2.28 | 2 of 2 seeds",
        "penalty: uniform < rpe | 1.4 % < 14.3 %, of 42.5M | 1 of 1 seeds",
        "cliff: top < bottom | 1.50 < 2.36 | not run",
        "cliff of uniform at most a tenth of the baseline's | 0.060 and 1.915 | 1 of 2 seeds",
        "penalty of uniform at most 2 % | 1.8 % | 1 of 2 seeds",
    ):
        assert f"| {row} |" in text
    assert tables(lines) == text, "lines that have no more get no more tables"


def detailed(arm, seed, shift, paper, rights):
    """Two spans with losses of 4 and 5 within the window, 5 and 6 beyond it, and `shift`; two exams."""
    spans = [{"in_window": x + shift, "beyond": x + 1.0 + 2 * shift} for x in (4.0, 5.0)]
    marks = [[(0.1, right > 0), (0.9, right > 1)] for right in rights]
    exams = [{"kind": "multikey", "length": n, "yarn": 1, "marks": marks} for n in (32, 64)]
    gains = [{"chunk": 8, "exact": [0.25, 0.25], "paper": [paper, paper]}]
    return line(arm, seed, 4.5 + shift, 1.0 + shift, of_spans=spans, exams=exams, gains=gains)


def test_tables_have_differences_from_the_baseline_of_the_same_seeds():
    lines = [detailed("baseline", s, 0.0, -0.5, [1, 1]) for s in (1, 2)]
    lines += [detailed("uniform", s, 0.125 * s, 2.0, [2, 2]) for s in (1, 2)]
    read = detailed("uniform, YaRN", 1, 0.5, 3.0, [0, 0])
    lines.append({k: v for k, v in read.items() if k not in ("peak_gib", "tokens_per_second")} | {"tokens": 0})
    parts = tables(lines).split("\n\n")[1:]
    known, _, losses, note, gains, of_gains, exams, of_exams, by_seed, places, further = parts
    assert known.startswith("| arm | seeds | loss 64..32 |") and of_gains.startswith("Nats a token")
    assert "| baseline | 2 | 4.500 | 5.500 | 1.000 |" in losses
    # 0.1875 is the mean of 0.125 and 0.25 over seeds, twice that beyond the window; both spans alike
    assert "| uniform | 2 | 4.688 (+0.188 to +0.188) | 5.875 (+0.375 to +0.375) | 1.188 (+0.188 to +0.188) |" in losses
    assert "| uniform, YaRN | 1 | 5.000 (+0.500 to +0.500) | 6.500 (+1.000 to +1.000) |" in losses
    assert note.startswith("2 spans a seed")
    assert "| gain | seeds | exact, chunks of 8 | paper, chunks of 8 |" in gains
    assert "| uniform | 2 | 0.250 (+0.250 to +0.250) | 2.000 (+2.000 to +2.000) |" in gains
    assert "| baseline | 2 | 0.500 | 0.500 |" in exams
    # two exams that differ alike leave a share of 1 - .025^(1/2) = .842 unseen, which may differ by -1 to 1
    assert "| uniform | 2 | 1.000 (-0.763 to +0.921) | 1.000 (-0.763 to +0.921) |" in exams
    assert "| uniform, YaRN | 1 | 0.000 (-0.921 to +0.763) | 0.000 (-0.921 to +0.763) |" in exams
    assert of_exams.startswith("2 texts a cell and seed; in brackets, from baseline of the same seeds")
    assert by_seed.splitlines()[2:] == [
        "| baseline | 0.50 / 0.50 | 0.50 / 0.50 |",
        "| uniform | 1.00 / 1.00 | 1.00 / 1.00 |",
        "| uniform, YaRN | 0.00 | 0.00 |",
    ]
    assert (
        "| baseline | 1.00 / - / - / - / 0.00 | 1.00 / - / - / - / 0.00 |" in places
        and "multikey 32 by place" in places
    )
    for row in (
        "exams beyond the window: baseline < uniform | 48.4 < 67.6 | 2 of 2 seeds",
        "cliff: retrofit < baseline | 0.45 < 2.84 | not run",
        "gain by the paper's form: uniform < uniform, YaRN | 2.72 < 2.99 | 1 of 1 seeds",
    ):
        assert f"| {row} |" in further


def test_intervals_widen_with_spans_that_disagree():
    lines = [detailed("baseline", 1, 0.0, -0.5, [1, 1]), detailed("uniform", 1, 0.0, 2.0, [0, 2])]
    lines[1]["of_spans"][0]["in_window"] += 0.5
    text = tables(lines)
    row = next(row for row in text.splitlines() if row.startswith("| uniform | 1 | 4.750 ("))
    low, high = (float(x) for x in row.split("(")[1].split(")")[0].split(" to "))
    assert low <= 0.0 and 0.5 <= high and "| uniform | 1 | 0.500 (" in text

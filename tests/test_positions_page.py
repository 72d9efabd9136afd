"""What pages say of PosAug from scratch is what the files of results hold."""

from statistics import fmean, mean

from posaug_results import penalties
from rpsd_far_results import by_exam
from support.pages import lines_of, share, text_of

NAMES = {
    "baseline": "baseline",
    "uniform": "PosAug, uniform 1/8..8",
    "step 1/16..16": "PosAug, step curriculum, 1/16..16",
    "skip": "ours: skip up to 14336, a split for each row",
    "continued": "baseline, continued",
    "retrofit": "baseline, retrofit",
    "baseline, YaRN": "baseline, read under YaRN",
    "uniform, YaRN": "PosAug, uniform, read under YaRN",
}


def test_what_posaug_from_scratch_does_not_show():
    runs = lines_of("posaug-from-scratch-h200.jsonl")
    results = text_of("docs/results/positions.md")
    within = [b["gain"] for run in runs for b in run["gain_by_position"] if b["end"] <= run["window"]]
    assert max(within) < 0.005  # nats, within the window: nothing is gained from context beyond 512 tokens
    baseline = [
        b["gain"] for run in runs if run["arm"] == "baseline" for b in run["gain_by_position"] if b["end"] <= 2048
    ]
    assert f"at most {max(baseline):.3f} nats" in results

    def beyond(arm):
        return mean(run["in_window"] + run["cliff"] for run in runs if run["arm"] == arm)

    assert f"({beyond('independent'):.3f} and {beyond('uniform'):.3f} beyond the window)" in results


def with_exams():
    """Lines of each arm."""
    runs = {}
    for run in lines_of("posaug-exams-h200.jsonl"):
        runs.setdefault(run["arm"], []).append(run)
    return runs


def keys(runs, length):
    return fmean(by_exam(runs, "multikey", length))


def beyond(runs):
    return fmean(span["beyond"] for run in runs for span in run["of_spans"])


def gain(runs, form):
    return fmean(value for run in runs for of in run["gains"] if of["chunk"] == 512 for value in of[form])


def test_the_table_with_exams_is_that_of_the_file():
    arms, page = with_exams(), text_of("docs/results/positions.md")
    assert set(arms) == set(NAMES)
    for arm, runs in arms.items():
        assert [run["seed"] for run in runs] == [42], "the pages say: one seed so far"
        cells = [f"{mean(run['in_window'] for run in runs):.3f}", f"{beyond(runs):.3f}"]
        cells += [
            f"{mean(run['cliff'] for run in runs):.3f}",
            f"{gain(runs, 'exact'):.3f}",
            f"{gain(runs, 'paper'):.3f}",
        ]
        cells += [share(keys(runs, length)) for length in (2048, 4096, 8192, 16384)]
        assert f"| {NAMES[arm]} | {' | '.join(cells)} |" in page


def test_what_is_said_of_the_table_with_exams_holds():
    arms, runs = with_exams(), lines_of("posaug-exams-h200.jsonl")
    base, yarn, uniform = arms["baseline"], arms["baseline, YaRN"], arms["uniform"]
    others = [same for arm, same in arms.items() if arm != "baseline, YaRN"]
    assert keys(yarn, 16384) > 0.95 and all(beyond(yarn) < beyond(same) for same in others)
    closest = max(others, key=lambda same: keys(same, 8192) + keys(same, 16384))
    assert closest is arms["skip"] and keys(closest, 16384) < keys(yarn, 16384)
    assert round(1 / keys(base, 4096)) == 9 and keys(base, 8192) == keys(base, 16384) == 0
    page = text_of("docs/results/positions.md")
    assert f"within the window behind it by {share(keys(base, 2048) - keys(uniform, 2048))}" in page
    assert 0.3 < keys(uniform, 4096) < 0.4 and 0.45 < keys(uniform, 2048) < 0.55
    penalty = penalties(runs)
    assert penalty["skip", 42] < penalty["uniform", 42] / 3
    lost = keys(base, 2048) - keys(arms["retrofit"], 2048)
    assert 0.3 < lost < 0.4 and arms["retrofit"][0]["cliff"] < 0 and abs(gain(arms["continued"], "exact")) > 1
    for arm, same in arms.items():
        if same[0]["cliff"] < 0:
            assert abs(gain(same, "exact")) < 0.06 and 0.45 < gain(same, "paper") < 0.95, arm
        else:
            assert gain(same, "paper") < 0, arm
    where = " ".join(text_of("docs/positions.md").split())
    assert f"under YaRN finds {share(keys(yarn, 16384))} of the keys at eight times its window, the skip" in where
    assert f"the skip {share(keys(arms['skip'], 16384))}, and PosAug none" in where and keys(uniform, 16384) == 0
    choosing = text_of("docs/choosing.md")
    found = [share(keys(arms["skip"], n)) for n in (8192, 16384)]
    assert "the skip finds {} at four windows and {} at eight".format(*found) in choosing
    assert "read under YaRN {} and {}".format(*(share(keys(yarn, n)) for n in (8192, 16384))) in choosing


def test_the_exams_that_were_tried_stood_where_the_page_says():
    runs = lines_of("posaug-exams-tried-h200.jsonl")
    of_16, few, (four,) = (
        [run["log"][-1]["answers"] for run in runs if run["keys"][0] == first] for first in (16, 1, 4)
    )
    page = " ".join(text_of("docs/results/positions.md").split())
    assert len(of_16) == 4 and f"at {min(of_16):.2f} to {max(of_16):.2f} nats a token" in page
    assert len(few) == 3 and f"at {min(few):.2f} to {max(few):.2f}." in page and f"it was {four:.2f} by then" in page

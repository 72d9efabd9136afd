"""What pages say of PosAug from scratch is what the files of results hold."""

from statistics import fmean, mean

from posaug_results import gain_table, loss_table, penalties
from rpsd_far_results import by_exam, exam_table
from support.pages import RESULTS, lines_of, share, text_of


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


def gain(runs, form, chunk=512):
    return fmean(value for run in runs for of in run["gains"] if of["chunk"] == chunk for value in of[form])


def test_the_tables_with_exams_are_those_of_the_file():
    arms, page = with_exams(), (RESULTS / "positions.md").read_text()
    assert set(arms) == {"baseline", "uniform", "step 1/16..16", "skip", "continued", "retrofit"} | {
        f"{arm}, YaRN" for arm in ("baseline", "uniform")
    }
    for runs in arms.values():
        assert [run["seed"] for run in runs] == [42], "the pages say: one seed so far"
    for table in (loss_table(arms), gain_table(arms), exam_table(arms, "baseline")):
        assert table in page


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
    chunks = [of["chunk"] for of in base[0]["gains"]]
    smooth = [same for same in arms.values() if same[0]["cliff"] < 0]
    for same in arms.values():
        of_chunks = [gain(same, "exact", chunk) for chunk in chunks]
        assert max(of_chunks) - min(of_chunks) < 0.01 and (same not in smooth or max(map(abs, of_chunks)) < 0.06)
        assert all((gain(same, "paper", chunk) > 0) == (same in smooth) for chunk in chunks)
    of_forms = [gain(same, "paper", chunk) for same in smooth for chunk in chunks]
    assert f"{min(of_forms):.1f} to {max(of_forms):.1f} nats" in page
    for same in smooth:
        assert 2 * gain(same, "paper", 1024) < gain(same, "paper", 128)
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

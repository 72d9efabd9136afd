"""What pages say of PosAug from scratch is what the files of results hold."""

from statistics import fmean, mean

from support.pages import RESULTS, lines_of, share, text_of

from posaug_results import gain_table, loss_table, penalties
from rpsd_far_results import by_exam, cells_of, exam_table, seed_table


def test_what_posaug_from_scratch_does_not_show():
    runs = lines_of("posaug-from-scratch-h200.jsonl")
    results = text_of("research/results/positions.md")
    within = [b["gain"] for run in runs for b in run["gain_by_position"] if b["end"] <= run["window"]]
    assert max(within) < 0.005  # nats, within the window: nothing is gained from context beyond 512 tokens
    baseline = [
        b["gain"] for run in runs if run["arm"] == "baseline" for b in run["gain_by_position"] if b["end"] <= 2048
    ]
    assert f"at most {max(baseline):.3f} nats" in results

    def beyond(arm):
        return mean(run["in_window"] + run["cliff"] for run in runs if run["arm"] == arm)

    assert f"({beyond('independent'):.3f} and {beyond('uniform'):.3f} beyond the window)" in results


SEEDS = [42, 137, 2024]


def with_exams():
    """Lines of each arm, by seed."""
    runs = {}
    lines = lines_of("posaug-exams-h200.jsonl") + lines_of("posaug-exams-h100.jsonl")
    for run in sorted(lines, key=lambda run: run["seed"]):
        runs.setdefault(run["arm"], []).append(run)
    return runs


def keys(runs, length):
    return fmean(by_exam(runs, "multikey", length))


def of_seeds(runs, length):
    return [keys([run], length) for run in runs]


def kept(runs, length):
    """Of what is found within the window, the share that is found at this length, seed by seed."""
    return [far / near for far, near in zip(of_seeds(runs, length), of_seeds(runs, 2048), strict=True)]


def beyond(run):
    return fmean(span["beyond"] for span in run["of_spans"])


def gain(runs, form, chunk=512):
    return fmean(value for run in runs for of in run["gains"] if of["chunk"] == chunk for value in of[form])


def in_each_seed(lower, higher, length):
    return [a < b for a, b in zip(of_seeds(lower, length), of_seeds(higher, length), strict=True)]


def test_the_tables_with_exams_are_those_of_the_file():
    arms, page = with_exams(), (RESULTS / "positions.md").read_text()
    trained = {"baseline", "uniform", "step", "step 1/16..16", "uniform, rows", "skip", "continued", "retrofit"}
    assert set(arms) == trained | {f"{arm}, YaRN" for arm in ("baseline", "uniform", "uniform, rows", "step")}
    for runs in arms.values():
        assert [run["seed"] for run in runs] == SEEDS
    of_seeds_too = seed_table(arms, cells_of(arms["baseline"][0]))
    for table in (loss_table(arms), gain_table(arms), exam_table(arms, "baseline"), of_seeds_too):
        assert table in page


def test_what_is_said_of_keys_beyond_the_window_holds():
    arms, page = with_exams(), text_of("research/results/positions.md")
    base, yarn, uniform, skip = (arms[name] for name in ("baseline", "baseline, YaRN", "uniform", "skip"))
    step_in_yarn, rows_in_yarn = arms["step, YaRN"], arms["uniform, rows, YaRN"]
    others = [same for same in arms.values() if same is not yarn]
    without = [same for same in others if same not in (step_in_yarn, rows_in_yarn)]
    assert min(kept(yarn, 16384)) > 0.945 and ".95 of it or more in each seed" in page
    for same in others:
        assert all(beyond(a) < beyond(b) for a, b in zip(yarn, same, strict=True))
    for same in without:
        assert all(in_each_seed(same, yarn, 16384))
    for same in (step_in_yarn, rows_in_yarn):
        ahead = [a - b for a, b in zip(of_seeds(same, 16384), of_seeds(yarn, 16384), strict=True)]
        assert max(map(abs, ahead[:2])) < 0.03 and ahead[2] > 0
    assert "is within .03 of it in two seeds" in page
    third = [share(of_seeds(same, 16384)[2]) for same in (step_in_yarn, rows_in_yarn, yarn)]
    assert "ahead in the third, {} and {} in place of {}, in which the baseline learned half".format(*third) in page
    assert f"the curriculum keeps {share(min(kept(step_in_yarn, 16384)))} or more of its own share to eight" in page
    assert abs(of_seeds(base, 2048)[2] - 0.5) < 0.02
    assert max(without, key=lambda same: keys(same, 16384)) is skip
    assert f"comes closest, {share(keys(skip, 16384))} in place of {share(keys(yarn, 16384))}." in page
    assert round(1 / keys(base, 4096)) == 8 and keys(base, 8192) < 0.002 and keys(base, 16384) == 0
    assert all(in_each_seed(uniform, base, 2048))
    assert f"in every seed, {share(keys(uniform, 2048))} in place of {share(keys(base, 2048))}:" in page
    assert sum(in_each_seed(base, uniform, 4096)) == 2 and keys(uniform, 8192) < 0.01
    in_yarn = arms["uniform, YaRN"]
    assert f"it keeps {share(min(kept(in_yarn, 16384)))} or more of its own share" in page
    assert all(in_each_seed(in_yarn, yarn, 16384))
    for length in (1024, 2048, 4096, 8192, 16384):
        assert all(in_each_seed(uniform, skip, length))
    at = [f"{share(min(kept(skip, n)))} to {share(max(kept(skip, n)))}" for n in (8192, 16384)]
    assert "it keeps {} at four times the window and {} at eight times".format(*at) in page
    assert f"than the baseline too: {share(keys(skip, 2048))} in place of {share(keys(base, 2048))}" in page
    step = arms["step 1/16..16"]
    assert sum(in_each_seed(uniform, step, 2048)) == 3 and step[1]["seed"] == 137
    assert f"two seeds, {share(of_seeds(step, 2048)[1])} within the window in one of them" in page
    assert abs(of_seeds(step, 2048)[2] - of_seeds(uniform, 2048)[2]) < 0.01
    narrow = arms["step"]
    assert in_each_seed(step, narrow, 2048) == [True, True, True]
    assert abs(of_seeds(step, 2048)[1] - of_seeds(narrow, 2048)[1]) < 0.0125  # 5 questions of 416
    assert max(run["cliff"] for run in (*step, *narrow)) < 0.04

    mended, by_rows = (narrow, arms["uniform, rows"]), arms["uniform, rows"]
    for same in mended:
        assert all(in_each_seed(uniform, same, 2048)) and all(in_each_seed(uniform, same, 4096))
        assert all(in_each_seed(skip, same, 2048))
    for same in (uniform, step, *mended):
        assert all(in_each_seed(same, skip, 16384))
        assert in_each_seed(same, skip, 8192) == [True, True, same is not narrow]
    beside = " and the skip ".join(share(of_seeds(same, 8192)[2]) for same in (narrow, skip))
    assert f"but for one seed, in which the step curriculum finds {beside};" in page
    within, twice, four_times = (" and ".join(share(keys(same, n)) for same in mended) for n in (2048, 4096, 8192))
    least = share(min(found for same in mended for found in of_seeds(same, 2048)))
    penalty = penalties([run for same in arms.values() for run in same])
    cost = [fmean(penalty[arm, seed] for seed in SEEDS) for arm in ("step", "uniform, rows", "uniform")]
    assert (
        f"they find {within} within the window, {least} or more in every seed, and {twice} at twice the window, "
        "more than the uniform law in every seed at both lengths, for {:.1f} and {:.1f} % of the loss within the "
        "window in place of {:.1f} %.".format(*cost)
    ) in page
    assert f"At four times the window they find {four_times}." in page

    papers = text_of("research/results/papers.md")
    assert f"find {within} within the window and {twice} at twice the window" in papers
    assert round(100 * keys(narrow, 16384)) == 1 and "where PosAug finds 1 % at most" in papers
    where = text_of("docs/positions.md")
    curve, of_rows = ([share(keys(same, n)) for n in (2048, 4096)] for same in mended)
    assert (
        f"Within the window the uniform law finds {share(keys(uniform, 2048))}, the step curriculum {curve[0]}" in where
    )
    assert f'`"granularity": "sample"` {of_rows[0]}; at twice the window {share(keys(uniform, 4096))}, ' in where
    assert f"{curve[1]} and {of_rows[1]}." in where and "PosAug none but for 1 % under the step curriculum" in where
    far = " and ".join(share(keys(same, 16384)) for same in (step_in_yarn, rows_in_yarn))
    assert f"Read under YaRN these two find {far} at eight times the window" in where
    assert f"read under YaRN finds {share(keys(yarn, 16384))} of the keys at eight times its window" in where
    assert (
        f"it, the skip {share(keys(skip, 16384))}, and PosAug none" in where
        and keys(uniform, 16384) == keys(by_rows, 16384) == 0
    )


def test_what_another_training_of_the_same_seeds_finds():
    page, now = text_of("research/results/positions.md"), with_exams()["step"]
    before = sorted(lines_of("posaug-exams-step-h100.jsonl"), key=lambda run: run["seed"])
    assert [(run["arm"], run["seed"]) for run in before] == [(run["arm"], run["seed"]) for run in now]
    said = ["{}, {} and {}".format(*map(share, of_seeds(same, n))) for n in (4096, 8192) for same in (before, now)]
    assert (
        "At twice the window those models find {} where these find {}, at four times {} where these find {};".format(
            *said
        )
        in page
    )
    least = share(min(of_seeds(before, 2048) + of_seeds(now, 2048)))
    assert f"within the window all six find {least} or more." in page


def test_what_is_said_of_losses_and_gains_with_exams_holds():
    arms = with_exams()
    runs = [run for same in arms.values() for run in same]
    page = text_of("research/results/positions.md")
    penalty = penalties(runs)
    assert all(penalty["skip", seed] < 0.55 * penalty["uniform", seed] for seed in SEEDS)
    rise = {arm: fmean(penalty[arm, seed] for seed in SEEDS) for arm in ("skip", "uniform")}
    assert rise["skip"] < rise["uniform"] / 3 and "for less than a third of its rise in loss" in page
    base, retrofit, continued = (arms[name] for name in ("baseline", "retrofit", "continued"))
    cliff = [fmean(run["cliff"] for run in same) for same in (retrofit, base)]
    assert f"{share(cliff[0])} nats are left of {cliff[1]:.2f}" in page
    assert f"It loses {share(keys(base, 2048) - keys(retrofit, 2048))} of the keys within the window" in page
    assert all(in_each_seed(retrofit, base, 2048))
    assert abs(keys(continued, 2048) - keys(base, 2048)) < 0.01 and fmean(run["cliff"] for run in continued) > 1
    chunks = [of["chunk"] for of in base[0]["gains"]]
    smooth = [same for same in arms.values() if fmean(run["cliff"] for run in same) < 0.1]
    assert [same for same in arms.values() if same not in smooth] == [base, continued]
    for same in arms.values():
        of_chunks = [gain(same, "exact", chunk) for chunk in chunks]
        assert max(of_chunks) - min(of_chunks) < 0.01 and (same not in smooth or max(map(abs, of_chunks)) < 0.11)
        assert all((gain(same, "paper", chunk) > 0) == (same in smooth) for chunk in chunks)
    of_forms = [gain(same, "paper", chunk) for same in smooth for chunk in chunks]
    assert f"{min(of_forms):.1f} to {max(of_forms):.1f} nats" in page
    parts = [gain(same, "paper", 1024) / gain(same, "paper", 128) for same in smooth]
    assert f"it is {min(parts):.2f} to {max(parts):.2f} of what it is in chunks of 128" in page


def test_the_exams_that_were_tried_stood_where_the_page_says():
    runs = lines_of("posaug-exams-tried-h200.jsonl")
    of_16, few, (four,) = (
        [run["log"][-1]["answers"] for run in runs if run["keys"][0] == first] for first in (16, 1, 4)
    )
    page = text_of("research/results/positions.md")
    assert len(of_16) == 4 and f"at {min(of_16):.2f} to {max(of_16):.2f} nats a token" in page
    assert len(few) == 3 and f"at {min(few):.2f} to {max(few):.2f}." in page and f"it was {four:.2f} by then" in page

"""What pages say of RPSD and its controls is what their files hold."""

from statistics import fmean

from support.pages import RESULTS, lines_of, share, text_of

from paired_results import seed_pairs
from result_lines import mean_of, runs_by_arm
from rope_patch.eval.results.paired import paired_interval
from rpsd_far_arms import arms as arms_of
from rpsd_far_match import mean_kl
from rpsd_far_results import by_exam, by_place, differences, kl, short_text, tables
from rpsd_small_scale import score

KINDS = ("multikey", "ordinal")


def controls():
    """Lines of each arm, by seed."""
    return runs_by_arm(sorted(lines_of("rpsd-far-controls-h200.jsonl"), key=lambda run: run["seed"]))


def found(runs, kind):
    return fmean(by_exam(runs, kind, 131072))


def above(ours, theirs, kind="multikey"):
    """Differences of exams at 131072 tokens, of the seeds that both have."""
    return differences(seed_pairs(ours, theirs), (kind, 131072, 4))


def in_words(differences):
    mean, low, high = (f"{x:.3f}".removeprefix("0") for x in (fmean(differences), *paired_interval(differences)))
    return mean, f"({low} to {high})"


def test_the_tables_of_controls_are_those_of_the_file():
    arms, page = controls(), (RESULTS / "self_distillation.md").read_text()
    assert {arm: [run["seed"] for run in same] for arm, same in arms.items()} == {
        "next-token": [1, 2, 3], "skip": [1, 2, 3], "skip, lambda 2": [1, 2], "dropout": [1, 2, 3],
    }  # fmt: skip
    runs = [run for same in arms.values() for run in same]
    for table in tables(runs).split("\n\n"):
        assert table in page


def test_what_is_said_of_dropout_holds():
    arms, page = controls(), text_of("research/results/self_distillation.md")
    plain, skip, dropout = (arms[name] for name in ("next-token", "skip", "dropout"))
    assert {run["strength"] for run in dropout} == {arms_of(32768)["dropout"].strength} == {0.01}
    kl = [fmean(mean_kl(run["log"]) for run in same) for same in (dropout, skip)]
    assert "over all of training {} nats, the skip's {}, in the mean".format(*map(share, kl)) in page
    more, less = above(skip, plain), above(dropout, plain)
    assert round(fmean(more) / fmean(less)) == 6
    said = [*in_words(more), *in_words(less)]
    assert (
        "{} more keys than next-token training {} and dropout {} more {}, in two seeds of three".format(*said) in page
    )
    of_mentions = [in_words(above(same, plain, "ordinal"))[0] for same in (skip, dropout)]
    assert "of the mentions {} and {}.".format(*of_mentions) in page
    apart = [figure for kind in KINDS for figure in in_words(above(skip, dropout, kind))]
    assert "in every seed, by {} of the keys {} and {} of the mentions {}.".format(*apart) in page
    for a, b in seed_pairs(skip, dropout):
        assert all(found([a], kind) > found([b], kind) for kind in KINDS)
    assert sum(found([a], "multikey") > found([b], "multikey") for a, b in seed_pairs(dropout, plain)) == 2
    lost = [short_text(b) - short_text(a) for a, b in seed_pairs(dropout, plain)]
    assert min(lost) > 0 and f"Of short text it loses {share(fmean(lost), 3)}, in every seed" in page
    assert abs(fmean(map(short_text, skip)) - fmean(map(short_text, plain))) < 0.001

    def within(runs):
        return fmean(mean_of(run["loss x1"], 64, 32768) for run in runs)

    assert abs(within(dropout) - within(skip)) < 0.005
    where = text_of("docs/self_distillation.md")
    figures = [share(found(same, kind)) for same in (dropout, skip, plain) for kind in KINDS]
    assert "find {} of the keys and {} of the mentions, where the skip finds {} and {} and".format(*figures) in where
    assert "and next-token training {} and {}. ".format(*figures[4:]) in where


def test_what_is_said_of_the_weight_and_of_seeds_holds():
    arms, page = controls(), text_of("research/results/self_distillation.md")
    plain, skip, heavy = (arms[name] for name in ("next-token", "skip", "skip, lambda 2"))
    assert "at 131072, {} of the keys {} in two seeds".format(*in_words(above(heavy, skip))) in page
    pairs = seed_pairs(heavy, skip)
    cost = fmean(mean_of(a["loss x1"], 64, 32768) - mean_of(b["loss x1"], 64, 32768) for a, b in pairs)
    assert f"It costs {share(cost)} nats of loss within the row more" in page
    assert all(found([a], kind) > found([b], kind) for a, b in pairs for kind in KINDS)
    keys = [f"{found(same, 'multikey'):.3f}".removeprefix("0") for same in (plain, skip)]
    assert "taught models, {} and {} of the keys.".format(*keys) in page
    spans = [[share(found([run], "multikey")) for run in same] for same in (plain, skip)]
    ends = [end for span in spans for end in (min(span), max(span))]
    assert "more with the seed, {} to {}, than the skip, {} to {}.".format(*ends) in page


def weights():
    """Lines of each arm on the models that were taught a third time, by seed."""
    return runs_by_arm(sorted(lines_of("rpsd-far-weights-h200.jsonl"), key=lambda run: run["seed"]))


def test_the_tables_of_weights_and_longest_skips_are_those_of_the_file():
    arms, page = weights(), (RESULTS / "self_distillation.md").read_text()
    assert {arm: [run["seed"] for run in same] for arm, same in arms.items()} == {
        "skip": [1, 2, 3], "skip, Y = 2 L": [1, 2, 3], "skip, lambda .5": [1, 2, 3],
        "skip, Y = L/2": [2], "skip, lambda 2": [2], "skip, lambda .2": [2],
    }  # fmt: skip
    for table in tables([run for same in arms.values() for run in same]).split("\n\n"):
        assert table in page


def test_what_is_said_of_weights_and_longest_skips_holds():
    arms, page = weights(), text_of("research/results/self_distillation.md")
    skip, half, twice_far = (arms[name] for name in ("skip", "skip, lambda .5", "skip, Y = 2 L"))

    def cost(arm):
        pairs = seed_pairs(arms[arm], skip)
        return fmean(mean_of(a["loss x1"], 64, 32768) - mean_of(b["loss x1"], 64, 32768) for a, b in pairs)

    keys, mentions = (in_words(above(skip, half, kind)) for kind in KINDS)
    assert (
        "finds {} of the keys less {}, in every seed, and of the mentions no fewer beyond chance, {} {}.".format(
            *keys, *mentions
        ).replace("(-0", "(-")
        in page
    )
    assert all(found([a], "multikey") > found([b], "multikey") for a, b in seed_pairs(skip, half))
    assert f"It gives back {share(-cost('skip, lambda .5'), 3)} of the .02 nats" in page
    assert "fewer mentions, {} {} in every seed".format(*in_words(above(skip, twice_far, "ordinal"))) in page
    assert all(found([a], "ordinal") > found([b], "ordinal") for a, b in seed_pairs(skip, twice_far))
    low, high = paired_interval(above(skip, twice_far))
    assert low < 0 < high, "keys are not told apart"
    assert f"and cost {share(cost('skip, Y = 2 L'), 3)} nats more within the row" in page
    medians = [fmean(map(kl, same)) for same in (twice_far, skip)]
    assert round(medians[0] / medians[1]) == 5
    same_model = share(found([run for run in skip if run["seed"] == 2], "multikey"), 3)
    near, light = (
        (share(found(arms[name], "multikey"), 3), *in_words(above(skip, arms[name])), share(-cost(name), 3))
        for name in ("skip, Y = L/2", "skip, lambda .2")
    )
    said = "{} in place of {}, by {} {}, for {} nats less."
    assert said.format(near[0], same_model, *near[1:]) in page
    said = "finds {}, which is no fewer beyond chance: by {} {}, for {} nats less.".format(*light).replace("(-0", "(-")
    assert said in page
    bounds = {name: paired_interval(above(skip, arms[name])) for name in ("skip, Y = L/2", "skip, lambda .2")}
    assert bounds["skip, Y = L/2"][0] > 0 > bounds["skip, lambda .2"][0], "one is beyond chance, the other is not"
    heavy = above(arms["skip, lambda 2"], skip)
    assert abs(fmean(heavy)) < 0.01, "twice the weight finds as many"
    more = in_words(above(arms["skip, lambda 2"], skip, "ordinal"))
    assert "as many keys, and {} more of the mentions {}.".format(*more) in page
    by_seed = [share(found([run], "multikey")) for run in skip]
    assert "the skip finds {}, {} and {} of the keys".format(*by_seed) in page
    assert all(
        found(same, "multikey") <= found([r for r in skip if len(same) == 3 or r["seed"] == 2], "multikey")
        for same in arms.values()
    )
    before = [found([run], "multikey") for run in controls()["skip"]]
    assert f"no more than {share(max(before) - min(before))} apart" in page


def lambdas():
    """Lines of each arm on the models that were taught a fourth time, by seed."""
    return runs_by_arm(sorted(lines_of("rpsd-far-lambdas-h200.jsonl"), key=lambda run: run["seed"]))


def test_the_tables_of_more_weights_are_those_of_the_file():
    arms, page = lambdas(), (RESULTS / "self_distillation.md").read_text()
    assert {arm: [run["seed"] for run in same] for arm, same in arms.items()} == {
        "skip": [1, 2, 3], "skip, lambda .2": [1, 2, 3], "skip, lambda 2": [1, 2, 3], "skip, Y = L/2": [1],
    }  # fmt: skip
    for table in tables([run for same in arms.values() for run in same]).split("\n\n"):
        assert table in page


def noises():
    """Lines of each arm on the models that were taught a fifth time, by seed."""
    return runs_by_arm(sorted(lines_of("rpsd-far-noise-h100.jsonl"), key=lambda run: run["seed"]))


def test_the_tables_of_noise_are_those_of_the_file():
    arms, page = noises(), (RESULTS / "self_distillation.md").read_text()
    assert {arm: [run["seed"] for run in same] for arm, same in arms.items()} == {
        "skip": [1, 2, 3], "noise": [1, 2, 3], "skip, Y = L/2": [2, 3],
    }  # fmt: skip
    names = ("skip", "noise", "skip, Y = L/2")
    for table in tables([run for name in names for run in arms[name]]).split("\n\n"):
        assert table in page


def test_what_is_said_of_noise_holds():
    """The control finds as many keys: that is said wherever the skip is praised."""
    arms, page = noises(), text_of("research/results/self_distillation.md")
    skip, noise, near = (arms[name] for name in ("skip", "noise", "skip, Y = L/2"))
    (strength,) = {run["strength"] for run in noise}
    kls = [fmean(mean_kl(run["log"]) for run in same) for same in (noise, skip)]
    assert f"Its strength, {strength:.2f}, was searched" in page
    assert "it is {} nats, the skip's {}.".format(*(share(kl, 3) for kl in kls)) in page
    keys, mentions = (in_words(above(skip, noise, kind)) for kind in KINDS)
    shares = [share(found(same, "multikey"), 3) for same in (noise, skip)]
    said = "finds {} of them at 131072 tokens, the skip {}, {} more {}, in one seed of three."
    assert said.format(*shares, keys[0], keys[1].replace("-0", "-")) in page
    low, high = paired_interval(above(skip, noise))
    assert low < 0 < high
    assert sum(found([a], "multikey") > found([b], "multikey") for a, b in seed_pairs(skip, noise)) == 1
    at_64k = share(fmean(differences(seed_pairs(skip, noise), ("ordinal", 65536, 2))), 3)
    assert "finds {} more {} there, in two seeds of three, and {} more at 65536.".format(*mentions, at_64k) in page
    assert sum(found([a], "ordinal") > found([b], "ordinal") for a, b in seed_pairs(skip, noise)) == 2
    dearer = [cost_of([pair]) for pair in seed_pairs(noise, skip)]
    assert min(dearer) > 0 and f"{share(fmean(dearer), 3)} nats less of loss within the row, in every seed" in page
    seconds = [fmean(run["train_seconds"] for run in same) for same in (skip, noise)]
    assert round(seconds[0] / seconds[1], 1) == 0.4 and "and two fifths of the time" in page
    assert abs(fmean(map(short_text, skip)) - fmean(map(short_text, noise))) < 0.005
    fewer = [figure for kind in KINDS for figure in in_words(above(skip, near, kind))]
    less = share(-cost_of(seed_pairs(near, skip)), 3)
    assert "find {} fewer keys {} and {} fewer mentions {} on both models, for".format(*fewer) in page
    assert f"for {less} nats less loss within the row. Their KL is a tenth" in page
    assert round(10 * fmean(mean_kl(run["log"]) for run in near) / kls[1]) == 1
    where = text_of("docs/self_distillation.md")
    figures = [share(found(same, kind)) for kind in KINDS for same in (noise, skip)]
    assert (
        "at 128K as the skip, {} and {}, and {} of the mentions, the skip {}; it costs .02 nats".format(*figures)
        in where
    )
    assert "attention of about the same KL, its control, finds as many keys" in text_of("research/results/papers.md")


def on_all_models(ours, theirs):
    """Pairs of two arms on each model that both have, of those that were taught anew."""
    times = [arms for arms in (controls(), weights(), lambdas(), noises()) if ours in arms and theirs in arms]
    return [pair for arms in times for pair in seed_pairs(arms[ours], arms[theirs])]


def cost_of(pairs):
    """Nats of loss within the row that the first runs have more."""
    return fmean(mean_of(a["loss x1"], 64, 32768) - mean_of(b["loss x1"], 64, 32768) for a, b in pairs)


def test_the_table_over_all_models_is_what_the_files_hold():
    page = (RESULTS / "self_distillation.md").read_text()
    for arm in ("skip, lambda .2", "skip, lambda .5", "skip, lambda 2", "skip, Y = L/2", "skip, Y = 2 L"):
        pairs, cells = on_all_models(arm, "skip"), []
        for kind in KINDS:
            more = differences(pairs, (kind, 131072, 4))
            low, high = paired_interval(more)
            cells.append(f"{fmean(more):+.3f} ({low:+.3f} to {high:+.3f})")
            cells.append(str(sum(found([a], kind) < found([b], kind) for a, b in pairs)))
        assert f"| {arm} | {len(pairs)} | {' | '.join(cells)} | {cost_of(pairs):+.3f} |" in page


def test_what_is_said_of_the_weight_over_all_models_holds():
    page = text_of("research/results/self_distillation.md")
    pairs = on_all_models("skip, lambda 2", "skip, lambda .2")
    keys, mentions = (in_words(differences(pairs, (kind, 131072, 4))) for kind in KINDS)
    said = "finds {} more of the keys than a fifth {} and {} more of the mentions {}, for {} nats."
    assert len(pairs) == 4 and said.format(*keys, *mentions, share(cost_of(pairs), 3)) in page
    where = text_of("docs/self_distillation.md")
    assert f"2 finds {keys[0]} more of the keys at 128K than 0.2, for {share(cost_of(pairs), 3)} nats" in where
    lead = above(controls()["skip"], controls()["next-token"])
    assert round(fmean(lead) / float(keys[0])) == 4
    costs = [cost_of(on_all_models(f"skip, lambda {weight}", "skip")) for weight in (".2", ".5", "2")]
    gains = [
        fmean(differences(on_all_models(f"skip, lambda {weight}", "skip"), ("multikey", 131072, 4)))
        for weight in (".2", ".5", "2")
    ]
    assert costs == sorted(costs) and gains == sorted(gains) and costs[1] < 0 < costs[2] and gains[1] < 0 < gains[2]
    fifth = fmean(differences(on_all_models("skip, lambda .2", "skip"), ("multikey", 131072, 4)))
    assert round(100 * fifth) == -4 and "here it is four points of the keys" in page


def eight_windows():
    return runs_by_arm(sorted(lines_of("rpsd-far-65536-h200.jsonl"), key=lambda run: run["seed"]))


def test_the_tables_of_rows_of_eight_windows_are_those_of_the_file():
    arms, page = eight_windows(), (RESULTS / "self_distillation.md").read_text()
    assert set(arms) == {"abf", "next-token", "next-token x1.6", "pose", "skip"}
    assert {tuple(run["seed"] for run in same) for same in arms.values()} == {(1, 2, 3)}
    runs = [run for same in arms.values() for run in same]
    for table in tables(runs).split("\n\n"):
        assert table in page
    questions = {(cell["kind"], len(exam)) for run in runs for cell in run["exams"] for exam in cell["marks"]}
    assert questions == {("multikey", 24), ("ordinal", 18)} and "24 questions of keys or 18 of mentions" in text_of(
        "research/results/self_distillation.md"
    )
    steps = {same[0]["log"][-1]["step"] for arm, same in arms.items() if arm in ("next-token", "pose", "skip")}
    assert steps == {32} and round(32 * 65536 / 1e6, 1) == 2.1


def more(ours, theirs, kind, length):
    """Differences of exams in rows of 65536, of the seeds that both have."""
    return differences(seed_pairs(ours, theirs), (kind, length, length // 65536))


def within_chance(differences):
    low, high = paired_interval(differences)
    return low < 0 < high


def test_what_is_said_of_keys_and_mentions_in_rows_of_eight_windows_holds():
    arms, page = eight_windows(), text_of("research/results/self_distillation.md")
    plain, longer, pose, skip = (arms[name] for name in ("next-token", "next-token x1.6", "pose", "skip"))
    keys, mentions = (in_words(more(skip, plain, kind, 131072)) for kind in KINDS)
    assert within_chance(more(skip, plain, "multikey", 131072))
    at_end = [f"{found(same, 'multikey'):.3f}".removeprefix("0") for same in (skip, plain)]
    ends = keys[1].replace("-0.", "-.")
    assert "{} and {} at 131072 tokens, {} more {} and fewer in".format(*at_end, keys[0], ends) in page
    assert "it finds {} more there {}, and fewer in that seed".format(*mentions) in page
    for kind, word in zip(KINDS, ("keys", "mentions"), strict=True):
        behind = [found([a], kind) < found([b], kind) for a, b in seed_pairs(skip, plain)]
        assert behind == [False, False, True]
        of_row = more(skip, plain, kind, 65536)
        assert within_chance(of_row) and fmean(of_row) < 0
        assert within_chance(more(longer, skip, kind, 131072))
        assert all(found([a], kind) > found([b], kind) for a, b in seed_pairs(skip, pose))
        assert "{0} of the {2} {1}".format(*in_words(more(skip, pose, kind, 131072)), word) in page
        for length in (65536, 131072):
            of_pose = more(pose, plain, kind, length)
            assert fmean(of_pose) < 0 or within_chance(of_pose)
            assert min(fmean(more(same, arms["abf"], kind, length)) for same in (plain, longer, pose, skip)) > 0.1
    of_row = [f"{fmean(by_exam(longer, kind, 65536)):.3f}".removeprefix("0") for kind in KINDS]
    leads = [in_words(more(longer, skip, kind, 65536)) for kind in KINDS]
    said = "length {} of the keys and {} of the mentions, {} {} and {} {} more than the skip"
    assert said.format(*of_row, *leads[0], *leads[1]) in page
    for same in arms.values():
        fifths = [fmean(of_seeds) for of_seeds in zip(*(by_place(run, "multikey", 65536) for run in same), strict=True)]
        assert fifths[0] == min(fifths)
    shares = [share(found(same, kind)) for same in (skip, plain, longer) for kind in KINDS]
    said = "{} of the keys and {} of the mentions, next-token training {} and {}, and 1.6 times its steps {} and {}"
    assert f"the skip finds {said.format(*shares)}" in text_of("docs/self_distillation.md")


def dearer(runs, others, field, first, end):
    """Nats of loss that the first runs have more, in words."""
    of_each = [mean_of(a[field], first, end) - mean_of(b[field], first, end) for a, b in seed_pairs(runs, others)]
    return share(fmean(of_each), 3)


def test_rows_of_eight_windows_are_set_against_those_of_four():
    page, arms, nearer = (
        text_of("research/results/self_distillation.md"),
        eight_windows(),
        runs_by_arm(lines_of("rpsd-far-h200.jsonl")),
    )
    skip, plain = arms["skip"], arms["next-token"]
    costs = (
        dearer(skip, plain, "loss x1", 64, 65536),
        dearer(nearer["skip"], nearer["next-token"], "loss x1", 64, 32768),
        dearer(skip, plain, "loss x2", 65536, 131072),
        dearer(nearer["next-token"], nearer["skip"], "loss x4", 32768, 131072),
    )
    said = "costs {} nats of loss within the row, in rows of four windows {}, and beyond it {}, where it was {} lower"
    assert said.format(*costs) in page
    pairs = seed_pairs(nearer["skip"], nearer["next-token"])
    at_2x, at_4x = (in_words(differences(pairs, ("multikey", n, n // 32768)))[0] for n in (65536, 131072))
    here = in_words(more(skip, plain, "multikey", 131072))[0]
    said = f"is {at_2x} of the keys in rows of four windows and {here} here; YaRN 4x, under which it is {at_4x} there"
    assert said in page
    kl = [share(fmean(mean_kl(run["log"]) for run in same)) for same in (skip, nearer["skip"])]
    assert "is {} nats over training, in rows of four windows {}.".format(*kl) in page


def test_no_model_answers_lambada_through_the_chat_template():
    files = ("h200", "controls-h200", "weights-h200", "lambdas-h200", "noise-h100", "65536-h200", "h100")
    runs = [run for file in files for run in lines_of(f"rpsd-far-{file}.jsonl")]
    assert {run["short_text"]["accuracy"]["lambada_openai"] for run in runs} == {0.0}
    assert "where no model gets a question of LAMBADA right" in text_of("research/results/self_distillation.md")
    of_cues = lines_of("endprompt-33m-h200.jsonl", "endprompt-33m-h100.jsonl")
    assert {run["short"]["lambada_openai"] for run in of_cues if "short" in run} == {0.0}
    assert "where LAMBADA is 0 for every model" in text_of("research/results/extension.md")


SMALL_SCALE = {
    "as it was taught": "taught",
    "under ABF, untrained": "abf",
    "next-token training": "standard",
    "LongCE": "longce",
    "PoSE, as RPSD's baseline": "pose baseline",
    "RPSD, skip": "skip",
    "RPSD, skip up to three rows, 24576": "skip, Y = 3 L",
    "RPSD, cyclic": "cyclic",
    "RPSD, fixed skip": "fixed skip",
    "dilation as the view": "dilation",
    "chunk-wise permutation": "chunk-permute",
    "NoPE as the view": "nope",
    "dropout control": "dropout",
    "attention-noise control": "noise",
    "RPSD, forward KL": "forward kl",
    "w/ CLM in place of the KL": "w/ clm",
    "RPSD and LongCE": "skip + longce",
}


def small_scale():
    return runs_by_arm(lines_of("rpsd-small-scale-h200.jsonl"))


def test_the_table_at_small_scale_is_what_its_file_holds():
    arms, page = small_scale(), (RESULTS / "self_distillation.md").read_text().replace("**", "")
    assert set(SMALL_SCALE.values()) == set(arms)
    for name, arm in SMALL_SCALE.items():
        same = arms[arm]
        cells = [name, str(len(same))]
        for kind in KINDS:
            shares = [fmean(run[kind][length] for run in same) for length in ("2048", "8192", "16384", "32768")]
            cells += [share(each) if each else "0" for each in shares]
        for first, end in ((64, 2048), (16384, 32768)):
            cells.append(f"{fmean(mean_of(run['loss_by_position'], first, end) for run in same):.3f}")
        assert f"| {' | '.join(cells)} |" in page


def test_what_is_said_against_the_paper_at_small_scale_holds():
    arms, page = small_scale(), text_of("research/results/self_distillation.md")

    def retrieved(arm, metric):
        return fmean(score(run, metric) for run in arms[arm])

    def dearer(arm, first, end):
        losses = (fmean(mean_of(run["loss_by_position"], first, end) for run in arms[a]) for a in (arm, "standard"))
        return f"{next(losses) - next(losses):.2f} nats"

    within = (64, 2048)
    assert f"the cyclic view is behind the skip up to 16K, and costs {dearer('cyclic', *within)};" in page
    for kind in KINDS:
        for length in ("8192", "16384"):
            cyclic, skip = (fmean(run[kind][length] for run in arms[arm]) for arm in ("cyclic", "skip"))
            assert cyclic < skip
        assert abs(retrieved("chunk-permute", kind) - retrieved("skip", kind)) < 0.01
        assert retrieved("longce", kind) > retrieved("standard", kind)
    assert f"finds as much as the skip, for {dearer('chunk-permute', *within)};" in page
    assert abs(retrieved("nope", "multikey") - retrieved("standard", "multikey")) < 0.01
    assert f"NoPE finds about as many keys as next-token training, for {dearer('nope', *within)}." in page
    assert f"LongCE retrieves better than next-token training, for {dearer('longce', 16384, 32768)} beyond 16K." in page

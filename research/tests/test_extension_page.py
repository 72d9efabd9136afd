"""What pages say of rows of the window beside rows of full length is what the file of results holds."""

from functools import partial
from statistics import fmean, stdev

import pytest
from support.pages import ROOT, lines_of, share, text_of

from keeping_questions import KEYS
from paired_results import by_distance, cell_scores, difference, macro

PAGE = "research/results/extension.md"
SHORT_ROWS = ("pose", "endprompt", "et(pose)", "b=0", "skip distil")  # that are below full length


@pytest.fixture(scope="module")
def runs():
    """Runs of each method under one rescaling to one target, by seed."""
    groups = {}
    for run in lines_of("extension-h200.jsonl"):
        groups.setdefault((run["target"], run["schedule"], run["method"]), {})[run["seed"]] = run
    return groups


def loss(run, span):
    return run["loss_by_position"][span]["loss"]


def losses_above(ours, theirs, span):
    """How much higher the loss is, seed by seed."""
    return [loss(ours[seed], span) - loss(theirs[seed], span) for seed in theirs]


def numbers(same, measure, length):
    """Shares of found numbers, seed by seed."""
    return [
        (run["teacher_forced"]["passkey"] if measure == "digits" else run["passkey"])[length] for run in same.values()
    ]


def of_seeds(same, measure, length):
    return share(fmean(numbers(same, measure, length)))


def test_which_short_rows_do_better_than_full_length(runs):
    page, far = text_of(PAGE), []
    for target, schedule, spans in ((32768, "pi", 3), (65536, "pi", 4), (65536, "yarn", 4)):
        full = runs[target, schedule, "full length"]
        for method in SHORT_ROWS:
            for span in range(spans):
                above = losses_above(runs[target, schedule, method], full, span)
                assert max(above) < 0, (target, schedule, method, span)
                far.append(fmean(above))
    assert f"in every seed, by up to {-min(far):.2f} nats." in page
    full = runs[65536, "yarn", "full length"]
    others = [losses_above(runs[65536, "yarn", method], full, 3) for method in ("longrecipe", "posaug")]
    assert min(map(min, others)) > 0
    assert "they end {:.3f} and {:.3f} nats above it at 32-64K, in every seed".format(*map(fmean, others)) in page
    full = runs[32768, "yarn", "full length"]
    pose, endprompt = (losses_above(runs[32768, "yarn", method], full, 2) for method in ("pose", "endprompt"))
    assert max(pose) < 0 and f"PoSE is below full length by {-fmean(pose):.3f} in every seed" in page
    assert sum(a > 0 for a in endprompt) == 2
    assert f"EndPrompt {fmean(endprompt):.3f} above it, in two seeds of three" in page


def test_the_cue_has_no_order_in_passkeys_as_written(runs):
    page = text_of(PAGE)
    near, far = ([runs[target, "yarn", method] for method in ("endprompt", "b=0")] for target in (32768, 65536))
    assert all(a > b for a, b in zip(*(numbers(same, "written", "32768") for same in near), strict=True))
    assert all(a < b for a, b in zip(*(numbers(same, "written", "65536") for same in far), strict=True))
    shares = [of_seeds(same, "written", "32768") for same in near] + [
        of_seeds(same, "written", "65536") for same in far
    ]
    said = "more are found at 32K ({}, without it {}) and fewer at 64K ({} and {}), each in every seed."
    assert said.format(*shares) in page


def test_what_is_said_of_posaug_and_of_the_skip_holds(runs):
    page = text_of(PAGE)
    shares = [
        of_seeds(runs[target, "yarn", method], "digits", str(target))
        for target in (65536, 32768)
        for method in ("posaug", "pose")
    ]
    assert "passkeys to 65536, {} in place of {} (to 32768 {} and {}, within noise)".format(*shares) in page
    clm, distilled = (runs[32768, "yarn", method] for method in ("clm on skips", "skip distil"))
    within = [losses_above(clm, distilled, span) for span in range(3)]
    assert max(map(max, within)) < 0 and all(round(-fmean(of), 3) in (0.008, 0.009) for of in within)
    beyond = losses_above(clm, distilled, 3)
    assert min(beyond) > 0 and f"at 32-64K, it is {fmean(beyond):.3f} above, in every seed." in page
    posaug = runs[32768, "yarn", "posaug"]
    assert max(max(losses_above(distilled, posaug, span)) for span in range(3)) < 0
    behind = losses_above(distilled, posaug, 3)
    assert min(behind) > 0 and f"at 32-64K, it is {fmean(behind):.3f} behind, in every seed." in page
    view, rows = (runs[32768, "yarn", method] for method in ("posaug kl", "posaug, rows"))
    names = view[0]["short"]
    points = [100 * fmean(view[seed]["short"][n] - rows[seed]["short"][n] for seed in view) for n in names]
    mean, error = fmean(points), stdev(points) / len(points) ** 0.5
    assert mean < 2 * error
    assert f"text is {mean:.2f} points of accuracy higher, with a standard error of {error:.2f} over" in page
    shares = [of_seeds(same, "digits", "32768") for same in (view, rows)]
    assert "its passkeys {} in place of {}, so that".format(*shares) in page


def test_what_the_page_of_positions_says_of_them_holds(runs):
    page = text_of("docs/positions.md")
    shares = [
        of_seeds(runs[65536, "yarn", method], "digits", "65536") for method in ("pose", "endprompt", "full length")
    ]
    assert "teacher-forced ({} and {}, full length {})".format(*shares) in page
    pose, full = (runs[32768, "yarn", method] for method in ("pose", "full length"))
    assert all(max(losses_above(pose, full, span)) < 0 for span in range(3))
    apart = [
        fmean(losses_above(same, runs[target, "yarn", method], span))
        for (target, schedule, method), same in runs.items()
        if schedule == "pi" and method != "none"
        for span in range(3 + (target == 65536))
    ]
    assert f"YaRN is ahead of PI by {min(apart):.1f} to {max(apart):.1f} nats with every method" in page


def test_what_is_said_of_endprompt_beside_untrained_yarn_holds(runs):
    page = text_of("research/results/papers.md")
    untrained, trained = runs[65536, "yarn", "none"], runs[65536, "yarn", "endprompt"]
    shares = [of_seeds(same, "written", "65536") for same in (untrained, trained)]
    higher = loss(untrained[0], 3) - fmean(loss(run, 3) for run in trained.values())
    assert "writes as many of the passkeys there, {} and {}, at a loss that is".format(*shares) in page
    assert f"at a loss that is {higher:.2f} nats higher" in page
    assert "fewer to 32768, each in every seed" in page  # as the test of the cue above has it


@pytest.fixture(scope="module")
def of_more():
    """Runs of each method on 33.6M tokens, by seed."""
    groups = {}
    for run in lines_of("endprompt-33m-h200.jsonl", "endprompt-33m-h100.jsonl"):
        groups.setdefault(run["method"], {})[run["seed"]] = run
    return groups


def passkeys(length):
    return partial(cell_scores, test="passkey", length=length)


def share_found(same, length=8192):
    """Share of the passkeys that all seeds find, at the window's length unless it is said, as a page has it."""
    return share(fmean(score for run in same.values() for score in passkeys(length)(run)))


def of_ten(same):
    """Share of the ten passkeys in one wording, the mean over seeds."""
    return fmean(numbers(same, "written", "8192"))


# first words of a row
TRAINED_ON_MORE = {
    "EndPrompt": "endprompt",
    "a word": "cue word",
    "last 20": "last 20",
    "last 64": "last 64",
    "last 512": "last 512",
    "random places": "et(pose)",
    "PoSE": "pose",
}

BY_DISTANCE = "| keys by eighths of the text, the nearest first |"

# whole rows
NAMES_ON_MORE = {
    "as it came": "native",
    "rescaled, untrained": "none",
    "EndPrompt without a cue, b = 0": "b=0",
    "EndPrompt": "endprompt",
    "EndPrompt, a word as its cue": "cue word",
    "EndPrompt, the last 20 tokens in place of a cue": "last 20",
    "EndPrompt, the last 64 tokens in place of a cue": "last 64",
    "EndPrompt, the last 512 tokens in place of a cue": "last 512",
    "EndPrompt, its cue at random places": "et(pose)",
    "PoSE": "pose",
}


def test_the_table_of_more_tokens_is_what_its_file_holds(of_more):
    page = (ROOT / PAGE).read_text().split("## EndPrompt on 33.6M tokens\n")[1].split(BY_DISTANCE)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    lengths = (8192, 16384, 32768, 65536)
    assert [row[0] for row in rows[1:]] == [
        *NAMES_ON_MORE,
        *(f"{name} above b = 0, paired" for name in TRAINED_ON_MORE),
    ]
    for name, *cells in rows[1 : -len(TRAINED_ON_MORE)]:
        same = of_more[NAMES_ON_MORE[name]].values()
        wanted = [str(len(same)), *(f"{fmean(loss(run, span) for run in same):.3f}" for span in range(4))]
        for test in ("passkey", "keys"):
            for length in lengths:
                scores = [score for run in same for score in cell_scores(run, test, length)]
                wanted.append(share(fmean(scores)) if scores else "-")
        assert cells == [*wanted, share(fmean(run["short_mean"] for run in same), 3)]
    for row, method in zip(rows[-len(TRAINED_ON_MORE) :], TRAINED_ON_MORE.values(), strict=True):
        tests = [("passkey", n) for n in lengths] + [("keys", n) for n in lengths]
        paired = [above(of_more, method, "b=0", partial(cell_scores, test=t, length=n)) for t, n in tests]
        paired.append(above(of_more, method, "b=0", lambda run: macro(run["short_scores"])))
        assert row[6:] == [cell.replace("0.", ".") for cell in paired]


def above(of_more, method, other, scores):
    """By how much a method is above another of the same seeds, with its interval."""
    return difference([(of_more[method][seed], of_more[other][seed]) for seed in of_more[method]], scores)


def figure(difference_with_interval):
    """The difference without its sign and interval, as sentences have it."""
    return difference_with_interval.split()[0].strip("+-").removeprefix("0")


def seeds_above(of_more, method, other, length):
    """Seeds in which a method finds more passkeys than another."""
    found = [[fmean(passkeys(length)(of_more[name][seed])) for seed in range(3)] for name in (method, other)]
    return sum(a > b for a, b in zip(*found, strict=True))


def lower_by(of_more, method, span):
    """Nats by which a method's loss is below the control's, by seed."""
    return [loss(of_more["b=0"][seed], span) - loss(of_more[method][seed], span) for seed in range(3)]


def test_what_is_said_of_more_tokens_holds(of_more):
    page = text_of(PAGE)
    control = of_more["b=0"]
    assert all(set(of_more[method]) == {0, 1, 2} for method in ("b=0", *TRAINED_ON_MORE.values()))
    cue = above(of_more, "endprompt", "b=0", passkeys(65536))
    assert f"With it {figure(cue)} more passkeys are found at 65536 tokens, in two seeds of three" in page
    assert [seeds_above(of_more, "endprompt", "b=0", n) for n in (65536, 32768, 16384)] == [2, 1, 2]
    seeds = difference([(control[1], control[0])], passkeys(65536))
    assert float(seeds.split()[0]) > float(cue.split()[0])
    said = seeds.replace("+", "").replace("0.", ".")
    assert f"Two seeds of the control differ by {said[:4]} at 65536 {said[5:]}" in page
    first, second, third = lower_by(of_more, "endprompt", 3)
    said = "the loss at 32-64K is {:.3f} and {:.3f} lower with the cue in two seeds and {:.3f} higher in the third"
    assert said.format(first, second, -third) in page and min(first, second, -third) > 0


def test_what_is_said_of_the_last_tokens_on_more_tokens_holds(of_more):
    page = text_of(PAGE)
    lengths = (8192, 16384, 32768)
    fewer = [figure(above(of_more, "last 20", "b=0", passkeys(n))) for n in lengths]
    assert "at 8192, 16384 and 32768 tokens, {}, {} and {}, in every seed".format(*fewer) in page
    assert [seeds_above(of_more, "last 20", "b=0", n) for n in lengths] == [0, 0, 0]
    far = figure(above(of_more, "last 20", "b=0", passkeys(65536)))
    assert f"and find {far} more at 65536, in two of three." in page
    assert seeds_above(of_more, "last 20", "b=0", 65536) == 2
    fewer = [figure(above(of_more, "last 20", "endprompt", passkeys(n))) for n in lengths]
    said = "Against the cue they find {}, {} and {} fewer to 32768, the first of these in every seed."
    assert said.format(*fewer) in page
    assert [seeds_above(of_more, "last 20", "endprompt", n) for n in lengths] == [0, 1, 1]


def test_what_is_said_of_more_of_the_end_on_more_tokens_holds(of_more):
    page = text_of(PAGE)
    arms, lengths = ("last 20", "last 64", "last 512"), (8192, 16384, 32768)
    shares = ["{}, {} and {}".format(*(share_found(of_more[arm], n) for arm in arms)) for n in lengths]
    said = "with 20, 64 and 512 tokens {} at 8192 tokens, {} at 16384, and {} at 32768, each fewer than the control"
    assert said.format(*shares) in page
    assert all(seeds_above(of_more, arm, "b=0", n) == 0 for arm in arms for n in lengths)
    steps = [[above(of_more, b, a, passkeys(n)) for n in lengths] for a, b in zip(arms, arms[1:], strict=False)]
    assert all(step.startswith("-") for of_lengths in steps for step in of_lengths)
    first, second = (sorted(figure(step) for step in of_lengths) for of_lengths in steps)
    assert f"From 20 to 64 it is {first[0]} to {first[-1]}, not in every seed; from 64 to 512 {second[0]} to" in page
    assert f"to {second[-1]}, in two seeds of three or in all." in page
    assert [seeds_above(of_more, "last 64", "last 20", n) for n in lengths] == [1, 0, 1]
    assert [seeds_above(of_more, "last 512", "last 64", n) for n in lengths] == [0, 1, 1]


def test_what_is_said_of_more_of_the_end_at_the_target_holds(of_more):
    page, far = text_of(PAGE), passkeys(65536)
    trained = ("b=0", *TRAINED_ON_MORE.values())
    shares = {method: share_found(of_more[method], 65536) for method in trained}
    assert max(shares, key=shares.get) == "last 64"
    control, cue = (above(of_more, "last 64", other, far) for other in ("b=0", "endprompt"))
    assert (
        f"the last 64 tokens find most, {shares['last 64']}: {figure(control)} more than the control "
        f"{interval(control)} and {figure(cue)} more than the cue {interval(cue)}, each in every seed"
    ) in page
    assert [seeds_above(of_more, "last 64", other, 65536) for other in ("b=0", "endprompt")] == [3, 3]
    assert "(-" in above(of_more, "last 64", "pose", far)
    assert [seeds_above(of_more, "last 64", "pose", n) for n in (16384, 32768)] == [3, 3]
    control = above(of_more, "last 512", "b=0", far)
    said = f"The last 512 find {shares['last 512']}, {figure(control)} more than the control {interval(control)}"
    assert said in page and seeds_above(of_more, "last 512", "b=0", 65536) == 2
    higher = [sorted(-nats for nats in lower_by(of_more, arm, 3)) for arm in ("last 64", "last 512")]
    said = (
        "the loss is {:.3f} to {:.3f} above the control's with 64 tokens and {:.3f} to {:.3f} with 512, in every seed"
    )
    assert said.format(higher[0][0], higher[0][-1], higher[1][0], higher[1][-1]) in page


def interval(difference_with_interval):
    """Its bounds, as sentences have them."""
    return difference_with_interval.replace("0.", ".").replace("+", "").split(maxsplit=1)[1]


def test_what_is_said_of_random_places_on_more_tokens_holds(of_more):
    page, same = text_of(PAGE), of_more["et(pose)"]
    control, cue = (above(of_more, "et(pose)", other, passkeys(65536)) for other in ("b=0", "endprompt"))
    assert (
        f"{figure(control)} more at 65536 tokens than the control, in every seed, and {figure(cue)} more than" in page
    )
    assert f"the cue at its one place {interval(cue)}, in two of three." in page
    assert [seeds_above(of_more, "et(pose)", other, 65536) for other in ("b=0", "endprompt")] == [3, 2]
    fewer = figure(above(of_more, "et(pose)", "b=0", passkeys(32768)))
    assert f"At 32768 it finds {fewer} fewer than the control, all of it in one seed" in page
    found = {
        m: [fmean(passkeys(32768)(of_more[m][seed])) for seed in range(3)] for m in ("et(pose)", "b=0", "endprompt")
    }
    assert [a > b for a, b in zip(found["et(pose)"], found["b=0"], strict=True)] == [True, False, True]
    lost = found["b=0"][1] - found["endprompt"][1]
    assert f"which finds {share(fmean(passkeys(32768)(same[1])), 3)} there; the cue at its one place has lost" in page
    assert f"has lost {share(lost, 3)} in the same seed." in page


def test_what_is_said_of_a_word_on_more_tokens_holds(of_more):
    page = text_of(PAGE)
    control = figure(above(of_more, "cue word", "b=0", passkeys(65536)))
    assert f"at the target: {control} more passkeys at 65536 tokens than the control, in two seeds of three." in page
    assert figure(above(of_more, "endprompt", "b=0", passkeys(65536))) == control
    assert [seeds_above(of_more, "cue word", "b=0", n) for n in (65536, 32768)] == [2, 1]
    assert above(of_more, "cue word", "b=0", passkeys(32768)).startswith("+0.000")
    sentence = above(of_more, "cue word", "endprompt", passkeys(32768))
    said = f"where the sentence finds {figure(sentence)} fewer than the word {interval(sentence)}, in two of three."
    assert said in page and seeds_above(of_more, "cue word", "endprompt", 32768) == 2


def test_what_is_said_of_pose_on_more_tokens_holds(of_more):
    page = text_of(PAGE)
    for other in ("b=0", "endprompt"):
        assert [seeds_above(of_more, "pose", other, n) for n in (8192, 16384, 32768, 65536)] == [0, 0, 0, 3]
    more = figure(above(of_more, "pose", "b=0", passkeys(65536)))
    fewer = [figure(above(of_more, "pose", "b=0", passkeys(n))) for n in (8192, 16384, 32768)]
    said = "beside the control {} more passkeys at 65536 tokens, {}, {} and {} fewer at 8192, 16384 and 32768."
    assert said.format(more, *fewer) in page
    far, half, near = (lower_by(of_more, "pose", span) for span in (3, 2, 0))
    assert min(far) > 0 and min(half) > 0 and max(near) < 0
    said = "loss at 32-64K is {:.3f} lower than the control's, at 16-32K {:.3f}, and within the window {:.3f} higher"
    assert said.format(fmean(far), fmean(half), -fmean(near)) in page
    assert f"PoSE does not bring them back: {share_found(of_more['pose'])}, and none of the ten" in page
    assert of_ten(of_more["pose"]) == 0


def test_what_is_said_of_keys_among_look_alikes_on_more_tokens_holds(of_more):
    page = text_of(PAGE)
    untrained = of_more["none"][0]

    def gain(method, length):
        runs = [(run, untrained) for run in of_more[method].values()]
        return difference(runs, partial(cell_scores, test="keys", length=length))

    for method in ("b=0", *TRAINED_ON_MORE.values()):
        assert all("(-" in gain(method, n) for n in (32768, 65536)), method
    arms = "endprompt", "last 512", "pose"
    cue, end, pose = (gain(method, 16384).replace("+", "").replace("0.", ".") for method in arms)
    said = f"At 16384 EndPrompt finds {cue[:4]} more {cue[5:]}, the last 512 tokens {end} and PoSE {pose}, still one in"
    assert said in page
    assert all("(-" in gain(m, 16384) for m in ("b=0", *TRAINED_ON_MORE.values()) if m not in arms)
    scores = [score for run in of_more["b=0"].values() for score in cell_scores(run, "keys", 65536)]
    of_texts = [sum(scores[first : first + KEYS]) for first in range(0, len(scores), KEYS)]
    said = f"of the control's {len(of_texts)} texts {of_texts.count(1)} get exactly one of eight right."
    assert said in page and "Each of 13 texts a length has eight keys" in page and len(of_texts) == 3 * 13


def test_the_table_of_keys_by_distance_is_what_its_file_holds(of_more):
    page = (ROOT / PAGE).read_text().split(BY_DISTANCE)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()[2:]]
    lengths = (8192, 16384, 32768, 65536)
    for (name, *cells), method in zip(rows, NAMES_ON_MORE.values(), strict=True):
        assert NAMES_ON_MORE[name] == method
        assert cells == [by_distance([*of_more[method].values()], n, KEYS).replace("0.", ".") for n in lengths]


def test_what_more_tokens_bring_back_within_the_window(of_more):
    page = text_of(PAGE)
    native, control = of_more["native"][0], of_more["b=0"]
    gain = difference([(run, native) for run in control.values()], passkeys(8192)).replace("+", "").replace("0.", ".")
    shares = share_found(control), share_found(of_more["native"])
    assert "{} at 8192 tokens without a cue, as it came {}, by {} more over".format(*shares, gain) in page
    short = [share(fmean(r["short_mean"] for r in same), 3) for same in (control.values(), [native])]
    assert "no short text is lost, {} and {}.".format(*short) in page
    lost = difference([(run, native) for run in control.values()], lambda run: macro(run["short_scores"]))
    assert "(-" in lost and " to +" in lost
    assert of_ten(of_more["native"]) == 1
    assert f"finds all and the control {share(of_ten(control))}:" in page


def test_what_the_page_of_papers_says_of_more_tokens_holds(of_more):
    page = text_of("research/results/papers.md")
    arms = of_more["endprompt"], of_more["b=0"]
    shares = [share_found(arm, n) for n in (65536, 32768) for arm in arms]
    said = (
        "the cue finds more passkeys at 65536 tokens, {} and {}, in two of three seeds, and fewer at 32768, {} and {};"
    )
    assert said.format(*shares) in page
    pose, end, places = (
        [share_found(of_more[arm], n) for n in (65536, 32768)] for arm in ("pose", "last 64", "et(pose)")
    )
    assert "PoSE finds more at 65536, {}, and fewer at 32768, {}, each in every seed. Both lose".format(*pose) in page
    said = (
        "The last 64 tokens of the body in place of a cue find most at 65536, {}, more than the cue in every seed and"
    )
    assert f"{said.format(end[0])} as many as PoSE within chance, and {end[1]} at 32768." in page
    assert "(-" in above(of_more, "last 64", "pose", passkeys(65536))
    assert [seeds_above(of_more, arm, "b=0", 8192) for arm in ("last 64", "pose")] == [0, 0]
    said = "At random places it finds {} at 65536, more than the control in every seed and, the paper's order,"
    assert said.format(places[0]) in page
    assert (
        f"order, than at its one place in two, and {places[1]} at 32768; a word in place of the sentence does no less."
        in page
    )

"""What pages say of rows of the window beside rows of full length is what the file of results holds."""

from statistics import fmean, stdev

import pytest
from support.pages import lines_of, share, text_of

PAGE = "docs/results/extension.md"
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


def numbers(same, measure, *of):
    """Shares of found numbers, seed by seed."""
    return [
        (run["teacher_forced"]["passkey"] if measure == "digits" else run["passkey"])[of[0]] for run in same.values()
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
    page = text_of("docs/results/papers.md")
    untrained, trained = runs[65536, "yarn", "none"], runs[65536, "yarn", "endprompt"]
    shares = [of_seeds(same, "written", "65536") for same in (untrained, trained)]
    higher = loss(untrained[0], 3) - fmean(loss(run, 3) for run in trained.values())
    assert "writes as many of the passkeys there, {} and {}, at a loss that is".format(*shares) in page
    assert f"at a loss that is {higher:.2f} nats higher" in page
    assert "fewer to 32768, each in every seed" in page  # as the test of the cue above has it

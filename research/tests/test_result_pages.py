"""Tables of pages of results are those of their files."""

import re
from pathlib import Path
from statistics import mean

import pytest
from support.pages import RESULTS, lines_of, text_of

import keeping_results
import paper_claims
import reply_noise
from claims import HEAD, Claim
from rope_patch.eval.results.paired import paired_interval


@pytest.mark.slow
def test_tables_of_the_search_for_what_keeps_are_those_of_the_file():
    tables = keeping_results.tables(lines_of("keeping-h200.jsonl")).split("\n\n")
    page = (RESULTS / "keeping.md").read_text()
    assert len(tables) == 6 and all(table in page for table in tables)


@pytest.mark.slow
def test_tables_of_the_arms_without_next_token_loss_of_text_are_those_of_the_file():
    tables = keeping_results.tables(lines_of("keeping-answers-h200.jsonl")).split("\n\n")
    page = (RESULTS / "keeping.md").read_text()
    assert len(tables) == 4 and all(table in page for table in tables)
    ((_, *cells),) = keeping_cells("keeping-answers-h200.jsonl", table=2).values()
    at_16384 = short(cells[9].split(" / ")[3])
    of_seeds = [
        mean(keeping_results.scores(run, "keys", 16384))
        for run in lines_of("keeping-seeds-h200.jsonl")
        if run["arm"] == "keep-2"
    ]
    least, most = (short(f"{value:.2f}") for value in (min(of_seeds), max(of_seeds)))
    assert f"at 16384 tokens {at_16384}, keep-2's three seeds {least} to {most}" in " ".join(page.split())


def test_the_table_of_arms_that_mend_the_recipe_is_that_of_its_file():
    tables = keeping_results.tables(lines_of("keeping-tried-h200.jsonl")).split("\n\n")
    page = (RESULTS / "keeping.md").read_text()
    assert len(tables) == 2 and all(table in page for table in tables)
    arms = keeping_cells("keeping-tried-h200.jsonl")
    assert f"More replies of keep-2 end here, {short(arms['keep-2'][7])} beside {short(arms['native'][7])}" in page


@pytest.mark.slow
def test_the_table_of_the_last_ideas_is_that_of_its_files():
    runs = lines_of("keeping-arms-h100.jsonl")
    tables = keeping_results.tables(runs).split("\n\n")
    page = (RESULTS / "keeping.md").read_text()
    assert len(tables) == 2 and all(table in page for table in tables)
    arm = {run["arm"]: run for run in runs}
    better = {
        measure: [
            name
            for name in arm
            if name != "native"
            and paired_interval([a - b for a, b in zip(of(arm[name]), of(arm["keep-2"]), strict=True)])[0] > 0
        ]
        for measure, of in (("short text", keeping_results.short_text), ("replies", keeping_results.reply_losses))
    }
    assert better == {"short text": [], "replies": []}, "the page says that none is better than the recipe"
    seconds = [f"{arm[name]['train_seconds']:.0f}" for name in ("keep-2-lora-slow", "keep-2")]
    said = " ".join(page.split())
    assert "{} seconds in place of {}".format(*seconds) in said
    answered = [step["teacher_probability"] for step in arm["keep-2-evidence"]["log"]]
    least, most = (short(f"{share:.2f}") for share in (min(answered), max(answered)))
    assert f"a probability of {least} to {most}" in said
    search = {line["arm"]: line["fitness"] for line in lines_of("factor-search-h100.jsonl") if line["line"] == "arm"}
    (found,) = (line["fitness"] for line in lines_of("factor-search-h100.jsonl") if line["line"] == "best")
    figures = search["yarn"], found, search["ntk-2"]
    assert "from YaRN's {:.2f} to {:.2f} (NTK 16x {:.2f})".format(*figures) in said


def test_what_noise_makes_of_replies_is_documented_as_the_file_has_it():
    page = (RESULTS / "keeping.md").read_text()
    lines = lines_of("reply-noise-cpu.jsonl")
    assert reply_noise.table(lines) in page
    native, *noisy = lines
    said = " ".join(page.split())
    losses = [mean(reply["nll"] for reply in line["own"]["replies"]) for line in lines]
    for line, loss in zip(noisy, losses[1:], strict=True):
        assert short(f"{line['own']['kl']:.3f}") in said and short(f"{loss - losses[0]:.3f}") + " nats" in said
    before, recipe = (
        mean(reply["nll"] for reply in run["own"]["replies"][:100])
        for name in ("native", "keep-2")
        for run in lines_of("keeping-arms-h100.jsonl")
        if run["arm"] == name
    )
    assert f"the recipe, at a KL of .110, is {short(f'{recipe - before:.3f}')} above the model as it came" in said


GEMMA = ("keeping-gemma-h200.jsonl", "keeping-gemma-h100.jsonl")


@pytest.mark.slow
def test_tables_of_the_second_model_are_those_of_the_files():
    runs = lines_of(*GEMMA)
    tables = keeping_results.tables(runs).split("\n\n")
    page = (RESULTS / "keeping.md").read_text()
    assert len(tables) == 4 and all(table in page for table in tables)
    said = " ".join(page.split())
    (row,) = (row for row in keeping_results.tables(runs, beside="no-kl-2").splitlines() if row.startswith("| keep-2"))
    assert row in page
    worse = [cell for cell in row.split(" | ") if "(" in cell and float(cell.split(" to ")[1].strip(") |")) < 0]
    assert len(worse) == 1
    loss, high, low = (short(x) for x in re.findall(r"[.\d]+", worse[0]))
    assert f"{loss} more of the numbers at 120000 tokens ({low} to {high}), the one cell of ten" in said
    beside_native = keeping_results.tables(runs, beside="native").splitlines()
    for arm, sentence in (
        ("pose", "{} of the prompts at 2048 tokens ({} to {})"),
        ("yarn", "{} of the passkeys at 2048 ({} to {})"),
    ):
        (row,) = (row for row in beside_native if row.startswith(f"| {arm},"))
        loss, low, high = (abs(float(x)) for x in re.findall(r"[+-][.\d]+", row.split(" | ")[2]))
        assert sentence.format(*(f"{x:.3f}".removeprefix("0") for x in (loss, high, low))) in said
    cells = keeping_cells(*GEMMA, table=2)
    middle = {arm: cells[arm][9].split(" / ")[1] for arm in ("pose", "keep-2")}
    pose, recipe = (short(middle[arm]) for arm in ("pose", "keep-2"))
    assert f"finds {pose} of the numbers at 30000 tokens, where the recipe finds {recipe}" in said
    assert not any("*" in row for row in tables[2].splitlines() if row.startswith("| keep-2")), "nothing is lost"
    control = short(cells["no-kl-2"][9].split(" / ")[-1])
    recipe = text_of("examples/recipes/gemma3_270m_keep_128k.yaml").replace("# ", "")
    assert f"Three seeds without the teacher find as much, and {control} of the numbers at 120000" in recipe
    for column in (8, 9):
        for arm in ("keep-2", "native"):
            told = [cell if cell == "1.00" else short(cell) for cell in cells[arm][column].split(" / ")]
            assert ", ".join(told if len(set(told)) > 1 else told[:1]) in recipe


def test_what_is_said_of_the_papers_is_what_the_files_hold():
    page = (RESULTS / "papers.md").read_text()
    for table in paper_claims.tables():
        title, rows = table.split("\n\n")
        assert title in page and rows in page


def test_new_tables_take_the_place_of_old_ones_on_the_page_and_in_readmes():
    def table(figures, more=""):
        return f"## A paper\n\n{HEAD}\n|---|---|---|---|---|\n| it helps | 1 < 2 | {figures} | a limit |{more}"

    page = (
        f"Words.\n\n## A paper\n\nAn introduction.\n\n{table('- | not run').partition(chr(10) * 2)[2]}\n\n## Another\n"
    )
    readme = {Path("README.md"): "Ours:\n\n| it helps | 1 < 2 | - | not run | a limit |\n\nMore."}
    new = table("3.0 < 4.0 | 1 of 1 seeds", "\n| and more | 1 < 2 | - | not run | a limit |")
    written, readmes = paper_claims.rewrite(page, [new], readme)
    assert written == f"Words.\n\n## A paper\n\nAn introduction.\n\n{new.partition(chr(10) * 2)[2]}\n\n## Another\n"
    assert readmes[Path("README.md")] == "Ours:\n\n| it helps | 1 < 2 | 3.0 < 4.0 | 1 of 1 seeds | a limit |\n\nMore."


def test_a_claim_of_an_arm_that_has_not_been_run_has_no_figures():
    claim = Claim("it helps", "1 < 2", "control", "ours", lambda run: run["loss"], 1, "a limit")
    control = {0: {"loss": 3.0}}
    assert claim.row({"control": control}) == "| it helps | 1 < 2 | - | not run | a limit |"
    assert claim.row({"control": control, "ours": {0: {"loss": 4.0}}}) == (
        "| it helps | 1 < 2 | 3.0 < 4.0 | 1 of 1 seeds | a limit |"
    )


def test_seconds_of_retrieval_are_those_of_the_file():
    lines = lines_of("eval-speed-h200.jsonl")
    page = " ".join((RESULTS / "speed.md").read_text().split())
    small = [line for line in lines if line["line"] == "together" and line["shape"] == "smollm2-135m"]
    first, *others = (f"{line['seconds']:.1f}" for line in small)
    assert f"| {first}, then {' and '.join(others)} |" in page
    parts = (f"{small[-1][name]:.1f}" for name in ("read_seconds", "decode_seconds"))
    assert f"| of it, reading / decoding | {' / '.join(parts)} |" in page
    before, after = (line["seconds"] for line in lines if line["line"] == "total" and line["models"] == 3)
    assert f"kinds together | {after:.0f} |" in page and f"in an earlier run | {before:.0f} |" in page
    (large,) = (line for line in lines if line["line"] == "together" and line["shape"] == "llama-3-8b")
    assert f"{large['prompts']} passkeys in {large['seconds']:.0f} seconds, {large['read_seconds']:.0f} of them" in page


def keeping_cells(*files, table=0):
    """Of each arm the cells of one of the tables of research/results/keeping.md, without their stars."""
    rows = keeping_results.tables(lines_of(*files)).split("\n\n")[table].splitlines()[2:]
    cells = [row.strip("| ").replace("*", "").split(" | ") for row in rows]
    return {row[0]: row for row in cells}


def short(cell):
    """As pages say it: .90, and 0."""
    return "0" if float(cell) == 0 else cell.removeprefix("0")

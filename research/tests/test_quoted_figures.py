"""What README and docs quote of results is what the files of results hold."""

import json
import math
import re
from functools import partial
from statistics import mean, median

import pytest
import scaling
import yaml
from support.pages import RESULTS, ROOT, lines_of, share, text_of

import keeping_results
import rpsd_far_results
import ruler_results
from paired_results import seed_pairs
from result_lines import mean_of, runs_by_arm
from rope_patch.eval.results.paired import paired_interval


def test_the_table_of_five_models_is_that_of_the_report():
    """Losses, and retrieval at every length: also where it fell."""
    summary = {
        row["figure"]: row["values"] for row in json.loads((RESULTS / "report-h200.json").read_text())["summary"]
    }
    page = text_of("research/results/models_side_by_side.md")
    models = ("native", "pi4", "yarn4", "skip", "yarn4+skip")

    def cells(figures, form):
        return " | ".join(", ".join(form(summary[f][m]) for f in figures) for m in models)

    def tenths(value):
        return f"{value:.1f}".removeprefix("0").removesuffix(".0") if value else "0"

    for kind in ("passkey", "single", "multikey"):
        assert f"| {cells([f'{kind} at {n}' for n in (4096, 16384, 32768)], tenths)} |" in page
    for figure in ("loss 64..8192 (nats per token)", "loss beyond 8192"):
        assert f"| {cells([figure], '{:.3f}'.format)} |" in page


def test_passkeys_as_written_are_those_of_the_file():
    """Beside the teacher-forced digits."""
    groups = {}
    for run in lines_of("extension-h200.jsonl"):
        groups.setdefault((run["target"], run["schedule"], run["method"]), []).append(run)

    def written(key, *lengths):
        return [share(mean(run["passkey"][str(n)] for run in groups[key])) for n in lengths]

    def forced(key, n):
        return share(mean(run["teacher_forced"]["passkey"][str(n)] for run in groups[key]))

    lengths = {32768: (8192, 16384, 32768), 65536: (8192, 16384, 32768, 65536)}
    results = text_of("research/results/extension.md")
    for method in {method for target, schedule, method in groups if (target, schedule) == (65536, "yarn")}:
        keys = {target: (target, "yarn", method) for target in lengths}
        cells = [
            cell for target, key in keys.items() for cell in [*written(key, *lengths[target]), forced(key, target)]
        ]
        assert f"| {' | '.join(cells)} |" in results, method
    for method in ("none", "skip distil"):
        key = (32768, "ntk", method)
        assert f"| {' | '.join([*written(key, *lengths[32768]), forced(key, 32768)])} | - |" in results


def keeping_differences(runs, arm, beside):
    """Mean and interval of each measure of an arm, less those of another."""
    header, _, *rows = keeping_results.tables(runs, beside=beside).splitlines()[2:]
    (row,) = (row for row in rows if row.startswith(f"| {arm},"))
    cells = zip(header.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True)
    return {name: [float(x) for x in re.findall(r"[+-]\d\.\d+", cell)] for name, cell in cells}


def split_row(row):
    """Cells of a row of a markdown table."""
    return row.strip("| ").split(" | ")


def size(value):
    return f"{abs(value):.3f}".removeprefix("0")


def least_to_most(difference):
    """A difference as pages say it, with a place for words behind the mean."""
    low, high = sorted(map(abs, difference[1:]))
    return f"{size(difference[0])} {{}}({size(low)} to {size(high)})"


@pytest.mark.slow
def test_what_the_control_of_the_first_seeds_finds_is_told_as_their_file_has_it():
    runs, said = lines_of("keeping-seeds-h200.jsonl"), text_of("research/results/keeping.md")
    keep, recipe = (keeping_differences(runs, "no-kl", beside) for beside in ("keep", "keep-2"))
    lengths = (2048, 4096, 7900, 16384, 32768, 60000)
    for beside, fewer, words in (
        (keep, (4096, 7900), "4096 and 7900 tokens, by {} ({} to {}) and {} ({} to {}), and as many"),
        (recipe, (16384, 32768), "16384 and 32768, by {} ({} to {}) and {} ({} to {})."),
    ):
        assert [n for n in lengths if beside[f"keys at {n}"][2] < 0] == list(fewer)
        assert all(beside[f"keys at {n}"][1] < 0 for n in lengths)
        assert all(beside[f"passkey at {n}"][2] >= 0 for n in lengths)
        of = [beside[f"keys at {n}"] for n in fewer]
        assert words.format(*(size(mean) for d in of for mean in (d[0], d[2], d[1]))) in said
    less = [size(recipe[f"keys at {n}"][0]) for n in (16384, 32768)]
    assert "{} and {} fewer at 16384 and 32768 tokens".format(*less) in text_of("docs/choosing.md")


def test_whether_pose_keeps_more_than_yarn_alone_depends_on_the_prompts():
    runs, page = lines_of("keeping-seeds-h200.jsonl"), text_of("research/results/keeping.md")
    more = keeping_differences(runs, "pose", "yarn")
    near, far = ("{} ({} to {})".format(*map(size, more[f"passkey at {n}"])).split(" ", 1) for n in (2048, 7900))
    lost = [size(keeping_differences(runs, arm, "native")["passkey at 2048"][0]) for arm in ("pose", "yarn")]
    assert "{} of the passkeys at 2048 tokens (YaRN alone, untrained, loses {})".format(*lost) in page
    said = "{} more of the passkeys than YaRN alone at 2048 tokens {} and {} more at 7900 {}."
    assert said.format(*near, *far) in page and more["passkey at 2048"][1] > 0


@pytest.mark.slow
def test_no_arm_of_three_seeds_stays_nearer_and_finds_as_much():
    assert "nothing stays nearer to the predictions of the model as it came and finds as much beyond its window" in (
        text_of("docs/choosing.md")
    )
    first = lines_of("keeping-seeds-h200.jsonl")
    later = lines_of("keeping-seeds-h100.jsonl") + lines_of("keeping-long-h100.jsonl")
    for runs in (first, later):
        arms = {arm: list({run["seed"]: run for run in same}.values()) for arm, same in runs_by_arm(runs).items()}
        whole = [run for arm, same in arms.items() for run in same if len(same) == 3]
        nearness = {arm: mean(run["own"]["kl"] for run in same) for arm, same in arms.items() if len(same) == 3}
        for arm in nearness:
            if nearness[arm] < nearness["keep-2"]:
                apart = keeping_differences(whole, arm, "keep-2")
                far = [apart[f"{test} at {n}"] for test in ("passkey", "words") for n in (16384, 32768, 60000)]
                assert min(high for *_, high in far) < 0, arm


@pytest.mark.slow
def test_what_three_seeds_more_gave_is_told_as_their_file_has_it():
    runs = lines_of("keeping-seeds-h100.jsonl")
    page, said = (RESULTS / "keeping.md").read_text(), text_of("research/results/keeping.md")
    (table,) = keeping_results.tables(runs).split("\n\n")[:1]
    assert table in page

    beyond = partial(keeping_differences, runs)
    control, native = beyond("no-kl-2", "keep-2"), beyond("keep-2", "native")
    for name, words in {"keys at 32768": "more than the recipe at 32768 tokens ", "keys at 60000": "at 60000 "}.items():
        assert control[name][1] > 0 and least_to_most(control[name]).format(words) in said
    assert all(control[f"keys at {n}"][1] < 0 < control[f"keys at {n}"][2] for n in (2048, 4096, 7900))
    assert all(control[f"words at {n}"][1] > 0 for n in (7900, 16384, 60000))
    assert least_to_most(control["replies"]).format("nats likelier ") in said
    mean_lost, low, high = native["short text"]
    assert f"{size(mean_lost)} below the model as it came (-{size(low)} to +{size(high)})" in said and low < 0 < high
    assert least_to_most(native["replies"]).format("nats ") in said and native["ended"][2] < 0
    within = (2048, 4096, 7900)
    assert all(native[f"{test} at {n}"][1] > 0 for test in ("passkey", "keys", "words") for n in within)
    slow, adapters = beyond("keep-2-slow", "keep-2"), beyond("keep-2-lora-slow", "keep-2")
    assert least_to_most(slow["replies"]).format("nats nearer ") in said
    assert least_to_most(slow["passkey at 60000"]).format("fewer passkeys at 60000 ") in said
    fewer = sorted(slow[f"words at {n}"][0] for n in within)
    assert f"by {size(fewer[-1])} to {size(fewer[0])}, and" in said
    assert all(slow[f"words at {n}"][2] < 0 for n in within)
    assert least_to_most(adapters["replies"]).format("nats nearer ") in said
    far = [adapters[f"words at {n}"] for n in (32768, 60000)]
    assert f"by {size(far[0][0])} and {size(far[1][0])}." in said and max(high for *_, high in far) < 0
    keys = [adapters[f"keys at {n}"] for n in (*within, 16384, 32768, 60000)]
    assert all(low < 0 < high for _, low, high in keys)
    seconds = {run["arm"]: [r["train_seconds"] for r in runs if r["arm"] == run["arm"]] for run in runs[3:]}
    times = [f"{f(seconds[arm]):.0f}" for arm in ("keep-2-lora-slow", "keep-2") for f in (min, max)]
    assert "{} to {} seconds in place of {} to {}".format(*times) in said


@pytest.mark.slow
def test_what_twice_the_rows_gave_is_told_as_the_file_has_it():
    runs, said = lines_of("keeping-long-h100.jsonl"), text_of("research/results/keeping.md")
    assert keeping_results.tables(runs).split("\n\n")[0] in (RESULTS / "keeping.md").read_text()
    recipe = [run for run in lines_of("keeping-seeds-h100.jsonl") if run["arm"] == "keep-2"]
    both = [*recipe, *(run for run in runs if run["arm"] != "keep-2")]
    lengths = (2048, 4096, 7900, 16384, 32768, 60000)
    found = [f"{test} at {n}" for test in ("keys", "words") for n in lengths]
    beside = keeping_differences(both, "no-kl-2-slow-long", "keep-2-slow-long")
    assert min(beside[f"words at {n}"][1] for n in lengths) > 0
    assert min(beside[f"keys at {n}"][1] for n in (4096, 16384)) > 0
    assert least_to_most(beside["words at 16384"]).format("more at 16384 tokens ") in said
    assert least_to_most(beside["replies"]).format("nats nearer ") in said
    control = keeping_differences(both, "no-kl-2-slow-long", "keep-2")
    assert min(control[name][2] for name in found) > 0  # none is lower beyond noise
    mean_far, low, high = control["replies"]
    assert f"{size(mean_far)} nats further from the model's own, within noise (-{size(low)} to +{size(high)})" in said
    fast = keeping_differences(lines_of("keeping-seeds-h100.jsonl"), "no-kl-2", "keep-2")
    assert f"where at 3e-4, in one seed, they were {size(fast['replies'][0])} further" in said
    slow = keeping_differences(both, "keep-2-slow-long", "native")
    assert least_to_most(slow["replies"]).format("nats less likely to the model as it came than its own ") in said
    assert least_to_most(slow["ended"]).format("fewer end ") in said
    assert least_to_most(slow["short text"]).format("lower, just beyond noise ") in said
    slow = keeping_differences(both, "keep-2-slow-long", "keep-2")
    assert all(slow[name][1] < 0 < slow[name][2] for name in ("replies", "short text", "ended"))
    assert least_to_most(slow["keys at 32768"]).format("more keys at 32768 tokens ") in said
    fewer = sorted(slow[f"words at {n}"][0] for n in lengths[:-1])
    assert f"{size(fewer[-1])} to {size(fewer[0])} fewer words up to 32768" in said
    assert all(slow[f"words at {n}"][2] < 0 for n in lengths[:-1])
    cells = keeping_cells("keeping-long-h100.jsonl")
    kl = {arm: short(row[5].split(" ± ")[0]) for arm, row in cells.items()}
    assert f"a KL of {kl['keep-2-slow-long']} in place of {kl['no-kl-2-slow-long']}" in said
    choosing = text_of("docs/choosing.md")
    recipes = short(f"{mean(run['own']['kl'] for run in recipe):.3f}")
    assert f"KL of {recipes} in place of {kl['no-kl-2-slow-long']}" in choosing


@pytest.mark.slow
def test_questions_about_a_paragraph_are_told_as_their_files_have_them():
    runs = lines_of("keeping-long-h100.jsonl", "keeping-squad-h200.jsonl")
    page, said = (RESULTS / "keeping.md").read_text(), text_of("research/results/keeping.md")
    assert keeping_results.tables(runs).split("\n\n")[-1] in page
    rows = [split_row(row) for row in keeping_results.paragraph_table(runs, "native").splitlines()[2:]]
    squad = {arm: short(share) for arm, _, share, *_ in rows}
    assert {seeds for arm, seeds, *_ in rows if arm in ("keep-2", "no-kl-2-slow-long")} == {"0 1 2"}
    beyond = {arm: [float(x) for x in re.findall(r"[+-]\d\.\d+", cell)] for arm, _, _, cell, *_ in rows[1:]}
    assert min(low for _, low, _ in beyond.values()) > 0
    _, low, high = beyond["keep-2"]
    assert f"model as it came, {squad['native']}: the recipe {squad['keep-2']}, in three" in said
    assert f"({size(low)} to {size(high)} more)" in said
    ((_, _, _, cell, *_),) = (
        row for row in map(split_row, keeping_results.paragraph_table(runs, "keep-2").splitlines()) if "no-kl" in row[0]
    )
    more, low, high = map(float, re.findall(r"[+-]\d\.\d+", cell))
    assert squad["no-kl-2-slow-long"] == max(squad.values()) and low > 0
    assert f"{squad['no-kl-2-slow-long']}, {size(more)} more than the recipe ({size(low)} to {size(high)})" in said
    ((*_, cell),) = (row for row in rows if row[0] == "no-kl-2-slow-long")
    less, low, high = map(float, re.findall(r"[+-]\d\.\d+", cell))
    assert high <= 0 and f"is {size(less)} below that of the model as it came, just beyond" in said
    assert f"({size(high)} to {size(low)})" in said
    questions = {run["squad"]["questions"] for run in runs if "squad" in run}
    assert f"SQuAD's questions, {questions.pop()} about 152 paragraphs" in said and not questions


def test_the_table_of_long_rows_is_that_of_its_file():
    header, *lines = lines_of("long-rows-h200.jsonl")
    cases = [line for line in lines if "case" in line]  # another run has a header of its own
    page = text_of("research/results/speed.md")
    whole = {}
    for case in cases:
        figures = [f"{case['seconds']:.2f}", f"{case['tokens_per_second']:.0f}", f"{case['tflops']:.0f}"]
        figures += [f"{case['peak_gib']:.1f}", f"{case['planned_gib']:.1f}" if "planned_gib" in case else "-"]
        figures.append(f"{case['peak_gib_with_32_layers']:.0f}" if "peak_gib_with_32_layers" in case else "-")
        assert f"| {' | '.join(figures)} |" in page
        whole[case["case"]] = figures[-1]
    assert f"{header['trl']}; one step a case" in page
    seconds = {case["case"]: case["seconds"] for case in cases}
    for length in (65536, 131072):
        ratio = seconds[f"trl-offload:{length}"] / seconds[f"clm:{length}:on"]
        assert f"{ratio:.2f} times" in page
    slower = [1 - seconds[case] / seconds["clm:65536:on"] for case in ("clm:65536", "trl:65536")]
    assert "trains {:.0%} slower, {:.0%} slower than TRL".format(*slower).replace("%", " %") in page
    next_token = [whole[f"clm:{length}:on"] for length in (262144, 524288)]
    assert "262144 tokens takes {} GiB with all layers and one of 524288 tokens {},".format(*next_token) in page
    assert f"self-distillation takes {whole['self-distill:262144:on']} GiB" in page
    by_layers = {case.get("peak_gib_with_32_layers"): case for case in cases if case["length"] == 342000}
    gib, reckoned = f"{by_layers.pop(None)['peak_gib']:.1f}", f"{next(iter(by_layers)):.0f}"
    assert f"A row of 342000 tokens trains with all layers in {gib} GiB" in page
    assert f"by arithmetic from twelve layers it was {reckoned}" in page


def test_the_tables_of_several_gpus_are_those_of_their_file():
    page, of_scaling, of_engines = (
        text_of(f"{name}.md") for name in ("research/results/speed", "docs/scaling", "docs/several_gpus")
    )
    own_rows = ("self-distill", "pose", "relation-distill")
    one, shared, efficiency, shared_memory = {}, [], {}, {}
    for line in lines_of("several-gpus-h200.jsonl"):
        gib = f"{line['peak_gib']:.1f}"
        if line["case"] not in own_rows:
            shared += [line] if "seconds" in line else []
            shared_memory[line["case"]] = gib
        elif line["gpus"] == 1:  # what lines of several GPUs that follow are compared with
            one[line["case"]] = line["tokens_per_second"], gib
        else:
            n, (rate, gib_of_one) = line["gpus"], one[line["case"]]
            share = f"{line['tokens_per_second'] / (n * rate):.0%}".replace("%", " %")
            efficiency[line["case"], n] = share
            own = [f"{rate:.0f}", gib_of_one, str(n), f"{line['tokens_per_second']:.0f}", gib, share]
            assert f"| {line['tokens'] // n} | {' | '.join(own)} |" in page
    assert len(efficiency) == 6
    ring, trl = shared_memory["ring-clm"], shared_memory["ring-trl"]
    assert f"takes {ring} GiB on each of two GPUs in a ring, and {trl} by TRL's trainer" in page
    fsdp2 = sorted(efficiency[case, n] for case in own_rows[:2] for n in (2, 4))
    ddp = " and ".join(efficiency["relation-distill", n].removesuffix(" %") for n in (2, 4))
    assert f"had {fsdp2[0]} to {fsdp2[-1]} of as many times the rate of one under `fsdp2`" in of_scaling
    assert f"and {ddp.replace(' and', ' % and')} % under `ddp`" in of_scaling
    least, most = fsdp2[0].removesuffix(" %"), fsdp2[-1]
    assert f"under `fsdp2`, {least} to {most} of as many times the rate" in of_engines
    assert f"first stage under `ddp`, {ddp} %" in of_engines

    names = {"ring": "ring, `fsdp2-cp`", "ulysses": "Ulysses, `zero3-sp`"}
    config = scaling.config_of("qwen3-4b")
    assert len(shared) == 7
    lost = {}
    for line in shared:
        config.num_hidden_layers = line["layers"] or scaling.config_of("qwen3-4b").num_hidden_layers
        operations = scaling.flops_per_token(config, line["length"], all_weights=True)
        runs = scaling.measured_runs()
        ideal = line["gpus"] * scaling.speed(runs) / operations / scaling.cost(runs, "self-distill sequential")
        figures = [str(line["gpus"]), str(line["length"])]
        figures += [f"{config.num_hidden_layers}, {names[line['case']]}", f"{line['seconds']:.2f}"]
        figures += [f"{line['tokens_per_second']:.0f}", f"{line['peak_gib']:.1f}"]
        lost[line["case"], line["gpus"], line["length"]] = 1 - line["tokens_per_second"] / ideal
        figures.append(f"{line['tokens_per_second'] / ideal:.0%}".replace("%", " %"))
        assert f"| {' | '.join(figures)} |" in page
        by_arithmetic = f"{line['length'] / ideal:.1f}"
        minutes, gib = line["seconds"] / 60, line["peak_gib"]
        if line["layers"] is None:
            assert f"row of 262144 tokens on two H200s: {minutes:.1f} minutes a step, {gib:.1f} GiB on each" in page
            said = f"took {line['seconds']:.1f} seconds at 262144 tokens on two, by this arithmetic {by_arithmetic}"
            assert said in of_scaling
        if line["length"] == 1 << 20:
            assert f"with four layers of 36: {minutes:.1f} minutes a step, {gib:.1f} GiB on each" in page
            said = f"{line['seconds']:.1f} at 1048576 tokens in four layers on four, by arithmetic {by_arithmetic}"
            assert said in of_scaling
            weights = sum(p.numel() for p in scaling._on_meta("qwen3-4b", True).model.layers[4:].parameters())
            assert f"{gib + 16 * weights / 4 / scaling.GIB:.0f} GiB on each GPU, with the weights" in page
            assert f"{9 * minutes:.0f} minutes a step, nine times as long" in page
    ring, ulysses = (f"{lost[case, 4, 65536]:.0%}".replace("%", " %") for case in ("ring", "ulysses"))
    assert f"over four GPUs, loses {ring} in a ring and {ulysses} under Ulysses" in page
    host = scaling.memory_on("qwen3-4b", 1 << 20, "self-distill", 4, all_weights=True, shared=True).split(" / ")[-1]
    assert f"{host} GiB of the host for each GPU, or {math.ceil(int(host) / 2)} with `passes" in page


def keeping_cells(*files, table=0):
    """Of each arm the cells of one of the tables of research/results/keeping.md, without their stars."""
    rows = keeping_results.tables(lines_of(*files)).split("\n\n")[table].splitlines()[2:]
    cells = [row.strip("| ").replace("*", "").split(" | ") for row in rows]
    return {row[0]: row for row in cells}


def short(cell):
    """As pages say it: .90, and 0."""
    return "0" if float(cell) == 0 else cell.removeprefix("0")


def steps():
    """Timed steps of models with random weights."""
    return json.loads((RESULTS / "self-distill-step-h200.json").read_text())["runs"]


LENGTHS = [2048, 4096, 7900, 16384, 32768, 60000]


def found_at(cells, arm, length, column=9):
    """The share of the passkeys that an arm finds; of keys among look-alikes with column 10."""
    return short(cells[arm][column].split(" / ")[LENGTHS.index(length)])


def keys_at_128k():
    """Of RPSD's skip and of next-token training."""
    far = runs_by_arm(lines_of("rpsd-far-h200.jsonl"))
    return [share(mean(rpsd_far_results.by_exam(far[arm], "multikey", 131072))) for arm in ("skip", "next-token")]


def recovered(arm):
    """Percent of the short benchmarks that the model has after a restoration, of what it had as it came."""
    runs = runs_by_arm(lines_of("restoration-h200.jsonl"))
    had, has = (mean(run["short_mean"] for run in runs[a] if run["after"] in ("extend", None)) for a in ("native", arm))
    return 100 * has / had


@pytest.mark.slow
def test_the_figures_of_the_readme():
    kept, searched = keeping_cells("keeping-seeds-h200.jsonl"), keeping_cells("keeping-h200.jsonl")
    rows = split_rows(text := (ROOT / "README.md").read_text())
    ruler = ruler_results.load()
    for name, arm in {"as it came": "native", "YaRN 8x, nothing trained": "yarn", "extended by": "skills"}.items():
        (row,) = (row for row in rows if row[0].startswith(name))
        in_ruler = [share(ruler_results.mean_score(ruler, arm, n)) for n in (8192, 32768)]
        assert row[1:] == [*in_ruler, short(f"{mean(mean(ruler_results.short_scores(run)) for run in ruler[arm]):.3f}")]
    extended = share(ruler_results.mean_score(ruler, "skills", 32768))
    untrained = found_at(searched, "ntk8", 16384)
    keys = keys_at_128k()
    kept_share = [f"{recovered(arm):.0f} %" for arm in ("pi4", "pi4 hidden+cpt", "pi4 clm qkv 0.001+cpt")]
    assert [row[-1] for row in rows if row[0] in METHODS] == [
        f"RULER at 32K: 0 → {extended}",
        f"passkeys at 16K: 0 → {untrained}",
        f"loss at 32K to 64K: {kept['pose'][4].split(' ± ')[0]}",
        f"keys at 128K: {keys[0]}, by next-token training {keys[1]}",
        f"short benchmarks: {kept_share[0]} → {kept_share[1]}",
    ]
    said = "keeps {} of its short benchmarks. [Restored](docs/distillation.md) with the original as teacher it has {}, and {}"
    assert said.format(*kept_share) in " ".join(text.split())
    hour = json.loads((RESULTS / "first-hour-h200.json").read_text())
    steps_of = {run["case"]: run for run in json.loads((RESULTS / "extension-memory-h200.json").read_text())["runs"]}
    lora = steps_of["llama-8b lora"]
    (long,) = (run for run in steps() if (run["shape"], run["run"], run["length"]) == ("llama-3-8b", "clm", 65536))
    assert [row[2:] for row in rows if row[0] in ("SmolLM2-135M", "Llama-3-8B")] == [
        # it trained on 256 rows
        [
            f"{steps_of['smollm2 all']['peak_gib']:.0f} GiB",
            f"{288 / 256 * hour['training']['seconds'] / 60:.0f} minutes",
        ],
        [f"{lora['peak_gib']:.0f} GiB", minutes_a_million(lora["length"] / lora["seconds_a_row"])],
        [f"{long['peak_gib']:.0f} GiB", minutes_a_million(long["tokens_per_second"])],
    ]


@pytest.mark.slow
def test_the_figures_of_the_gallery():
    notes = yaml.safe_load((ROOT / "docs" / "gallery.yaml").read_text())
    said = {name: re.findall(r"\d*\.\d+", note["found"]) for name, note in notes.items() if "found" in note}
    kept, searched = keeping_cells("keeping-seeds-h200.jsonl"), keeping_cells("keeping-h200.jsonl")
    arms = ("pi4", "pi4 hidden+cpt", "pi4 ard+cpt", "pi4 clm qkv 0.001+cpt")
    pi, hidden, ard, control = (f"{recovered(arm):.1f}" for arm in arms)
    far, before = (runs_by_arm(lines_of(f"rpsd-far-{gpu}.jsonl")) for gpu in ("h200", "h100"))
    seconds = {arm: mean(run["train_seconds"] for run in runs) for arm, runs in before.items()}
    within = [mean(mean_of(run["loss x1"], 64, 32768) for run in far[arm]) for arm in ("skip", "next-token")]
    assert said | {"posaug": [], "rpe": []} == {
        "ntk": [
            *(found_at(searched, "ntk8", n) for n in (16384, 32768)),
            *(found_at(searched, arm, 7900, column=10) for arm in ("ntk8", "native")),
        ],
        "yarn": [*(found_at(kept, "yarn", n) for n in (16384, 7900)), found_at(kept, "native", 7900)],
        "pose": [kept["pose"][4].split(" ± ")[0], *(found_at(kept, arm, 2048) for arm in ("native", "pose"))],
        "native-distill": [short(kept[arm][5].split(" ± ")[0]) for arm in ("keep-2", "no-kl")],
        "pi": [pi, hidden],
        "hidden-distill": [hidden, control],
        "relation-distill": [ard, control],
        "skip": keys_at_128k(),
        "self-distill": [f"{seconds['skip'] / seconds['next-token']:.1f}", share(within[0] - within[1])],
        "endprompt": [],
        "posaug": [],
        "rpe": [],
    }
    # of models of 10.6M parameters; held by the tests of its own results
    assert said["posaug"] == ["10.6", ".98", "2.2", "4.1"] and "for 2.2 to 4.1 % of the loss" in text_of(
        "docs/positions.md"
    )


METHODS = (
    "a longer window that keeps the answers",
    "no training",
    "the lowest perplexity on long prose",
    "to read beyond long training sequences",
    "to repair a rescaled model",
)


def split_rows(page):
    """Cells of the rows of all tables of a page."""
    return [split_row(line) for line in page.splitlines() if line.startswith("|")]


def minutes_a_million(tokens_per_second):
    return f"{1e6 / tokens_per_second / 60:.1f} minutes for a million tokens"


@pytest.mark.slow
def test_what_is_said_of_the_recipe_that_keeps_is_what_its_three_seeds_gave():
    table = keeping_results.tables(lines_of("keeping-seeds-h200.jsonl")).split("\n\n")[0]
    assert table in (RESULTS / "keeping.md").read_text()
    cells = keeping_cells("keeping-seeds-h200.jsonl")
    choosing = text_of("docs/choosing.md")
    arms = ["native", "yarn", "pose", "keep-2", "no-kl"]

    def row_of(column, lengths=None):
        told = [cells[arm][column].split(" ± ")[0].split(" / ") for arm in arms]
        return [" / ".join(short(cell[k]) for k in (lengths or [0])) for cell in told]

    for name, row in {
        "[passkey](glossary.md#passkey), 2048 / 7900 / 60000": row_of(9, [0, 2, 5]),
        "[keys among look-alikes](glossary.md#look-alike-keys), the same lengths": row_of(10, [0, 2, 5]),
        "away from its own chats ([nats](glossary.md#nats) a token)": row_of(5),
        "replies that end within 128 tokens": row_of(7),
        "[short benchmarks](glossary.md#short-benchmarks)": row_of(8),
    }.items():
        assert f"| {name} | {' | '.join(row)} |" in choosing
    assert {arm: int(cells[arm][1]) for arm in ("keep-2", "no-kl")} == {"keep-2": 3, "no-kl": 2}
    passkeys, keys = (cells["keep-2"][k].split(" / ") for k in (9, 10))
    lost = float(cells["native"][8]) - float(cells["keep-2"][8])
    assert f"1.00 to 32768 tokens and {short(passkeys[5])} at 60000" in choosing and set(passkeys[:5]) == {"1.00"}
    assert short(keys[5]) in choosing and f"{lost:.3f}".removeprefix("0") in choosing
    assert short(cells["keep-2"][7]) in choosing and short(cells["native"][7]) in choosing


def test_what_is_said_of_the_recipe_with_skills_is_what_its_three_seeds_gave():
    """Means over seeds, of the recipe and of the model as it came."""
    runs = ruler_results.load()

    def score(arm, n):
        return share(ruler_results.mean_score(runs, arm, n))

    def of(measure, arm, digits):
        return f"{mean(map(measure, runs[arm])):.{digits}f}".removeprefix("0")

    recipe = (ROOT / "examples" / "recipes" / "smollm2_keep_64k.yaml").read_text()
    short_text = [of(lambda run: mean(ruler_results.short_scores(run)), arm, 3) for arm in ("skills", "native")]
    replies = [of(lambda run: mean(ruler_results.ended(run)), arm, 2) for arm in ("skills", "native")]
    at = {n: [score(arm, n) for arm in ("skills", "native")] for n in (4096, 8192, 32768)}
    assert (
        "RULER {} at 4096 tokens (as it came {}), {} at 8192 ({}) and {} at 32768 ({}), no task below the model as it came "
        "within its window, short text {} ({}), replies that end {} ({};"
    ).format(*at[4096], *at[8192], *at[32768], *short_text, *replies) in " ".join(recipe.replace("#", "").split())
    assert "rises from {1} to {0} at 8192 tokens and from {3} to {2} at 32768".format(*at[8192], *at[32768]) in text_of(
        "docs/choosing.md"
    )
    rows, without = (
        " ".join(text_of("docs/rows.md").split()),
        of(lambda run: mean(ruler_results.short_scores(run)), "keep-2", 3),
    )
    lifted = [(score("keep-2", n), score("skills", n)) for n in (4096, 32768)]
    assert "from {} to {} at 4096 tokens and from {} to {} at 32768".format(*lifted[0], *lifted[1]) in rows
    assert f"short text from {without} to {short_text[0]}" in rows
    kl = [of(lambda run: run["own"]["kl"], arm, 2) for arm in ("skills", "skills-no-kl-slow")]
    assert "the KL from the original is {} nats, without a teacher {}".format(*kl) in text_of(
        "trl_ext/extension/choices.py"
    )


def test_the_kl_of_each_control_and_the_losses_of_long_rows_are_those_of_their_files():
    runs = lines_of("rpsd-small-scale-h200.jsonl")
    results = text_of("research/results/self_distillation.md")
    for arm, sentence in (
        ("skip", "is {:.3f} nats for the skip"),
        ("noise", "{:.3f} nats"),
        ("dropout", "{:.2f} nats"),
    ):
        late = [
            e["kl"] for run in runs if run["arm"] == arm for e in run["log"] if e.get("step", 0) > 192 and "kl" in e
        ]
        assert sentence.format(median(late)) in results
    plain, skip = sorted(lines_of("rpsd-small-scale-32k-rows-h200.jsonl"), key=lambda run: run["arm"] == "skip")
    for span in (0, -1):
        losses = [run["loss_by_position"][span]["loss"] for run in (skip, plain)]
        assert f"{losses[0]:.3f} and {losses[1]:.3f}" in results


def test_rows_of_four_windows_are_told_as_their_file_has_them():
    runs, said = lines_of("rpsd-far-h200.jsonl"), text_of("research/results/self_distillation.md")
    page = (RESULTS / "self_distillation.md").read_text()
    for table in rpsd_far_results.tables(runs).split("\n\n"):
        assert table in page
    arms = runs_by_arm(runs)
    names = ("skip", "next-token", "next-token x1.6", "pose", "abf", "cyclic")
    assert set(arms) == set(names) and {len(same) for same in arms.values()} == {3}

    def found(same, kind, length):
        return f"{mean(rpsd_far_results.by_exam(same, kind, length)):.3f}".removeprefix("0")

    keys, mentions = ([found(arms[name], kind, 131072) for name in names] for kind in ("multikey", "ordinal"))
    assert "{} of the keys, in place of {} by next-token".format(*keys) in said
    assert "{2} by 1.6 times its steps, and {3} by next-token training on the same".format(*keys) in said
    assert "Of the mentions it finds {}, in place of {}, {} and {}. ABF".format(*mentions) in said
    assert f"ABF alone finds {keys[4]} and {mentions[4]} there" in said
    assert f"finds less than next-token training, {keys[5]} and {mentions[5]}" in said
    for name in names[1:]:
        for seed, skip in enumerate(arms["skip"]):
            for kind in ("multikey", "ordinal"):
                ours, theirs = (found([run], kind, 131072) for run in (skip, arms[name][seed]))
                assert ours > theirs, (name, seed, kind)
    pose = seed_pairs(arms["skip"], arms["pose"])
    for kind, sentence in (("multikey", "{} of the keys ({} to {})"), ("ordinal", "{} of the mentions ({} to {})")):
        differences = rpsd_far_results.differences(pose, (kind, 131072, 4))
        figures = (mean(differences), *paired_interval(differences, bounds=(-1, 1)))
        assert sentence.format(*(f"{figure:.3f}".removeprefix("0") for figure in figures)) in said
    page = text_of("docs/self_distillation.md")
    for name in names:
        cells = [
            ", ".join(share(mean(rpsd_far_results.by_exam(arms[name], kind, n))) for n in (32768, 65536, 131072))
            for kind in ("multikey", "ordinal")
        ]
        assert "| {} | {} |".format(*cells) in page, name
    near = [found(arms[name], "multikey", 32768) for name in ("skip", "next-token", "abf")]
    assert "keys {}, {} with next-token training, {} without training".format(*near) in said

    def loss(name, field, first, end):
        return mean(mean_of(run[field], first, end) for run in arms[name])

    cost = [loss(name, "loss x1", 64, 32768) - loss("next-token", "loss x1", 64, 32768) for name in ("skip", "cyclic")]
    assert [f"{nats:.2f}" for nats in cost] == ["0.02", "0.07"]
    assert "It costs .02 nats of loss within the row" in said and "costs .07 nats" in said
    far = {name: loss(name, "loss x4", 32768, 131072) for name in names}
    lower = [f"{far[name] - far['skip']:.3f}".removeprefix("0") for name in ("next-token", "pose")]
    assert "the skip's loss is {} lower, {} lower than PoSE's".format(*lower) in said
    kl = {name: mean(map(rpsd_far_results.kl, arms[name])) for name in ("skip", "cyclic")}
    assert round(kl["cyclic"] / kl["skip"]) == 9 and "its KL is nine times the skip's" in said

    before = {run["arm"]: run for run in lines_of("rpsd-far-h100.jsonl")}
    order = ("skip", "next-token", "abf")
    keys, mentions = ([found([before[arm]], kind, 131072) for arm in order] for kind in ("multikey", "ordinal"))
    assert "keys {}, {} and {} by the skip, next-token training and none".format(*keys) in said
    assert "mentions {}, {} and {}.".format(*mentions) in said
    ratio = before["skip"]["train_seconds"] / before["next-token"]["train_seconds"]
    assert f"the skip took {ratio:.1f} times as long" in said and round(10 * 1.6 / ratio) == 9


def test_rates_of_the_relation_kernel_count_its_products():
    """Six products of matrices over the causal half, attention's seven."""

    def rate(file, peer):
        rows = json.loads((RESULTS / file).read_text())["rows"]
        row = next(r for r in rows if r["n"] == 8192 and r["shape"].startswith("H32"))
        return round(100 * (6 / row["relation_kl"]["both_ms"]) / (7 / row[peer]["both_ms"]))

    cudnn, flash = rate("relation-kl-h200.json", "cudnn"), rate("relation-kl-flash4-h200.json", "flash4")
    assert f"{cudnn} % of cuDNN's rate, and in the run below at {flash} % of FlashAttention-4's" in text_of(
        "research/results/kernels.md"
    )

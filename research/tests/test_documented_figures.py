"""Documented figures are those of the files."""

import json
import re
from pathlib import Path
from statistics import mean, median

from support.pages import share

import extension
import posaug_results
import restoration_results
import rpsd_small_scale
from result_lines import read_lines
from rope_patch.eval import recovery_ratio

RESULTS = Path(__file__).parents[2] / "research" / "results"


def test_documented_losses_and_recoveries_are_those_of_the_file():
    """Means of every arm with a row in the text, and no row without an arm."""
    printed = restoration_results.table(read_lines(RESULTS / "restoration-h200.jsonl"))
    documented = page("restoration").split("\n## Rates")[0]  # of another file

    def means(table):
        """Losses in three spans and recovery, without the spread of seeds."""
        rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line)
        cut = ([cell[:5] for cell in cells if re.match(r"\d\.\d{3}", cell)] + cells[-1:] for cells in rows)
        return {(*cells[:3], cells[-1].split(" ")[0]) for cells in cut if len(cells) > 3}

    assert len(means(documented)) > 20
    assert means(documented) <= means(printed)


def page(name):
    """A page of results, without bold marks."""
    return (RESULTS / f"{name}.md").read_text().replace("**", "")


def section(name, title):
    """The text under a heading of a page, to the next one."""
    return page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_documented_times_are_those_of_the_files():
    vocabulary = section("self_distillation", "The vocabulary loss")
    for row in json.loads((RESULTS / "linear-ce-kl-h200.json").read_text())["rows"]:
        ours, trl = row["ours"], row["trl"]
        assert f"| {ours['ms']:.1f}, {ours['peak_gib']:.1f}" in vocabulary
        assert f"| {trl['ms'] / ours['ms']:.2f} |" in vocabulary
    steps = section("self_distillation", "A step")
    for row in json.loads((RESULTS / "self-distill-step-h200.json").read_text())["runs"]:
        if row["length"] < 262144:
            assert f"| {row['tokens_per_second']:.0f} |" in steps
    kernels = page("kernels")
    rows = json.loads((RESULTS / "relation-kl-h200.json").read_text())["rows"]
    for row in rows:
        ours, cudnn, flash = (row[name] for name in ("relation_kl", "cudnn", "flash2"))
        graphs = [times["both_graph_ms"] for times in (ours, cudnn, flash)]
        cells = [*graphs, graphs[0] / graphs[1], row["over_graph"]]
        assert f"| {ours['forward_ms']:.2f} / {ours['both_ms']:.2f} | {cudnn['forward_ms']:.2f} / " in kernels
        assert f"| {' | '.join(f'{cell:.2f}' for cell in cells)} |" in kernels
    packed = section("kernels", "Packed rows")
    runs = [json.loads(line) for line in (RESULTS / "relation-kl-packed-h200.jsonl").read_text().splitlines()]
    for row in [row for run in runs for row in run["rows"]]:
        graph = row["relation_kl"]["both_graph_ms"]
        ratios = [row["ratio"][peer] for peer in ("varlen", "flex")]
        ratios += [graph / row[peer]["both_graph_ms"] for peer in ("any_gpu", "cudnn")]
        assert f"| {' | '.join(f'{cell:.2f}' for cell in (graph, *ratios))} |" in packed
    launches = section("kernels", "Launches from Python")
    lines = [json.loads(line) for line in (RESULTS / "relation-kl-launches-h200.jsonl").read_text().splitlines()]
    (whole,) = (line for line in lines if line.get("heads") == [32, 8, 8] and line["n"] == 8192)
    assert f"takes {whole['alone_ms']:.2f} ms (graph {whole['alone_graph_ms']:.2f})" in launches
    assert f"{whole['together_ms']:.2f} ({whole['together_graph_ms']:.2f})" in launches
    step = section("kernels", "A step of stage 1 on Llama-3-8B")
    stage_1, clm, _ = json.loads((RESULTS / "distillation-step-h200.json").read_text())["runs"]
    share = stage_1["tokens_per_second"] / clm["tokens_per_second"]
    assert f"| stage 1 | {stage_1['tokens_per_second']:.0f} | {f'{share:.2f}'.removeprefix('0')} |" in step
    assert f" {100 * stage_1['relation_share']:.1f} % |" in step and f"| {clm['tokens_per_second']:.0f} | 1 |" in step
    beside = section("kernels", "Beside FlashAttention-4")
    for row in json.loads((RESULTS / "relation-kl-flash4-h200.json").read_text())["rows"]:
        if row["n"] == 16384 and "H3" not in row["shape"]:
            assert f"| {row['relation_kl']['both_ms'] / row['flash4']['both_ms']:.2f} |" in beside


def by_arm(runs):
    """Runs of each arm."""
    return [[r for r in runs if r["arm"] == arm] for arm in dict.fromkeys(r["arm"] for r in runs)]


def test_documented_figures_of_small_models_are_those_of_their_files():
    """PosAug from scratch, by arm; exams of RPSD's comparison, by arm and length."""
    runs = read_lines(RESULTS / "posaug-from-scratch-h200.jsonl")
    documented = page("positions")
    penalty = posaug_results.penalties(runs)
    for same in by_arm(runs):
        cells = [f"{mean(r['in_window'] for r in same):.3f}"]
        cells.append(f"{mean(penalty[r['arm'], r['seed']] for r in same):.2f}" if same[0]["arm"] != "baseline" else "-")
        cells += [f"{mean(r[metric] for r in same):.3f}" for metric in ("cliff", "gain")]
        assert f"| {len(same)} | " + " | ".join(cells) + " |" in documented
    exams = section("self_distillation", "What the paper claims, at small scale")
    runs = read_lines(RESULTS / "rpsd-small-scale-h200.jsonl")
    for same in by_arm(runs):
        graded = [mean(r[kind][n] for r in same) for kind in ("multikey", "ordinal") for n in same[0][kind]]
        cells = [f"{a:.2f}".removeprefix("0") if a else "0" for a in graded]
        cells += [f"{mean(r['loss_by_position'][k]['loss'] for r in same):.3f}" for k in (0, -1)]
        assert f"| {len(same)} | " + " | ".join(cells) + " |" in exams
    for line in rpsd_small_scale.table(runs).split("| the paper's ordering")[1].splitlines()[2:]:
        assert line in exams


def test_documented_figures_of_the_extension_are_those_of_the_file():
    """Means over seeds, of every method under every schedule: losses by span, found numbers, short text; costs."""
    documented = page("extension")
    runs = read_lines(RESULTS / "extension-h200.jsonl")
    native = next(r for r in runs if r["method"] == "native")
    main = extension.methods(8192, 65536, 8)

    def means(same, spans, needles):
        losses = [f"{mean(r['loss_by_position'][k]['loss'] for r in same):.3f}" for k in range(spans)]
        shares = [f"{mean(r['teacher_forced'][kind][n] for r in same):.2f}" for kind, n in needles]
        short = f"{mean(recovery_ratio(r['short'], native['short']) for r in same):.1f}"
        return " | ".join([*losses, *(share.removeprefix("0") for share in shares), short])

    groups = {}
    for run in runs:
        groups.setdefault((run["target"], run["schedule"], run["method"]), []).append(run)
    for (target, schedule, method), same in groups.items():
        assert len(same) == (1 if method in ("native", "none") else 3)
        if schedule == "yarn" and method in main:
            near, far = (("multikey", str(n)) for n in (target // 2, target))
            yarn = means(same, 3 + (target > 32768), [("passkey", str(target)), near, far])
            pi = means(groups[target, "pi", method], 3 + (target > 32768), [])
            assert f"| {yarn} | {pi} |" in documented, method
        if (target, schedule) == (32768, "yarn") and (method not in main or method in ("skip distil", "posaug")):
            numbers = [("passkey", "32768"), ("multikey", "16384"), ("multikey", "32768")]
            assert f"| {means(same, 4, numbers)} |" in documented, method
    costs = {}
    for run in read_lines(RESULTS / "extension-cost-h200.jsonl"):
        costs.setdefault((run["method"], run["rows_at_once"]), []).append(run)
    full = costs["full length", 1]
    for (_, rows), same in costs.items():
        speed, memory = (median(r[name] for r in same) for name in ("tokens_per_second", "peak_gib"))
        over = speed / median(r["tokens_per_second"] for r in full), memory / median(r["peak_gib"] for r in full)
        assert f"| {rows} | {speed:.0f} | {over[0]:.2f} | {memory:.1f} | {over[1]:.2f} |" in documented


def test_vllm_on_a_gpu_is_documented_as_the_file_has_it():
    text = section("serving", "vLLM on a GPU")
    for line in json.loads((RESULTS / "served-vllm-h200.json").read_text())["lines"]:
        figures = f"{line['loss_within']:.3f} | {line['loss_beyond']:.3f} | {line['mean_difference']:.3f}"
        counts = f"{line['largest_difference']:.2f} | {line['passkeys']} | {line['same_answers']}"
        assert f"| {line['program']}, {line['dtype']} | {figures} | {counts} |\n" in text


def test_the_first_hour_on_a_gpu_is_documented_as_the_file_has_it():
    hour = json.loads((RESULTS / "first-hour-h200.json").read_text())
    text = section("first_hour", "On one H200")
    cells = {line["cell"]: line for line in hour["cells"]}
    lengths = [1024 << i for i in range(7)]
    for test, name in (("passkey", "passkeys"), ("niah-multikey", "keys among look-alikes")):
        for when, whose in (("before", "first"), ("after", "model's")):
            found = " | ".join(f"{float(cells[f'{test} at {length}'][whose]):.0f} %" for length in lengths)
            assert f"| {name} {when} | {found} |\n" in text
    assert not [line for line in hour["cells"] if line["outcome"] == "below"]
    assert f"Of {len(hour['cells'])} cells none is worse" in text
    for step, said in (
        ("plan", "own text, the plan"),
        ("extend", "own text, all of it"),
        ("demo", "the demo, all of it"),
    ):
        assert f"| {said} | {hour['seconds'][step] / 60:.1f} |" in text
    assert f"[{hour['seconds']['demo'] / 60:.1f} minutes](first_hour.md#on-one-h200)" in page("demo")
    values = {line["figure"]: line["values"] for line in hour["summary"]}
    within, beyond = values["loss 64..8192 (nats per token)"], values["loss beyond 8192"]
    assert f"went from {within['native']:.3f} to {within['extended']:.3f} nats" in text
    assert f"from {beyond['native']:.3f} to {beyond['extended']:.3f}." in text


def test_steps_of_extend_are_documented_as_the_file_has_them():
    text = section("speed", "A step of `rope-patch extend`")
    for run in json.loads((RESULTS / "extension-memory-h200.json").read_text())["runs"]:
        rate = run["operations_a_row"] / run["seconds_a_row"] / 1e12
        assert f"| {run['shape']} | {run['length']} | {run['train']}" in text
        assert f"| {run['peak_gib']:.1f} |" in text and f"| {run['seconds_a_row']:.2f} | {rate:.0f} |\n" in text


def test_rows_without_masks_are_documented_as_the_file_has_them():
    text = section("speed", "Rows without masks")
    runs = [run for run in read_lines(RESULTS / "row-masks-h200.jsonl") if run.get("masks")]
    assert len(runs) > 10
    for run in runs:
        seconds = " | ".join(f"{run[way]['seconds']:.2f}" for way in ("masks", "none"))
        gib = " | ".join(f"{run[way]['peak_gib']:.1f}" for way in ("masks", "none"))
        case = f"{run['shape']} | {run['tokens']} | {run['document'] or 'all'}"
        assert f"| {case} | {seconds} | {gib} | {run['ratio']:.2f} |\n" in text


def test_noise_on_attention_is_documented_as_the_files_have_it():
    said = " ".join(section("speed", "Noise on attention").split())
    cases = [line for line in read_lines(RESULTS / "noise-attention-h200.jsonl") if "case" in line]
    for case in cases:
        shown = " | ".join(f"{case[figure]:.1f}" for figure in ("forward_ms", "backward_ms", "ratio"))
        assert f"| {case['case']} | {shown} |" in said
    runs = {run["tiles"]: run for run in read_lines(RESULTS / "noise-attention-h100.jsonl")}
    plain, own, small = (runs[tiles] for tiles in ("plain", "own", "64x32"))
    forwards = f"{small['forward_ms']:.1f} ms where flex attention's own took {own['forward_ms']:.1f},"
    assert f"the fastest forward of six sizes, {forwards}" in said
    assert min(run["forward_ms"] for run in runs.values() if run is not plain) == small["forward_ms"]
    assert f"than its own, {own['backward_ms']:.1f} ms" in said
    assert min(run["backward_ms"] for run in runs.values() if run is not plain) > 0.97 * own["backward_ms"]
    assert len({json.dumps(run["options"]) for run in runs.values()}) - 2 == 6


def overheads(file):
    return json.loads((RESULTS / f"view-overhead-{file}-h200.json").read_text())["rows"]


def test_what_a_patch_costs_is_documented_as_the_files_have_it():
    text = section("speed", "What a patch costs")
    near, far = ({row["view"]: row for row in overheads(file)} for file in ("8k", "32k"))
    for view, row in near.items():
        cells = f"{row['overhead_percent']:+.2f} % | ±{row['noise_percent']:.1f}"
        other = f"{far[view]['overhead_percent']:+.2f} % | ±{far[view]['noise_percent']:.2f}"
        assert f"| {view} | {cells} | {other} |\n" in text
    most = max(row["overhead_percent"] for row in far.values())
    outside = {view for view, row in (near | far).items() if abs(row["overhead_percent"]) > row["noise_percent"]}
    assert outside == {"compose"}
    said = " ".join((RESULTS.parents[1] / "docs/models.md").read_text().split())
    assert f"took at most {most:.2f} % longer at 32768 tokens of Llama-3-8B's shape" in said
    steps = {(row["view"], row["seq_len"]): row for row in overheads("step")}
    for view in ("standard", "posaug"):
        cells = [
            f"{steps[view, n]['overhead_percent']:+.2f} % | ±{steps[view, n]['noise_percent']:.{digits}f}"
            for n, digits in ((2048, 1), (8192, 2))
        ]
        assert f"| {view} | {cells[0]} | {cells[1]} |\n" in text
    both = json.loads((RESULTS / "step-before-after-h200.json").read_text())
    for before, after in zip(both["before"]["runs"], both["after"]["runs"], strict=True):
        cells = [f"{run['tokens_per_second']:.0f}" for run in (before, after)]
        cells += [f"{run['peak_gib']:.2f}" for run in (before, after)]
        assert f"| {before['run']} | {' | '.join(cells)} |\n" in text


def test_the_same_lengths_on_other_texts_are_documented_as_the_file_has_them():
    text = section("demo", "The same lengths on other texts")
    lines = [line for line in read_lines(RESULTS / "demo-search-h200.jsonl") if "model" in line]
    names = {"native": "as it came", "ntk 2.0": "NTK 2x, untrained", "extended rows 12 to 12288": "extended, 12 rows"}
    for model, name in names.items():
        (bins,) = (line["loss"] for line in lines if line["model"] == model and line.get("rows") == 4)
        cells = [f"{mean(bins[k : k + 2]):.3f}" for k in (8, 10)]
        for kind, numbers in (("passkey", 1), ("several", 4), ("several", 8)):
            found = [line for line in lines if (line["model"], line.get("numbers_a_text")) == (model, numbers)]
            (of_lengths,) = (x["found"] for x in found if x["kind"] == kind and x["questions"] == 16)
            cells.append(" / ".join(share(value) for value in of_lengths))
        assert f"| {name} | {' | '.join(cells)} |\n" in text


def test_the_earlier_demo_is_documented_as_its_files_have_it():
    text = section("demo", "The earlier demo")
    posaug, skip, yarn = (
        json.loads((RESULTS / f"demo-{name}-h200.json").read_text()) for name in ("posaug", "skip", "yarn-skip")
    )
    for name, run in {
        "as it came": posaug["results"]["before"],
        "control": posaug["results"]["control"],
        "PosAug": posaug["results"]["after"],
        "skip": skip["results"]["after"],
        "YaRN 4x + skip": yarn["results"]["after"],
    }.items():
        far = [b["loss"] for b in run["loss_by_position"] if b["first"] >= 8192]
        narrow = [f"{loss:.2f}" for loss in far[:4]]
        assert f"| {name} | {run['loss_in_window']:.3f} | {run['cliff']:.3f} | {' | '.join(narrow)} |" in text
    penalties = [run["in_distribution_penalty_against_control_percent"] for run in (posaug, skip)]
    assert "at equal tokens: {:.1f} % for PosAug, {:.1f} % for the skip".format(*penalties) in " ".join(text.split())


def test_ruler_is_documented_as_its_files_have_it():
    text = " ".join(section("models_side_by_side", "RULER").split())
    ruler = json.loads((RESULTS / "ruler-h200.json").read_text())
    means = {
        name: [f"{100 * mean(scores[k] for scores in tasks.values()):.1f}" for k in (0, 1)]
        for name, tasks in ruler["scores"].items()
    }
    native, yarn = means["native"], means["yarn4"]
    assert "native scores {} at 4096 and {} at 16384 tokens on average,".format(*native) in text
    assert "YaRN 4x without training {} and {}.".format(*yarn) in text and f"{ruler['samples']} prompts of each" in text
    cpu = json.loads((RESULTS / "ruler-vs-lm-eval-cpu.json").read_text())
    cells = [f"{s['ours']:.3f}, {s['lm_eval']:.3f}".replace("0.", ".") for s in cpu["scores"].values()]
    assert f"| {cpu['samples']} of {cpu['length']} tokens, CPU | {' | '.join(cells)} |" in text


def test_measures_at_128k_and_own_chats_are_documented_as_their_files_have_them():
    text = section("speed", "Evaluation at 128K tokens")
    rows = json.loads((RESULTS / "eval-memory-h200.json").read_text())["rows"]
    for n in range(len(rows) // 2):
        cells = [f"{rows[k]['seconds']:.1f} | {rows[k]['peak_gib_above_weights']:.1f}" for k in (n, n + len(rows) // 2)]
        assert f"| {' | '.join(cells)} |\n" in text
    text = section("speed", "A model's own chats")
    _, new, old = read_lines(RESULTS / "rows-speed-h200.jsonl")
    for run in (new, old):
        rates = f"{run['chats_per_second']:.1f} | {run['tokens_per_second']:.0f} | {run['peak_gib']:.1f}"
        assert f"| {run['chats']} | {run['seconds']:.1f} | {rates} |\n" in text
    assert f"{old['ratio']:.1f} times the tokens a second, {old['chats_ratio']:.1f} times the chats." in text

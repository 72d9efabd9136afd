"""The two commands that measure: what they take from the command line, and what they print."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.device import choose_device
from .hub_revision import add_model_revision
from .model_spec import NATIVE, ModelSpec

if TYPE_CHECKING:
    from rope_patch.eval import EvalPlan

# those that `eval` runs when none is named
DEFAULT = ("cliff", "gain", "passkey", "niah-single", "niah-multikey", "position", "attention", "entropy", "view-kl")
# --flag -> the measures that it stands for
FLAGS = {
    "cliff": ("cliff",),
    "gain": ("gain",),
    "passkey": ("passkey",),
    "niah": ("niah-single", "niah-multikey", "niah-multivalue", "niah-multiquery", "niah-ordinal", "position"),
    "ruler": ("ruler",),
    "short": ("short",),
    "attention": ("attention", "entropy"),
    "view-kl": ("view-kl",),
}
# the shortest default length is the window over this: what was lost shows within the window, and most on short prompts
SHORTEST = 16
# --flag -> what it measures, for somebody who has never heard of it
HELP = {
    "cliff": "loss at every position of a text (cross-entropy of the next token, in nats). The cliff is how much "
    "higher it is beyond the window that the model was trained on than within it",
    "gain": "context gain: how much lower the loss is when the model reads the whole text instead of its last 512 "
    "tokens",
    "passkey": "retrieval of a five-digit number that stands somewhere in repeated filler sentences",
    "niah": "needle in a haystack: retrieval of sentences hidden in your text. One; one of several; several at once; "
    "the first, second, ... of several. Also accuracy by the place of the answer",
    "ruler": "RULER's 13 long-context tasks, through lm-eval",
    "short": "eight benchmarks of short text, through lm-eval: what long-context training must not ruin",
    "attention": "how far back the last tokens look, and how spread out attention is beyond the window",
    "view-kl": "how much the predictions change when the second half of a text is moved to later positions",
}


def add_commands(commands: Any) -> None:
    """Add `eval` and `probe` to the subparsers."""
    evaluate = commands.add_parser(
        "eval",
        help="measure models side by side and write figures, tables and one HTML page",
        description="Measure one or several models and write a report. Without a measure named, those run that need no "
        "other data. A run that was stopped goes on with the same command.",
    )
    evaluate.set_defaults(run=run_eval)
    evaluate.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="[LABEL=]PATH[@METHOD:OPTION=VALUE,...]",
        help="hub id, checkpoint or adapter, rescaled or not; may be repeated. The others are compared with the one "
        "labelled native, or else with the first",
    )
    evaluate.add_argument(
        "--model-revision",
        action="append",
        default=[],
        metavar="[LABEL=]NAME",
        help="branch, tag or commit on the hub of the model with that label, or of the only one on the hub; may be "
        "repeated; default: main",
    )
    evaluate.add_argument(
        "--report", type=Path, default=Path("rope-patch-report"), dest="output_dir", help="default: %(default)s"
    )
    measures = evaluate.add_argument_group(
        "measures", "without any: all but --ruler, --short and --lm-eval, and two of --niah"
    )
    for flag in FLAGS:
        measures.add_argument(f"--{flag}", action="store_true", help=HELP[flag])
    measures.add_argument(
        "--lm-eval",
        metavar="TASK[,TASK]",
        type=_names,
        default=(),
        help="tasks, groups or tags of the installed lm-eval by name: long ones such as longbench2, infinitebench, "
        "babilong, graphwalks, and short ones such as mmlu, gsm8k, ifeval. niah_... and ruler_... are RULER's, at "
        "--lengths. Documents longer than --length are left out",
    )
    _add_data(evaluate, rows=4)
    evaluate.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        action="extend",
        help="prompt lengths for retrieval and RULER; default: from a sixteenth of the window on in powers of two to "
        "--length, as far as needles and question fit in",
    )
    evaluate.add_argument(
        "--trials",
        type=int,
        help="retrieval prompts of each length and depth, in four wordings in turn; default: 2. There are "
        "ten depths: 20 gives 200 prompts a length",
    )
    evaluate.add_argument("--ruler-tasks", nargs="+", action="extend", help="default: all whose data are given")
    evaluate.add_argument("--ruler-samples", type=int, help="prompts of each task and length; default: 20")
    evaluate.add_argument("--squad", help="SQuAD's JSON file for RULER's first QA task")
    evaluate.add_argument("--hotpotqa", help="HotpotQA's JSON file for RULER's second QA task")
    evaluate.add_argument("--short-data", help="folder of short-text benchmarks as .jsonl(.xz); default: from the hub")
    evaluate.add_argument(
        "--benchmarks", nargs="+", action="extend", help="short-text benchmarks; default: all that there are"
    )
    evaluate.add_argument(
        "--lm-eval-data", help="folder with the data of --lm-eval as TASK.jsonl(.xz); default: from the hub"
    )
    evaluate.add_argument(
        "--limit", type=int, help="samples of each short-text benchmark and of each task of --lm-eval at most"
    )
    evaluate.add_argument(
        "--batch-size", type=int, help="prompts answered at once, at most; default: as many as memory holds"
    )
    evaluate.add_argument(
        "--window",
        type=int,
        help="positions over which all models are compared, within and beyond; default: the trained window of the "
        "first model",
    )
    evaluate.add_argument(
        "--chat-template",
        choices=["auto", "on", "off"],
        default="auto",
        help="whether retrieval, RULER, short text and lm-eval's tasks are asked through the tokenizer's chat "
        "template; auto: if it has one, and LAMBADA as raw text. Loss by position reads raw text in any case",
    )
    evaluate.add_argument(
        "--backend",
        choices=["transformers", "vllm"],
        default="transformers",
        help="who answers --passkey and --niah. vllm, where it is installed: for checkpoints, neither adapters nor "
        "rescaled after loading; its first answers are compared with Transformers'. All else is measured by "
        "Transformers; default: %(default)s",
    )
    probe = commands.add_parser(
        "probe",
        help="where the window of a model ends, and what to do about it",
        description="Measure loss by position, try YaRN without training, and recommend a method and a recipe.",
    )
    probe.set_defaults(run=run_probe, output_dir=None)
    probe.add_argument("--model", required=True, help="hub id, checkpoint or adapter")
    add_model_revision(probe)
    probe.add_argument("--plot", type=Path, help="also draw loss by position as PLOT.png and PLOT.svg")
    _add_data(probe, rows=2)


def _add_data(parser: argparse.ArgumentParser, rows: int) -> None:
    parser.add_argument("--length", type=int, help="tokens in the longest row; default: four trained windows")
    parser.add_argument("--rows", type=int, default=rows, help="held-out rows; default: %(default)s")
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        help="held-out text: files, or .jsonl(.xz, .gz) with `text`; default: Python's own sources",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, on a CPU float32"
    )


def run_eval(args: argparse.Namespace) -> int:
    """`rope-patch eval`."""
    _require_positive(args)

    from rope_patch.base.empty_folders import without_empty_folders

    with without_empty_folders(args.output_dir):
        return _eval(args)


def _eval(args: argparse.Namespace) -> int:
    specs = [ModelSpec.parse(text) for text in args.model]
    labels = [spec.label for spec in specs]
    if len(set(labels)) < len(labels):
        raise ValueError(f"labels must differ, got {', '.join(labels)}: name models as LABEL=PATH.")
    specs = asked = _of_revisions(specs, args.model_revision)
    for spec in specs:
        spec.check()
    device, dtype = _device(args)

    from rope_patch.checkpoints.full_disk import told_of_full_disk
    from rope_patch.eval import regressions, run_suite, write_report
    from rope_patch.eval.measures.comparisons import baseline_label
    from rope_patch.eval.measures.prompt_grid import DEPTHS
    from rope_patch.eval.report import require_report, summary
    from rope_patch.prompts.asking import uses_chat_template
    from rope_patch.prompts.wordings import N_WORDINGS

    require_report(args.output_dir)
    first = specs[labels.index(baseline_label(labels))]
    specs = [first, *(spec for spec in specs if spec is not first)]
    tokenizer = first.load_tokenizer()
    length = args.length or _default_length(first)
    plan = _plan(args, length)
    chat = uses_chat_template(tokenizer, plan.chat_template)
    _require_one_tokenizer(specs, tokenizer, chat=chat and plan.asks)
    if plan.window is None:
        plan = replace(plan, window=first.trained_window())
    plan = _without_too_long(plan, named=any(getattr(args, flag.replace("-", "_")) for flag in FLAGS))
    if plan.reads_attention:
        _require_recomputable_attention(specs)
    if not plan.lengths:
        plan = _with_lengths(plan, tokenizer)
    results = run_suite(
        {spec.label: lambda spec=spec: spec.load(device, dtype) for spec in specs},  # type: ignore[misc]
        tokenizer,
        _texts(args, length),
        plan,
        args.output_dir / "cache",
        checkpoints={spec.label: spec.for_others for spec in specs if spec.is_checkpoint},
    )
    settings = {
        **{f"model {spec.label}": _said(spec, text) for spec, text in zip(asked, args.model, strict=True)},
        "text": ", ".join(args.text) if args.text else "Python's standard library",
        "dtype": str(dtype).removeprefix("torch."),
        "held-out rows": f"{args.rows} of {length} tokens",
        "prompt lengths": ", ".join(map(str, plan.lengths)),
        "prompts": f"{len(DEPTHS) * plan.trials} of each length: {plan.trials} at each of {len(DEPTHS)} depths, in "
        f"{N_WORDINGS} wordings",
        "prompts are answered by": plan.backend,
        **({"prompts are": "in the tokenizer's chat template" if chat else "raw text"} if plan.asks else {}),
        "window": f"{plan.window} positions" + ("" if args.window else f", the trained window of {first.label}"),
        "seed": plan.seed,
    }
    with told_of_full_disk(args.output_dir):
        page = write_report(
            results, args.output_dir, title="Long-context evaluation", settings=settings, window=plan.window
        )
    prompts = f" Prompts are {settings['prompts are']}." if plan.asks else ""
    print(f"\nAll models are compared over one window: {settings['window']}.{prompts}")
    if "cliff" in plan.measures and plan.window is not None and plan.window + 1 >= plan.length:
        print(f"Rows of {plan.length} tokens end within it, so that no cliff is measured: give a longer --length.")
    _print_summary(summary(results), [spec.label for spec in specs])
    print()
    for sentence in regressions(results, window=plan.window).verdict():
        print(sentence)
    print(f"\nReport: {page}")
    return 0


def _said(spec: ModelSpec, text: str) -> str:
    """A model as the command line names it, with its revision."""
    return text if spec.model_revision is None else f"{text} at revision {spec.model_revision}"


def _of_revisions(specs: list[ModelSpec], named: Sequence[str]) -> list[ModelSpec]:
    """The models at the revisions of --model-revision, [LABEL=]NAME each.

    Raises:
        ValueError: a label of no model, one without a label where several models are on the hub, or a second one.
    """
    labels, found = [spec.label for spec in specs], {spec.label: spec for spec in specs}
    of_hub = [spec.label for spec in specs if not Path(spec.path).is_dir()]
    for text in named:
        label, equals, revision = text.partition("=")
        if not equals:
            if len(of_hub) != 1 and len(specs) > 1:
                raise ValueError(
                    f"--model-revision {text}: of which model? Name it as LABEL=NAME, one of {', '.join(labels)}."
                )
            label, revision = (of_hub or labels)[0], text
        if label not in found:
            raise ValueError(f"--model-revision {text}: no model is labelled {label}, only {', '.join(labels)}.")
        if found[label].model_revision is not None:
            raise ValueError(f"--model-revision must name one revision of {label}, got a second one, {revision}.")
        found[label] = found[label].of_revision(revision)
    return [found[label] for label in labels]


def _require_recomputable_attention(specs: list[ModelSpec]) -> None:
    """Raise for the attention of a model what its measure would raise, before those in front of it are measured."""
    from rope_patch.eval.measures.attention import require_recomputable_attention

    for spec in specs:
        try:
            require_recomputable_attention(spec.twin())
        except ValueError as error:
            raise ValueError(f"--model {spec.label}: {error}") from error


def _require_one_tokenizer(specs: list[ModelSpec], tokenizer: Any, *, chat: bool) -> None:
    """Raise unless all models read what they are measured on as the first does; those without a tokenizer are told.

    Args:
        specs: the models, the first in front.
        tokenizer: of the first.
        chat: whether questions go through its chat template.

    Raises:
        ValueError: two make other tokens of a text, or of a chat.
    """
    from rope_patch.checkpoints.files_beside import tokenizer_files
    from rope_patch.eval.results.tokenizer_identity import asks_alike, reads_alike

    first, *others = specs
    seen = {first.tokenizer_source}
    for spec in others:
        source = spec.tokenizer_source
        if source in seen:
            continue
        seen.add(source)
        if not tokenizer_files(*source):
            print(f"{spec.label} comes without a tokenizer and is given the tokens of {first.label}'s.")
            continue
        own = spec.load_tokenizer()
        apart = "Measure each in a run of `rope-patch eval` with a --report of its own."
        if not reads_alike(tokenizer, own):
            raise ValueError(
                f"--model: all models of a run are given the same tokens, and the tokenizers of {first.label} and "
                f"{spec.label} make different ones of a text. {apart}"
            )
        if chat and not asks_alike(tokenizer, own):
            raise ValueError(
                f"--model: all models of a run are asked through one chat template, and those of {first.label} and "
                f"{spec.label} differ. --chat-template off asks both in raw text. {apart}"
            )


def run_probe(args: argparse.Namespace) -> int:
    """`rope-patch probe`."""
    _require_positive(args)
    spec = ModelSpec.parse(args.model).of_revision(args.model_revision)
    if spec.method not in (None, NATIVE):
        raise ValueError(
            f"--model: probe looks at a model as it is, beside a YaRN of its own: leave out @{spec.method} and what "
            f"follows it. `rope-patch eval --model {spec.path} --model {args.model}` sets a rescaling beside it."
        )
    spec.check()
    device, dtype = _device(args)
    length = args.length or _default_length(spec)

    from rope_patch.eval import LossByPosition, probe, text_rows
    from rope_patch.eval.report import require_writable
    from rope_patch.eval.results.figures import require_matplotlib, save_figure

    if args.plot:
        require_matplotlib()
        require_writable(args.plot.parent)
    window = spec.trained_window()
    if window is not None and length < window + 2:
        raise ValueError(f"--length must reach beyond the trained window of {window} positions, got {length}.")
    rows = text_rows(spec.load_tokenizer(), _texts(args, length), seq_len=length, n_rows=args.rows)
    result = probe(spec.load(device, dtype), rows)
    print(result)
    if args.plot:
        curves = {"as it is": result.native}
        if result.yarn is not None:
            curves[f"YaRN {result.factor:g}x, untrained"] = result.yarn
        for file in save_figure(LossByPosition.figure(curves), args.plot):
            print(f"Figure: {file}")
    return 0


def _plan(args: argparse.Namespace, length: int) -> "EvalPlan":
    from rope_patch.eval import MEASURES, EvalPlan
    from rope_patch.eval.measures.ruler import TASKS

    named = {name for flag, names in FLAGS.items() if getattr(args, flag.replace("-", "_")) for name in names}
    # lm-eval by itself would cut RULER's prompts to the window in the config, and measure lengths of its own
    of_ruler = [task for task in args.lm_eval if task in (*TASKS, "ruler")]
    others = tuple(task for task in args.lm_eval if task not in of_ruler)
    named |= ({"ruler"} if of_ruler else set()) | ({"lm-eval"} if others else set())
    ruler_tasks = tuple(dict.fromkeys([*(args.ruler_tasks or ()), *(task for task in of_ruler if task != "ruler")]))
    chosen = named or set(DEFAULT)
    # what has a default in the plan is given where the command line names it
    counts = {name: getattr(args, name) for name in ("trials", "ruler_samples") if getattr(args, name) is not None}
    return EvalPlan(
        measures=tuple(name for name in MEASURES if name in chosen),
        length=length,
        n_rows=args.rows,
        lengths=tuple(dict.fromkeys(args.lengths or ())),
        ruler_tasks=ruler_tasks or None,
        squad=args.squad,
        hotpotqa=args.hotpotqa,
        short_data=args.short_data,
        benchmarks=tuple(args.benchmarks) if args.benchmarks else None,
        limit=args.limit,
        lm_eval=others,
        lm_eval_data=args.lm_eval_data,
        batch_size=args.batch_size,
        chat_template=args.chat_template,
        window=args.window,
        backend=args.backend,
        **counts,
    )


def _with_lengths(plan: "EvalPlan", tokenizer: Any) -> "EvalPlan":
    """Lengths from a sixteenth of the window on in powers of two to the longest row; those that are too short are told.

    Without a known window, from a sixteenth of the longest row on.
    """
    from rope_patch.eval.measures.prompt_grid import shortest_prompt
    from rope_patch.eval.measures.ruler import SHORTEST_LENGTH
    from rope_patch.prompts.needles import KINDS

    shortest = max(1, min(plan.window or plan.length, plan.length) // SHORTEST)
    lengths = [shortest << k for k in range(40) if shortest << k < plan.length] + [plan.length]

    def at_least(needed: int, measures: str) -> tuple[int, ...]:
        left_out = ", ".join(str(length) for length in lengths if length < needed)
        if left_out:
            print(f"Prompts of {left_out} tokens are left out: {measures} needs {needed}. --lengths names others.")
        return tuple(length for length in lengths if length >= needed) or (plan.length,)

    kinds = [kind for kind in KINDS if {kind, f"niah-{kind}"} & set(plan.measures)]
    needed = max((shortest_prompt(kind, tokenizer, plan.chat_template) for kind in kinds), default=0)
    return replace(
        plan,
        lengths=at_least(needed, "retrieval"),
        ruler_lengths=at_least(SHORTEST_LENGTH, "RULER") if "ruler" in plan.measures else None,
    )


def _without_too_long(plan: "EvalPlan", *, named: bool) -> "EvalPlan":
    """The plan without what nobody asked for by name and rows of its length are too short for, which is told.

    Args:
        plan: what is measured.
        named: whether measures were named. The entropy of attention has no flag of its own.
    """
    left_out = {
        name: least
        for name, least in plan.too_short(plan.window).items()
        if len(plan.measures) > 1 and (not named or name == "entropy")
    }
    for name, least in left_out.items():
        print(f"{name} is left out: it needs rows of {least} tokens, and --length is {plan.length}.")
    return replace(plan, measures=tuple(name for name in plan.measures if name not in left_out))


def _names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _require_positive(args: argparse.Namespace) -> None:
    for name in ("length", "rows", "trials", "ruler_samples", "batch_size", "limit", "window"):
        given = getattr(args, name, None)
        if given is not None and given < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {given}.")


def _device(args: argparse.Namespace) -> tuple[str, Any]:
    import torch

    device = choose_device(args.device, torch.cuda.is_available())
    return device, getattr(torch, args.dtype or ("float32" if device == "cpu" else "bfloat16"))


def _default_length(spec: ModelSpec) -> int:
    window = spec.trained_window()
    if window is None:
        raise ValueError(f"the config of {spec.path} names no window: give --length.")
    return 4 * window


def _texts(args: argparse.Namespace, length: int) -> list[str]:
    """Held-out documents. Of the standard library, no more files are read than rows and haystacks can need."""
    from rope_patch.eval import read_texts, standard_library_files

    if args.text:
        return list(read_texts(args.text))
    texts: list[str] = []
    for file in standard_library_files()[::2]:  # the demo trains on the others
        texts += read_texts([file])
        # a token of code has 3 to 4 characters, and a file gives one row
        if sum(min(len(text), 8 * length) for text in texts) > 8 * length * (args.rows + 1):
            break
    return texts


def _print_summary(figures: list[dict[str, Any]], labels: list[str]) -> None:
    width = max(len(row["figure"]) for row in figures) + 2
    print(f"\n{'':{width}}" + "".join(f"{label:>12.11}" for label in labels))
    for row in figures:
        cells = (f"{row['values'][k]:12.3f}" if k in row["values"] else f"{'-':>12}" for k in labels)
        print(f"{row['figure']:{width}}" + "".join(cells))

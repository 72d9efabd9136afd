"""`rope-patch eval` and `rope-patch probe`: measure models."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from ..engines.device import choose_device
from .hub_revision import add_model_revision
from .model_spec import NATIVE, ModelSpec

if TYPE_CHECKING:
    from rope_patch.eval import EvalPlan, Measure

# the shortest default prompt is the window over this: losses show within the window, and most on short prompts
SHORTEST = 16
# fields of the plan without a flag of the same name
_NO_FLAG = ("measures", "length", "n_rows", "gain", "ruler_lengths", "depths", "lm_eval", "options")


def add_commands(commands: Any) -> None:
    """Add `eval` and `probe` to the subparsers."""
    evaluate = commands.add_parser(
        "eval",
        help="measure models side by side and write figures, tables and one HTML page",
        description="Measure one or several models and write a report. Without flags of measures, those run that need "
        "no other data. The same command resumes a stopped run.",
        complete=_add_measures,
    )
    evaluate.set_defaults(run=run_eval)
    evaluate.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="[LABEL=]PATH[@METHOD:OPTION=VALUE,...]",
        help="hub id, checkpoint or adapter, with or without a RoPE scaling; may be repeated. The baseline is the "
        "model labelled native, or else the first. Models with one LABEL are compared as one, by their mean: the same "
        "training from several seeds",
    )
    evaluate.add_argument(
        "--model-revision",
        action="append",
        default=[],
        metavar="[LABEL=]NAME",
        help="branch, tag or commit on the hub of the model with that label; the only model on the hub needs no label; "
        "may be repeated; default: main",
    )
    evaluate.add_argument(
        "--report", type=Path, default=Path("rope-patch-report"), dest="output_dir", help="default: %(default)s"
    )
    _add_data(evaluate, rows=4)
    probe = commands.add_parser(
        "probe",
        help="find where the context window of a model ends, and what to do about it",
        description="Measure loss by position, try YaRN without training, and recommend a method and a recipe.",
    )
    probe.set_defaults(run=run_probe, output_dir=None)
    probe.add_argument("--model", required=True, help="hub id, checkpoint or adapter")
    add_model_revision(probe)
    probe.add_argument("--plot", type=Path, help="also draw loss by position as PLOT.png and PLOT.svg")
    _add_data(probe, rows=2)


def _add_measures(parser: argparse.ArgumentParser) -> None:
    """Add the flags of measures and of the fields of `EvalPlan`."""
    from rope_patch.eval import EvalPlan

    from .catalogue import options_of

    group = parser.add_argument_group("measures", "Default: those that need no other data, and two kinds of --niah.")
    for flag, measures in _by_flag().items():
        first = next(measure for measure in measures if measure.help)
        group.add_argument(f"--{flag}", help=first.help, **first.argument)
        for name, argument in first.options.items():
            group.add_argument(f"--{name.replace('_', '-')}", **argument)
    hints = get_type_hints(EvalPlan)
    for option in options_of(EvalPlan):
        if option.name not in _NO_FLAG:
            meaning = option.meaning.rstrip(".").replace("%", "%%")
            parser.add_argument(f"--{option.name.replace('_', '-')}", help=meaning, **_argument(hints[option.name]))


def _argument(hint: Any) -> dict[str, Any]:
    """Options of `add_argument` for a field of the plan with this type."""
    kind = next(kind for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if kind is not NoneType)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is tuple:
        return {"type": get_args(kind)[0], "nargs": "+", "action": "extend"}
    return {"type": kind}


def _by_flag() -> "dict[str, list[Measure]]":
    """Flag -> the measures that it switches on."""
    from rope_patch.eval import MEASURES

    MEASURES.load_all()
    flags: dict[str, list[Measure]] = {}
    for measure in MEASURES.values():
        flags.setdefault(measure.flag or measure.name, []).append(measure)
    return flags


def _add_data(parser: argparse.ArgumentParser, rows: int) -> None:
    parser.add_argument("--length", type=int, help="tokens in the longest sequence; default: four context windows")
    parser.add_argument("--rows", type=int, default=rows, help="held-out sequences; default: %(default)s")
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        help="held-out text: files, or .jsonl(.xz, .gz) with `text`; default: Python's own sources",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
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
    # `typed` stays in the order of the command line, beside args.model
    specs = typed = _at_revisions(_specs(args.model), args.model_revision)
    labels = [spec.label for spec in specs]
    for spec in specs:
        spec.check()
    device, dtype = _device(args)

    from rope_patch.checkpoints.full_disk import disk_full_errors
    from rope_patch.eval import regressions, run_suite, verdict, write_report
    from rope_patch.eval.measures.comparisons import baseline_label
    from rope_patch.eval.measures.prompt_grid import DEPTHS
    from rope_patch.eval.report import require_report, summary
    from rope_patch.prompts.asking import uses_chat_template
    from rope_patch.prompts.wordings import N_WORDINGS

    require_report(args.output_dir)
    first = specs[labels.index(baseline_label(labels))]
    specs = [first, *(spec for spec in specs if spec is not first)]  # the baseline is measured first
    tokenizer = first.load_tokenizer()
    length = args.length or _default_length(first)
    plan = _plan(args, length)
    chat = uses_chat_template(tokenizer, plan.chat_template)
    _require_one_tokenizer(specs, tokenizer, chat=chat and plan.asks)
    if plan.window is None:
        plan = replace(plan, window=first.trained_window())
    plan = _without_too_long(plan, named=any(_value_of(args, flag) for flag in _by_flag()))
    for check, spec in product(plan.model_checks, specs):
        try:
            check(spec.twin())  # without weights, before any model is measured
        except ValueError as error:
            raise ValueError(f"--model {spec.label}: {error}") from error
    if not plan.lengths:
        plan = _with_lengths(plan, tokenizer)
    results = run_suite(
        # functions, so that one model is loaded at a time
        {spec.label: lambda spec=spec: spec.load(device, dtype) for spec in specs},  # type: ignore[misc]
        tokenizer,
        _texts(args, length),
        plan,
        args.output_dir / "cache",
        checkpoints={spec.label: spec.for_others for spec in specs if spec.is_checkpoint},
    )
    settings = {
        **{
            f"model {spec.label}": f"{text} at revision {spec.model_revision}" if spec.model_revision else text
            for spec, text in zip(typed, args.model, strict=True)
        },
        "text": ", ".join(args.text) if args.text else "Python's standard library",
        "dtype": str(dtype).removeprefix("torch."),
        "held-out rows": f"{args.rows} of {length} tokens",
        "prompt lengths": ", ".join(map(str, plan.lengths)),
        "prompts": f"{len(DEPTHS) * plan.trials} of each length: {plan.trials} at each of {len(DEPTHS)} depths, in "
        f"{N_WORDINGS} wordings",
        "prompts are answered by": plan.backend,
        **({"prompts are": "in the tokenizer's chat template" if chat else "raw text"} if plan.asks else {}),
        "window": f"{plan.window} positions" + ("" if args.window else f", the context window of {first.label}"),
        "seed": plan.seed,
    }
    with disk_full_errors(args.output_dir):
        page = write_report(
            results, args.output_dir, title="Long-context evaluation", settings=settings, window=plan.window
        )
    prompts = f" Prompts are {settings['prompts are']}." if plan.asks else ""
    print(f"\nAll models are compared over one context window: {settings['window']}.{prompts}")
    if "cliff" in plan.measures and plan.window is not None and plan.window + 1 >= plan.length:
        print(
            f"Sequences of {plan.length} tokens end within it, so no loss beyond is measured: give a longer --length."
        )
    figures, labels = summary(results), [spec.label for spec in specs]
    width = max(len(row["figure"]) for row in figures) + 2
    print(f"\n{'':{width}}" + "".join(f"{label:>12.11}" for label in labels))
    for row in figures:
        cells = (f"{row['values'][k]:12.3f}" if k in row["values"] else f"{'-':>12}" for k in labels)
        print(f"{row['figure']:{width}}" + "".join(cells))
    print()
    for sentence in verdict(regressions(results, window=plan.window)):
        print(sentence)
    print(f"\nReport: {page}")
    return 0


def _specs(models: Sequence[str]) -> list[ModelSpec]:
    """The models of --model. Those of a label that is given twice are several trained models of one method."""
    from rope_patch.eval.measures.comparisons import baseline_label

    specs = [ModelSpec.parse(text) for text in models]
    counts = Counter(spec.label for spec in specs)
    for spec, text in zip(specs, models, strict=True):
        if counts[spec.label] > 1 and not text.startswith(f"{spec.label}="):
            raise ValueError(f"labels must differ, got {spec.label} twice: name models as LABEL=PATH.")
    baseline = baseline_label(counts)
    if counts[baseline] > 1:
        raise ValueError(
            f"--model {baseline} is what others are compared with, so it must be one model, got {counts[baseline]}: "
            "name another model before it, or label one native."
        )
    seen: Counter[str] = Counter()
    for k, spec in enumerate(specs):
        if counts[spec.label] > 1:
            seen[spec.label] += 1
            # reports take the mean of ours#1, ours#2, ...
            specs[k] = replace(spec, label=f"{spec.label}#{seen[spec.label]}")
    return specs


def _at_revisions(specs: list[ModelSpec], revisions: Sequence[str]) -> list[ModelSpec]:
    """The models at the revisions of --model-revision, [LABEL=]NAME each; the only model on the hub needs no label."""
    by_label = {spec.label: spec for spec in specs}
    on_hub = [spec.label for spec in specs if not Path(spec.path).is_dir()] or [*by_label]
    for text in revisions:
        label, equals, revision = text.partition("=")
        if not equals:
            label, revision = on_hub[0] if len(on_hub) == 1 else "", text  # "" is refused below
        if label not in by_label:
            raise ValueError(
                f"--model-revision must be LABEL=NAME, with a label of --model, {' or '.join(by_label)}, got {text}."
            )
        by_label[label] = by_label[label].of_revision(revision)
    return list(by_label.values())


def _require_one_tokenizer(specs: list[ModelSpec], tokenizer: Any, *, chat: bool) -> None:
    """Raise ValueError unless all models tokenize texts, and with `chat` chats, as the first one does.

    A model without a tokenizer gets that of the first, and a line says so.
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
            print(f"{spec.label} has no tokenizer and is measured with that of {first.label}.")
            continue
        other = spec.load_tokenizer()
        remedy = "Measure each in its own run, with its own --report."
        if not reads_alike(tokenizer, other):
            raise ValueError(
                f"--model: all models of a run read the same tokens, and the tokenizers of {first.label} and "
                f"{spec.label} make different tokens of a text. {remedy}"
            )
        if chat and not asks_alike(tokenizer, other):
            raise ValueError(
                f"--model: all models of a run are asked through one chat template, and those of {first.label} and "
                f"{spec.label} differ. --chat-template off asks both in raw text. {remedy}"
            )


def run_probe(args: argparse.Namespace) -> int:
    """`rope-patch probe`."""
    _require_positive(args)
    spec = ModelSpec.parse(args.model).of_revision(args.model_revision)
    if spec.method not in (None, NATIVE):
        raise ValueError(
            f"--model: probe compares a model with YaRN and takes no other RoPE scaling: leave out @{spec.method} and "
            f"what follows. `rope-patch eval --model {spec.path} --model {args.model}` compares the two."
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
        raise ValueError(f"--length must be longer than the context window of {window} positions, got {length}.")
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
    from rope_patch.eval.measures.ruler_prompts import TASKS

    # RULER's tasks run here: lm-eval would cut their prompts to the window in the config, at lengths that it chooses
    of_ruler = [task for task in args.lm_eval if task in (*TASKS, "ruler")]
    args.lm_eval = [task for task in args.lm_eval if task not in of_ruler]
    if of_ruler:
        args.ruler = True
        args.ruler_tasks = [*(args.ruler_tasks or ()), *(task for task in of_ruler if task != "ruler")] or None
    chosen = [m for flag, measures in _by_flag().items() if _value_of(args, flag) for m in measures]
    chosen = chosen or [measure for measure in MEASURES.values() if measure.by_default]
    given = {field.name: getattr(args, field.name, None) for field in fields(EvalPlan)}
    return EvalPlan(
        measures=tuple(name for name, measure in MEASURES.items() if measure in chosen),
        **{
            **{k: tuple(dict.fromkeys(v)) if isinstance(v, list) else v for k, v in given.items() if v is not None},
            "length": length,
            "n_rows": args.rows,
            "options": {name: getattr(args, name) for measure in chosen for name in measure.options},
        },
    )


def _value_of(args: argparse.Namespace, flag: str) -> Any:
    """The value of a flag; false in an `if` when the flag is not there."""
    return getattr(args, flag.replace("-", "_"))


def _with_lengths(plan: "EvalPlan", tokenizer: Any) -> "EvalPlan":
    """The plan with default lengths of prompts: powers of two from a sixteenth of the window to the longest row.

    Without a known window they begin at a sixteenth of the longest row. Too short lengths are left out with a message.
    """
    shortest = max(1, min(plan.window or plan.length, plan.length) // SHORTEST)
    lengths = [shortest << k for k in range(40) if shortest << k < plan.length] + [plan.length]

    def long_enough(measures: "list[Measure]") -> tuple[int, ...]:
        needed, name = max([(m.shortest(plan, tokenizer), m.name) for m in measures], default=(0, ""))
        left_out = ", ".join(str(length) for length in lengths if length < needed)
        if left_out:
            print(f"Prompts of {left_out} tokens are left out: {name} needs {needed}. --lengths names others.")
        return tuple(length for length in lengths if length >= needed) or (plan.length,)

    of_ruler = [measure for measure in plan.chosen if "ruler_lengths" in measure.parts]
    return replace(
        plan,
        lengths=long_enough([measure for measure in plan.chosen if measure not in of_ruler]),
        ruler_lengths=long_enough(of_ruler) if of_ruler else None,
    )


def _without_too_long(plan: "EvalPlan", *, named: bool) -> "EvalPlan":
    """The plan without measures that need longer rows, unless a flag names them."""
    from rope_patch.eval import MEASURES

    left_out = {
        name: least
        for name, least in plan.too_short(plan.window).items()
        if len(plan.measures) > 1 and not (named and MEASURES[name].help)
    }
    for name, least in left_out.items():
        print(f"{name} is left out: it needs rows of {least} tokens, and --length is {plan.length}.")
    return replace(plan, measures=tuple(name for name in plan.measures if name not in left_out))


def _require_positive(args: argparse.Namespace) -> None:
    from rope_patch.base.validators import require_integer

    for name in ("length", "rows", "trials", "ruler_samples", "batch_size", "limit", "window"):
        if getattr(args, name, None) is not None:
            require_integer(f"--{name.replace('_', '-')}", getattr(args, name), least=1)


def _device(args: argparse.Namespace) -> tuple[str, Any]:
    import torch

    device = choose_device(args.device, torch.cuda.is_available())
    return device, getattr(torch, args.dtype or ("float32" if device == "cpu" else "bfloat16"))


def _default_length(spec: ModelSpec) -> int:
    window = spec.trained_window()
    if window is None:
        raise ValueError(f"the config of {spec.path} has no context window: give --length.")
    return 4 * window


def _texts(args: argparse.Namespace, length: int) -> list[str]:
    """Held-out documents: --text, or as many sources of the standard library as rows and haystacks need."""
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

"""`rope-patch reproduce`: the commands of a paper one after the other, and its figures beside what came."""

import argparse
import json
import shlex
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PAPERS = Path("examples", "papers")
_STEPS = "reproduce.yaml"
_CLONE = "git clone https://github.com/rope-patch/rope-patch && cd rope-patch"


def add_commands(commands: Any) -> None:
    """Add `reproduce` to the subparsers."""
    reproduce = commands.add_parser(
        "reproduce",
        help="train and evaluate as a paper does, and print its figures beside what came",
        description="Run the commands of a paper, which are in examples/papers/NAME/reproduce.yaml: rows, training and "
        "evaluation. By default they run at a size for one GPU, on the small model and the texts of `rope-patch demo`, "
        "which are installed. The same command goes on after the last command that was finished.",
    )
    reproduce.set_defaults(run=run_reproduce)
    reproduce.add_argument("paper", metavar="NAME", help="rpsd, linearard, posaug, endprompt, or a folder of yours")
    reproduce.add_argument("--full", action="store_true", help="the paper's models, data and settings")
    reproduce.add_argument("--dry-run", action="store_true", help="print the commands and exit")
    reproduce.add_argument(
        "--output", dest="output_dir", metavar="DIR", type=Path, help="folder for all results; default: NAME, NAME-full"
    )


def run_reproduce(args: argparse.Namespace) -> int:
    """Run what is not done yet of a paper's commands, and print the table."""
    folder = next((at for at in (_PAPERS / args.paper, Path(args.paper)) if (at / _STEPS).is_file()), None)
    if folder is None:
        known = ", ".join(sorted(file.parent.name for file in _PAPERS.glob(f"*/{_STEPS}")))
        there = f"{_PAPERS} has {known}" if known else f"here is no {_PAPERS}, which comes with the sources: {_CLONE}"
        raise ValueError(f"NAME must be a paper, or a folder with {_STEPS}, got {args.paper}: {there}.")
    if args.output_dir is None:
        args.output_dir = Path(folder.name + "-full" * args.full)

    from ..recipes.recipe import read_yaml

    paper = read_yaml(folder / _STEPS, str(folder / _STEPS))
    size = paper["full" if args.full else "small"]
    commands = with_paths(size["commands"], folder, args.output_dir)
    if args.dry_run:
        print("\n".join(commands))
        return 0
    if any("$model" in command or "$texts" in command for command in size["commands"]):
        _write_demo(args.output_dir)
    status = run_commands(commands, args.output_dir)
    if status == 0:
        made = table(f"{paper['paper']}, {args.output_dir}", size["figures"], read_figures(args.output_dir / "report"))
        (args.output_dir / "figures.md").write_text(made, encoding="utf-8")
        print(f"\n{made}\nReport: {args.output_dir / 'report' / 'report.html'}")
    return status


def with_paths(commands: list[str], folder: Path, output: Path) -> list[str]:
    """The commands with paths in place of $folder, $output, $model, $texts and $held_out."""
    from ..demo.settings import NAME

    paths = {"folder": folder, "output": output, "model": output / NAME, "texts": output / "library.jsonl"}
    quoted = {name: shlex.quote(str(path)) for name, path in (paths | {"held_out": output / "held-out.jsonl"}).items()}
    return [string.Template(command).substitute(quoted) for command in commands]


def run_commands(commands: list[str], output: Path) -> int:
    """Run the commands that have not been run, each in a process of its own; the status of the first that fails, or 0.

    Args:
        commands: of this package or of Python, as a shell takes them.
        output: folder whose done.json has the commands that were finished and the seconds that each took.
    """
    record = output / "done.json"
    done = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    programs = {"rope-patch": [sys.executable, "-m", "trl_ext"], "python": [sys.executable]}
    for number, command in enumerate(commands, 1):
        print(f"\n[{number}/{len(commands)}] {command}{' (done)' * (command in done)}", flush=True)
        if command in done:
            continue
        program, *words = shlex.split(command)
        begin = time.perf_counter()
        status = _finished(subprocess.Popen([*programs[program], *words]))
        if status:
            print(f"\nThat command failed. The same command goes on from there, in {output}.", file=sys.stderr)
            return status
        done[command] = round(time.perf_counter() - begin, 1)
        print(f"{done[command]} seconds", flush=True)
        output.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")  # after each, so that Ctrl-C loses one
    return 0


def _finished(process: "subprocess.Popen[bytes]") -> int:
    """Its status once it has ended. Ctrl-C goes to the process too, which ends by itself: it may be saving."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def read_figures(report: Path) -> dict[str, dict[str, float | None]]:
    """Figure -> label of a model -> value, of a report of `rope-patch eval`."""
    summary = json.loads((report / "results.json").read_text(encoding="utf-8"))["summary"]
    return {row["figure"]: row["values"] for row in summary}


def table(title: str, claims: list[dict[str, Any]], figures: dict[str, dict[str, float | None]]) -> str:
    """Each claim of a paper with its figures, and the same of this run, in Markdown.

    Args:
        title: of the table.
        claims: each with `claim`, `paper` (its figures), `figure` (a name in `figures`) and `models`, labels whose
            figures rise in this order if the claim holds.
        figures: of `read_figures`.
    """
    lines = [title, "", "| the paper's claim | its figures | here | of | models |", "|---|---|---|---|---|"]
    for claim in claims:
        values = [figures.get(claim["figure"], {}).get(label) for label in claim["models"]]
        known = [value for value in values if value is not None]
        shown = (
            " < " if len(known) == len(values) and all(a < b for a, b in zip(known, known[1:], strict=False)) else ", "
        )
        here = shown.join("-" if value is None else f"{value:.3f}" for value in values)
        models = ", ".join(claim["models"])
        lines.append(f"| {claim['claim']} | {claim['paper']} | {here} | {claim['figure']} | {models} |")
    return "\n".join(
        [*lines, "", 'A "<" stands where the figures are in the order of the claim, a comma elsewhere.', ""]
    )


def _write_demo(output: Path) -> None:
    """Write the small model, the texts to train on and others to evaluate on."""
    from ..demo.files import write_files
    from ..demo.library import write_held_out

    write_files(output)
    write_held_out(output / "held-out.jsonl")

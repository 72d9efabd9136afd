"""Tables of what research/experiments/served.py found, for research/results/serving.md."""

from collections.abc import Callable, Sequence
from typing import Any

Line = dict[str, Any]
OURS = "ours"
TOLERANCE = 0.1  # largest difference of logits, in standard deviations of them, that rounding may make
ORDER = (
    "Transformers",
    "Transformers 4",
    "vLLM on a CPU",
    "llama.cpp",
    "mlx-lm",
    "CTranslate2",
    "ONNX Runtime GenAI",
)


def is_wrong(line: Line) -> bool:
    """Whether a program served another model than ours."""
    return line["outcome"] == "served" and line["largest_difference"] > TOLERANCE * line["spread"]


def tables(lines: Sequence[Line]) -> str:
    """A table for each length of the row, the longest first, why cells are refused, and the programs' versions."""
    lengths = sorted({line["length"] for line in lines}, reverse=True)
    parts = [_table(length, [line for line in lines if line["length"] == length]) for length in lengths]
    return "\n".join([*parts, _reasons(lines), f"Run with {versions(lines)}.\n"])


def versions(lines: Sequence[Line]) -> str:
    """Which version of each program was run."""
    by_program = {line["program"]: line["version"] for line in lines if line["program"] != OURS}
    return ", ".join(f"{program} ({by_program[program]})" for program in ORDER if program in by_program)


def _table(length: int, lines: Sequence[Line]) -> str:
    by_cell = {(line["program"], line["rescaling"]): line for line in lines}
    programs = [program for program in ORDER if any(line["program"] == program for line in lines)]
    beyond = any(line.get("loss_beyond") is not None for line in lines)
    wrote = any("as_written" in line for line in lines)
    what = f"loss{' beyond the window' if beyond else ''}, passkeys{' teacher-forced, as written' if wrote else ''}"
    header = [f"rescaling, {length} tokens", f"ours: {what}", *programs]
    rows = [header, ["---"] * len(header)]
    for rescaling in dict.fromkeys(line["rescaling"] for line in lines):
        ours = by_cell.get((OURS, rescaling))
        rows.append([_code(rescaling), "-" if ours is None else _loss(ours)])
        rows[-1] += [_cell(by_cell.get((program, rescaling))) for program in programs]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(line: Line | None) -> str:
    """Largest difference of logits, then loss and passkeys, teacher-forced and, where it wrote, as written."""
    if line is None:
        return "-"
    if line["outcome"] != "served":
        return "refused" if line["outcome"] == "refused" else "refused by the program"
    text = f"{line['largest_difference']:.2g}; {_loss(line)}"
    return f"**wrong** {text}" if is_wrong(line) else text


def _loss(line: Line) -> str:
    loss = line["loss_within"] if line["loss_beyond"] is None else line["loss_beyond"]
    return ", ".join(
        [f"{loss:.3f}", *(str(line[measure]) for measure in ("passkeys", "as_written") if measure in line)]
    )


def _code(rescaling: str) -> str:
    """The method and its options as code, the words between them plain."""
    if rescaling == "none":
        return rescaling
    method, _, options = rescaling.partition(", ")
    return ", ".join([f"`{method}`", *([" and ".join(f"`{o}`" for o in options.split(" and "))] if options else [])])


def _reasons(lines: Sequence[Line]) -> str:
    """What is refused, by `export` and by programs, each reason once."""
    text = ""
    tellers: tuple[tuple[str, Callable[[Line], str]], ...] = (
        ("refused", lambda line: line["reason"].partition(": ")[2]),
        ("failed", lambda line: f'{line["program"]} says "{_error(line["reason"])}"'),
    )
    for outcome, tell in tellers:
        by_reason: dict[str, list[str]] = {}
        for line in lines:
            if line["outcome"] == outcome:
                by_reason.setdefault(tell(line), []).append(f"{_code(line['rescaling'])} for {line['program']}")
        text += "".join(f"- {'; '.join(dict.fromkeys(cells))}: {why}\n" for why, cells in by_reason.items())
    return text


def _error(reason: str) -> str:
    """What an error says in its first line, without its kind; of pydantic's the first sentence of what is wrong."""
    first, *others = reason.partition(": ")[2].splitlines()
    if "validation error" in first and others:
        return others[0].strip().removeprefix("Value error, ").partition(". ")[0]
    return first

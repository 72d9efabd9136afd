"""What research/experiments/factor_search.py found: its table, and its rescaling as options of `patch_model`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paired_results import head
from paired_results import row as markdown_row
from result_lines import read_lines

Line = dict[str, Any]


def best_of(generations: Sequence[Line]) -> Line:
    """The point with the smallest fitness of all generations, what was measured of it, and its generation."""
    candidates = (
        {**measured, "point": point, "generation": line["generation"]}
        for line in generations
        for point, measured in zip(line["points"], line["measured"], strict=True)
    )
    return min(candidates, key=lambda candidate: candidate["fitness"])


def searched_rescaling(file: Path) -> tuple[str, dict[str, Any]]:
    """Method and options of `patch_model`: those of the last search that has ended in a file.

    Raises:
        ValueError: no search has ended there.
    """
    ended = [line for line in read_lines(file) if line.get("line") == "best"]
    if not ended:
        raise ValueError(f"{file} has no result of research/experiments/factor_search.py: let a search end first.")
    return ended[-1]["rescale"], ended[-1]["rescale_args"]


def table(lines: Sequence[Line]) -> str:
    """Markdown, a table for each set of prompts: arms and searches, then the generations and divisors of searches."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        names = ("model", "window", "target", "lengths", "books", "question_seed", "text_weight")
        groups.setdefault(", ".join(f"{name} {line[name]}" for name in names), []).append(line)
    return "\n\n".join(f"{conditions}\n\n{_of_prompts(same)}" for conditions, same in groups.items())


def _of_prompts(lines: Sequence[Line]) -> str:
    lengths = " / ".join(map(str, lines[0]["lengths"]))
    heads = ["rescaling", "fitness", f"loss of answers at {lengths}", f"loss of books at {lengths}", "attention factor"]
    rows = head(heads)
    generations = [line for line in lines if line["line"] == "generation"]
    for line in lines:
        if line["line"] == "arm":
            rows.append(_row(line["arm"], line, line["attention_factor"]))
        elif line["line"] == "best":
            name = f"searched, seed {line['seed']}, {line['generations']} generations from {line['from']}"
            rows.append(_row(name, line, line["rescale_args"]["attention_factor"]))
    parts = ["\n".join(rows)]
    if generations:
        heads = ["seed", "generation", "smallest fitness", "largest", "smallest so far"]
        rows = head(heads)
        smallest: dict[str, float] = {}
        for line in generations:
            search = str([line[name] for name in ("seed", "start", "knots", "population", "step")])
            values = [measured["fitness"] for measured in line["measured"]]
            smallest[search] = min(*values, smallest.get(search, values[0]))
            figures = [f"{value:.4f}" for value in (min(values), max(values), smallest[search])]
            rows.append(markdown_row([str(line["seed"]), str(line["generation"]), *figures]))
        parts.append("\n".join(rows))
    for line in lines:
        if line["line"] == "best":
            divisors = " ".join(f"{x:.3f}" for x in line["rescale_args"]["long_factor"])
            parts.append(f"Divisors of seed {line['seed']}, {line['generations']} generations: {divisors}")
    return "\n\n".join(parts)


def _row(name: str, line: Line, attention_factor: float) -> str:
    losses = [" / ".join(f"{x:.3f}" for x in line[of]) for of in ("answers", "text")]
    return markdown_row([name, f"{line['fitness']:.4f}", *losses, f"{attention_factor:.3f}"])

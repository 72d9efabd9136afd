"""Tables of what benchmarks/keeping.py found.

Run: python benchmarks/keeping_results.py FILE.jsonl ...

One table for each number of prompts, as models are compared on the same prompts and rows alone, those of a cell being
raw and in the chat template. A cell below the native model's beyond noise is marked with *: the 95 % interval of
the paired difference, by bootstrap over prompts, lies below 0.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from result_lines import mean_of, read_lines

from rope_patch.eval.paired import paired_interval

Run = dict[str, Any]
SPANS = [(64, 8192), (8192, 32768), (32768, 65536)]


def scores(run: Run, test: str, length: int) -> list[int]:
    """Of all prompts of a test and a length, raw ones first."""
    cells = [c for c in run["asked"] if (c["test"], c["length"]) == (test, length)]
    return [s for c in sorted(cells, key=lambda c: c["chat"]) for s in c["scores"]]


def share(run: Run, native: Run, test: str, length: int) -> str:
    """The share of right answers, with * where the native model's is higher beyond noise."""
    own, others = scores(run, test, length), scores(native, test, length)
    _, high = paired_interval([a - b for a, b in zip(own, others, strict=True)])
    return f"{fmean(own):.2f}{'*' if high < 0 else ''}"


def table(runs: list[Run]) -> str:
    """Markdown of runs on the same prompts, the native model among them."""
    native = next(r for r in runs if r["arm"] == "native")
    lengths = sorted({c["length"] for c in native["asked"]})
    at = " / ".join(str(n) for n in lengths)
    columns = ["arm", *(f"loss {a}-{b}" for a, b in SPANS), "KL on chats", f"passkey at {at}", "keys"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for run in sorted(runs, key=lambda r: r["arm"] != "native"):
        losses = [f"{mean_of(run['loss_by_position'], a, b):.3f}" for a, b in SPANS]
        shares = [" / ".join(share(run, native, test, n) for n in lengths) for test in ("passkey", "keys")]
        lines.append("| " + " | ".join([run["arm"], *losses, f"{run['kl_on_chats']:.3f}", *shares]) + " |")
    counts = " / ".join(str(len(scores(native, "passkey", n))) for n in lengths)
    told = f"Prompts a cell: passkey {counts}, keys {len(scores(native, 'keys', lengths[0]))}."
    return "\n".join([*lines, "", told])


def by_prompts(runs: list[Run]) -> dict[int, list[Run]]:
    """Runs with as many prompts, which are the same ones."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(sum(len(c["scores"]) for c in run["asked"]), []).append(run)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    print("\n\n".join(table(same) for same in by_prompts(read_lines(*args.files)).values()))


if __name__ == "__main__":
    main()

"""A rescaling chosen by needles: an evolutionary search for divisors of RoPE frequencies, for an untrained model.

Run: python research/experiments/factor_search.py MODEL --text books.jsonl.xz ... [--lengths 2048 7900 32768 60000] [--books 2]
         [--arms NAME ...] [--seeds 0] [--start best] [--generations 10] [--minutes 4] [--out FILE.jsonl]
     python research/experiments/factor_search.py --table FILE.jsonl

In the spirit of LongRoPE2 (arXiv:2502.20082) candidates are compared by the loss of answers alone: numbers that stand
under a key in a book (factor_fitness.py), within the window and beyond it. The search is CMA-ES over the few
coordinates of factor_space.py, around the divisors of a rescaling with a formula. Such rescalings are measured first,
as arms of the study. Choose --text and --question-seed so that no prompt is one that the result is reported by.

--out gets a line for each arm, for each generation, and at the end one with the best divisors as options of
`patch_model`; the last such line is what `keeping.py --rescaling FILE` takes. A search that is cut off goes on where it
was, and one with more --generations, too.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cmaes import CMA
from transformers import AutoTokenizer

from factor_fitness import Book, books_with_questions, fitness, token_rows
from factor_results import best_of, table
from factor_space import Space, divisors_of, references
from harness import Line, Run, carry_out, chosen, has, require, show, study_parser
from keeping import served
from result_lines import Deadline, read_lines
from rope_patch.eval import read_texts

Measure = Callable[[list[float]], Line]


def evolve(
    measure: Measure,
    start: Sequence[float],
    *,
    seed: int,
    population: int,
    step: float,
    generations: int,
    known: Sequence[Line] = (),
    deadline: Deadline | None = None,
) -> Iterator[Line]:
    """Generations of CMA-ES, as they are measured: each one's points and what was measured of them.

    Generation 0 is the start alone.

    Args:
        measure: of a point; its "fitness" is to become small.
        start: mean of the first draws.
        seed: of the draws.
        population: points of a generation.
        step: standard deviation of the first draws, in each coordinate.
        generations: beside generation 0.
        known: the first generations, of an earlier search with the same arguments; they are not measured again.
        deadline: no generation begins that would not be through by then.
    """
    known = sorted(known, key=lambda line: line["generation"])
    slowest = max((line["generation_seconds"] for line in known[1:]), default=0.0)
    search = CMA(np.array(start, dtype=np.float64), step, seed=seed, population_size=population)
    for generation in range(generations + 1):
        # drawn also where they are known, so that the next draws are those of one search
        points = [search.ask().tolist() for _ in range(population)] if generation else [list(start)]
        if generation < len(known):
            line = known[generation]
        else:
            if deadline is not None and not deadline.leaves(slowest):
                return
            begin = time.perf_counter()
            line = {"generation": generation, "points": points, "measured": [measure(point) for point in points]}
            line["generation_seconds"] = time.perf_counter() - begin
            slowest = max(slowest, line["generation_seconds"] * (1 if generation else population))
            yield line
        if generation:
            values = [measured["fitness"] for measured in line["measured"]]
            search.tell([(np.array(point), value) for point, value in zip(line["points"], values, strict=True)])


def reference(name: str, model: Any, books: Sequence[Book], args: argparse.Namespace) -> Iterable[Line]:
    """What is measured of a rescaling with a formula, and its divisors."""
    rescale = references(args.window, args.target)[name]
    divisors = divisors_of(model, rescale)
    measured = fitness(model, books, rescale, args.text_weight)
    yield {**measured, "divisors": divisors.by_frequency, "attention_factor": divisors.attention_factor}


def search(
    seed: int, model: Any, books: Sequence[Book], args: argparse.Namespace, of_prompts: Line, of_search: Line
) -> Iterator[Line]:
    """The generations of a search that --out does not have, and then the best divisors of all."""
    lines = [line for line in read_lines(args.out) if has(line, of_prompts)]
    known = [line for line in lines if has(line, {**of_search, "line": "generation"})]
    # arms that are measured later do not move a start that is taken
    start = known[0]["from"] if known else start_of(args.start, lines)
    space = Space(divisors_of(model, references(args.window, args.target)[start]), args.knots)

    def measure(point: list[float]) -> Line:
        return fitness(model, books, space.divisors(point).rescale(args.window, args.target), args.text_weight)

    made = evolve(
        measure,
        [0.0] * (args.knots + 1),
        seed=seed,
        population=args.population,
        step=args.step,
        generations=args.generations,
        known=known,
        deadline=args.deadline,
    )
    for line in made:
        known.append(line)
        yield {"line": "generation", "generations": None, "from": start, **line}
    # a search may have been told to go on for more generations before
    generations = [line for line in known if line["generation"] <= args.generations]
    if generations:
        found = best_of(generations)
        method, options = space.divisors(found["point"]).rescale(args.window, args.target)
        done = max(line["generation"] for line in generations)
        yield {**found, "from": start, "rescale": method, "rescale_args": options, "generations": done}


def start_of(name: str, lines: Iterable[Line]) -> str:
    """The arm to start from: the one of that name, or of those that are measured the one with the best answers.

    Raises:
        ValueError: none is measured yet.
    """
    if name != "best":
        return name
    measured = [line for line in lines if line["line"] == "arm"]
    if not measured:
        raise ValueError("--start best needs arms that are measured, and there are none: name an arm to start from.")
    best = min(measured, key=lambda line: line["fitness"])
    return str(best["arm"])


def shown(line: Line) -> str:
    """One line of results, in brief."""
    if line["line"] == "generation":
        values = [measured["fitness"] for measured in line["measured"]]
        return f"generation {line['generation']}: fitness {min(values):.4f} to {max(values):.4f}"
    answers = " / ".join(f"{x:.3f}" for x in line["answers"])
    return f"fitness {line['fitness']:.4f}, answers {answers}"


def main() -> None:
    parser = study_parser(__doc__, "factor_search.jsonl")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", nargs="+", help="JSON lines with `text`: books that hold the numbers")
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--target", type=int, default=65536)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 7900, 32768, 60000])
    parser.add_argument(
        "--books", type=int, default=2, help="of each length; each has eight numbers that are asked for"
    )
    parser.add_argument("--question-seed", type=int, default=2, help="another than results are reported by")
    parser.add_argument("--text-weight", type=float, default=0.0, help="of the books' loss beside the answers'")
    parser.add_argument("--start", default="best", help="arm to start from; best: the best of those measured")
    parser.add_argument("--knots", type=int, default=8, help="frequencies whose divisors are searched for")
    parser.add_argument("--population", type=int, default=8, help="candidates of a generation")
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--step", type=float, default=0.15, help="of the first draws: a change of ln(divisor)")
    args = parser.parse_args()
    if args.table:
        show(args, table, None)
        return
    require(parser, args, "model", "text")
    known = references(args.window, args.target)
    names = chosen(parser, args, known)
    if args.start not in ("best", *known):
        parser.error(f"unknown --start {args.start}; known: best, {', '.join(known)}")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = served(args.model)
    texts = token_rows(tokenizer, read_texts(args.text), max(args.lengths), args.books * len(args.lengths))
    books = books_with_questions(tokenizer, texts, args.lengths, args.books, args.question_seed)
    of_prompts: Line = {"model": Path(args.model).name} | {
        name: getattr(args, name) for name in ("window", "target", "lengths", "books", "question_seed", "text_weight")
    }
    of_search = {name: getattr(args, name) for name in ("start", "knots", "population", "step")}
    runs = [
        Run(
            name,
            {"line": "arm", "arm": name, **of_prompts},
            partial(reference, name, model, books, args),
            {"arm": name},
        )
        for name in names
    ]
    for seed in args.seeds:
        of_seed = {"arm": "searched", "seed": seed, **of_search}
        key = {"line": "best", "generations": args.generations, **of_seed, **of_prompts}
        each = partial(search, seed, model, books, args, of_prompts, of_seed)
        runs.append(Run(f"searched, seed {seed}", key, each))
    carry_out(runs, args, shown)


if __name__ == "__main__":
    main()

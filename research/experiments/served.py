"""A model under each rescaling through each program that serves models: logits, loss and passkeys beside ours.

Run: python research/experiments/served.py MODEL --text BOOKS.jsonl.xz --out FILE.jsonl
         [--length 10240] [--programs NAME ...] [--rescalings LABEL ...] [--work FOLDER] [--minutes M]

The programs come first: python tests/serving/programs.py. The model is rescaled in memory, reads one row in float32, a
held-out book with four passkeys in it (served_row.py), and writes an answer to each question; that is "ours". Then
`rope_patch.export` writes it for a program, which does the same on the CPU with one thread, or refuses to write it.
Programs that `export` has no target for get the checkpoint for Transformers. One JSON line a cell is added to --out;
cells in the file are not run again. docs/serving_table.py writes the tables of research/results/serving.md from the file.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from result_lines import Deadline, add_line, read_lines
from rope_patch import export, patch_model
from rope_patch.base.environment import installed_versions
from rope_patch.eval import read_texts
from served_row import Row, passkey_row

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))  # last: its folders bear our packages' names
sys.path.append(str(ROOT / "tests" / "serving" / "workers"))

from greedy import written  # noqa: E402
from reduced import reduced  # noqa: E402
from serving.programs import WHOLE_MODELS, Program, converter_packages, llama_cpp_sources  # noqa: E402
from transformers_reader import Reader  # noqa: E402

OURS = "ours"
FACTOR = 8.0
WRITTEN = 12  # tokens behind each question
KEPT = 64  # places of the row whose logits are compared, evenly spread, beside those of the answers
# program -> the target of `export` that it is asked with
TARGETS = {
    "Transformers": "transformers",
    "Transformers 4": "transformers",
    "vLLM on a CPU": "vllm",
    "llama.cpp": "llama.cpp",
    "mlx-lm": "mlx",
    "CTranslate2": "transformers",
    "ONNX Runtime GenAI": "transformers",
}


def rescalings(head_dim: int, window: int) -> dict[str, tuple[str, dict[str, Any]] | None]:
    """Label -> method and options; None is the model as it came."""
    long_factor = np.linspace(1, FACTOR, head_dim // 2).tolist()
    by_factor: dict[str, Any] = {"factor": FACTOR}
    return {
        "none": None,
        "ntk": ("ntk", by_factor),
        "abf": ("abf", {"theta": 2e6, "max_position_embeddings": int(FACTOR * window)}),
        "pi": ("pi", by_factor),
        "yarn": ("yarn", by_factor),
        "yarn, attention_factor": ("yarn", {**by_factor, "attention_factor": 1.0}),
        "yarn, beta_fast and beta_slow": ("yarn", {**by_factor, "beta_fast": 16.0, "beta_slow": 2.0}),
        "yarn, mscale and mscale_all_dim": ("yarn", {**by_factor, "mscale": 1.0, "mscale_all_dim": 0.5}),
        "yarn, truncate=False": ("yarn", {**by_factor, "truncate": False}),
        "llama3": ("llama3", by_factor),
        "longrope": ("longrope", {**by_factor, "long_factor": long_factor}),
        "dynamic-ntk": ("dynamic-ntk", by_factor),
        "drop-rope": ("drop-rope", {"max_position_embeddings": int(FACTOR * window)}),
    }


def rescaled(folder: Path, label: str) -> PreTrainedModel:
    """The model in float32 under a rescaling."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    method = rescalings(model.config.head_dim, model.config.max_position_embeddings)[label]
    return model if method is None else patch_model(model, method[0], **method[1])


def kept_places(row: Row) -> list[int]:
    """Places of `row` whose logits are compared: evenly spread ones, and each that the answers are told from."""
    spread = np.linspace(0, len(row.ids) - 1, KEPT).round().astype(int).tolist()
    return sorted({*spread, *(place - 1 for first, end in row.answers for place in range(first, end))})


def read_by_ours(model: PreTrainedModel, row: Row) -> dict[str, np.ndarray]:
    """What a worker saves, of a model in memory."""
    ids, reader = np.array(row.ids), Reader(model)
    said = reduced(ids, reader.logits(ids), kept_places(row))
    return {**said, "written": np.array(written(reader.read, ids[: row.n_text], row.questions, WRITTEN))}


def figures(
    said: dict[str, np.ndarray], ours: dict[str, np.ndarray], row: Row, window: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What a program makes of a row, beside ours.

    Returns:
        Largest difference of logits; their standard deviation; mean loss of the book's tokens within the window and
        beyond it, in nats; how many passkeys it names teacher-forced; at how many of the compared places the likeliest
        token is ours. Where it wrote, also the replies, and how many have their passkey.
    """
    loss, likeliest, ids = said["loss"], said["likeliest"], np.array(row.ids)
    kept = kept_places(row)
    wrote = {}
    if "written" in said:
        replies = [str(tokenizer.decode(reply)) for reply in said["written"]]
        keys = [str(tokenizer.decode(row.ids[first:end])).strip() for first, end in row.answers]
        wrote = {"as_written": sum(k in reply for k, reply in zip(keys, replies, strict=True)), "replies": replies}
    return {
        "largest_difference": float(np.abs(said["logits"] - ours["logits"]).max()),
        "spread": float(ours["logits"].std()),
        "loss_within": float(loss[: window - 1].mean()),
        "loss_beyond": float(loss[window - 1 : row.n_text - 1].mean()) if row.n_text > window else None,
        "passkeys": sum(bool((likeliest[first - 1 : end - 1] == ids[first:end]).all()) for first, end in row.answers),
        "asked": len(row.answers),
        "same_likeliest": int((likeliest[kept] == ours["likeliest"][kept]).sum()),
        "compared": len(kept),
        **wrote,
    }


class Study:
    """The cells of one model and row.

    Args:
        model: folder of the checkpoint.
        row: that is read.
        tokenizer: of the model.
        work: a folder for what ours says of it, kept from run to run.
    """

    def __init__(self, model: Path, row: Row, tokenizer: PreTrainedTokenizerBase, work: Path) -> None:
        self.model, self.row, self.tokenizer, self.work = model, row, tokenizer, work
        config = AutoConfig.from_pretrained(model)
        self.window: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self.head_dim: int = config.head_dim
        np.save(work / "ids.npy", np.array([row.ids], dtype=np.int32))

    def ours(self, label: str) -> dict[str, np.ndarray]:
        """What this package's model says, computed once."""
        file = self.work / f"ours-{label}.npz"
        if not file.exists():
            np.savez(file, **read_by_ours(rescaled(self.model, label), self.row))
        return dict(np.load(file))

    def cell(self, program: str, label: str) -> dict[str, Any]:
        """One cell, with "outcome": "served", "refused" by `export`, or "failed" in the program."""
        began = time.perf_counter()
        if program == OURS:
            said = self.ours(label)
            outcome: dict[str, Any] = {"outcome": "served", **self._figures(said, said)}
        else:
            outcome = self._served(WHOLE_MODELS[program], label)
        return {**outcome, "seconds": round(time.perf_counter() - began, 1)}

    def _served(self, program: Program, label: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            folder, out = Path(scratch) / "checkpoint", Path(scratch) / "said.npz"
            target = TARGETS[program.name]
            converter = llama_cpp_sources() / "convert_hf_to_gguf.py"
            try:
                exported = export(
                    rescaled(self.model, label),
                    folder,
                    target=target,
                    converter=converter if target == "llama.cpp" else None,
                    check=False,
                )
            except ValueError as refusal:
                return {"outcome": "refused", "reason": str(refusal)}
            job = {
                "checkpoint": str(folder),
                "ids": str(self.work / "ids.npy"),
                "rows": {"row": len(self.row.ids)},
                "kept": {"row": kept_places(self.row)},
                "asked": {
                    "row": {"text": self.row.n_text, "questions": self.row.questions, "tokens": WRITTEN},
                },
                "vocabulary": self.vocabulary,
                "head_dim": self.head_dim,
                "out": str(out),
            }
            program.run([job])
            if (error := out.with_suffix(".error")).exists():
                return {"outcome": "failed", "reason": error.read_text()[:500]}
            said = {name.partition("|")[2]: array for name, array in np.load(out).items()}
            measured = self._figures(said, self.ours(label))
            return {"outcome": "served", "folded": exported.folded, **measured}

    def _figures(self, said: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> dict[str, Any]:
        return figures(said, ours, self.row, self.window, self.tokenizer)


def cells(programs: Sequence[str], labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(program, rescaling), ours first."""
    for program in [OURS, *(p for p in programs if p != OURS)]:
        for label in labels:
            yield program, label


def main() -> None:
    """Add the cells that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--text", required=True, type=Path, help="held-out books; the first one is read")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--length", type=int, default=10240, help="tokens of the row")
    parser.add_argument("--programs", nargs="+", choices=WHOLE_MODELS, default=list(WHOLE_MODELS))
    parser.add_argument("--rescalings", nargs="+", metavar="LABEL", help="default: all")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rope-patch-serving")
    parser.add_argument("--minutes", type=float, help="begin no cell after so many")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = next(read_texts([args.text]))
    row = passkey_row(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], args.length)
    work = args.work / str(args.length)
    work.mkdir(parents=True, exist_ok=True)
    study = Study(args.model, row, tokenizer, work)
    # for `export`, which looks for them, and for the process that it starts
    sys.path.append(str(converter_packages()))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(converter_packages())]))
    labels = args.rescalings or list(rescalings(study.head_dim, study.window))
    there = {(line["program"], line["rescaling"], line["length"]) for line in read_lines(args.out)}
    deadline = Deadline(args.minutes)
    for program, label in cells(args.programs, labels):
        if (program, label, args.length) in there:
            continue
        if not deadline.leaves(0):
            break
        if program != OURS and (missing := WHOLE_MODELS[program].missing):
            raise SystemExit(missing)
        version = installed_versions("transformers")["transformers"] if program == OURS else None
        line = {
            "program": program,
            "version": version or WHOLE_MODELS[program].version,
            "rescaling": label,
            "length": args.length,
            "window": study.window,
            **study.cell(program, label),
        }
        add_line(args.out, line)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""The row that programs are asked with, what is made of their logits, and the tables of it in results/serving.md."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from serving.table import WHOLE_END, WHOLE_START
from support.characters import character_tokenizer
from support.tiny import WINDOW, tiny

from result_lines import read_lines
from rope_patch import patch_model
from rope_patch.prompts.wordings import PASSKEY_WORDINGS
from served import TARGETS, WHOLE_MODELS, Reader, Study, cells, figures, kept_places, reduced, written
from served_results import ORDER, is_wrong, tables
from served_row import Row, passkey_row

ROOT = Path(__file__).parents[2]
LINES = read_lines(ROOT / "research" / "results" / "served-cpu.jsonl")
LENGTH = 3000


@pytest.mark.parametrize("seed", [0, 1])
def test_a_row_has_each_passkey_and_asks_for_it(seed):
    tokenizer = character_tokenizer()
    book = tokenizer("It was a dark night. The rain fell; " * 200, add_special_tokens=False)["input_ids"]
    row = passkey_row(tokenizer, book, LENGTH, seed)
    assert len(row.ids) == LENGTH
    text, dialogue = tokenizer.decode(row.ids[: row.n_text]), tokenizer.decode(row.ids[row.n_text :])
    for question, (first, _) in zip(row.questions, row.answers, strict=True):
        assert f"{tokenizer.decode(question)} " in tokenizer.decode(row.ids[row.n_text : first])
    keys = [tokenizer.decode(row.ids[first:end]) for first, end in row.answers]
    assert sorted(keys) == sorted(re.findall(r"\d{5}", dialogue)) and len(set(keys)) == len(PASSKEY_WORDINGS)
    for wording in PASSKEY_WORDINGS:
        key = next(key for key in keys if wording.needle.format(key=key) in text)
        sentence = text.index(wording.needle.format(key=key))
        assert text[:sentence].rstrip().endswith(".")
        assert f"{wording.question} {wording.beginning} {key}" in dialogue
    places = [text.index(key) / len(text) for key in keys]
    assert min(places) < 0.2 and max(places) > 0.8


def test_a_short_book_is_refused():
    with pytest.raises(ValueError, match="a row of 100 tokens needs as many of a book, got 99"):
        passkey_row(character_tokenizer(), [5] * 99, 100)


def test_what_is_kept_of_logits_is_what_they_say():
    logits = torch.randn(40, 17, dtype=torch.float64)
    ids = torch.randint(17, (40,))
    said = reduced(ids.numpy(), (part.numpy() for part in logits.split(7)), [0, 6, 7, 39])
    assert (said["logits"] == logits[[0, 6, 7, 39]].float().numpy()).all()
    assert (said["likeliest"] == logits.argmax(-1).numpy()).all()
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    np.testing.assert_allclose(said["loss"], loss.numpy(), rtol=1e-12)
    with pytest.raises(RuntimeError, match="logits of 33 tokens for a row of 40"):
        reduced(ids.numpy(), (part.numpy() for part in logits[:33].split(7)), [0])


def test_figures_are_of_the_parts_of_the_row():
    """Loss within the window and beyond it, without the questions; a passkey counts when every digit is first."""
    row = Row(list(range(30)), [(24, 26), (27, 30)], 22, [[22, 23], [26]])
    likeliest = np.array([*range(1, 30), 0])
    likeliest[25 - 1] = 0
    kept = kept_places(row)
    said = {"logits": np.ones((len(kept), 30)), "loss": np.arange(1.0, 30), "likeliest": likeliest}
    ours = {**said, "logits": said["logits"] + np.eye(len(kept), 30), "likeliest": np.array([*range(1, 30), 0])}
    tokenizer = character_tokenizer()
    of = figures(said, ours, row, 10, tokenizer)
    assert of["passkeys"] == 1 and of["asked"] == 2
    assert of["loss_within"] == np.arange(1, 10).mean() and of["loss_beyond"] == np.arange(10, 22).mean()
    assert of["largest_difference"] == 1 and of["spread"] == ours["logits"].std()
    assert of["same_likeliest"] == len(kept) - 1 == of["compared"] - 1
    assert figures(said, ours, row, 22, tokenizer)["loss_beyond"] is None


def study(folder):
    tiny().save_pretrained(folder / "model")
    (folder / "work").mkdir()
    ids = torch.randint(3, 101, (WINDOW + 20,)).tolist()
    row = Row(ids, [(len(ids) - 3, len(ids))], len(ids) - 8, [ids[-8:-3]])
    return Study(folder / "model", row, character_tokenizer(), folder / "work")


@torch.no_grad()
@pytest.mark.parametrize("rescaling", ["none", "yarn"])
def test_what_is_written_is_the_likeliest_token_of_whole_rows(rescaling):
    """Behind a text that was read with other tokens after it, which are dropped, and question by question."""
    model = tiny().eval()
    if rescaling != "none":
        patch_model(model, rescaling, factor=4.0)
    ids = torch.randint(3, 101, (WINDOW + 30,)).numpy()
    text, questions = ids[: WINDOW + 9], [[5, 6, 7], [8], [9, 10]]
    reader = Reader(model)
    assert sum(map(len, reader.logits(ids))) == len(ids)
    replies = written(reader.read, text, questions, 4)
    for question, reply in zip(questions, replies, strict=True):
        read = [*text.tolist(), *question]
        for token in reply:
            assert model(torch.tensor([read])).logits[0, -1].argmax() == token
            read.append(token)


def test_a_reply_counts_when_its_passkey_is_in_it():
    tokenizer = character_tokenizer()
    ids = tokenizer("told 12345 asked: 12345 asked: 99999", add_special_tokens=False)["input_ids"]
    row = Row(ids, [(18, 23), (31, 36)], 10, [[5], [6]])
    said = {"logits": np.ones((len(kept_places(row)), 3)), "loss": np.ones(35), "likeliest": np.zeros(36)}
    replies = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("is 12345.", "is 1234 .")]
    of = figures({**said, "written": np.array(replies)}, said, row, 10, tokenizer)
    assert of["as_written"] == 1 and of["replies"] == ["is 12345.", "is 1234 ."]
    assert "as_written" not in figures(said, said, row, 10, tokenizer)


def test_ours_is_the_patched_model(tmp_path):
    made = study(tmp_path)
    by_label = {label: made.ours(label)["logits"] for label in ("none", "yarn", "dynamic-ntk", "drop-rope")}
    assert all(abs(by_label[a] - by_label[b]).max() > 0.01 for a in by_label for b in by_label if a < b)
    of = made.cell("ours", "yarn")
    assert of["outcome"] == "served" and of["largest_difference"] == 0 and of["loss_beyond"] > 0
    assert len(of["replies"]) == 1 and len(of["replies"][0]) > 0


def test_what_export_refuses_is_a_cell_with_its_reason(tmp_path):
    of = study(tmp_path).cell("mlx-lm", "yarn, truncate=False")
    assert of["outcome"] == "refused" and "always rounds the ends of the ramp" in of["reason"]


@pytest.mark.slow
def test_transformers_reads_what_export_writes_as_ours(tmp_path):
    """In a process of its own, also where a rescaling follows the length of the row."""
    made = study(tmp_path)
    of = made.cell("Transformers", "dynamic-ntk")
    assert of["outcome"] == "served" and of["largest_difference"] == 0
    assert of["replies"] == made.cell("ours", "dynamic-ntk")["replies"]


def test_ours_comes_first():
    assert list(cells(["mlx-lm"], ["ntk", "pi"])) == [
        ("ours", "ntk"), ("ours", "pi"), ("mlx-lm", "ntk"), ("mlx-lm", "pi"),
    ]  # fmt: skip
    assert set(TARGETS) == set(WHOLE_MODELS) == set(ORDER)


def line(program, outcome="served", **fields):
    figures = {"largest_difference": 0.5, "spread": 4.0, "loss_within": 3.0, "loss_beyond": None, "passkeys": 2}
    named = {"program": program, "version": "1.0", "rescaling": "yarn", "length": 64, "outcome": outcome}
    return {**named, **(figures if outcome == "served" else {}), **fields}


def test_a_table_tells_wrong_cells_and_why_others_are_refused():
    lines = [
        line("ours", largest_difference=0.0),
        line("llama.cpp", largest_difference=0.3),
        line("mlx-lm"),
        line("vLLM on a CPU", "refused", reason="vllm would: it drops it."),
        line("CTranslate2", "failed", reason="NotImplementedError: no yarn\nmore"),
    ]
    assert [is_wrong(of) for of in lines] == [False, False, True, False, False]
    text = tables(lines)
    of_pydantic = "ValidationError: 1 validation error for X\n  Value error, 9 is more than 8. More.\n"
    assert ' says "9 is more than 8"\n' in tables([line("ours"), line("vLLM on a CPU", "failed", reason=of_pydantic)])
    assert "| `yarn` | 3.000, 2 | refused | 0.3; 3.000, 2 | **wrong** 0.5; 3.000, 2 | refused by the program |" in text
    assert "- `yarn` for vLLM on a CPU: it drops it." in text
    assert "passkeys teacher-forced, as written" not in text
    wrote = tables([line("ours", largest_difference=0.0, loss_beyond=2.0, as_written=1), *lines[1:]])
    assert "ours: loss beyond the window, passkeys teacher-forced, as written |" in wrote
    assert "| `yarn` | 2.000, 2, 1 | refused |" in wrote
    assert '- `yarn` for CTranslate2: CTranslate2 says "no yarn"' in text
    assert "\nRun with vLLM on a CPU (1.0), llama.cpp (1.0), mlx-lm (1.0), CTranslate2 (1.0).\n" in text


def test_the_page_has_the_tables_of_the_file():
    page = (ROOT / "research" / "results" / "serving.md").read_text(encoding="utf-8")
    assert tables(LINES) == page.partition(WHOLE_START)[2].partition(WHOLE_END)[0]


def test_export_refuses_what_its_programs_serve_wrong():
    """Of the programs that it has a target for; it knows nothing of the others."""
    served = [of for of in LINES if TARGETS.get(of["program"], "transformers") != "transformers"]
    assert len({of["program"] for of in served}) == 3
    assert not [of for of in served if is_wrong(of)]
    # a model that nobody rescaled is refused beyond its window, as it should be
    failed = [of for of in served if of["outcome"] == "failed"]
    assert all(of["rescaling"] == "none" and of["length"] > of["window"] for of in failed)
    assert not [of for of in LINES if of["program"].startswith("Transformers") and of["largest_difference"] > 0]

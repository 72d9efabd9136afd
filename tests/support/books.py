"""Books that studies read: words of letters that any tokenizer of characters has."""

import json
import random
from pathlib import Path


def write_books(folder: Path, n_words: int) -> None:
    """train.jsonl and val.jsonl, each with three texts of so many random words."""
    draw = random.Random(0)
    for name in ("train", "val"):
        books = [" ".join("".join(draw.choices("abcdefgh", k=5)) for _ in range(n_words)) for _ in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": book}) + "\n" for book in books))

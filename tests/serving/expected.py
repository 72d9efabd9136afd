"""What is expected of each cell, as data. A new version of a program that mends or breaks one fails its test.

A string is a row of the table, one character a family in the order of `checkpoints.FAMILIES`: Llama, Mistral, Qwen2,
Qwen3, Gemma3, Phi3. + right, - wrong and the program says nothing, r refused by the program, . not a rescaling of
the family.
"""

from collections.abc import Iterator

from serving.checkpoints import FAMILIES, FORMS, RESCALINGS
from serving.outcomes import REFUSED, RIGHT, WRONG

KINDS = {"+": RIGHT, "-": WRONG, "r": REFUSED}

# program -> form -> one string a rescaling, in the order of `checkpoints.RESCALINGS`; "both" where the form is the same
EXPECTED: dict[str, dict[str, list[str]]] = {
    # 0.33.0
    "vLLM": {
        "both": [
            "++++++",  # none
            "++++++",  # ntk
            "++++++",  # abf
            "+++++.",  # pi
            "+++++.",  # yarn
            "+++++.",  # yarn, attention_factor
            "+++++.",  # yarn, beta_fast and beta_slow
            "+++++.",  # yarn, mscale and mscale_all_dim
            "++++..",  # yarn, truncate=False
            "+++++.",  # llama3
            "------",  # longrope: long factors for short rows
            "++++++",  # longrope, equal factors
            "------",  # longrope, attention_factor
            "+++++-",  # cope: for Phi3 the attention factor, which follows from its windows
            "-----.",  # dynamic-ntk: the table ends at the window
            "+++++.",  # drop-rope
        ],
    },
    # 0.5.23; of Gemma3's RoPE parameters it takes the bases alone
    "SGLang": {
        "both": [
            "++++++",  # none
            "++++++",  # ntk
            "++++++",  # abf
            "++++-.",  # pi
            "++++-.",  # yarn
            "-----.",  # yarn, attention_factor
            "++++-.",  # yarn, beta_fast and beta_slow
            "++++-.",  # yarn, mscale and mscale_all_dim
            "++++..",  # yarn, truncate=False
            "++++-.",  # llama3
            "++++-+",  # longrope
            "++++-+",  # longrope, equal factors
            "------",  # longrope, attention_factor
            "++++--",  # cope
            "-----.",  # dynamic-ntk
            "++++-.",  # drop-rope
        ],
    },
    # of llama-cpp-python 0.3.36
    "llama.cpp": {
        "both": [
            "++++++",  # none
            "++++++",  # ntk
            "++++++",  # abf
            "+++++.",  # pi
            "+++++.",  # yarn
            "-----.",  # yarn, attention_factor
            "-----.",  # yarn, beta_fast and beta_slow
            "-----.",  # yarn, mscale and mscale_all_dim
            "----..",  # yarn, truncate=False
            "++---.",  # llama3
            "------",  # longrope: long factors for short rows with Phi3, unscaled with others
            "-----+",  # longrope, equal factors
            "------",  # longrope, attention_factor
            "------",  # cope: unscaled, and for Phi3 the attention factor
            "-----.",  # dynamic-ntk
            "++---.",  # drop-rope
        ],
    },
    # 0.32.2
    "mlx-lm": {
        "as saved": [
            "---+--",  # none
            "---+--",  # ntk
            "---+--",  # abf
            "---+-.",  # pi
            "---+-.",  # yarn
            "-----.",  # yarn, attention_factor
            "---+-.",  # yarn, beta_fast and beta_slow
            "---+-.",  # yarn, mscale and mscale_all_dim
            "----..",  # yarn, truncate=False
            "---+-.",  # llama3
            "------",  # longrope
            "---+--",  # longrope, equal factors
            "------",  # longrope, attention_factor
            "---+--",  # cope
            "-----.",  # dynamic-ntk
            "---+-.",  # drop-rope
        ],
        "older keys": [
            "++++++",  # none
            "++++++",  # ntk
            "++++++",  # abf
            "+++++.",  # pi
            "+++++.",  # yarn
            "-----.",  # yarn, attention_factor
            "+++++.",  # yarn, beta_fast and beta_slow
            "+++++.",  # yarn, mscale and mscale_all_dim
            "----..",  # yarn, truncate=False
            "+++++.",  # llama3
            "------",  # longrope: long factors for short rows
            "++++++",  # longrope, equal factors
            "------",  # longrope, attention_factor
            "+++++-",  # cope: for Phi3 the attention factor, which follows from its windows
            "-----.",  # dynamic-ntk: another base for each part of the row
            "+++++.",  # drop-rope
        ],
    },
    # 4.8.5
    "CTranslate2": {
        "both": [
            "++++rr",  # none
            "++++rr",  # ntk
            "++++rr",  # abf
            "++++r.",  # pi
            "rrrrr.",  # yarn
            "rrrrr.",  # yarn, attention_factor
            "rrrrr.",  # yarn, beta_fast and beta_slow
            "rrrrr.",  # yarn, mscale and mscale_all_dim
            "rrrr..",  # yarn, truncate=False
            "-rrrr.",  # llama3
            "rrrrrr",  # longrope
            "rrrrrr",  # longrope, equal factors
            "rrrrrr",  # longrope, attention_factor
            "rrrrrr",  # cope
            "rrrrr.",  # dynamic-ntk
            "-rrrr.",  # drop-rope
        ],
    },
    # 0.18.0; Gemma3's dictionary of layer types it does not read, and Phi3 only with LongRoPE
    "ONNX Runtime GenAI": {
        "as saved": [
            "++++r+",  # none
            "++++rr",  # ntk
            "++++rr",  # abf
            "-+++r.",  # pi
            "-rrrr.",  # yarn
            "-rrrr.",  # yarn, attention_factor
            "----r.",  # yarn, beta_fast and beta_slow
            "-rrrr.",  # yarn, mscale and mscale_all_dim
            "-rrr..",  # yarn, truncate=False
            "+rrrr.",  # llama3
            "-rrrrr",  # longrope
            "-rrrrr",  # longrope, equal factors
            "-rrrrr",  # longrope, attention_factor
            "-rrrrr",  # cope
            "rrrrr.",  # dynamic-ntk
            "+rrrr.",  # drop-rope
        ],
        "older keys": [
            "++++r+",  # none
            "++++rr",  # ntk
            "++++rr",  # abf
            "-+++r.",  # pi
            "-rrrr.",  # yarn
            "-rrrr.",  # yarn, attention_factor
            "----r.",  # yarn, beta_fast and beta_slow
            "-rrrr.",  # yarn, mscale and mscale_all_dim
            "-rrr..",  # yarn, truncate=False
            "+rrrr.",  # llama3
            "-rrrr+",  # longrope
            "-rrrr+",  # longrope, equal factors
            "-rrrr-",  # longrope, attention_factor
            "-rrrr-",  # cope
            "rrrrr.",  # dynamic-ntk
            "+rrrr.",  # drop-rope
        ],
    },
}


def expected_of(program: str, family: str) -> dict[tuple[str, str], str]:
    """(form, rescaling) -> kind, for what the family takes."""
    return {(form, rescaling): kind for form, rescaling, of, kind in cells(program) if of == family}


def cells(program: str) -> Iterator[tuple[str, str, str, str]]:
    """(form, rescaling, family, kind) of every cell of a program."""
    for form in FORMS:
        rows = EXPECTED[program].get("both") or EXPECTED[program][form]
        for rescaling, row in zip(RESCALINGS, rows, strict=True):
            for family, kind in zip(FAMILIES, row, strict=True):
                if kind != ".":
                    yield form, rescaling, family, KINDS[kind]

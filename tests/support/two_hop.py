"""A measure as a package of its own writes it: variables are assigned from one another; what value has the last one?"""

import random
import string
from itertools import pairwise

from rope_patch.eval import MEASURES, Prompt, asking
from rope_patch.prompts.asking import uses_chat_template
from rope_patch.prompts.needles import hide


def prompts(plan, tokenizer, texts, n_tokens):
    """Facts at random places of the held-out texts, in order: "VAR A = 12345.", "VAR B = A.", "VAR C = B."."""
    haystack = tokenizer("\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    chat = uses_chat_template(tokenizer, plan.chat_template)
    made = []
    for trial in range(plan.trials):
        rng = random.Random(f"{plan.seed} {n_tokens} {trial}")
        value, *names = str(rng.randint(10000, 99999)), *rng.sample(NAMES, plan.options["hops"] + 1)
        facts = [f"VAR {name} = {before}." for before, name in pairwise([value, *names])]
        asked, depths = f"\nThe value of VAR {names[-1]}", sorted(rng.random() for _ in facts)
        ids = hide(tokenizer, haystack, facts, asked, "is", n_tokens=n_tokens, depths=depths, chat=chat)
        made.append(Prompt(ids, [value], f"{asked} is"))
    return made


NAMES = [a + b for a in string.ascii_uppercase for b in string.ascii_uppercase]
TWO_HOP = asking(
    "two-hop",
    prompts,
    new_tokens=12,
    help="variable tracking: assignments that lead to a number",
    options={"hops": {"type": int, "default": 2, "help": "assignments after the first; default: %(default)s"}},
)
MEASURES.add(TWO_HOP.name, TWO_HOP)

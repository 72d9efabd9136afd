"""Rows of questions: a tokenizer for them, and their answers."""

import itertools

from support.characters import beginning_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}(no thoughts){% endif %}{% endif %}"
)


def bos_tokenizer(template=TEMPLATE):
    """One token a character, and a beginning of each text, as most models have one."""
    made = beginning_tokenizer()
    made.chat_template = template
    return made


def answers_of(tokenizer, row):
    """(text before, text) of each run of labelled tokens."""
    answers, place = [], 0
    for labelled, run in itertools.groupby(row.labelled):
        end = place + len(list(run))
        if labelled:
            answers.append((tokenizer.decode(row.ids[:place]), tokenizer.decode(row.ids[place:end])))
        place = end
    return answers

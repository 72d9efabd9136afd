"""Values of a record as Markdown: none of them can start a heading, HTML, a link or a code block in the card."""

import re

_PLAIN = re.compile(r"[\w +,.;:/()%='\"\[\]{}-]*")
_LINK = re.compile(r"\]\(|://|www\.", re.IGNORECASE)


def is_plain(value: str) -> bool:
    """Whether no part of a value is Markdown syntax."""
    return _PLAIN.fullmatch(value) is not None and _LINK.search(value) is None


def text(value: object) -> str:
    """A value unchanged if it is plain, else as code."""
    return str(value) if is_plain(str(value)) else code(value)


def code(value: object) -> str:
    """A value as inline code, also for a table cell."""
    shown = " ".join(str(value).split()).replace("`", "'")
    # in a table cell \| is a literal |, but \\| is a backslash and the end of the cell
    shown = shown.replace("\\|", "\\ |").replace("|", "\\|")
    return f"`{shown}`" if shown else '""'


def fenced(value: str) -> str:
    """Text that cannot end the code block around it."""
    return re.sub("`{3,}", "'''", value)

"""Values in a page of Markdown: whatever a record says, it opens no heading, HTML, link or block of code there."""

import re

_PLAIN = re.compile(r"[\w +,.;:/()%='\"\[\]{}-]*")
_LINK = re.compile(r"\]\(|://|www\.", re.IGNORECASE)


def is_plain(value: str) -> bool:
    """Whether nothing in a value means anything in Markdown."""
    return _PLAIN.fullmatch(value) is not None and _LINK.search(value) is None


def text(value: object) -> str:
    """A value as it is where it is plain, else as code."""
    return str(value) if is_plain(str(value)) else code(value)


def code(value: object) -> str:
    """A value as code within a line, also of a table."""
    shown = " ".join(str(value).split()).replace("`", "'")
    # in a table a backslash in front of | is part of the value, and two are one backslash and the end of the cell
    shown = shown.replace("\\|", "\\ |").replace("|", "\\|")
    return f"`{shown}`" if shown else '""'


def fenced(value: str) -> str:
    """Lines of a block of code, which they do not end."""
    return re.sub("`{3,}", "'''", value)

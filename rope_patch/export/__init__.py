"""Writing a checkpoint that another program serves right, and refusing one that it would serve wrong.

`export` is public; `serving` says which programs serve a checkpoint right.
"""

from .exporting import Exported, export, require_served
from .programs import PROGRAMS

__all__ = ["PROGRAMS", "Exported", "export", "require_served"]

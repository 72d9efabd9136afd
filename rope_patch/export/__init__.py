"""Writing a model so that another program serves it right, or refusing where that program would serve it wrong.

`export` is public; `serving` tells which programs read a model.
"""

from .exporting import Exported, export, require_served
from .programs import PROGRAMS

__all__ = ["PROGRAMS", "Exported", "export", "require_served"]

"""Measuring long-context models: figures that show where a window ends."""

from .loss_by_position import LossByPosition, loss_by_position
from .plot import plot_loss_by_position

__all__ = ["LossByPosition", "loss_by_position", "plot_loss_by_position"]

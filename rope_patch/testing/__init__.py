"""What every view and every rescaling promises, as checks for those of other packages; our own tests run the same.

Import from this package in tests; no other room of `rope_patch` does.
"""

from .models import random_ids, small_model
from .rescalings import check_rescaling
from .views import check_view

__all__ = ["check_rescaling", "check_view", "random_ids", "small_model"]

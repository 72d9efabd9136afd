"""A model of Transformers that reads rows, of any version of it, patched or not."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from reduced import CHUNK


class Reader:
    """It reads one row at a time, at once, as a rescaling may follow its length, and keeps it until the next."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None

    @torch.no_grad()
    def logits(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """[tokens, vocabulary] of a row, in parts."""
        self.cache = None
        for part in self._hidden(ids).split(CHUNK):
            yield self.model.lm_head(part).numpy()

    @torch.no_grad()
    def read(self, ids: Sequence[int], place: int) -> np.ndarray:
        """[vocabulary] behind `ids`, which stand at `place`."""
        if dropped := self.cache.get_seq_length() - place:
            self.cache.crop(-dropped)
        return self.model.lm_head(self._hidden(np.array(ids))[-1]).numpy()

    def _hidden(self, ids: np.ndarray) -> torch.Tensor:
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        output = self.model.model(tokens, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        return output.last_hidden_state[0]

"""The files that a trainer writes beside the weights it saves: the record of the run, and the model card."""

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.adapters.sidecar import SIDECAR_NAME
from rope_patch.checkpoints.files_beside import LICENSE_FILES, copy_license, require_no_links_out
from rope_patch.forward.sources import ViewSource
from rope_patch.loading import adapter_folder_of
from rope_patch.model_card import RECORD_NAME, has_card_of_user, write_card, write_runs
from rope_patch.rope.rotary import find_causal_lm

from .method_record import record_of
from .model_card import DatasetFacts, SavedRun, card_of, run_facts, runs_before


class RunRecord:
    """A run, after the earlier runs that made its base model.

    Args:
        model: as it will be trained.
        output_dir: of the trainer.
        source: of its view, None for a model without RoPE.
        method: of `training_method`.
        dataset: the training set as the user gave it.
    """

    def __init__(
        self,
        model: nn.Module,
        output_dir: str | None,
        source: ViewSource | None,
        method: dict[str, Any],
        dataset: DatasetFacts,
    ) -> None:
        self.source, self.method, self.dataset = source, method, dataset
        self._base = find_causal_lm(model).config._name_or_path
        require_no_links_out(self._base, LICENSE_FILES)  # before the training, at whose end they are copied
        # an adapter that was loaded to be trained on brings its own runs, after those of its base
        self._earlier = runs_before(str(adapter_folder_of(model) or self._base), output_dir)
        self._keeps_card: dict[Path, bool] = {}  # of folders that are being saved into

    def write_before_weights(self, run: SavedRun, folder: Path) -> None:
        """Write the record before the weights, so that it is pushed to the hub with them."""
        write_runs(self._runs(run), folder)
        # asked now, as PEFT writes into the README.md that it finds
        self._keeps_card[folder] = has_card_of_user(folder)

    def write_after_weights(self, run: SavedRun, folder: Path) -> None:
        """Write the model card, which names the files of the folder, and copy the license of a local base model.

        `rope_patch.export` fetches the license of a model on the hub, so that no checkpoint waits for the hub.
        """
        if Path(self._base).is_dir():
            copy_license([(self._base, None)], folder)
        write_card(folder, card_of(run, self._runs(run)), keep=self._keeps_card.pop(folder))

    def write_card(
        self,
        run: SavedRun,
        folder: Path,
        *,
        title: str | None,
        dataset_name: str | None,
        tags: str | list[str] | None,
    ) -> None:
        """Write the model card with the user's title and tags, unless somebody wrote or edited the existing one."""
        keep = self._keeps_card[folder] if folder in self._keeps_card else has_card_of_user(folder)
        write_card(folder, card_of(run, self._runs(run, dataset_name), title=title, tags=tags), keep=keep)

    def copy(self, checkpoint: Path, folder: Path) -> None:
        """Put the record of a checkpoint, and the RoPE of its adapter, beside its weights in another folder."""
        for name in (RECORD_NAME, SIDECAR_NAME):
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)  # of what was saved there before

    def _runs(self, run: SavedRun, dataset_name: str | None = None) -> list[dict[str, Any]]:
        """The records of all runs, this one last."""
        facts = run_facts(run, self.source, self.dataset.named(dataset_name), self._earlier)
        return [*self._earlier, record_of(self.method, facts)]

"""What a trainer writes of its run beside the weights that it saves: the record of the method, and the model card."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.adapters.sidecar import SIDECAR_NAME
from rope_patch.checkpoints.files_beside import LICENSE_FILES, copy_license, require_no_links_out
from rope_patch.forward.sources import ViewSource
from rope_patch.loading import adapter_folder_of
from rope_patch.model_card import RECORD_NAME, has_card_of_user, write_card, write_runs
from rope_patch.rope.rotary import find_causal_lm

from .method_record import record_of
from .model_card import DatasetFacts, card_of, run_facts, runs_before

if TYPE_CHECKING:
    from ..trainer.trainer import RopeSFTTrainer


class RunRecord:
    """A run, after those that made the model that it began with.

    Args:
        trainer: of the run; its model is as it will be trained.
        source: of its view, None for a model without RoPE.
        method: of `training_method`.
        dataset: the training set as it came.
    """

    def __init__(
        self, trainer: "RopeSFTTrainer", source: ViewSource | None, method: dict[str, Any], dataset: DatasetFacts
    ) -> None:
        self.source, self.method, self.dataset = source, method, dataset
        base = find_causal_lm(trainer.model).config._name_or_path
        require_no_links_out(base, LICENSE_FILES)  # before the training, at whose end they are copied
        # an adapter that was loaded to be trained on brings its own runs, after those of its base
        self._earlier = runs_before(str(adapter_folder_of(trainer.model) or base), trainer.args.output_dir)
        self._keeps_card: dict[Path, bool] = {}  # of folders that are being saved into

    def write_before_weights(self, trainer: "RopeSFTTrainer", folder: Path) -> None:
        """Write the record: before the weights, to be among what is pushed to the hub with them."""
        write_runs(self._runs(trainer), folder)
        # PEFT writes into the README.md that it finds
        self._keeps_card[folder] = has_card_of_user(folder)

    def write_after_weights(self, trainer: "RopeSFTTrainer", folder: Path) -> None:
        """Write the model card, which tells of the files that are there, and the license of a model in a folder.

        That of a model on the hub `rope_patch.export` fetches: nothing is asked of the hub at each checkpoint.
        """
        base = find_causal_lm(trainer.model).config._name_or_path
        if Path(base).is_dir():
            copy_license([(base, None)], folder)
        write_card(folder, card_of(trainer, self._runs(trainer)), keep=self._keeps_card.pop(folder))

    def write_card(
        self,
        trainer: "RopeSFTTrainer",
        folder: Path,
        *,
        title: str | None,
        dataset_name: str | None,
        tags: str | list[str] | None,
    ) -> None:
        """Write the model card as the user wants it, unless somebody wrote or edited the one that is there."""
        keep = self._keeps_card[folder] if folder in self._keeps_card else has_card_of_user(folder)
        write_card(folder, card_of(trainer, self._runs(trainer, dataset_name), title=title, tags=tags), keep=keep)

    def copy(self, checkpoint: Path, folder: Path) -> None:
        """Put the record of a checkpoint, and the RoPE of its adapter, beside its weights in another folder."""
        for name in (RECORD_NAME, SIDECAR_NAME):
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)  # of what was saved there before

    def _runs(self, trainer: "RopeSFTTrainer", dataset_name: str | None = None) -> list[dict[str, Any]]:
        """This run as it stands, after the earlier ones."""
        tokens = int(trainer._total_train_tokens)
        run = run_facts(trainer, self.source, self.dataset.named(dataset_name), self._earlier, tokens)
        return [*self._earlier, record_of(self.method, run)]

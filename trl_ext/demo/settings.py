"""What the demo does, as values. Imports nothing heavy, so that `rope-patch demo --help` answers at once."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..run_folder import record_settings, require_same_settings


@dataclass(frozen=True)
class DemoSettings:
    """One run of the demo; equal settings in the same folder go on where they stopped.

    Args:
        model: hub id or folder; None means the embedded SmolLM2-135M-Instruct.
        device: "cpu" or "cuda".
        view: view to train with.
        view_args: its options.
        rescale: rescaling to apply first, or None.
        rescale_args: its options.
        measure_length: tokens in a measured row.
        measure_rows: held-out rows measured.
        train_length: tokens in a training row.
        batch_size: rows in an optimizer step.
        steps: optimizer steps.
        learning_rate: peak, reached after a tenth of the steps; falls to a tenth by a cosine.
        lora_rank: of the adapters on all attention projections.
        control: also train the same steps without the view, to tell its effect from that of the text.
        seed: of everything.
    """

    model: str | None
    device: str
    view: str
    view_args: dict[str, Any]
    rescale: str | None
    rescale_args: dict[str, Any]
    measure_length: int
    measure_rows: int
    train_length: int
    batch_size: int
    steps: int
    learning_rate: float
    lora_rank: int
    control: bool
    seed: int

    @property
    def train_tokens(self) -> int:
        """Tokens that one training run sees."""
        return self.steps * self.batch_size * self.train_length

    def check(self, folder: Path) -> None:
        """Raise ValueError if `folder` holds a run with other settings."""
        require_same_settings(folder / "settings.json", asdict(self), "--output-dir")

    def claim(self, folder: Path) -> None:
        """Make `folder` this run's."""
        record_settings(folder / "settings.json", asdict(self))


GPU = DemoSettings(
    model=None,
    device="cuda",
    view="posaug",
    view_args={},
    rescale=None,
    rescale_args={},
    measure_length=32768,
    measure_rows=4,
    train_length=4096,
    batch_size=4,
    steps=160,
    learning_rate=3e-3,
    lora_rank=32,
    control=True,
    seed=0,
)

# Two cores: short rows, and a measured row that reaches just as far as the cliff needs to show. With the 33 thousand
# tokens that they can see in time, PosAug pays within the window for what it takes off the cliff; a skip halves the
# cliff and costs a percent (docs/results/demo.md), so that is what is shown.
CPU = replace(
    GPU,
    device="cpu",
    view="skip",
    view_args={"max_skip": 13824},
    measure_length=14336,
    measure_rows=1,
    train_length=512,
    batch_size=2,
    steps=32,
    control=False,
)

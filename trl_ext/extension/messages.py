"""Send messages of other packages to a file while an extension runs, instead of among its own lines."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_OWN = ("rope_patch", "rope_kernels", "trl_ext")


class MessageFile(logging.Handler):
    """Keeps messages until `write_to` names a file, which the first message creates."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        self._waiting: list[str] = []  # until the folder of the run exists
        self._file: Path | None = None

    def write_to(self, file: Path) -> None:
        """Append the kept messages, and all later ones, to `file`, whose folder exists."""
        self._file = file
        for line in self._waiting:
            self._write(line)
        self._waiting = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep or write one message."""
        line = self.format(record)
        if self._file is None:
            self._waiting.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        assert self._file is not None
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


@contextmanager
def others_quiet() -> Iterator[MessageFile]:
    """Collect logs and warnings of other packages, and switch off their progress bars.

    Warnings of this project are shown as usual. Collected messages are lost unless `write_to` names a file within the
    block.
    """
    import datasets
    import transformers

    handler = MessageFile()
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        shown = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any
        ) -> None:
            if any(f"/{package}/" in Path(filename).as_posix() for package in _OWN):
                shown(message, category, filename, lineno, *rest, **named)
            else:
                logging.getLogger("py.warnings").warning("%s:%s: %s: %s", filename, lineno, category.__name__, message)

        warnings.showwarning = show
        root = logging.getLogger()
        root.addHandler(handler)
        undo.callback(root.removeHandler, handler)
        for name in ("transformers", "datasets", "huggingface_hub"):  # they print by their own handlers
            logger = logging.getLogger(name)
            undo.callback(vars(logger).update, handlers=logger.handlers, propagate=logger.propagate)
            logger.handlers, logger.propagate = [], True
        if not datasets.are_progress_bars_disabled():
            undo.callback(datasets.enable_progress_bars)
        if transformers.logging.is_progress_bar_enabled():
            undo.callback(transformers.logging.enable_progress_bar)
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
        yield handler

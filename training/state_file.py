"""The state a training run is resumed from, as its work folder keeps it."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from eyas.training.run_config import RunConfig

_MAY_CHANGE = ("checkpoint_minutes",)  # settings a resumed run need not share


class StateFile:
    """The file of one run.

    Args:
        num_ranks: how many train together.
    """

    def __init__(self, work_folder: Path, config: RunConfig, num_ranks: int) -> None:
        self.path = work_folder / "training-state.pt"
        self._config = config
        self._num_ranks = num_ranks

    def write(self, content: dict[str, Any]) -> None:
        """Write `content` with what the run is; the file appears complete or not at all.

        Raises:
            OSError: where the disk is full; the file of before is left.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            torch.save({"config": asdict(self._config), "num_ranks": self._num_ranks, **content}, partial)
        except RuntimeError as error:  # of torch's writer
            partial.unlink(missing_ok=True)
            raise OSError(f"{self.path} cannot be written: {str(error).splitlines()[0]}") from error
        partial.replace(self.path)

    def read(self) -> dict[str, Any] | None:
        """What was written, its tensors on the CPU; None for a new run.

        A run may be given more steps than it was begun with, but no fewer.

        Raises:
            ValueError: if the number of ranks or a setting has changed since, or the file is damaged.
        """
        if not self.path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"{self.path} is damaged and cannot be resumed from; remove it to begin anew, or choose another work "
                "folder"
            ) from error
        if "step" not in state:
            raise ValueError(f"{self.path} was written by an earlier version; choose another work folder")
        num_ranks = state.get("num_ranks", 1)
        if num_ranks != self._num_ranks:
            raise ValueError(
                f"{self.path} was written by {num_ranks} ranks, now there are {self._num_ranks}; resume with as many "
                "or choose another work folder"
            )
        written, given = state["config"], asdict(self._config)
        # A setting that an earlier version did not have yet was at its default.
        written = {field.name: field.default for field in fields(self._config)} | written
        changed = [name for name in written if name not in _MAY_CHANGE and given.get(name) != written[name]]
        if "num_steps" in changed and self._is_longer(written["num_steps"]):
            changed.remove("num_steps")
        if changed:
            raise ValueError(
                f"{self.path} was written with {changed[0]} = {written[changed[0]]}, now it is "
                f"{given.get(changed[0])}; resume with the same settings or choose another work folder"
            )
        return state

    def _is_longer(self, num_steps: int | None) -> bool:
        """Whether the run has more steps now; one whose length came from minutes is not compared."""
        given = self._config.num_steps
        return given is not None and num_steps is not None and given > num_steps

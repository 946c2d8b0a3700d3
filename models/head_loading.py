"""From a path to a draft head: find the format, normalise, check, load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from eyas.models.acceptance_prior import AcceptancePrior
from eyas.models.config import DecoderConfig
from eyas.models.eagle import EagleConfig, load_eagle
from eyas.models.eagle3 import load_eagle3
from eyas.models.eagle3_config import Eagle3Config
from eyas.models.eagle_folder import open_eagle_folder
from eyas.models.head import DraftHead
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.heads_file import open_heads_file
from eyas.models.medusa import load_medusa
from eyas.models.medusa_config import MedusaConfig
from eyas.models.medusa_folder import open_medusa
from eyas.models.mtp import MtpConfig, load_mtp
from eyas.models.mtp_tensors import open_mtp_checkpoint
from eyas.models.speculators_folder import open_speculators_folder
from eyas.models.target_weights import TargetWeights


class HeadConfig(Protocol):
    """What every kind's normalised config tells without loading a weight; see `DraftHead`."""

    @property
    def capture(self) -> tuple[int, ...]: ...

    @property
    def max_depth(self) -> int | None: ...

    @property
    def plausible_captures(self) -> tuple[tuple[int, ...], ...]:
        """Readings of the files' layer ids that a probe should compare, `capture` first."""


@dataclass(frozen=True, slots=True)
class HeadKind:
    """How one kind of head is made from its files.

    Args:
        normalise: files, target and options to the kind's config; raises `ValueError` naming the field.
        load: the same with the target's weights to the module; raises `ValueError` naming the tensor.
    """

    normalise: Callable[[HeadFiles, DecoderConfig, HeadOptions], HeadConfig]
    load: Callable[[HeadFiles, TargetWeights, HeadOptions, torch.dtype, torch.device], DraftHead]


# The first that recognises a path reads it.
_FORMATS: tuple[Callable[[Path], HeadFiles | None], ...] = (
    open_heads_file,
    open_medusa,
    open_speculators_folder,
    open_mtp_checkpoint,
    open_eagle_folder,
)
_KINDS = {
    "eagle": HeadKind(EagleConfig.normalise, load_eagle),
    "eagle3": HeadKind(Eagle3Config.normalise, load_eagle3),
    "medusa": HeadKind(MedusaConfig.normalise, load_medusa),
    "mtp": HeadKind(MtpConfig.normalise, load_mtp),
}


# Python's own words for text where a number is due; they name no field.
_NUMBER_ERRORS = ("invalid literal", "could not convert")


def open_head(path: Path) -> HeadFiles:
    """Find out what the head at `path` is.

    Raises:
        ValueError: if it is none of the formats Eyas reads, or damaged.
    """
    if not path.exists():
        raise ValueError(f"head: {path} does not exist")
    for open_format in _FORMATS:
        files = open_format(path)
        if files is not None:
            return files
    hint = "; only Medusa heads and .heads come as one file, give the folder of any other" if path.is_file() else ""
    raise ValueError(f"head: {path} is not a draft head in a format that Eyas reads; docs/heads.md lists them{hint}")


def normalise_head(files: HeadFiles, target: DecoderConfig, options: HeadOptions | None = None) -> HeadConfig:
    """Explicit config of a head for a target, without loading its weights.

    Raises:
        ValueError: naming the field; for a field of another type or value than any head has, the file and the reason.
    """
    files.check_base(target)
    AcceptancePrior.of_config(files.config)
    try:
        return _KINDS[files.kind].normalise(files, target, options or HeadOptions())
    except (TypeError, ArithmeticError, KeyError, AttributeError, ValueError) as error:
        reason = str(error).strip()
        if isinstance(error, ValueError) and "\n" not in reason and not reason.startswith(_NUMBER_ERRORS):
            raise
        first_line = reason.partition("\n")[0]
        raise ValueError(f"{files.path}: its config holds a field of a wrong type or value: {first_line}") from error


def load_head(
    path: Path, target: TargetWeights, dtype: torch.dtype, device: torch.device, options: HeadOptions | None = None
) -> DraftHead:
    """Load the head at `path` for a target.

    Raises:
        ValueError: naming the field or tensor, with what was expected and found.
    """
    files = open_head(path)
    normalise_head(files, target.config, options)  # first, because its errors are about the files alone
    head = _KINDS[files.kind].load(files, target, options or HeadOptions(), dtype, device).eval()
    prior = AcceptancePrior.of_config(files.config)
    head.acceptance_prior = None if prior is None else prior.to(device)
    return head

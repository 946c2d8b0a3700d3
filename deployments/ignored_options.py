"""Options of training that would be ignored are refused, or a run would not be what its command line says."""

from __future__ import annotations

import argparse
import os

from eyas.training.generation import CorpusConfig
from eyas.training.objective_options import ObjectiveOptions

_OWN, _OBJECTIVE = CorpusConfig(), ObjectiveOptions()
_INVENTED = {"user_tokens": _OWN.max_user_tokens, "opener_share": _OWN.opener_share}
_WRITTEN = _INVENTED | {
    "corpus_tokens": _OWN.num_tokens,
    "greedy_share": _OWN.greedy_share,
    "answer_temperature": _OWN.answer_temperature,
    "answer_tokens": _OWN.max_answer_tokens,
    "writers": os.cpu_count() or 1,
}
_TREE = {"tree_width": _OBJECTIVE.tree_width, "tree_share": _OBJECTIVE.tree_share}


def refuse_ignored(args: argparse.Namespace) -> None:
    """Check the parsed options of `eyas train`; one given with its default value cannot be told from one left out.

    Raises:
        ValueError: naming the first option that would have no effect, and why.
    """
    if args.corpus:
        _refuse(args, _WRITTEN, "is for texts the target writes, not with --corpus; leave one of them out")
    elif args.prompts is not None:
        _refuse(args, _INVENTED, "is for user turns the target invents, not with --prompts; leave one of them out")
    is_plain = any(path.suffix not in (".jsonl", ".json") for path in args.corpus or ())
    if args.window is not None and not is_plain:
        raise ValueError("--window: is for plain text; give a .txt file with --corpus, or leave it out")
    if getattr(args, "objective", "tree") != "tree":
        _refuse(args, _TREE, "is for --objective tree; add that, or leave it out")


def _refuse(args: argparse.Namespace, defaults: dict[str, float], reason: str) -> None:
    for name, default in defaults.items():
        if getattr(args, name, default) != default:
            raise ValueError(f"--{name.replace('_', '-')}: {reason}")

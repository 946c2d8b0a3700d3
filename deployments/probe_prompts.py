"""What the target is asked at start, so that the probe can measure a head, and what is said of the result."""

from __future__ import annotations

import logging

from eyas.deployments.tokenizer import Tokenizer
from eyas.workers.probe import ProbeReport

_log = logging.getLogger("ray.serve")

_QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short Python function that reverses a string.",
    "List three tips for learning a new language.",
    "Tell me a short story about a bird that learns to fly.",
    "What is the capital of France, and what is it known for?",
    "Solve 17 times 6 step by step.",
    "Write a polite e-mail asking for a day off.",
    "Describe how bread is made.",
)


def probe_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of eight everyday questions, in the model's chat template where it has one."""
    if tokenizer.has_chat_template:
        return [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in _QUESTIONS]
    return [tokenizer.encode(question) for question in _QUESTIONS]


def log_probe(report: ProbeReport) -> None:
    """One line of information, and a warning for everything that looks wrong."""
    _log.info(
        "probe: the head's first candidate is right in %.0f %% of %d positions (target states %s)",
        100 * report.agreement[report.best],
        report.num_tokens,
        list(report.capture),
    )
    for warning in report.warnings():
        _log.warning("probe: %s", warning)

"""Curves from raw scores to calibrated ones, and the files that carry them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.deployments.inspection import inspect_path
from eyas.models.acceptance_prior import FIELD, AcceptancePrior
from eyas.models.config import DecoderConfig
from eyas.models.head_files import HeadFiles, HeadOptions
from eyas.models.head_loading import load_head, normalise_head, open_head
from eyas.models.head_writing import (
    save_prior,
    with_prior,
    write_eagle_folder,
    write_heads_file,
    write_medusa_folder,
    write_vllm_medusa_folder,
)
from eyas.models.target_weights import TargetWeights

if TYPE_CHECKING:
    from tests.conftest import TinyModels

NewPrior = Callable[..., AcceptancePrior]
CPU = torch.device("cpu")
INF = math.inf
NUMBERS = st.one_of(st.floats(-20, 0), st.sampled_from([0.0, -0.0, -INF, -1e4, -1e-30, -1.5, -3.0, -3.0000002]))


@st.composite
def priors(draw: st.DrawFn) -> AcceptancePrior:
    """Any curves that the checks let through."""
    knots = sorted({round(x, 3) for x in draw(st.lists(st.floats(-12, -0.01), min_size=1, max_size=5))})
    knots = [x for x in knots if x < 0] or [-1.0]
    depths, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    count = len(knots) + 1
    steps = st.lists(st.floats(0, 5, width=32), min_size=count, max_size=count)

    def curves() -> Tensor:
        drawn = [[draw(steps) for _ in range(ranks)] for _ in range(depths)]
        return -torch.tensor(drawn, dtype=torch.float32).cumsum(2).flip(2)

    regimes = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    return AcceptancePrior(torch.tensor([*knots, 0.0]), *(curves() if there else None for there in regimes))


@given(prior=priors(), level=st.integers(1, 9), rank=st.integers(0, 9), raw=st.lists(NUMBERS, min_size=1, max_size=9))
def test_scores_rise_with_raw_ones(prior: AcceptancePrior, level: int, rank: int, raw: list[float]) -> None:
    """Catches a fall between or at knots, a score above 0, NaN, and -inf that becomes possible."""
    ordered = torch.tensor(sorted(raw)).view(-1, 1, 1)
    likely = torch.zeros(ordered.shape[0], 1, rank)  # better-ranked siblings bound nothing from below
    for is_sampled in (False, True):
        regime = torch.full((ordered.shape[0],), is_sampled)
        scores = prior.apply(torch.cat([likely, ordered], dim=2), level, regime)[:, 0, rank]
        assert bool((scores.diff().nan_to_num(nan=0.0) >= 0).all())
        assert bool((scores <= 0).all())
        assert torch.equal(scores == -INF, ordered.flatten() == -INF)


@given(prior=priors(), level=st.integers(1, 4), raw=st.lists(NUMBERS, min_size=1, max_size=12))
def test_siblings_keep_the_order_of_their_head(prior: AcceptancePrior, level: int, raw: list[float]) -> None:
    """Catches a worse-ranked candidate that outscores a better one because its curve lies higher."""
    siblings = torch.tensor(sorted(raw, reverse=True)).view(1, 1, -1).expand(2, 1, -1)
    scores = prior.apply(siblings, level, torch.tensor([False, True]))
    assert bool((scores[..., 1:] <= scores[..., :-1]).all())


def test_curves_are_straight_between_knots_and_parallel_to_raw_scores_below() -> None:
    """Catches an interpolation by the wrong knot or share, and scores that stop falling with the raw ones."""
    curves = torch.tensor([[[-3.0, -1.0, -0.5]], [[-6.0, -6.0, -6.0]]])
    prior = AcceptancePrior(torch.tensor([-4.0, -2.0, 0.0]), curves, None)
    raw = torch.tensor([0.0, -0.5, -1.0, -2.0, -3.0, -4.0, -5.5, -1e4, -INF]).view(-1, 1, 1)
    scores = prior.apply(raw, 1, torch.zeros(9, dtype=torch.bool)).flatten()
    assert scores.tolist() == [-0.5, -0.625, -0.75, -1.0, -2.0, -3.0, -4.5, -9999.0, -INF]
    assert prior.apply(raw[:1], 2, torch.tensor([False])).item() == -6.0


def test_rounding_makes_no_joint_fall() -> None:
    """Catches a piece that ends a rounding error above where the next one begins."""
    generator = torch.Generator().manual_seed(3)
    knots = torch.tensor([-9.21, -6.908, -2.303, -0.693, -0.105, -0.051, 0.0])
    curves = -torch.rand(1, 400, 7, generator=generator).mul(2).cumsum(2).flip(2)
    raw = [knots]
    for _ in range(3):
        raw = [raw[0].nextafter(torch.tensor(-20.0)), *raw, raw[-1].nextafter(torch.tensor(0.0))]
    ordered = torch.stack(raw, dim=1).flatten()  # [7 * 7]
    for rank in range(400):
        curve = AcceptancePrior(knots, curves[:, rank : rank + 1], None)
        scores = curve.apply(ordered.view(-1, 1, 1), 1, torch.zeros(49, dtype=torch.bool)).flatten()
        assert bool((scores.diff() >= 0).all())


def test_depths_and_ranks_beyond_the_table_use_the_nearest(new_prior: NewPrior) -> None:
    """Catches an index past the table, and a neutral constant for what was never seen."""
    prior = new_prior(depths=2, ranks=3)
    raw = torch.tensor([-0.2, -0.9, -1.8, -2.5, -4.0]).expand(2, 1, -1)
    regimes = torch.tensor([False, True])
    assert torch.equal(prior.apply(raw, 7, regimes), prior.apply(raw, 2, regimes))
    curve = AcceptancePrior(prior.knots, *(x[:, 2:] for x in (prior.greedy, prior.sampled) if x is not None))
    alone = curve.apply(raw[..., 3:], 2, regimes)
    expected = torch.minimum(alone, prior.apply(raw, 2, regimes)[..., 2:3])
    assert torch.equal(prior.apply(raw, 2, regimes)[..., 3:], expected)
    assert not torch.equal(prior.apply(raw, 1, regimes), prior.apply(raw, 2, regimes))


def test_every_request_is_scored_in_its_own_regime(new_prior: NewPrior) -> None:
    """Catches one regime for a whole batch, and rows or siblings that reach others."""
    prior = new_prior()
    raw = -torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(1)).cumsum(2)
    regimes = torch.tensor([True, False, False, True])
    scores = prior.apply(raw, 1, regimes)
    for row in range(4):
        for node in range(3):
            alone = prior.apply(raw[row : row + 1, node : node + 1], 1, regimes[row : row + 1])
            assert torch.equal(scores[row, node], alone[0, 0])
    assert not torch.equal(prior.apply(raw, 1, ~regimes), scores)


@pytest.mark.parametrize("regimes", ["", "greedy", "sampled"])
def test_a_regime_without_curves_is_left_raw(regimes: str, new_prior: NewPrior) -> None:
    """Catches rounding, or another regime's curves, where calibration was no better than raw scores."""
    prior = new_prior(regimes=regimes)
    raw = (
        torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(2))
        .mul(5)
        .log_softmax(2)
        .sort(2, descending=True)
        .values
    )
    scores = prior.apply(raw, 1, torch.tensor([False, True]))
    assert prior.is_identity == (regimes == "")
    assert [torch.equal(scores[row], raw[row]) for row in range(2)] == [regimes != "greedy", regimes != "sampled"]


def test_garbage_becomes_impossible(new_prior: NewPrior) -> None:
    """Catches NaN of a padding row that spreads to its siblings, and scores above 0."""
    raw = torch.tensor([[[math.nan, INF, 3.0, -0.5]]])
    scores = new_prior().apply(raw, 1, torch.tensor([True]))
    assert scores.flatten().tolist() == [-INF] * 4  # in a head's order nothing follows an impossible one
    assert not bool(new_prior().apply(raw[..., 1:], 1, torch.tensor([False])).isnan().any())


def test_json_brings_back_the_same_curves(new_prior: NewPrior) -> None:
    """Catches digits, regimes or ranks that get lost, and a form that grows with every write."""
    for regimes in ("greedy sampled", "greedy", "sampled", ""):
        described = json.loads(json.dumps(new_prior(regimes=regimes).as_json()))
        prior = AcceptancePrior.of_config({FIELD: described})
        assert prior is not None
        assert prior.as_json() == described
        for ours, theirs in zip((prior.greedy, prior.sampled), _curves(new_prior(regimes=regimes)), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, atol=5.1e-4, rtol=0)
    assert AcceptancePrior.of_config({}) is None


def _curves(prior: AcceptancePrior) -> tuple[Tensor | None, Tensor | None]:
    return prior.greedy, prior.sampled


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), [1], "acceptance_prior: expected a JSON object, found list"),
        (("version",), 2, r"acceptance_prior.version: is 2, only 1 is supported; run `eyas calibrate`"),
        (("version",), None, "acceptance_prior.version: is None"),
        (("warm",), 1, "acceptance_prior.warm: is no field"),
        (("log_probs",), None, "acceptance_prior.log_probs: expected numbers in a string, found None"),
        (("log_probs",), "-6 -3 x -1 0", "acceptance_prior.log_probs: expected numbers"),
        (("log_probs",), "-6 -3 -3 -1 0", "acceptance_prior.log_probs: must increase and end in 0"),
        (("log_probs",), "-6 -3 -2 -1 -0.5", "acceptance_prior.log_probs: must increase and end in 0"),
        (("log_probs",), "-inf -3 -2 -1 0", "acceptance_prior.log_probs: must increase"),
        (("log_probs",), "0", "acceptance_prior.log_probs: expected at least 2 numbers"),
        (("log_probs",), "-1 0", r"acceptance_prior.greedy: expected depths of ranks of 2 numbers"),
        (("greedy",), "-1 0", "acceptance_prior.greedy: expected a list of depths"),
        (("greedy",), [], "acceptance_prior.greedy: expected a list of depths"),
        (("greedy", 1), [], "acceptance_prior.greedy: expected a list of depths"),
        (("greedy", 1, 2), 5, r"acceptance_prior.greedy\[1\]\[2\]: expected numbers"),
        (("greedy", 1, 2), "-1 0", r"acceptance_prior.greedy\[1\]\[2\]: 3 ranks of 2 numbers, expected 3 of 5"),
        (("greedy", 1), ["-5 -4 -3 -2 -1"], r"acceptance_prior.greedy\[1\]\[0\]: 1 ranks of 5 numbers"),
        (("greedy", 0, 1), "-5 -4 -3 -2 0.1", r"acceptance_prior.greedy\[0\]\[1\]: must be finite, not above 0"),
        (("greedy", 0, 1), "-5 -4 -4.1 -2 0", r"acceptance_prior.greedy\[0\]\[1\]: must be finite"),
        (("greedy", 0, 1), "-5 -4 nan -2 0", r"acceptance_prior.greedy\[0\]\[1\]: must be finite"),
        (("greedy", 0, 1), "-inf -4 -3 -2 0", r"acceptance_prior.greedy\[0\]\[1\]: must be finite"),
        (("sampled",), [["-5 -4 -3 -2 0"]], "acceptance_prior.sampled: holds 1 depths of 1 ranks"),
    ],
)
def test_a_damaged_prior_is_refused_by_name(
    path: tuple[Any, ...], value: Any, message: str, new_prior: NewPrior
) -> None:
    """Catches damage that would be served, and errors that do not say where it is."""
    config: dict[str, Any] = {FIELD: copy.deepcopy(new_prior().as_json())}
    place: Any = config
    steps = (FIELD, *path)
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = value
    with pytest.raises(ValueError, match=message):
        AcceptancePrior.of_config(config)


def test_a_loaded_head_has_its_prior(tiny_models: TinyModels, new_prior: NewPrior) -> None:
    """Catches a prior left behind at load, and a damaged one that only shows once the head drafts."""
    folder = tiny_models.target()
    target = TargetWeights(folder, DecoderConfig.from_folder(folder))
    head = tiny_models.head(folder)
    assert load_head(head, target, torch.float32, CPU).acceptance_prior is None
    save_prior(head, new_prior())
    loaded = load_head(head, target, torch.float32, CPU).acceptance_prior
    assert loaded is not None
    assert loaded.as_json() == new_prior().as_json()
    config = json.loads((head / "config.json").read_text())
    config[FIELD]["version"] = 9
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="acceptance_prior.version: is 9"):
        normalise_head(open_head(head), target.config)  # what a router looks at, which loads no weights


def _eagle3(tiny_models: TinyModels, target: Path, folder: Path) -> Path:
    return tiny_models.head(target)


def _eagle(tiny_models: TinyModels, target: Path, folder: Path) -> Path:
    return tiny_models.eagle_head(target)


def _medusa(tiny_models: TinyModels, target: Path, folder: Path) -> Path:
    noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    tensors = {f"{head}.{name}": noise for head in range(2) for name in ("0.linear.weight",)}
    tensors |= {f"{head}.1.weight": noise.repeat(2, 1)[:61].clone() for head in range(2)}
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    return folder


def _mtp(tiny_models: TinyModels, target: Path, folder: Path) -> Path:
    config = json.loads((target / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    last = "model.layers.3."
    own = {n.removeprefix(last): x for n, x in load_file(target / "model.safetensors").items() if n.startswith(last)}
    own |= {
        "input_proj.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(1)),
        **{f"{name}_layernorm.weight": torch.ones(32) for name in ("token", "hidden", "final")},
    }
    return tiny_models.write(config, {f"model.mtp_layers.0.{name}": tensor for name, tensor in own.items()})


WRITERS: dict[str, tuple[Any, list[str]]] = {
    "eagle3": (_eagle3, ["heads", "folder"]),
    "eagle": (_eagle, ["heads", "folder"]),
    "medusa": (_medusa, ["heads", "folder", "vllm"]),
    "mtp": (_mtp, ["heads"]),
}


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, (_, all_) in WRITERS.items() for layout in all_])
def test_every_format_carries_the_prior(
    kind: str, layout: str, tiny_models: TinyModels, new_prior: NewPrior, tmp_path: Path
) -> None:
    """Catches a format whose reader or writer drops the field."""
    folder = tiny_models.target()
    target = TargetWeights(folder, DecoderConfig.from_folder(folder))
    head = WRITERS[kind][0](tiny_models, folder, tmp_path / "head")
    save_prior(head, new_prior())
    files = open_head(head)
    assert files.kind == kind
    for source in (files, with_prior(files, new_prior(seed=3))):
        out = tmp_path / f"{layout}-{source is files}{'.heads' if layout == 'heads' else ''}"
        _write(layout, out, source, target)
        prior = load_head(out, target, torch.float32, CPU).acceptance_prior
        assert prior is not None
        assert prior.as_json() == new_prior(seed=0 if source is files else 3).as_json()


def _write(layout: str, out: Path, files: HeadFiles, target: TargetWeights) -> None:
    if layout == "heads":
        write_heads_file(out, files, target.config)
    elif layout == "vllm":
        write_vllm_medusa_folder(out, files, target)
    elif files.kind == "medusa":
        write_medusa_folder(out, files, target.config)
    else:
        write_eagle_folder(out, files, target.config)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_speculators_folders_may_hold_one(name: str, new_prior: NewPrior, tmp_path: Path) -> None:
    """Catches the nested config's reader, which names the fields it keeps."""
    config = {"speculators_model_type": name, "transformer_layer_config": {"model_type": "llama"}}
    prefix = "mtp_layers.0." if name == "mtp" else ""
    save_file({f"{prefix}fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {FIELD: new_prior().as_json()}))
    assert open_head(tmp_path).config[FIELD] == new_prior().as_json()


@pytest.mark.parametrize("regimes", ["greedy sampled", "sampled", ""])
def test_an_inspection_tells_which_regimes_are_calibrated(
    regimes: str, tiny_models: TinyModels, new_prior: NewPrior
) -> None:
    """Catches a prior that cannot be seen, and one printed number by number."""
    folder = tiny_models.target()
    head = tiny_models.head(folder)
    assert inspect_path(head, folder, HeadOptions()).fields["acceptance prior"] == "none"
    save_prior(head, new_prior(regimes=regimes))
    shown = inspect_path(head, folder, HeadOptions()).fields["acceptance prior"]
    assert shown == (", ".join(regimes.split()) or "raw scores are kept")
    assert "greedy" not in inspect_path(head, None, HeadOptions()).fields

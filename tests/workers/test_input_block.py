"""The blocks of small inputs."""

from __future__ import annotations

import torch

from eyas.workers.input_block import InputBlock


def test_every_field_begins_where_kernels_expect_it() -> None:
    """Catches fields of odd length that move the next ones off 16 bytes, for which kernels would be compiled anew."""
    block = InputBlock({"a": (3,), "b": (1, 5), "c": (1,), "d": (2, 2)}, torch.device("cpu"))
    base = block.device["a"].data_ptr()
    assert {(field.data_ptr() - base) % 16 for field in block.device.values()} == {0}


def test_fields_arrive_apart() -> None:
    """Catches fields that overlap, and one of the two sides laid out otherwise than the other."""
    shapes = {"a": (3,), "b": (2, 5), "c": (1,)}
    block = InputBlock(shapes, torch.device("cpu"))
    for number, name in enumerate(shapes):
        block.host[name].fill(number + 1)
    block.host_floats("c").fill(0.25)
    block.upload()
    assert {name: tuple(field.shape) for name, field in block.device.items()} == shapes
    assert block.device["a"].unique().tolist() == [1]
    assert block.device["b"].unique().tolist() == [2]
    assert block.device_floats("c").tolist() == [0.25]

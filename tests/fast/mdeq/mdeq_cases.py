"""Small multiscale DEQs with every kind of path, and how they are compared."""

from __future__ import annotations

from dataclasses import replace

import torch

from gdeq.models import MDEQCell, MDEQConfig

FEW = MDEQConfig(
    channels=(4, 4, 6),
    blocks=2,
    expansion=3,
    groups=2,
    head_channels=(2, 2, 3),
    final_channels=5,
    classes=3,
    image_channels=2,
    dropout=0.3,
    outer_norm="group",
    fused=True,
)
LITTLE = replace(FEW, channels=(4, 6), head_channels=(1, 1), blocks=1, dropout=0.0)


def shifted(module):
    """With norms that scale and shift, as after some training."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def cells(config, size, device, batch=2):
    """A plain cell, a fused one with the same parameters, a state and an injection.

    The same numbers on every device.
    """
    plain = shifted(MDEQCell(replace(config, fused=False)))
    fused = MDEQCell(replace(config, fused=True)).to(device)
    fused.load_state_dict(plain.state_dict())
    injection = torch.randn(batch, config.channels[0], *size).relu()
    z = tuple(torch.randn_like(part).to(device) for part in plain.initial_state(injection))
    return plain.to(device), fused, z, injection.to(device)


def close(found, expected, tolerance=1e-5):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm() / (b.double().norm() + 1e-6)
        assert error <= tolerance, f"off by {error:.1e}"

"""Settings that belong together, by name: `gdeq train NAME`."""

from __future__ import annotations

from typing import Any

_FAST = {"schedule": "onecycle", "warmup": 0.2}
# What the trials of docs/results.md led to: Muon is worth 20 per cent after three epochs, batch
# norm in stem and head 2 after eight; mixed images, decay and dropout against learning by heart.
_CIFAR10 = {
    "data": "cifar10",
    "epochs": 30,
    "batch_size": 512,
    "precision": "bf16",
    "label_smoothing": 0.1,
    "jacobian_step": 0.1,
    "model": {"size": "large", "dropout": 0.1, "outer_norm": "batch"},
    "optimizer": {
        "name": "muon", "lr": 0.02, "momentum": 0.95, "weight_decay": 0.2, "clip": 5.0, **_FAST,
    },
    "augment": {"crop": 4, "flip": True, "alternate": True, "cutmix": 0.5, "fill": "reflect"},
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    # A minute on two cores.
    "digits": {
        "epochs": 20,
        "batch_size": 64,
        "label_smoothing": 0.1,
        "solver": {"max_iter": 12, "tol": 1e-2},
        "gradient": {"max_iter": 20, "tol": 1e-2},
        "optimizer": {"lr": 5e-3, "weight_decay": 0.1, **_FAST, "clip": 1.0},
        "augment": {"crop": 1},
    },
    "fashion-mnist": {
        "data": "fashion-mnist",
        "epochs": 5,
        "batch_size": 128,
        "model": {"size": "small"},
        "augment": {"flip": True},
    },
    # As in MDEQ: Adam at 1e-3 with a cosine over 220 epochs.
    "cifar10": {
        "data": "cifar10",
        "epochs": 220,
        "batch_size": 128,
        "precision": "tf32",
        "model": {"size": "large", "dropout": 0.25},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "augment": {"crop": 4, "flip": True},
    },
    # Ours: one cycle of Muon, a few forward steps, one VJP of refinement.
    # The last norm of an MDEQ's f has no gain: its numbers are of one size, and 8 bits are enough.
    "cifar10-fast": _CIFAR10
    | {"solver": {"max_iter": 6, "tol": 0.0, "step_bits": 8}, "gradient": {"refine": 1}},
    # What `gdeq paper` trains with: one recipe for all rows, the paper's 18 and 20 solver steps.
    "cifar10-paper": _CIFAR10
    | {
        "log_every": 50,
        "checkpoint_seconds": 300.0,
        "solver": {"max_iter": 18, "tol": 0.0, "step_bits": 8},
        "gradient": {"max_iter": 20, "tol": 0.0},
    },
}


# Broyden's steps and VJPs as residual and error ask for: the adaptive row of Table 2.
PRESETS["cifar10-adaptive"] = PRESETS["cifar10-fast"] | {
    "epochs": 34,
    "measure_every": 40,
    "model": _CIFAR10["model"] | {"dropout": 0.2},  # type: ignore[operator]
    "solver": {"max_iter": 5, "tol": 0.0, "step_bits": 8},
    "gradient": {"name": "jfb", "refine": 1},
    "optimizer": _CIFAR10["optimizer"] | {"lr": 0.01},  # type: ignore[operator]
    "adapt": {
        "enabled": True, "forward_at_first": 0.2, "forward": 0.06, "backward_at_first": 0.85,
        "backward": 0.5, "steps": [3, 4, 5, 6, 7], "refine": [0, 1, 2], "room": 0.65,
    },
}  # fmt: skip

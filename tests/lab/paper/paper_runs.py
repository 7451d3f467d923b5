"""The plan on 12 digits, two epochs of three steps: seconds instead of hours."""

SETTINGS = [
    *[
        "data=digits",
        "model.size=small",
        "epochs=2",
        "batch_size=4",
        "precision=float32",
        "device=cpu",
    ],
    *["log_every=1", "checkpoint_seconds=0", "ema=0", "solver.max_iter=3"],
]
SETS = [part for setting in SETTINGS for part in ("--set", setting)]
SMALL = [*SETS, "--batches", "1", "--images", "4"]


def only(*names):
    return [part for name in names for part in ("--only", name)]

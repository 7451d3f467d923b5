"""The imaging task: it learns from a photograph, goes on where it stopped, takes every gradient."""

import numpy as np
import pytest
import torch
from PIL import Image

from gdeq.lab.tasks.imaging import Imaging, gaussian, sampled
from gdeq.lab.training import config as configs
from gdeq.lab.training import runs
from gdeq.lab.training.folder import RunError, read_metrics
from gdeq.lab.training.process import Process

TINY = [
    *("epochs=1", "batch_size=4", "patch=16", "patches=8", "log_every=1", "device=cpu"),
    *("model.width=4", "model.scales=2", "model.blocks=1", "solver.max_iter=4"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of one's own, of two sizes: waves."""
    made = tmp_path_factory.mktemp("pictures")
    for part, sizes in {"train": [(32, 40), (40, 32)], "test": [(24, 40), (18, 22)]}.items():
        (made / part).mkdir()
        for number, (height, width) in enumerate(sizes):
            y, x = np.mgrid[:height, :width]
            wave = 127 + 90 * np.sin(0.3 * x + number) * np.cos(0.2 * y)
            Image.fromarray(wave.astype(np.uint8)).save(made / part / f"{number}.png")
    return made


def config(folder, *settings, preset="denoise-photos"):
    return configs.load(preset, [*TINY, f"data={folder}", "test=test", *settings])


def trained(path, wanted):
    """What is recorded of its epochs."""
    runs.train(path, wanted)
    return [record for record in read_metrics(path / "metrics.jsonl") if record["kind"] == "epoch"]


GRADIENTS = [
    *("gradient=gdeq gradient.refine=0", "gradient=gdeq gradient.refine=2", "gradient=jfb"),
    *("gradient=npg", "gradient=implicit", "gradient=unrolled"),
]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_every_gradient_trains_it(folder, tmp_path, gradient):
    wanted = config(folder, "epochs=4", "optimizer.lr=1e-2", *gradient.split())
    *_, last = trained(tmp_path / "run", wanted)
    assert last["step"] == 16
    assert last["test_psnr"] > 20.1  # 19.9 before


@pytest.mark.parametrize("method", ["pgd", "admm"])
@pytest.mark.parametrize("kind", ["deblur kernels=gaussian noise=[2,5]", "frequencies"])
def test_every_kind_of_measurement(folder, tmp_path, kind, method):
    settings = [*f"kind={kind}".split(), f"model.method={method}", "residual_weight=1"]
    told = trained(tmp_path / "run", config(folder, *settings))
    assert told[-1]["test_psnr"] > 10
    again = runs.trained(tmp_path / "run")
    assert again.evaluate()["psnr"] == pytest.approx(told[-1]["test_psnr"], abs=0.01)


def test_it_learns(folder, tmp_path):
    more = ["patches=80", "optimizer.lr=1e-2"]
    told = trained(tmp_path / "run", config(folder, *more))
    assert told[-1]["test_psnr"] > 22  # 19.9 before


def test_a_denoiser_becomes_an_equilibrium(folder, tmp_path):
    """The preset for a GPU: f is applied once in the first steps, and solved in the others."""
    small = ["epochs=4", "patches=20", "shrunk=[0.8]", "precision=float32", "ema=0"]
    more = ["pretrain_steps=40", "optimizer.lr=0.03", "test_every=2"]
    told = trained(tmp_path / "run", config(folder, *small, *more, preset="denoise"))
    assert [record["step"] for record in told] == [20, 40, 60, 80]
    assert told[1]["residual"] > 0.05
    assert all(record["residual"] < 0.005 for record in told[2:])
    assert told[-1]["test_psnr"] > told[1]["test_psnr"] > 20.5


def test_resumed_it_is_the_same(folder, tmp_path):
    steady = ["optimizer.schedule=constant", "optimizer.warmup=0"]
    trained(tmp_path / "whole", config(folder, "epochs=2", *steady))
    trained(tmp_path / "half", config(folder, *steady))
    with pytest.raises(RunError, match="test cannot change"):  # what it holds out would be seen
        runs.resume(tmp_path / "half", overrides=["test=validation"])
    runs.resume(tmp_path / "half", overrides=["epochs=2"])
    whole, half = (runs.trained(tmp_path / name).model for name in ("whole", "half"))
    for mine, theirs in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def task(folder, *settings):
    return Imaging(config(folder, *settings), Process(device=torch.device("cpu")))


def test_noise_is_as_strong_as_it_says(folder):
    made = task(folder, "noise=[10,50]", "patches=400", "batch_size=400")
    measured, clean = next(iter(made.train_batches(400).epoch()))[1]
    level = 255 * measured[:, 1, 0, 0]
    assert level.unique().tolist() == pytest.approx([10 + 2.5 * n for n in range(17)])
    strength = 255 * (measured[:, :1] - clean).flatten(1).std(1)
    torch.testing.assert_close(strength, level, rtol=0.3, atol=0)


def test_smaller_copies_of_the_pictures_are_trained_on(folder):
    made = task(folder, "shrunk=[0.75,0.5]")
    assert made.train.sizes.tolist() == [
        *([32, 40], [40, 32]),
        *([24, 30], [30, 24]),
        *([16, 20], [20, 16]),
    ]
    assert len(made.data.train[0]) == 6 * 8
    # Waves of some 20 pixels: half as large, they are what every other pixel shows, about.
    half, whole = made.train[4].astype(float), made.train[0].astype(float)
    every_other = (whole[::2, ::2] + whole[1::2, ::2] + whole[::2, 1::2] + whole[1::2, 1::2]) / 4
    assert abs(half - every_other)[2:-2, 2:-2].max() < 3


def test_masks_keep_the_share_and_all_low_frequencies():
    mask = sampled(torch.randn(8, 64, 48), 0.3)
    assert mask.mean() == pytest.approx(0.3, abs=0.01)
    assert mask[..., :3, :2].min() == 1
    torch.testing.assert_close(gaussian().sum(), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("noise=[25]", "noise must be two numbers such as"),
        ("noise=[30,20]", "noise must be two numbers such as"),
        ("kind=sharpen", "kind must be"),
        ("kept=0", "kept must be"),
        ("shrunk=[1.5]", "shrunk must be scales between 0 and 1"),
        ("shrunk=[0]", "shrunk must be scales between 0 and 1"),
        ("model.method=fista", "method must be"),
    ],
)
def test_wrong_settings_are_named(setting, message):
    with pytest.raises(configs.ConfigError, match=message):
        configs.load("denoise", [setting])

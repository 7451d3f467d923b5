"""Restoring noisy, blurred or partly measured images by an equilibrium; judged by PSNR."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn.functional import pad

from gdeq.lab.data.bsd import BSD
from gdeq.lab.data.pictures import (
    Draw,
    PatchBatches,
    Pictures,
    WholeBatches,
    held_out,
    photos,
    pictures_of,
    read_folder,
    with_shrunk,
)
from gdeq.lab.data.sets import data_root, find
from gdeq.lab.tasks.task import Data, Metric, Task
from gdeq.lab.training.settings import Config
from gdeq.options import check_choice, check_integer, check_real, options

if TYPE_CHECKING:
    from gdeq.models.proximal import Restorer


@options
class RestorerConfig:
    """Which iteration, and which network as its prox."""

    method: str = "pgd"  # pgd (one image as its state), admm (an image and a dual)
    step: float = 0.5  # step size η of the data term, at the start
    width: int = 64  # features at half of the resolution, twice as many at each scale below
    scales: int = 3  # scales of the U-Net
    blocks: int = 2  # blocks per scale, on the way down and on the way up
    keep: float = 1.0  # share of the iterate, where the network takes off noise; the rest is Aᵀy

    def __post_init__(self) -> None:
        check_choice(self, "method", ("pgd", "admm"))
        check_real(self, "step", 0.0, open_low=True)
        check_real(self, "keep", 0.0, 1.0)
        for name in ("width", "scales", "blocks"):
            check_integer(self, name, 1)


@options
class ImagingConfig(Config):
    """One training of a restorer."""

    data: str = "bsd"  # bsd (`gdeq data bsd`), photos (two of scikit-learn), or a folder
    test: str = "bsd68"  # bsd68, set12, validation (of BSD400); if data is a folder: one in it
    kind: str = "denoise"  # denoise, deblur, frequencies
    noise: tuple[float, ...] = (25.0, 25.0)  # standard deviation in grey levels: least, most
    kernels: str = "levin"  # deblur: levin (eight, `gdeq data bsd`), gaussian (one)
    kept: float = 0.3  # frequencies: share that is measured
    patch: int = 96  # side of a training patch in pixels
    patches: int = 64  # patches per picture and epoch
    shrunk: tuple[float, ...] = ()  # scales below 1 at which training sees the pictures, too
    model: RestorerConfig = field(default_factory=RestorerConfig)
    fixed: ClassVar = (
        *Config.fixed,
        *("data", "test", "kind", "model.method", "model.width", "model.scales", "model.blocks"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "kind", ("denoise", "deblur", "frequencies"))
        check_choice(self, "kernels", ("levin", "gaussian"))
        check_real(self, "kept", 0.0, 1.0, open_low=True)
        for name in ("patch", "patches"):
            check_integer(self, name, 1)
        if not all(0 < scale < 1 for scale in self.shrunk):
            raise ValueError(
                f"Config.shrunk must be scales between 0 and 1 such as [0.9,0.7], "
                f"got {self.shrunk!r}"
            )
        least, *most = self.noise
        if len(most) != 1 or not 0 <= least <= most[0] <= 255:
            raise ValueError(
                f"Config.noise must be two numbers such as [25,25], got {self.noise!r}"
            )


# For both kinds of problem.  The loss is some ten grey levels and the square of a residual 1e-5, so
# the penalty needs a large weight to be felt.
PHOTOS: dict[str, Any] = {
    "data": "photos",
    "epochs": 8,
    "batch_size": 16,
    "patch": 48,
    "patches": 1600,
    "model": {"width": 24, "scales": 2, "blocks": 1},
    "solver": {"max_iter": 6, "tol": 1e-3},
    "gradient": {"refine": 1},
    "residual_weight": 3e3,
    "optimizer": {"lr": 2e-3, "schedule": "onecycle", "warmup": 0.1, "clip": 100.0},
}
GPU: dict[str, Any] = {
    "batch_size": 64,
    "precision": "bf16",
    "ema": 0.999,
    "log_every": 50,
    "gradient": {"refine": 1},
    "residual_weight": 3e3,
    "optimizer": {
        **{"name": "muon", "lr": 1.5e-2, "weight_decay": 0.05},
        **{"schedule": "onecycle", "warmup": 0.05, "clip": 100.0},
    },
}
# One application of f to y is a denoiser, at less than half of a step's cost.  With a step of 0.8
# it is nearly an equilibrium, too: the last third of the training makes it one.
NOISE: dict[str, Any] = {
    "epochs": 60,
    "test_every": 15,
    "patches": 16,
    "shrunk": [0.9, 0.8, 0.7],
    "pretrain_steps": 16_000,
    "pretrain_layers": 1,
    "residual_every": 10,
    "model": {"step": 0.8},
    "solver": {"max_iter": 3, "tol": 0.0},
}


# What a blur takes away has nothing to hold it: without these, f has no equilibrium.
BLUR: dict[str, Any] = {
    "kind": "deblur",
    "noise": [2.55, 2.55],
    "solver": {"max_iter": 8, "tol": 1e-3},
    "gradient": {"refine": 2},
    "residual_weight": 3e4,
    "residual_every": 1,
}


class Imaging(Task[ImagingConfig]):
    """A sample is a measurement; its target is the image."""

    name = "imaging"
    settings = ImagingConfig
    presets: ClassVar = {
        # Two photographs, one to learn from and one for the test: two minutes on two cores.
        "denoise-photos": PHOTOS,
        "deblur-photos": {
            **PHOTOS,
            **BLUR,
            "kernels": "gaussian",
            "model": {**PHOTOS["model"], "keep": 0.5},
        },
        # BSD400 to BSD68, a few minutes on one H200.
        "denoise": {**GPU, **NOISE},
        "deblur": {
            **{**GPU, **BLUR, "epochs": 36, "test_every": 12, "model": {"keep": 0.5}},
            "optimizer": {**GPU["optimizer"], "lr": 1e-2},
        },
    }
    metric = Metric("psnr", "dB", digits=2)
    samples = "patches"

    def load(self) -> Data:
        pictures, self.test, kernels = self._pictures()
        self.train = with_shrunk(pictures, self.config.shrunk)
        self.kernels = _stacked(kernels).to(self.device)  # (n, k, k)
        ways = len(self.kernels) if self.config.kind == "deblur" else 1
        self.ways = ways
        # What there is of each is cut or measured when its batch is made.
        return Data(
            train=(torch.arange(self.config.patches * len(self.train)),),
            test=(torch.arange(ways * len(self.test)),),
        )

    def _pictures(self) -> tuple[Pictures, Pictures, list[Tensor]]:
        """For training and for the test, and the blur kernels."""
        config, pools = self.config, None
        levin = config.kind == "deblur" and config.kernels == "levin"
        if config.data == "bsd" or levin:
            source = find("bsd")
            assert isinstance(source, BSD)
            pools = source.load(data_root(self.root))
        kernels = [gaussian()] if pools is None else list(map(torch.from_numpy, pools.kernels))
        if config.kernels == "gaussian":
            kernels = [gaussian()]
        if config.data == "bsd":
            assert pools is not None
            check_choice(config, "test", ("bsd68", "set12", "validation"))
            if config.test == "validation":
                return *held_out(pools.train), kernels
            return pools.train, getattr(pools, config.test), kernels
        if config.data == "photos":
            temple, flower = (photos()[number] for number in range(2))
            return pictures_of([temple]), pictures_of([flower]), kernels
        folder = Path(config.data)
        return read_folder(folder / "train"), read_folder(folder / config.test), kernels

    def model(self) -> Restorer:
        from gdeq.models.proximal import Restorer  # noqa: PLC0415 (`gdeq --help` does not wait)

        config = self.config
        made = Restorer(
            config.kind,
            **vars(config.model),
            solver=config.solver.build(),
            gradient=config.gradient.build(),
        )
        if self.device.type == "cuda":
            prox = made.get_submodule("deq.cell.prox")
            prox.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.compile(prox)
        return made

    def losses(self, output: Tensor, *targets: Tensor) -> Tensor:
        """Root mean square error in grey levels."""
        error = (output - targets[0]).square().flatten(1).mean(1)
        return 255 * (error + 1e-8).sqrt()

    def score(self, output: Tensor, *targets: Tensor) -> Tensor:
        from gdeq.models.proximal import psnr  # noqa: PLC0415

        return psnr(output, targets[0])

    def train_batches(self, size: int, plain: bool = False) -> PatchBatches:
        return PatchBatches(
            self.train,
            size,
            self.measure,
            patch=self.config.patch,
            each=self.config.patches,
            plain=plain,
            seed=self.config.seed,
            device=self.device,
            **self.share(),
        )

    def test_batches(self, size: int) -> WholeBatches:
        return WholeBatches(
            self.test, size, self.measure, each=self.ways, device=self.device, **self.share()
        )

    def measure(self, clean: Tensor, which: Tensor, draw: Draw) -> Tensor:
        """The input of the model: what was measured, the noise level, and how (see `Restorer`)."""
        from gdeq.models.proximal import Blur, Frequencies, spread_of  # noqa: PLC0415

        size = (clean.shape[-2], clean.shape[-1])
        low, high = self.config.noise
        # One of some levels, evenly spaced.
        share = (which % 17).float() / 16 if high > low else torch.zeros_like(which.float())
        level = ((low + share * (high - low)) / 255)[:, None, None, None].expand(-1, 1, *size)
        how: tuple[Tensor, ...] = ()
        y = clean
        if self.config.kind == "deblur":
            how = (spread_of(self.kernels[which % self.ways], size)[:, None],)
            y = Blur(how[0])(clean)
        elif self.config.kind == "frequencies":
            how = (sampled(draw(*size), self.config.kept),)
            y = Frequencies(how[0])(clean)
        noise = draw(*y.shape[1:]) * level
        if self.config.kind == "frequencies":
            noise = noise * how[0]
        return torch.cat([y + noise, level, *how], 1)

    def notes(self) -> Iterator[str]:
        clean, found = 0.0, 0
        for _, (measured, truth) in self.test_batches(256).epoch():
            if self.config.kind == "frequencies":
                return
            clean += float(self.score(measured[:, :1], truth).sum())
            found += len(truth)
        yield f"what was measured: {self.metric.text(clean / found)}"


def gaussian(deviation: float = 1.6, width: int = 15) -> Tensor:  # -> (width, width)
    along = torch.arange(width) - width // 2
    line = torch.exp(-0.5 * (along / deviation).double() ** 2)
    kernel = line[:, None] * line
    return kernel / kernel.sum()


def _stacked(kernels: list[Tensor]) -> Tensor:  # each (k, k) -> (n, most, most) in float32
    """Of one size: zeros around those that are smaller."""
    most = max(len(kernel) for kernel in kernels)
    around = [(most - len(kernel)) // 2 for kernel in kernels]  # widths are odd
    return torch.stack(
        [pad(kernel, (n, n, n, n)).float() for kernel, n in zip(kernels, around, strict=True)]
    )


def sampled(normal: Tensor, kept: float) -> Tensor:  # (b, h, w) -> (b, 1, h, w)
    """A random mask: all low frequencies, and as many others as make up the share."""
    height, width = normal.shape[1:]
    rows, columns = (torch.fft.fftfreq(n, device=normal.device).abs() for n in (height, width))
    low = (rows[:, None] < 0.04) & (columns < 0.04)
    uniform = torch.special.ndtr(normal)
    share = (kept - low.float().mean()).clamp(min=0) / (1 - low.float().mean())
    return (low | (uniform < share)).float()[:, None]

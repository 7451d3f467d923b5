"""What `gdeq bench` measures: MDEQ, and cells of plain modules as a user writes them.

All have a stem, a DEQ and a head, so that every library is timed by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdeq import DEQ, GDEQ, JFB, NPG, Broyden, Gradient, Implicit

CELLS = ("mdeq", "transformer", "convolution", "mlp")


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    size: str = "large"  # of an MDEQ: small, tiny, large
    batch: int = 128
    side: int = 32  # height and width of images; the tokens of a transformer
    forward: int = 18  # Broyden steps
    backward: int = 20  # of Implicit
    precision: str = "bf16"  # of ours: float32, tf32, bf16
    rounds: int = 20
    device: str = "cuda"
    cell: str = "mdeq"
    width: int = 0  # of the other cells: features of a token, channels of a pixel
    step_bits: int = 8  # of a stored step in half precision; all cells end in a norm

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample of a plain cell."""
        tokens, pixels = (self.side, self.width), (self.width, self.side, self.side)
        return {"transformer": tokens, "convolution": pixels, "mlp": (self.width,)}[self.cell]

    @property
    def title(self) -> str:
        if self.cell == "mdeq":
            return f"MDEQ-{self.size.upper()}, batch {self.batch} of {self.side}×{self.side}"
        sample = "×".join(str(size) for size in self.shape)
        compiled = ", torch.compile" if self.cuda else ""
        return f"{self.cell} cell, batch {self.batch} of {sample}{compiled}"

    def gradients(self) -> dict[str, Gradient]:
        return {
            "gdeq": GDEQ(),
            "gdeq refine 1": GDEQ(refine=1),
            "jfb": JFB(),
            "npg": NPG(steps=5, damping=0.5),
            "implicit": Implicit(Broyden(self.backward, tol=0.0), double_backward=False),
        }

    def draw(self) -> tuple[Tensor, Tensor]:
        """An input and what the output is compared with: labels, or another state."""
        torch.manual_seed(0)
        if self.cell == "mdeq":
            images = torch.randn(self.batch, 3, self.side, self.side, device=self.device)
            labels = torch.randint(0, 10, (self.batch,), device=self.device)
            return images.to(memory_format=torch.channels_last), labels
        x, y = torch.randn(2, self.batch, *self.shape, device=self.device)
        return x, y

    def solver(self) -> Broyden:
        return Broyden(self.forward, tol=0.0, step_bits=self.step_bits, stop="whole")


# On a GPU, and small enough for tests on a CPU.
GPU: dict[str, dict[str, Any]] = {
    "mdeq": {},
    "transformer": {"width": 512, "side": 256, "batch": 32},
    "convolution": {"width": 48, "side": 32, "batch": 128},
    "mlp": {"width": 1024, "batch": 512},
}
CPU: dict[str, dict[str, Any]] = {
    "mdeq": {"size": "small", "batch": 64, "side": 8},
    "transformer": {"width": 32, "side": 16, "batch": 4},
    "convolution": {"width": 8, "side": 8, "batch": 8},
    "mlp": {"width": 64, "batch": 32},
}


def default_setup(device: str = "auto", cell: str = "mdeq") -> Setup:
    """On a GPU the paper's model, or a cell of a usual size; on a CPU one that takes seconds."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        return Setup(cell=cell, device=device, **GPU[cell])
    return Setup(cell=cell, precision="float32", rounds=10, device=device, **CPU[cell])


class TransformerCell(nn.Module):
    """A post-norm block: attention and a feed-forward layer over (batch, tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.project(z).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = self.first(z + x + self.merge(seen))
        return self.second(h + self.narrow(functional.gelu(self.widen(h)))).to(z.dtype)


class ConvolutionCell(nn.Module):
    """A residual block of two 3×3 convolutions over (batch, width, height, width of the image)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first, self.second, self.third = (nn.GroupNorm(8, width) for _ in range(3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        h = functional.relu(self.first(self.one(z)))
        h = self.second(x + self.two(h))
        return self.third(functional.relu(z + h)).to(z.dtype)


class MLPCell(nn.Module):
    """Two layers and a norm over (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(x + self.two(functional.relu(self.one(z)))).to(z.dtype)


class Plain(nn.Module):
    """A cell alone: nothing before the DEQ and nothing after it."""

    def __init__(self, cell: nn.Module, solver: Broyden, gradient: Gradient) -> None:
        super().__init__()
        self.stem, self.head = nn.Identity(), nn.Identity()
        self.deq = DEQ(cell, solver, gradient)

    def forward(self, x: Tensor) -> Tensor:
        # The state has the precision that f computes in: half the bytes between f and the solver.
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return self.deq(x, z0=torch.zeros_like(x, dtype=dtype))


def build(setup: Setup, gradient: Gradient, fused: bool | str = "auto") -> Any:
    """fused: whether an MDEQ runs on kernels of its own, and other cells are compiled."""
    torch.manual_seed(0)
    if setup.cell == "mdeq":
        from gdeq.models.mdeq import mdeq  # noqa: PLC0415

        kind: dict[str, Any] = {"dropout": 0.0, "outer_norm": "group", "fused": fused}
        model = mdeq(setup.size, solver=setup.solver(), gradient=gradient, **kind)
        return model.to(setup.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    kinds = {"transformer": TransformerCell, "convolution": ConvolutionCell, "mlp": MLPCell}
    cell = kinds[setup.cell](setup.width).to(setup.device)
    if setup.cuda and fused:
        cell.compile()
    return Plain(cell, setup.solver(), gradient)


def loss_of(setup: Setup, output: Tensor, y: Tensor) -> Tensor:
    if setup.cell != "mdeq":
        return functional.mse_loss(output.float(), y)
    from gdeq.fast.kernels.loss import cross_entropy  # noqa: PLC0415

    return cross_entropy(output, y)

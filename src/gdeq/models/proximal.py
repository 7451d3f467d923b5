"""Restoring images: the equilibrium of a proximal iteration whose prox is a network.

An image x was measured as y = A x + noise.  Proximal gradient descent has one image as its state
(Gilton et al. 2021), ADMM an image and a scaled dual variable:

    PGD     z ← prox(z − η Aᵀ(Az − y))

    ADMM    x = argmin ½‖Ax − y‖² + ‖x − (z − u)‖² / 2η
            z ← prox(x + u)
            u ← u + x − z

An equilibrium of ADMM has x = z and u = −η Aᵀ(Az − y), so that its z is one of PGD, whatever the
prox is.

Images are (batch, 1, height, width), of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle, relu

from gdeq import DEQ, GDEQ, Broyden, Gradient, Solver

# -- what is measured ------------------------------------------------------------------------------


class Operator:
    """The operator A of a measurement; here the identity, so that there is only noise.

    A subclass overrides the call, and what it needs of the other methods.

    Examples:
        >>> import torch
        >>> from gdeq.models.proximal import Operator
        >>> y = torch.ones(1, 1, 8, 8)
        >>> Operator().nearest(y, torch.zeros_like(y), step=1.0).mean()  # halfway
        tensor(0.5000)
    """

    def __call__(self, x: Tensor) -> Tensor:
        """A x."""
        return x

    def adjoint(self, y: Tensor) -> Tensor:
        """Aᵀy."""
        return y

    def power(self, x: Tensor) -> Tensor | float:
        """What AᵀA multiplies each frequency of ``rfft2(x)`` with."""
        return 1.0

    def nearest(self, y: Tensor, v: Tensor, step: Tensor | float) -> Tensor:
        """The x that minimises ½‖Ax − y‖² + ‖x − v‖² / (2 step)."""
        spectrum = torch.fft.rfft2(v + step * self.adjoint(y))
        return torch.fft.irfft2(spectrum / (1 + step * self.power(v)), s=v.shape[-2:])


class Blur(Operator):
    """Convolution with a kernel, with periodic boundaries.

    spread: (b, 1, h, w) the kernel in an image of the full size, from `spread_of`.

    Examples:
        >>> import torch
        >>> from gdeq.models.proximal import Blur, spread_of
        >>> A = Blur(spread_of(torch.full((3, 3), 1 / 9), (8, 8)))
        >>> point = torch.zeros(1, 1, 8, 8)
        >>> point[..., 4, 4] = 9.0
        >>> A(point)[0, 0, 4, 2:7].abs().round()
        tensor([0., 1., 1., 1., 0.])
    """

    def __init__(self, spread: Tensor) -> None:
        self.transfer = torch.fft.rfft2(spread)  # (b, 1, h, w // 2 + 1)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.fft.irfft2(self.transfer * torch.fft.rfft2(x), s=x.shape[-2:])

    def adjoint(self, y: Tensor) -> Tensor:
        return torch.fft.irfft2(self.transfer.conj() * torch.fft.rfft2(y), s=y.shape[-2:])

    def power(self, x: Tensor) -> Tensor:
        return self.transfer.abs().square()


def spread_of(kernel: Tensor, size: tuple[int, int]) -> Tensor:  # (..., j, k) -> (..., h, w)
    """A kernel in an image of this size, with its middle at pixel (0, 0), as `Blur` takes it.

    Examples:
        >>> import torch
        >>> from gdeq.models.proximal import spread_of
        >>> spread_of(torch.ones(3, 3), (4, 4))[0]
        tensor([1., 1., 0., 1.])
    """
    (height, width), (j, k) = size, kernel.shape[-2:]
    if j > height or k > width:
        raise ValueError(
            f"a kernel of {j} × {k} pixels does not fit into images of {height} × {width}"
        )
    whole = pad(kernel, (0, width - k, 0, height - j))
    return whole.roll((-(j // 2), -(k // 2)), (-2, -1))


class Frequencies(Operator):
    """Some frequencies of an image, as magnetic resonance imaging measures them.

    A measurement y is (b, 2, h, w), the real and the imaginary part.

    mask: (b, 1, h, w) 1 where ``fft2`` is measured, 0 elsewhere.

    Examples:
        >>> import torch
        >>> from gdeq.models.proximal import Frequencies
        >>> x = torch.randn(1, 1, 8, 8)
        >>> A = Frequencies(torch.ones(1, 1, 8, 8))
        >>> torch.allclose(A.adjoint(A(x)), x, atol=1e-6)
        True
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, x: Tensor) -> Tensor:
        found = torch.view_as_real(torch.fft.fft2(x[:, 0], norm="ortho"))  # (b, h, w, 2)
        return self.mask * found.movedim(-1, 1)

    def adjoint(self, y: Tensor) -> Tensor:
        spectrum = torch.view_as_complex((self.mask * y).movedim(1, -1).contiguous())
        return torch.fft.ifft2(spectrum, norm="ortho").real[:, None]

    def power(self, x: Tensor) -> Tensor:
        # A real image has each frequency twice, at k and −k, of which one may be missing.
        mirrored = self.mask.flip(-2, -1).roll((1, 1), (-2, -1))
        return (0.5 * (self.mask + mirrored))[..., : x.shape[-1] // 2 + 1]


# -- cells -----------------------------------------------------------------------------------------

Prox = Callable[..., Tensor]


class ProximalGradient(nn.Module):
    """f(z, y) = prox(z − η Aᵀ(Az − y)), with a learned step η.

    prox: called as prox(v, *given), where the cell is called as f(z, y, A, *given).

    Examples:
        >>> import torch, gdeq
        >>> from gdeq.models.proximal import Operator, ProximalGradient
        >>> shrink = lambda v: torch.nn.functional.softshrink(v, 0.25)  # the prox of 0.5 η |z|
        >>> deq = gdeq.DEQ(ProximalGradient(shrink, step=0.5), gdeq.Picard(50))
        >>> deq(torch.full((1, 1, 2, 2), 2.0), Operator())[0, 0, 0].detach()
        tensor([1.5000, 1.5000])
    """

    def __init__(self, prox: Prox, step: float = 1.0) -> None:
        super().__init__()
        self.prox = prox
        self.log_step = nn.Parameter(torch.tensor(math.log(step)))

    def initial_state(self, y: Tensor, A: Operator, *given: Tensor) -> Tensor:
        return A.adjoint(y)

    def forward(self, z: Tensor, y: Tensor, A: Operator, *given: Tensor) -> Tensor:
        return self.prox(z - self.log_step.exp() * A.adjoint(A(z) - y), *given)


class ADMM(nn.Module):
    """The same equilibrium by the method of multipliers: the state is an image and a dual, (z, u).

    Examples:
        >>> import torch, gdeq
        >>> from gdeq.models.proximal import ADMM, Operator
        >>> shrink = lambda v: torch.nn.functional.softshrink(v, 0.25)
        >>> deq = gdeq.DEQ(ADMM(shrink, step=0.5), gdeq.Picard(50))
        >>> z, u = deq(torch.full((1, 1, 2, 2), 2.0), Operator())
        >>> z[0, 0, 0].detach(), u[0, 0, 0].detach()  # the same as by proximal gradients
        (tensor([1.5000, 1.5000]), tensor([0.2500, 0.2500]))
    """

    def __init__(self, prox: Prox, step: float = 1.0) -> None:
        super().__init__()
        self.prox = prox
        self.log_step = nn.Parameter(torch.tensor(math.log(step)))

    def initial_state(self, y: Tensor, A: Operator, *given: Tensor) -> tuple[Tensor, Tensor]:
        z = A.adjoint(y)
        return z, torch.zeros_like(z)

    def forward(
        self, state: tuple[Tensor, Tensor], y: Tensor, A: Operator, *given: Tensor
    ) -> tuple[Tensor, Tensor]:
        z, u = state
        x = A.nearest(y, z - u, self.log_step.exp())
        z = self.prox(x + u, *given)
        return z, u + x - z


# -- the prox --------------------------------------------------------------------------------------


class Block(nn.Module):
    """h + two convolutions.  At first the second one is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.second(relu(self.first(h)))


class Denoiser(nn.Module):
    """Subtract from an image v what a small U-Net takes for noise.

    The U-Net sees v, the noise level of the measurement and Aᵀy, and works at half of the
    resolution and below.  It has no norms, so that brightness is kept.

    width: features at half of the resolution, twice as many at each scale below.
    scales: the number of resolutions.
    blocks: residual blocks at each scale, on the way down and again on the way up.
    keep: κ: the noise is subtracted from κ v + (1 − κ) Aᵀy.  In deblurring, where A removes parts
        of an image, a κ below 1 lets f contract.

    Examples:
        >>> import torch
        >>> from gdeq.models.proximal import Denoiser
        >>> image = torch.rand(1, 1, 13, 21)
        >>> Denoiser(width=8, scales=2, blocks=1)(image, torch.zeros_like(image), image).shape
        torch.Size([1, 1, 13, 21])
    """

    def __init__(
        self, width: int = 64, scales: int = 3, blocks: int = 2, keep: float = 1.0
    ) -> None:
        super().__init__()
        self.keep = keep
        widths = [width * 2**scale for scale in range(scales)]
        self.multiple = 2**scales
        self.head = nn.Conv2d(3 * 4, width, 3, padding=1)
        self.down = nn.ModuleList(_blocks(w, blocks) for w in widths)
        self.up = nn.ModuleList(_blocks(w, blocks) for w in widths[:-1])
        pairs = list(pairwise(widths))
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.tail = nn.Conv2d(width, 4, 3, padding=1)
        for parameter in self.tail.parameters():  # at first v stays as it is
            nn.init.zeros_(parameter)

    def forward(self, v: Tensor, level: Tensor, back: Tensor) -> Tensor:  # (b, 1, h, w) each
        height, width = v.shape[-2:]
        h = torch.cat([v, level, back], 1)
        bottom, right = -height % self.multiple, -width % self.multiple
        if bottom or right:
            h = pad(h, (0, right, 0, bottom), mode="replicate")
        h = self.head(pixel_unshuffle(h, 2))
        passed = []
        for blocks, shrink in zip(self.down, self.shrink, strict=False):
            h = blocks(h)
            passed.append(h)
            h = shrink(h)
        h = self.down[-1](h)
        for blocks, grow in zip(reversed(self.up), reversed(self.grow), strict=True):
            h = blocks(grow(h) + passed.pop())
        noise = pixel_shuffle(self.tail(h), 2)[..., :height, :width]
        return (v if self.keep == 1 else back + self.keep * (v - back)) - noise


def _blocks(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(count)))


# -- the model -------------------------------------------------------------------------------------

KINDS = ("denoise", "deblur", "frequencies")
METHODS = {"pgd": ProximalGradient, "admm": ADMM}


class Restorer(nn.Module):
    """Restore an image (b, 1, h, w) from a measurement y.

    The channels of the input have the size of the image.  They depend on the kind:

    - denoise: y, noise level
    - deblur: y, noise level, the kernel by `spread_of`
    - frequencies: y (real and imaginary part), noise level, mask

    kind: denoise, deblur or frequencies.
    method: pgd or admm.
    step: the step η before training.
    denoiser: options of `Denoiser`.

    Examples:
        >>> import torch
        >>> from gdeq.models.proximal import Restorer
        >>> model = Restorer("denoise", width=8, scales=2, blocks=1)
        >>> noisy, level = torch.rand(2, 1, 16, 24), torch.full((2, 1, 16, 24), 0.1)
        >>> model(torch.cat([noisy, level], 1)).shape
        torch.Size([2, 1, 16, 24])
    """

    def __init__(
        self,
        kind: str = "denoise",
        method: str = "pgd",
        step: float = 0.5,
        solver: Solver | None = Broyden(max_iter=6, tol=1e-3),  # noqa: B008 (frozen)
        gradient: Gradient = GDEQ(refine=1),  # noqa: B008 (frozen)
        **denoiser: Any,
    ) -> None:
        super().__init__()
        for name, given, known in (("kind", kind, KINDS), ("method", method, METHODS)):
            if given not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
        self.kind, self.method = kind, method
        self.deq = DEQ(METHODS[method](Denoiser(**denoiser), step), solver, gradient)

    def forward(self, measured: Tensor) -> Tensor:  # (b, c, h, w) -> (b, 1, h, w)
        z = self.deq(*self.inputs(measured))
        return z if self.method == "pgd" else z[0]

    def inputs(self, measured: Tensor) -> tuple[Tensor, Operator, Tensor, Tensor]:
        """What the cell is called with: y, A, the noise level and Aᵀy."""
        many = measured.shape[1]
        wanted = {"denoise": 2, "deblur": 3, "frequencies": 4}[self.kind]
        if many != wanted:
            raise ValueError(f"a measurement to {self.kind} has {wanted} channels, got {many}")
        y, A = self._split(list(measured.split(1, 1)))
        return y, A, measured[:, y.shape[1] : y.shape[1] + 1], A.adjoint(y)

    def _split(self, channels: list[Tensor]) -> tuple[Tensor, Operator]:
        if self.kind == "denoise":
            return channels[0], Operator()
        if self.kind == "deblur":
            return channels[0], Blur(channels[2])
        return torch.cat(channels[:2], 1), Frequencies(channels[3])


def psnr(image: Tensor, truth: Tensor) -> Tensor:  # (b, c, h, w) in [0, 1] -> (b,)
    """Peak signal-to-noise ratio in dB, of images rounded to 8 bits as in the literature.

    Examples:
        >>> import torch
        >>> from gdeq.models.proximal import psnr
        >>> psnr(torch.full((1, 1, 4, 4), 0.5), torch.full((1, 1, 4, 4), 0.6))
        tensor([20.1720])
    """
    rounded = (255 * image.float()).clamp(0, 255).round()
    error = (rounded - 255 * truth.float()).square().flatten(1).mean(1)
    return 10 * (255**2 / error).log10()

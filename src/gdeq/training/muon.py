"""Muon (Keller Jordan 2024): momentum whose update is made orthogonal, matrix by matrix.

With U S Vᵀ the momentum of a weight matrix, the update is about U Vᵀ: all its directions count the
same.  Five Newton–Schulz steps bring the singular values near 1 (0.7 to 1.2), by products alone:

    X ← a X + (b A + c A²) X,    A = X Xᵀ,    X₀ = G / ‖G‖_F

A convolution's kernel (out, in, k, k) is the matrix (out, in·k·k).  The size of an update is

    "shape":     lr √max(1, out / (in·k·k)), so that each row of it has about the length lr
    "relative":  lr ‖W‖_F / ‖U Vᵀ‖_F, so that W changes by this share of itself; for weights whose
                 scale does not matter because a norm follows them, which is all of them in MDEQ

What is no such matrix (biases, norms, gains, the first and the last layer) is left to Adam.

On a GPU small matrices of different shapes are filled up with zeros to one shape, which changes
nothing in the result and saves hundreds of short kernels; nothing is asked of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Of one Newton–Schulz step on a large GPU, in µs: starting its kernels; per flop; per number moved.
LAUNCHES, FLOP, MOVED = 9.0, 3e-9, 1e-6


def orthogonalize(x: Tensor) -> Tensor:  # (n, rows, columns), rows <= columns
    """About U Vᵀ of each matrix; a matrix of zeros stays one."""
    a, b, c = NEWTON_SCHULZ
    length = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=_at_least_float32(x))
    x = (x / length.clamp_min(torch.finfo(length.dtype).tiny)).to(x.dtype)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@dataclass
class Stack:
    """Matrices that go through Newton–Schulz together, each lying or standing as it is wider."""

    rows: int
    columns: int
    members: list[int] = field(default_factory=list)  # numbers of the parameters

    def cost(self, count: int, rows: int, columns: int) -> float:
        return count * (6 * rows * rows * columns * FLOP + 4 * rows * columns * MOVED)


def stacks(shapes: Sequence[tuple[int, int]], pad: bool) -> list[Stack]:
    """Which of these matrices (rows <= columns) go together; with ``pad`` also unequal ones."""
    found: list[Stack] = []
    order = sorted(range(len(shapes)), key=lambda n: (-shapes[n][0] * shapes[n][1], shapes[n], n))
    for number in order:
        rows, columns = shapes[number]
        best, least = None, LAUNCHES
        for stack in found:
            if (stack.rows, stack.columns) == (rows, columns):
                best = stack
                break
            if not pad:
                continue
            count = len(stack.members)
            size = max(rows, stack.rows), max(columns, stack.columns)
            extra = stack.cost(count + 1, *size) - stack.cost(count, stack.rows, stack.columns)
            extra -= stack.cost(1, rows, columns)
            if extra < least:
                best, least = stack, extra
        if best is None:
            best = Stack(rows, columns)
            found.append(best)
        best.rows, best.columns = max(rows, best.rows), max(columns, best.columns)
        best.members.append(number)
    return found


def _view(place: Tensor, shape: torch.Size, lying: bool) -> Tensor:
    """A matrix in a stack as the parameter that it stands for, (out, in, ...).

    The columns are ordered as channels-last memory is; their order does not matter.
    """
    inner = shape[1:].numel()
    rows, columns = (shape[0], inner) if lying else (inner, shape[0])
    matrix = place[:rows, :columns]
    matrix = matrix if lying else matrix.T
    return matrix.unflatten(1, (*shape[2:], shape[1])).movedim(-1, 1)


class _Orthogonal:
    """The stacks of one group's parameters, in memory that stays where it is."""

    def __init__(self, params: list[Tensor], pad: bool | None) -> None:
        device, kept = params[0].device, params[0].dtype
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu and kept == torch.float32 else kept
        lying = [p.shape[0] <= p.shape[1:].numel() for p in params]
        shapes = [(p.shape[0], p.shape[1:].numel()) for p in params]
        ordered = [s if wide else (s[1], s[0]) for s, wide in zip(shapes, lying, strict=True)]
        self.dtype = kept
        self.shapes = [p.shape for p in params]
        self.lying = lying
        self.stacks = stacks(ordered, on_gpu if pad is None else pad)
        # Zero beyond the matrices, and never written there.
        self.places = [
            torch.zeros(len(s.members), s.rows, s.columns, dtype=dtype, device=device)
            for s in self.stacks
        ]
        self.inputs = self._views(self.places)
        order = [number for stack in self.stacks for number in stack.members]
        self.order = torch.tensor(order, device=device)
        by_shape = [max(1.0, shapes[n][0] / shapes[n][1]) ** 0.5 for n in order]
        self.by_shape = torch.tensor(by_shape, dtype=kept, device=device)

    def _views(self, places: list[Tensor]) -> list[Tensor]:
        """One for each parameter, in their order."""
        found: dict[int, Tensor] = {}
        for stack, place in zip(self.stacks, places, strict=True):
            for at, number in enumerate(stack.members):
                found[number] = _view(place[at], self.shapes[number], self.lying[number])
        return [found[number] for number in range(len(self.shapes))]

    def __call__(
        self, updates: list[Tensor], params: list[Tensor], rate: Any, relative: bool
    ) -> list[Tensor]:
        """The orthogonal updates, each already of its size: -> as the parameters."""
        for place, update in zip(self.inputs, updates, strict=True):
            place.copy_(update)
        done = [orthogonalize(place).to(self.dtype) for place in self.places]
        if relative:
            lengths = torch.cat([torch.linalg.vector_norm(x, dim=(1, 2)) for x in done])
            weights = torch.stack(torch._foreach_norm(params))[self.order]
            sizes = weights / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        else:
            sizes = self.by_shape
        parts = (rate * sizes).split([len(x) for x in done])
        return self._views([x.mul_(s[:, None, None]) for x, s in zip(done, parts, strict=True)])


class Muon(torch.optim.Optimizer):
    """Groups with ``orthogonal`` get Muon's update, the others Adam's with decoupled decay.

    scale: "shape" or "relative", see above.
    pad: whether matrices of unlike shapes share a stack; by default on a GPU.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        *,
        scale: str = "shape",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        pad: bool | None = None,
    ) -> None:
        self.pad, self.relative = pad, scale == "relative"
        # Adam's counter of steps lies on the GPU, as `load_state_dict` is told by these two.
        on_gpu = next(iter(groups[0]["params"])).device.type == "cuda"
        more = {"fused": on_gpu or None, "capturable": on_gpu, "weight_decay": 0.0}
        super().__init__(
            groups,
            {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "orthogonal": False}
            | more,
        )
        self.made: dict[int, _Orthogonal] = {}  # by the number of the group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            # Autocast would take float32 products for ones that may be rounded.
            with torch.autocast(params[0].device.type, enabled=False):
                if group["orthogonal"]:
                    self._orthogonal(number, group, params)
                else:
                    self._adam(group, params)
        return loss

    def _orthogonal(self, number: int, group: dict[str, Any], params: list[Tensor]) -> None:
        made = self.made.get(number)
        if made is None or made.shapes != [p.shape for p in params]:
            made = self.made[number] = _Orthogonal(params, self.pad)
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        momentum = group["momentum"]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads, alpha=1 - momentum)
        updates = list(torch._foreach_mul(buffers, momentum))  # Nesterov's look ahead
        torch._foreach_add_(updates, grads, alpha=1 - momentum)
        rate = group["lr"]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_add_(params, made(updates, params, rate, self.relative), alpha=-1)

    def _adam(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                where = p.device if group["capturable"] else "cpu"
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=where)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            fused=group["fused"],
            capturable=group["capturable"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Matrices between the first and the last; these two; all that is no matrix.

    A weight-normalised layer has its direction among the matrices and its gain, one number a row,
    among the rest.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.dim() > 1 and p.numel() > p.shape[0]]
    rest = [p for p in params if not (p.dim() > 1 and p.numel() > p.shape[0])]
    return matrices[1:-1], matrices[:1] + matrices[1:][-1:], rest

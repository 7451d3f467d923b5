"""Muon (Keller Jordan 2024): momentum whose update is made orthogonal, matrix by matrix.

With U S Vᵀ the momentum of a weight matrix, the update is about U Vᵀ: all its directions count the
same.  Five Newton–Schulz steps bring the singular values near 1 (0.7 to 1.2), by products alone:

    X ← a X + (b A + c A²) X,    A = X Xᵀ,    X₀ = G / ‖G‖_F

A convolution's kernel (out, in, k, k) is the matrix (out, in·k·k).  An update has the size
lr √max(1, out / (in·k·k)), so that each row of it has about the length lr.

What is no such matrix (biases, norms, gains, the first and the last layer) is left to Adam.

Matrices go through Newton–Schulz in stacks.  On a GPU small ones of unlike shapes share a stack,
filled up with zeros, which changes nothing in the result and saves hundreds of short kernels; the
stacks go side by side, in bf16, and nothing is asked of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gdeq.fast.streams import Parallel, Serial

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Of one Newton–Schulz step on a large GPU, in µs: starting its kernels; per flop; per number moved.
LAUNCHES, FLOP, MOVED = 9.0, 2.5e-9, 1e-6
BRANCHES = 8  # stacks side by side: none of those of MDEQ-LARGE fills a large GPU alone


def orthogonalize(x: Tensor) -> Tensor:  # (n, rows, columns), rows <= columns
    """About U Vᵀ of each matrix; a matrix of zeros stays one."""
    a, b, c = NEWTON_SCHULZ
    # In float64, where squares of float32 stay in the range.  (Those of float64 itself may leave
    # it; then a matrix as small, or as large, has no update.)
    lengths = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float64)
    lengths = torch.where(lengths > 0, lengths, 1.0).to(torch.promote_types(x.dtype, torch.float32))
    x = torch.div(x, lengths, out=torch.empty_like(x))
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        # a I + b A + c A²: with a X in place of a I, X would be copied to be added to.
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        x = torch.bmm(factor, x)
    return x


@dataclass(frozen=True)
class Stack:
    """Matrices that go through Newton–Schulz together, none of them higher than wide."""

    rows: int
    columns: int
    members: tuple[int, ...]  # numbers of the matrices

    @property
    def flops(self) -> int:
        """Of one step."""
        return len(self.members) * (4 * self.rows**2 * self.columns + 2 * self.rows**3)

    @property
    def cost(self) -> float:
        """Of one step, in µs, without the starting of its kernels."""
        return self.flops * FLOP + 4 * len(self.members) * self.rows * self.columns * MOVED

    def __add__(self, other: Stack) -> Stack:
        rows, columns = max(self.rows, other.rows), max(self.columns, other.columns)
        return Stack(rows, columns, self.members + other.members)


def stacks(shapes: Sequence[tuple[int, int]], pad: bool) -> list[Stack]:
    """Which of these matrices (rows <= columns) go together; with ``pad`` also unequal ones.

    Of all pairs of stacks, the one that saves most is joined, until none saves anything.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for number, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(number)
    found = [Stack(*shape, tuple(members)) for shape, members in alike.items()]
    while pad and len(found) > 1:
        pairs = [(one + other, one, other) for one, other in combinations(found, 2)]
        extra = [both.cost - one.cost - other.cost for both, one, other in pairs]
        both, *joined = pairs[extra.index(min(extra))]
        if min(extra) >= LAUNCHES:
            break
        found = [stack for stack in found if stack not in joined] + [both]
    return sorted(found, key=lambda stack: -stack.cost)


def part_of(place: Tensor, x: Tensor) -> Tensor:
    """Where the matrix x, or its transpose, lies in a stack, in the shape of x."""
    out, inner = x.shape[0], x.shape[1:].numel()
    part = place[:out, :inner] if out <= inner else place[:inner, :out].mT
    return part.view(x.shape)


def orthogonal(directions: list[Tensor], pad: bool) -> list[Tensor]:
    """Of each matrix or kernel its update, of the length that its shape asks for."""
    device, kept = directions[0].device, directions[0].dtype
    dtype = torch.bfloat16 if device.type == "cuda" and kept == torch.float32 else kept
    shapes = [(x.shape[0], x.shape[1:].numel()) for x in directions]
    found = [torch.empty_like(x) for x in directions]
    branches = Parallel(device, BRANCHES, grad=False) if device.type == "cuda" else Serial()
    load, used = [0.0] * BRANCHES, []
    for stack in stacks([(min(shape), max(shape)) for shape in shapes], pad):
        branch = load.index(min(load))
        load[branch] += LAUNCHES + stack.cost
        size = len(stack.members), stack.rows, stack.columns
        with branches.on(branch):
            filled = torch.zeros(size, dtype=dtype, device=device)
            for place, number in zip(filled, stack.members, strict=True):
                part_of(place, directions[number]).copy_(directions[number])
            made = orthogonalize(filled)
            for place, number in zip(made, stack.members, strict=True):
                out, inner = shapes[number]
                length = max(1.0, out / inner) ** 0.5
                torch.mul(part_of(place, found[number]), length, out=found[number])
            used.append((filled, made))  # until the branches have joined
    branches.join(found)
    return found


class Muon(torch.optim.Optimizer):
    """Groups with ``orthogonal`` get Muon's update, the others Adam's with decoupled decay.

    pad: whether matrices of unlike shapes share a stack; by default on a GPU.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        pad: bool | None = None,
    ) -> None:
        # Adam's counter of steps lies on the GPU, as `load_state_dict` is told by these two.
        on_gpu = groups[0]["params"][0].device.type == "cuda"
        self.pad = on_gpu if pad is None else pad
        more = {"fused": on_gpu or None, "capturable": on_gpu, "weight_decay": 0.0}
        kept = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "orthogonal": False}
        super().__init__(groups, kept | more)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            # Autocast would take float32 products for ones that may be rounded.
            with torch.autocast(params[0].device.type, enabled=False):
                if group["orthogonal"]:
                    self._orthogonal(group, params)
                else:
                    self._adam(group, params)
        return loss

    def _orthogonal(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        grads: Any = [p.grad for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, buffers, group["momentum"])  # Nesterov's look ahead
        updates = orthogonal(list(ahead), self.pad)
        torch._foreach_mul_(updates, group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(params, updates)

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

"""Muon (Keller Jordan 2024): momentum whose update is made orthogonal, matrix by matrix.

With U S Vᵀ the momentum of a weight matrix, the update is about U Vᵀ: all its directions count the
same.  Five Newton–Schulz steps bring the singular values near 1 (0.7 to 1.2), by products alone:

    X ← a X + (b A + c A²) X,    A = X Xᵀ,    X₀ = G / ‖G‖_F

A convolution's kernel (out, in, k, k) is the matrix (out, in·k·k).  An update has the size
lr √max(1, out / (in·k·k)), so that each row of it has about the length lr.

What is no such matrix (biases, norms, gains, the first and the last layer) is left to Adam.

The momentum of all of them lies in one piece of memory, stack by stack, and the updates are made in
another: a few long kernels.  On a GPU small matrices of different shapes are filled up with zeros
to one shape, which changes nothing in the result and saves hundreds of short kernels, and the
stacks go side by side; nothing is asked of the host.
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


def orthogonalize(
    x: Tensor, dtype: torch.dtype | None = None, lengths: Tensor | None = None
) -> Tensor:
    """About U Vᵀ of each matrix; a matrix of zeros stays one.

    x: (n, rows, columns), rows <= columns.  dtype: of the products and the result, if not of x.
    lengths: (n,), `lengths_of` them, where they are known.
    """
    a, b, c = NEWTON_SCHULZ
    lengths = lengths_of(list(x)) if lengths is None else lengths
    x = torch.div(x, lengths[:, None, None], out=torch.empty_like(x, dtype=dtype))
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        # a I + b A + c A²: with a X in place of a I, X would be copied to be added to.
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        x = torch.bmm(factor, x)
    return x


def lengths_of(matrices: list[Tensor]) -> Tensor:  # -> (n,)
    """‖X‖_F of each, 1 for zeros.  In float64, where squares of float32 stay in the range.

    (Those of float64 itself may leave it; then a matrix as small, or as large, has no update.)
    """
    lengths = torch.stack(torch._foreach_norm(matrices, 2.0, torch.float64))
    kept = torch.promote_types(matrices[0].dtype, torch.float32)
    return torch.where(lengths > 0, lengths, 1.0).to(kept)


@dataclass(frozen=True)
class Stack:
    """Matrices that go through Newton–Schulz together."""

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
        pairs = ((one + other, one, other) for one, other in combinations(found, 2))
        best = min(pairs, key=lambda pair: _extra(*pair))
        if _extra(*best) >= LAUNCHES:
            break
        found = [stack for stack in found if stack not in best[1:]] + [best[0]]
    return sorted(found, key=lambda stack: -stack.cost)


def _extra(both: Stack, one: Stack, other: Stack) -> float:
    return both.cost - one.cost - other.cost


class _Place:
    """A stack's part of the flat memory, where its matrices (out, in) lie one after the other."""

    def __init__(self, stack: Stack, shapes: list[tuple[int, int]], start: int) -> None:
        """shapes: (out, in) of the members."""
        self.stack, self.start = stack, start
        self.shape = len(stack.members), *shapes[0]
        self.lying = shapes[0][0] <= shapes[0][1]
        self.size = sum(out * inner for out, inner in shapes)
        # Of each number in the stack, where not all are alike: filled up, or some standing.
        self.positions: Tensor | None = None
        self.filled: Tensor | None = None
        if len(set(shapes)) > 1:
            cells = torch.arange(len(shapes) * stack.rows * stack.columns)
            cells = cells.view(len(shapes), stack.rows, stack.columns)
            parts = []
            for cell, (out, inner) in zip(cells, shapes, strict=True):
                part = cell[:out, :inner] if out <= inner else cell[:inner, :out].T
                parts.append(part.flatten())
            self.positions = torch.cat(parts)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.positions is None:
            return
        self.positions = self.positions.to(device)
        shape = len(self.stack.members), self.stack.rows, self.stack.columns
        self.filled = torch.zeros(shape, dtype=dtype, device=device)  # beyond the matrices for ever

    def _matrices(self, flat: Tensor) -> Tensor:
        """Those of a stack in which all are alike, where they lie: (n, rows, columns)."""
        found = self._part(flat).view(self.shape)
        return found if self.lying else found.mT

    def _part(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size]

    def orthogonal(self, flat: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        if self.filled is None or self.positions is None:
            return orthogonalize(self._matrices(flat), dtype, lengths)
        self.filled.view(-1).index_copy_(0, self.positions, self._part(flat).to(dtype))
        return orthogonalize(self.filled, lengths=lengths)

    def put(self, x: Tensor, sizes: Tensor, flat: Tensor) -> None:
        """The matrices x, each times its size, to where they belong."""
        sizes = sizes[:, None, None]
        if self.positions is None:
            torch.mul(x, sizes, out=self._matrices(flat))
        else:
            scaled = (x * sizes).view(-1)
            torch.index_select(scaled, 0, self.positions, out=self._part(flat))


class _Orthogonal:
    """The momentum and the updates of one group's parameters, in the order of their stacks."""

    def __init__(self, params: list[Tensor], pad: bool | None) -> None:
        device, kept = params[0].device, params[0].dtype
        on_gpu = device.type == "cuda"
        self.params = params
        self.dtype = torch.bfloat16 if on_gpu and kept == torch.float32 else kept
        shapes = [(p.shape[0], p.shape[1:].numel()) for p in params]
        turned = [(out, inner) if out <= inner else (inner, out) for out, inner in shapes]
        pad = on_gpu if pad is None else pad
        self.places: list[_Place] = []
        start = 0
        for stack in stacks(turned, pad):
            place = _Place(stack, [shapes[n] for n in stack.members], start)
            place.to(device, self.dtype)
            start += place.size
            self.places.append(place)
        self.order = [n for place in self.places for n in place.stack.members]
        self.strides = [_strides(p) for p in params]
        self.momentum = torch.zeros(start, dtype=kept, device=device)
        self.buffers = self.views(self.momentum)
        by_shape = [max(1.0, shapes[n][0] / shapes[n][1]) ** 0.5 for n in self.order]
        self.by_shape = torch.tensor(by_shape, dtype=kept, device=device)
        self.on_gpu = on_gpu

    def views(self, flat: Tensor) -> list[Tensor]:
        """As the parameters, in their order."""
        found: dict[int, Tensor] = {}
        start = 0
        for n in self.order:
            found[n] = flat.as_strided(self.params[n].shape, self.strides[n], start)
            start += self.params[n].numel()
        return [found[n] for n in range(len(self.params))]

    def __call__(
        self, grads: list[Tensor], momentum: float, rate: Any, aside: Callable[[], None]
    ) -> Tensor:
        """The orthogonal updates, each already of its size.

        aside: the decay of the parameters, done at the same time.
        """
        flat = torch.empty_like(self.momentum)
        views = self.views(flat)
        torch._foreach_copy_(views, list(map(_with_strides, grads, self.strides)))
        self.momentum.lerp_(flat, 1 - momentum)
        flat.lerp_(self.momentum, momentum)  # Nesterov's look ahead
        lengths = lengths_of([views[n] for n in self.order])
        sizes = rate * self.by_shape
        each = [len(place.stack.members) for place in self.places]
        branches = Parallel(flat.device, BRANCHES, grad=False) if self.on_gpu else Serial()
        load, kept = [0.0] * BRANCHES, []
        for place, part, known in zip(
            self.places, sizes.split(each), lengths.split(each), strict=True
        ):
            branch = load.index(min(load))
            load[branch] += LAUNCHES + place.stack.cost
            with branches.on(branch):
                x = place.orthogonal(flat, known, self.dtype)
                place.put(x, part, flat)
                kept.append(x)  # until the branches have joined
        with branches.on(load.index(min(load))):
            aside()
        branches.join([flat])
        return flat


def _strides(p: Tensor) -> tuple[int, ...]:
    """Those of the parameter, or of a contiguous one where its rows are not in one piece."""
    dense = torch.empty_like(p, device="meta")  # keeps the strides of what has no gaps
    if dense.stride() == p.stride() and p.stride(0) == p.shape[1:].numel():
        return p.stride()
    return torch.empty(p.shape, device="meta").stride()


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x, or a copy where it lies in another order."""
    ways = zip(x.stride(), strides, x.shape, strict=True)
    if all(own == wanted for own, wanted, size in ways if size > 1):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


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
        groups = [{**group, "params": list(group["params"])} for group in groups]
        params = [p for group in groups for p in group["params"]]
        flat = [p for g in groups if g.get("orthogonal") for p in g["params"] if p.dim() < 2]
        if flat:
            raise ValueError(
                f"a parameter of shape {tuple(flat[0].shape)} is no matrix and cannot be made "
                "orthogonal: put it into a group without 'orthogonal'"
            )
        self.pad = pad
        # Adam's counter of steps lies on the GPU, as `load_state_dict` is told by these two.
        on_gpu = bool(params) and params[0].device.type == "cuda"
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
        if made is None or list(map(id, made.params)) != list(map(id, params)):
            made = self.made[number] = _Orthogonal(params, self.pad)
        for p, buffer in zip(params, made.buffers, strict=True):
            kept = self.state[p].get("momentum_buffer")
            if kept is not buffer:
                if kept is not None:  # from a checkpoint
                    buffer.copy_(kept)
                self.state[p]["momentum_buffer"] = buffer
        rate = group["lr"]

        def decay() -> None:
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - rate * group["weight_decay"])

        grads = [p.grad for p in params if p.grad is not None]
        updates = made(grads, group["momentum"], rate, decay)
        torch._foreach_sub_(params, made.views(updates))

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

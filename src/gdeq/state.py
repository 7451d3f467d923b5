"""States: the user's nested tensors, and the batched vectors that solvers work on.

A state is a tensor ``(batch, ...)`` or any nesting of tuples, lists and dicts of them.  Solvers see
``(batch, d)`` in float32 or better; the user's f sees the structure and dtypes that it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gdeq.options import count, describe

State = Any  # a tensor, or any nesting of tuples, lists and dicts of tensors
DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
Vectorized = Callable[[Tensor], Tensor]  # (batch, d) -> (batch, d)


class StateError(ValueError):
    """The state, or what f made of it, does not have the form a solve needs.

    Examples:
        >>> import torch, gdeq
        >>> try:
        ...     gdeq.solve(lambda z: z[:, :2], torch.zeros(1, 3))
        ... except gdeq.StateError as error:
        ...     print(error)
        f(z) has shape (1, 2), but the state there has (1, 3); f must keep the shape of z
    """


class StateTypeError(StateError, TypeError):
    """A part of the state is not a floating-point tensor."""


class StateSpace:
    """The layout of one state: how its tensors lie in a batched vector, and what f must return."""

    def __init__(self, z0: State) -> None:
        named, self.spec = _named_leaves(z0, "z0")
        if not named:
            raise StateError("z0 holds no tensor; a state needs at least one")
        first_path, first = named[0]
        for path, leaf in named:
            if leaf.dtype not in DTYPES:
                raise StateTypeError(
                    f"{path} has dtype {leaf.dtype}; a state must be floating point "
                    "(use z0.float(), or torch.view_as_real for complex states)"
                )
            if leaf.is_nested:
                raise StateTypeError(
                    f"{path} is a nested tensor; a state has samples of one shape: pad them, "
                    "use torch.nested.to_padded_tensor(z0, 0.0)"
                )
            if leaf.layout != torch.strided:
                raise StateTypeError(f"{path} is sparse; a state must be dense: use z0.to_dense()")
            if leaf.dim() == 0:
                raise StateError(
                    f"{path} has no batch dimension; a state is (batch, ...): "
                    "use z0.unsqueeze(0) for a single sample"
                )
            if leaf.shape[0] != first.shape[0]:
                raise StateError(
                    f"batch sizes differ: {first_path} has {count(first.shape[0], 'sample')}, "
                    f"{path} has {leaf.shape[0]}; the first dimension of every tensor is the batch"
                )
            if leaf.device != first.device:
                raise StateError(
                    f"{first_path} is on {first.device} but {path} is on {leaf.device}; "
                    "move the whole state to one device"
                )
        self.paths = [path.removeprefix("z0") for path, _ in named]
        self.batch, self.device = first.shape[0], first.device
        self.shapes = [leaf.shape for _, leaf in named]
        self.dtypes = [leaf.dtype for _, leaf in named]
        self.sizes = [leaf.shape[1:].numel() for _, leaf in named]
        # An image in channels-last memory stays as it lies, or every call of f would move it.
        self.channels_last = [
            leaf.dim() == 4
            and leaf.is_contiguous(memory_format=torch.channels_last)
            and not leaf.is_contiguous()
            for _, leaf in named
        ]
        self.size = sum(self.sizes)
        self.dtype = torch.float32  # of the solvers' algebra: float32 or better
        for dtype in self.dtypes:
            self.dtype = torch.promote_types(self.dtype, dtype)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which PyTorch's own description of a structure warns of."""
        return {**vars(self), "spec": self.state(list(range(len(self.paths))))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "spec": pytree.tree_structure(state["spec"])})

    # ---- between the user's state and its tensors

    def leaves(self, value: State, who: str, cast: bool) -> list[Tensor]:
        """The tensors of ``who``, a state of this form; cast: other floating dtypes will do."""
        found, spec = pytree.tree_flatten(value)
        if spec != self.spec or not all(isinstance(leaf, Tensor) for leaf in found):
            found = self._in_order_of_z0(value, who)
        for path, leaf, shape, dtype in zip(
            self.paths, found, self.shapes, self.dtypes, strict=True
        ):
            if leaf.shape != shape:
                raise StateError(
                    f"{who}{path} has shape {tuple(leaf.shape)}, but the state there has "
                    f"{tuple(shape)}; f must keep the shape of z"
                )
            if leaf.device != self.device:
                raise StateError(
                    f"{who}{path} is on {leaf.device}, but the state is on {self.device}"
                )
            if leaf.dtype != dtype and not (cast and leaf.is_floating_point()):
                raise StateError(
                    f"{who}{path} has dtype {leaf.dtype}, but the state there has {dtype}; f must "
                    "keep the dtype of z (cast inside f, or give z0 in the dtype f works in)"
                )
        return found

    def _in_order_of_z0(self, value: State, who: str) -> list[Tensor]:
        """Keys of a dict may come in another order, and a list may stand for a tuple."""
        named, _ = _named_leaves(value, who)
        by_path = {path.removeprefix(who): leaf for path, leaf in named}
        if by_path.keys() != set(self.paths):
            known = self.state([torch.empty(0)] * len(self.paths))
            raise StateError(
                f"{who} has the structure {_sketch(value)}, but z0 has {_sketch(known)}; "
                "f must return what it was given, in the same nesting"
            )
        return [by_path[path] for path in self.paths]

    def state(self, leaves: Sequence[Any]) -> State:
        """The tensors in the structure of z0."""
        return pytree.tree_unflatten(leaves, self.spec)

    # ---- between tensors and batched vectors

    def join(
        self,
        leaves: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        factor: Tensor | None = None,
    ) -> Tensor:
        """The tensors of a state as one batched vector, (batch, d); a single one may be shared.

        dtype: that of the solvers' algebra by default.  factor: (batch,), multiplies each sample.
        """
        rows = [
            part.to(dtype or self.dtype).reshape(self.batch, size)
            for part, size in zip(self.in_memory_order(leaves), self.sizes, strict=True)
        ]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        return flat if factor is None else flat * factor.unsqueeze(1)

    def split(
        self, flat: Tensor, dtypes: Sequence[torch.dtype], factor: Tensor | None = None
    ) -> list[Tensor]:
        """The inverse of `join`, in these dtypes.  flat: (batch, d)."""
        flat = flat if factor is None else flat * factor.unsqueeze(1)
        parts = [flat] if len(self.sizes) == 1 else list(flat.split(self.sizes, dim=1))
        return [
            self.shaped(part, i).to(dtype)
            for i, (part, dtype) in enumerate(zip(parts, dtypes, strict=True))
        ]

    def copies(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The same values in memory of their own."""
        return [leaf.clone() for leaf in leaves]

    def in_memory_order(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The tensors with their dimensions in the order in which they lie in memory."""
        return [
            leaf.permute(0, 2, 3, 1) if last else leaf
            for leaf, last in zip(leaves, self.channels_last, strict=True)
        ]

    def shaped(self, part: Tensor, index: int) -> Tensor:
        """The inverse of `in_memory_order` for one tensor, whatever its shape is now."""
        shape = self.shapes[index]
        if not self.channels_last[index]:
            return part.reshape(shape)
        batch, channels, height, width = shape
        return part.reshape(batch, height, width, channels).permute(0, 3, 1, 2)

    def pack(self, z: State) -> Tensor:  # -> (batch, d)
        """A state of this layout as one batched vector, in memory of its own."""
        flat = self.join(self.leaves(z, "the state", cast=True))
        return flat.clone() if len(self.sizes) == 1 else flat

    def unpack(self, flat: Tensor) -> State:  # flat: (batch, d)
        """The state that a batched vector stands for, in its own shapes and dtypes."""
        return self.state(self.split(flat, self.dtypes))


class StateMap:
    """The user's f, on the tensors of a state and on batched vectors.

    The algebra around f runs outside autocast (`full_precision`), so the autocast state of the
    caller is kept here and restored for each call.  Under autocast f may return half precision.

    precision: the spacing of the numbers that f computes with.
    """

    def __init__(self, space: StateSpace, f: Callable[[State], State]) -> None:
        if not callable(f):
            raise TypeError(f"f must be callable, a function of the state, got {describe(f)}")
        self.space, self.f = space, f
        self.kind = space.device.type
        self.autocast_dtype = autocast_dtype(self.kind)
        self.precision = max(torch.finfo(dtype).eps for dtype in space.dtypes)
        if self.autocast_dtype and torch.float64 not in space.dtypes:  # which autocast leaves alone
            self.precision = max(self.precision, torch.finfo(self.autocast_dtype).eps)

    def __call__(self, flat: Tensor) -> Tensor:  # (batch, d) -> (batch, d)
        joined = self.space.join(self.leaves(self.space.split(flat, self.space.dtypes)))
        inside = self.inside(flat)
        return joined if inside is None else torch.where(inside, joined, torch.nan)

    def inside(self, flat: Tensor) -> Tensor | None:  # (batch, d) -> (batch, 1)
        """Where f can be given z at all; None where that is everywhere.

        z is kept in float32 and may leave the range of float16, which f need not show.
        """
        if torch.float16 not in self.space.dtypes:
            return None
        halves = [dtype == torch.float16 for dtype in self.space.dtypes]
        most = torch.finfo(torch.float16).max
        parts = zip(flat.split(self.space.sizes, dim=1), halves, strict=True)
        within = [part.abs() <= (most if half else torch.inf) for part, half in parts]
        return torch.cat(within, dim=1).all(1, keepdim=True)

    def leaves(self, z: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of f(z) for those of z."""
        before = versions(z)
        with (
            torch.autocast(self.kind, dtype=self.autocast_dtype)
            if self.autocast_dtype
            else contextlib.nullcontext()
        ):
            out = self.f(self.space.state(z))
        if before != versions(z):
            raise StateError(
                "f changed its argument z in place; the solver still needs it: use operations "
                "that return a new tensor (nn.ReLU(inplace=False), z = z + ... for z += ...)"
            )
        return self.space.leaves(out, "f(z)", cast=self.autocast_dtype is not None)


def versions(leaves: Sequence[Tensor]) -> list[int | None]:
    """How often each was changed in place, where that is known."""
    if torch.compiler.is_compiling():
        return []
    return [None if leaf.is_inference() else leaf._version for leaf in leaves]


def detached(z: State) -> State:
    """The same tensors without autograd history."""
    return pytree.tree_map(lambda leaf: leaf.detach(), z)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Outside autocast: the solvers' own algebra must not be rounded to half precision."""
    if autocast_dtype(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _named_leaves(value: State, who: str) -> tuple[list[tuple[str, Tensor]], pytree.TreeSpec]:
    """Each tensor with its place, as ``z0[1]['a']``, and the structure."""
    found, _ = pytree.tree_flatten_with_path(_unnamed(value))
    named = [(who + pytree.keystr(path), leaf) for path, leaf in found]
    for path, leaf in named:
        if not isinstance(leaf, Tensor):
            got = type(leaf).__name__
            if is_dataclass(leaf):
                got += f"; call torch.export.register_dataclass({got}) once"
            raise StateTypeError(
                f"{path} must be a tensor or a tuple, list or dict of tensors, got {got}"
            )
    structure = pytree.tree_structure(value)
    if structure.num_leaves != len(named):  # PyTorch takes an instance of a subclass for a leaf
        structure = pytree.tree_structure(_unnamed(value))
    return named, structure


def _unnamed(value: State) -> State:
    """The same in plain dicts and tuples, so that a place has one name in all of them."""
    if isinstance(value, dict):
        return {key: _unnamed(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_unnamed(part) for part in value)
    return value


def _sketch(value: State) -> str:
    return repr(pytree.tree_map(lambda _: "tensor", value)).replace("'tensor'", "tensor")


def autocast_dtype(kind: str) -> torch.dtype | None:
    """That of autocast as it is now on such a device; None where it is off."""
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # it is an error to ask of meta
    return torch.get_autocast_dtype(kind) if on else None

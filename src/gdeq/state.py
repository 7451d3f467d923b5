"""Many tensors (multiscale, dict, tuple) <-> one batched vector.

A state is a tensor ``(batch, ...)`` or any nesting of tuples, lists and dicts of them.  Solvers see
``(batch, d)`` in float32 or better; the user's ``f`` sees the structure and dtypes it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdeq.fast.kernels import choice
from gdeq.options import count

State = Any  # a tensor, or any nesting of tuples, lists and dicts of tensors
Vectorized = Callable[[Tensor], Tensor]  # (batch, d) -> (batch, d)


class StateError(ValueError):
    """The state, or what f made of it, does not have the form a solve needs."""


class StateTypeError(StateError, TypeError):
    """A part of the state is not a floating-point tensor."""


def _flatten(value: State, path: str, leaves: list[tuple[str, Tensor]], like: Any = None) -> Any:
    """Collect the leaves in order; return the structure with ``None`` where a tensor stood.

    Dicts are read in the order of ``like``, so that f may return its keys in another order.
    """
    if isinstance(value, Tensor):
        leaves.append((path, value))
        return None
    if isinstance(value, dict):
        same_keys = isinstance(like, dict) and like.keys() == value.keys()
        return {
            key: _flatten(value[key], f"{path}[{key!r}]", leaves, like[key] if same_keys else None)
            for key in (like if same_keys else value)
        }
    if isinstance(value, (tuple, list)):
        pairs = like if isinstance(like, (tuple, list)) and len(like) == len(value) else value
        parts = [
            _flatten(part, f"{path}[{i}]", leaves, known if pairs is like else None)
            for i, (part, known) in enumerate(zip(value, pairs, strict=True))
        ]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    raise StateTypeError(
        f"{path} must be a tensor or a tuple, list or dict of tensors, got {type(value).__name__}"
    )


def _rebuild(structure: Any, leaves: list[Tensor]) -> State:
    """The inverse of `_flatten`; consumes ``leaves`` from the front."""
    if structure is None:
        return leaves.pop(0)
    if isinstance(structure, dict):
        return {key: _rebuild(part, leaves) for key, part in structure.items()}
    parts = [_rebuild(part, leaves) for part in structure]
    if isinstance(structure, list):
        return parts
    return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)


def _same_structure(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, dict) or isinstance(b, dict):
        if not (isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys()):
            return False
        return all(_same_structure(a[key], b[key]) for key in a)
    # A list and a tuple of the same parts are alike: nobody means to change the one into the other.
    return len(a) == len(b) and all(_same_structure(x, y) for x, y in zip(a, b, strict=True))


def _sketch(structure: Any) -> str:
    if structure is None:
        return "tensor"
    if isinstance(structure, dict):
        return "{" + ", ".join(f"{k!r}: {_sketch(v)}" for k, v in structure.items()) + "}"
    return "(" + ", ".join(_sketch(part) for part in structure) + ")"


def copied(z: State) -> State:
    """The same values in memory of their own, without autograd history."""
    leaves: list[tuple[str, Tensor]] = []
    structure = _flatten(z, "z", leaves)
    return _rebuild(structure, [leaf.detach().clone() for _, leaf in leaves])


def matched(value: State, like: State, who: str) -> list[tuple[Tensor, Tensor]]:
    """The tensors of a state beside those of one that has the form it must have.

    Raises a `StateError` that says what is expected.  Floating dtypes may differ: under autocast a
    network returns half precision, whatever the state has.
    """
    wanted: list[tuple[str, Tensor]] = []
    structure = _flatten(like, "the state", wanted)
    found: list[tuple[str, Tensor]] = []
    given = _flatten(value, who, found, structure)
    if not _same_structure(given, structure):
        raise StateError(
            f"{who} has the structure {_sketch(given)}, but the state has {_sketch(structure)}"
        )
    for (path, leaf), (_, model) in zip(found, wanted, strict=True):
        if leaf.shape != model.shape:
            raise StateError(
                f"{path} has shape {tuple(leaf.shape)}, but the state there has "
                f"{tuple(model.shape)}"
            )
        if not leaf.is_floating_point():
            raise StateTypeError(f"{path} has dtype {leaf.dtype}, but the state is floating point")
        if leaf.device != model.device:
            raise StateError(f"{path} is on {leaf.device}, but the state is on {model.device}")
    return [(leaf, model) for (_, leaf), (_, model) in zip(found, wanted, strict=True)]


def conformed(value: State, like: State, who: str) -> State:
    """A state in the structure, dtypes and memory order of another, without autograd history."""
    leaves = []
    for leaf, model in matched(value, like, who):
        same = leaf.dtype == model.dtype and leaf.stride() == model.stride()
        leaves.append(leaf.detach() if same else torch.empty_like(model).copy_(leaf.detach()))
    return _rebuild(_flatten(like, "the state", []), leaves)


class StateSpace:
    """The layout of one state: how its tensors lie in a batched vector, and what f must return."""

    def __init__(self, z0: State) -> None:
        leaves: list[tuple[str, Tensor]] = []
        self.structure = _flatten(z0, "z0", leaves)
        if not leaves:
            raise StateError("z0 holds no tensor; a state needs at least one")
        first = leaves[0][1]
        for path, leaf in leaves:
            if not leaf.is_floating_point():
                raise StateTypeError(
                    f"{path} has dtype {leaf.dtype}; a state must be floating point "
                    "(use z0.float(), or torch.view_as_real for complex states)"
                )
            if leaf.dim() == 0:
                raise StateError(
                    f"{path} has no batch dimension; a state is (batch, ...): "
                    "use z0.unsqueeze(0) for a single sample"
                )
            if leaf.shape[0] != first.shape[0]:
                raise StateError(
                    f"batch sizes differ: {leaves[0][0]} has {count(first.shape[0], 'sample')}, "
                    f"{path} has {leaf.shape[0]}; the first dimension of every tensor is the batch"
                )
            if leaf.device != first.device:
                raise StateError(
                    f"{leaves[0][0]} is on {first.device} but {path} is on {leaf.device}; "
                    "move the whole state to one device"
                )
        self.batch = first.shape[0]
        self.device = first.device
        self.shapes = [leaf.shape for _, leaf in leaves]
        self.dtypes = [leaf.dtype for _, leaf in leaves]
        self.sizes = [leaf.shape[1:].numel() for _, leaf in leaves]
        # An image in channels-last memory stays as it lies, or every call of f would move it.
        self.channels_last = [_is_channels_last(leaf) for _, leaf in leaves]
        self.size = sum(self.sizes)
        self.dtype = torch.float32  # solver algebra: float32 or better
        for dtype in self.dtypes:
            self.dtype = torch.promote_types(self.dtype, dtype)

    def join(self, leaves: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The tensors of a state as one batched vector, (batch, d); a single one may be shared.

        dtype: the default is that of the solvers' algebra.
        """
        dtype = dtype or self.dtype
        parts = self._in_order(leaves)
        kernels = self._kernels(leaves[0], [leaf.dtype for leaf in leaves])
        if kernels is not None:
            found: Tensor = kernels.join(self._flat(parts), dtype)
            return found
        rows = [
            part.to(dtype).reshape(self.batch, size)
            for part, size in zip(parts, self.sizes, strict=True)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def split(self, flat: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:  # (batch, d)
        """The inverse of `join`, in these dtypes."""
        kernels = self._kernels(flat, dtypes)
        if kernels is not None:
            parts = kernels.split(flat, self.sizes, dtypes[0])
            return [self._shaped(part, i) for i, part in enumerate(parts)]
        parts = [flat] if len(self.sizes) == 1 else list(flat.split(self.sizes, dim=1))
        return [
            self._shaped(part, i).to(dtype)
            for i, (part, dtype) in enumerate(zip(parts, dtypes, strict=True))
        ]

    def join_scaled(self, leaves: Sequence[Tensor], factor: Tensor) -> Tensor:  # -> (batch, d)
        """`join` times a factor of each sample, (batch,); without autograd."""
        kernels = self._kernels(leaves[0], [leaf.dtype for leaf in leaves])
        if kernels is None:
            return self.join(leaves) * factor.unsqueeze(1)
        found: Tensor = kernels.join_scaled(self._flat(self._in_order(leaves)), self.dtype, factor)
        return found

    def split_scaled(
        self, flat: Tensor, dtypes: Sequence[torch.dtype], factor: Tensor
    ) -> list[Tensor]:
        """`split` of the vector times a factor of each sample, (batch,); without autograd."""
        kernels = self._kernels(flat, dtypes)
        if kernels is None:
            return self.split(flat * factor.unsqueeze(1), dtypes)
        parts = kernels.split_scaled(flat, self.sizes, dtypes[0], factor)
        return [self._shaped(part, i) for i, part in enumerate(parts)]

    def norms(self, leaves: Sequence[Tensor]) -> Tensor | None:  # -> (batch,)
        """Of the batched vector, where that need not be made for it; without autograd."""
        kernels = self._kernels(leaves[0], [leaf.dtype for leaf in leaves])
        if kernels is None or self.dtype == torch.float64:
            return None
        found: Tensor = kernels.norms(self._flat(self._in_order(leaves)), self.dtype)
        return found

    def _flat(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.reshape(self.batch, -1) for part in parts]

    def _kernels(self, x: Tensor, dtypes: Sequence[torch.dtype]) -> Any:
        """The module where `join` and `split` are one launch each; None where plain ones run."""
        if len(dtypes) == 1 or min(self.sizes) == 0 or choice.chosen(x) != "triton":
            return None
        from gdeq.fast.kernels import state  # noqa: PLC0415 (needs Triton)

        return state if state.takes(self.batch, dtypes) else None

    def copies(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The same in memory of their own; one operation where they lie in one buffer."""
        buffer = _as_one_buffer(self._in_order(leaves))
        if buffer is None:
            return [leaf.clone() for leaf in leaves]
        return self.in_parts(buffer.clone())

    def _in_order(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The tensors with their dimensions in the order of memory."""
        return [
            leaf.permute(0, 2, 3, 1) if last else leaf
            for leaf, last in zip(leaves, self.channels_last, strict=True)
        ]

    def _shaped(self, part: Tensor, index: int) -> Tensor:
        """The inverse of `_in_order` for one part, whatever its shape is now."""
        shape = self.shapes[index]
        if not self.channels_last[index]:
            return part.reshape(shape)
        batch, channels, height, width = shape
        return part.reshape(batch, height, width, channels).permute(0, 3, 1, 2)

    def pack(self, z: State) -> Tensor:  # -> (batch, d)
        """A state of this layout as one batched vector."""
        return self.join(self.leaves(z, "the state", cast=True))

    def start(self, z0: State) -> Tensor:  # -> (batch, d)
        """`pack`, in memory of its own: what is found must not change with the user's z0."""
        flat = self.pack(z0)
        return flat.clone() if len(self.sizes) == 1 else flat

    def unpack(self, flat: Tensor) -> State:  # flat: (batch, d)
        """The state that a batched vector stands for, in its own shapes and dtypes."""
        return self.state(self.split(flat, self.dtypes))

    def in_parts(self, parts: Tensor) -> list[Tensor]:  # (batch·d,)
        """The tensors that lie there one after another (`VectorMap`)."""
        pieces = parts.split([self.batch * size for size in self.sizes])
        # As .data: views of one buffer could not be changed in place, one without the others.
        return [self._shaped(piece, i).data for i, piece in enumerate(pieces)]

    def as_parts(self, leaves: Sequence[Tensor]) -> Tensor:  # -> (batch·d,)
        """The inverse of `in_parts`: the memory of the tensors, if they lie there so."""
        found = self._in_order(leaves)
        adjacent = _as_one_buffer(found)
        if adjacent is not None:
            return adjacent
        if any(leaf.dtype != found[0].dtype for leaf in found):
            found = [leaf.to(self.dtype) for leaf in found]
        return torch.cat([leaf.reshape(-1) for leaf in found])

    def state(self, leaves: Sequence[Tensor]) -> State:
        """The tensors in their structure."""
        return _rebuild(self.structure, list(leaves))

    def leaves(self, value: State, who: str, cast: bool) -> list[Tensor]:
        found: list[tuple[str, Tensor]] = []
        structure = _flatten(value, who, found, self.structure)
        if not _same_structure(structure, self.structure):
            raise StateError(
                f"{who} has the structure {_sketch(structure)}, but z0 has "
                f"{_sketch(self.structure)}; f must return what it was given, in the same nesting"
            )
        for (path, leaf), shape, dtype in zip(found, self.shapes, self.dtypes, strict=True):
            if leaf.shape != shape:
                raise StateError(
                    f"{path} has shape {tuple(leaf.shape)}, but the state there has "
                    f"{tuple(shape)}; f must keep the shape of z"
                )
            if leaf.device != self.device:
                raise StateError(f"{path} is on {leaf.device}, but the state is on {self.device}")
            if leaf.dtype != dtype and not (cast and leaf.is_floating_point()):
                raise StateError(
                    f"{path} has dtype {leaf.dtype}, but the state there has {dtype}; f must keep "
                    "the dtype of z (cast inside f, or give z0 in the dtype f works in)"
                )
        return [leaf for _, leaf in found]

    def vectorize(self, f: Callable[[State], State]) -> VectorMap:
        """f on batched vectors, called under the autocast state that holds here and now."""
        return VectorMap(self, f)

    def precision(self) -> float:
        """The spacing of the numbers that f computes with, under the autocast state of now."""
        kind = self.device.type
        worst = max(torch.finfo(dtype).eps for dtype in self.dtypes)
        if _autocast_enabled(kind) and torch.float64 not in self.dtypes:  # it leaves float64 alone
            worst = max(worst, torch.finfo(torch.get_autocast_dtype(kind)).eps)
        return worst


class VectorMap:
    """The user's f on batched vectors.

    The algebra around f runs outside autocast (`full_precision`), so the autocast state of the
    caller is kept here and put back for each call.  Under autocast f may return half precision.

    Beside the batched vector, ``(batch, d)``, there is a second form, *parts*: one buffer that
    holds all samples of the first tensor of the state, then all of the second, and so on.  Tensors
    of the state are dense views of it, so f is called, and its result taken, without a copy.
    """

    def __init__(self, space: StateSpace, f: Callable[[State], State]) -> None:
        self.space, self.f = space, f
        self.kind = space.device.type
        self.autocast = _autocast_enabled(self.kind)
        self.autocast_dtype = torch.get_autocast_dtype(self.kind) if self.autocast else None

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
        limits = [
            torch.finfo(dtype).max if dtype == torch.float16 else torch.inf
            for dtype in self.space.dtypes
        ]
        parts = flat.split(self.space.sizes, dim=1)
        within = [(part.abs() <= limit).all(1) for part, limit in zip(parts, limits, strict=True)]
        return torch.stack(within).all(0).unsqueeze(1)

    @property
    def parts_dtype(self) -> torch.dtype | None:
        """The one dtype of all tensors of the state; None where `on_parts` cannot be used."""
        first = self.space.dtypes[0]
        return first if all(dtype == first for dtype in self.space.dtypes) else None

    def on_parts(self, parts: Tensor) -> Tensor:  # (batch·d,) -> (batch·d,)
        """f from parts to parts; the result may have the dtype of autocast.

        Whether z was within the range of the parts (`inside`) the caller knows.
        """
        return self.space.as_parts(self.leaves(self.space.in_parts(parts)))

    def leaves(self, z: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of f(z) for those of z."""
        versions = [None if leaf.is_inference() else leaf._version for leaf in z]
        with (
            torch.autocast(self.kind, dtype=self.autocast_dtype)
            if self.autocast
            else contextlib.nullcontext()
        ):
            out = self.f(self.space.state(z))
        now = [None if leaf.is_inference() else leaf._version for leaf in z]
        if now != versions:
            raise StateError(
                "f changed its argument z in place; the solver still needs it: use operations "
                "that return a new tensor (nn.ReLU(inplace=False), z = z + ... for z += ...)"
            )
        return self.space.leaves(out, "f(z)", cast=self.autocast)


def _as_one_buffer(leaves: list[Tensor]) -> Tensor | None:
    """The memory of all the tensors as one vector, if they lie there densely one after another."""
    first = leaves[0]
    at = first.data_ptr()
    for leaf in leaves:
        if leaf.dtype != first.dtype or not leaf.is_contiguous() or leaf.data_ptr() != at:
            return None
        if leaf.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        at += leaf.numel() * leaf.element_size()
    return first.as_strided((sum(leaf.numel() for leaf in leaves),), (1,), first.storage_offset())


def _is_channels_last(leaf: Tensor) -> bool:
    dense = leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last)
    return dense and not leaf.is_contiguous()


def _autocast_enabled(device_type: str) -> bool:
    available = torch.amp.autocast_mode.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Outside autocast: the solvers' own algebra must not be rounded to half precision."""
    if _autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()

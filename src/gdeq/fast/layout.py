"""How the fast engine keeps a state: in parts.

*Parts* are one buffer, ``(batch·d,)``, that holds all samples of the first tensor of the state,
then all of the second, and so on.  Tensors of the state are dense views of it, so f is called, and
its result taken, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdeq.fast.kernels import state
from gdeq.state import StateMap, StateSpace


class FastSpace(StateSpace):
    """A state space that joins and splits tensors in one launch each, where they are alike."""

    def join(
        self,
        leaves: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        factor: Tensor | None = None,
    ) -> Tensor:
        differentiates = factor is not None and torch.is_grad_enabled()
        if differentiates or not self._in_one_launch([leaf.dtype for leaf in leaves]):
            return super().join(leaves, dtype, factor)
        return state.join(self.rows(leaves), dtype or self.dtype, factor)

    def split(
        self, flat: Tensor, dtypes: Sequence[torch.dtype], factor: Tensor | None = None
    ) -> list[Tensor]:
        differentiates = factor is not None and torch.is_grad_enabled()
        if differentiates or not self._in_one_launch(dtypes):
            return super().split(flat, dtypes, factor)
        parts = state.split(flat, self.sizes, dtypes[0], factor)
        return [self.shaped(part, i) for i, part in enumerate(parts)]

    def copies(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """One operation where the tensors lie in one buffer."""
        buffer = _as_one_buffer(self.in_memory_order(leaves))
        return super().copies(leaves) if buffer is None else self.in_parts(buffer.clone())

    def rows(self, leaves: Sequence[Tensor]) -> list[Tensor]:  # (batch, size) each
        return [part.reshape(self.batch, -1) for part in self.in_memory_order(leaves)]

    def norms(self, leaves: Sequence[Tensor]) -> Tensor | None:  # -> (batch,)
        """Of the batched vector, where that need not be made for it; without autograd."""
        if self.dtype == torch.float64 or not self._in_one_launch([x.dtype for x in leaves]):
            return None
        return state.norms(self.rows(leaves), self.dtype)

    def in_parts(self, parts: Tensor) -> list[Tensor]:  # (batch·d,)
        """The tensors that lie there one after another."""
        pieces = parts.split([self.batch * size for size in self.sizes])
        # As .data: views of one buffer could not be changed in place, one without the others.
        return [self.shaped(piece, i).data for i, piece in enumerate(pieces)]

    def as_parts(self, leaves: Sequence[Tensor]) -> Tensor:  # -> (batch·d,)
        """The inverse of `in_parts`: the memory of the tensors, if they lie there so."""
        found = self.in_memory_order(leaves)
        adjacent = _as_one_buffer(found)
        if adjacent is not None:
            return adjacent
        if any(leaf.dtype != found[0].dtype for leaf in found):
            found = [leaf.to(self.dtype) for leaf in found]
        return torch.cat([leaf.reshape(-1) for leaf in found])

    def _in_one_launch(self, dtypes: Sequence[torch.dtype]) -> bool:
        several = len(dtypes) > 1 and min(self.sizes) > 0
        return several and state.takes(self.batch, dtypes)


class PartsMap(StateMap):
    """The user's f from parts to parts."""

    space: FastSpace

    @property
    def parts_dtype(self) -> torch.dtype | None:
        """The one dtype of all tensors of the state; None where f cannot be given parts."""
        first = self.space.dtypes[0]
        return first if all(dtype == first for dtype in self.space.dtypes) else None

    def on_parts(self, parts: Tensor) -> Tensor:  # (batch·d,) -> (batch·d,)
        """The result may have the dtype of autocast.

        Whether z was within the range of the parts (`inside`) the caller knows.
        """
        return self.space.as_parts(self.leaves(self.space.in_parts(parts)))


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

"""Group and batch normalisation with what surrounds them in a multiscale cell, channels-last.

    norm_act     act(norm(x))                                              group_norm.py
    block_end    norm₂(relu(z + norm₁(y · mask + injection)))              residual.py
    fuse         relu(own + Σ_j repeat_j(norm_j(raw_j)))                    fusion.py
    batch_norms  act(Σ_j norm_j(x_j)), over the batch in training          batch_norm.py

These are bound by memory, so each reads its input once and writes its output once where a tile of
(all pixels of a sample) × (some groups) fits into registers.  Where it does not, the pixels go by
in chunks, once for the statistics and once more for the result; the second read comes from cache.
Each file begins with a table of its kernels and of what each is for.

Variance is Σ(x − mean)², never E[x²] − mean².  Tensors may be slices over the channels of a larger
channels-last tensor: each comes with the stride of its pixels.  Of `slices` the gradients are
written into one memory (slices.py).

Backward of y = act(w x̂ + b), x̂ = (x − mean) ρ, ρ = 1/√(var + ε), with g = act′ dy and means over
the group:

    dw = Σ g x̂,  db = Σ g,  dx = ρ (w g − mean(w g) − x̂ mean(w g x̂)).

dw and db are summed over the pixels by the program of a sample and over the batch afterwards; the
order is fixed, so the results repeat bit for bit.  Scale and shift may also be given for each
sample, (batch, channels), and so are their gradients then: `per_sample` makes that of many vectors
and sums the gradients of all of them over the batch at once.
"""

from gdeq.fast.kernels.norms.affine import per_sample
from gdeq.fast.kernels.norms.batch_norm import BatchSource, Running, batch_norms, batch_norms_plain
from gdeq.fast.kernels.norms.fusion import Source, fuse
from gdeq.fast.kernels.norms.group_norm import norm_act, norm_act_plain
from gdeq.fast.kernels.norms.residual import block_end
from gdeq.fast.kernels.norms.slices import slices
from gdeq.fast.kernels.norms.tensors import empty_channels_last, room_beside

__all__ = [
    "BatchSource",
    "Running",
    "Source",
    "batch_norms",
    "batch_norms_plain",
    "block_end",
    "empty_channels_last",
    "fuse",
    "norm_act",
    "norm_act_plain",
    "per_sample",
    "room_beside",
    "slices",
]

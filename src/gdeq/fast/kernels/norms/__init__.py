"""Group normalisation and what surrounds it in a multiscale cell, on channels-last tensors.

    norm_act     act(norm(x))                                              single.py
    block_end    norm₂(relu(z + norm₁(y · mask + injection)))              residual.py
    fuse         act(own + Σ_j repeat_j(norm_j(raw_j)))                    fusion.py
    batch_norms  act(Σ_j norm_j(x_j)), over the batch in training          batch.py

These are bound by memory, so each reads its input once and writes its output once where a tile of
(all pixels of a sample) × (some groups) fits into registers.  Where it does not, the pixels go by
in chunks, once for the statistics and once more for the result; the second read comes from cache.
For groups of 20, 40, 80 … channels norm_act has kernels of its own: split.py forward in half
precision, held.py backward in bfloat16.  Where no number of a tile is masked, so has block_end in
bfloat16, held_block_forward.py and held_block.py backward; and so has fuse backward where a tile
holds all pixels, fusion_whole.py.

Variance is Σ(x − mean)², never E[x²] − mean².  Chunks a, b of n_a, n_b numbers are joined by

    δ = mean_b − mean_a,  mean = mean_a + δ n_b / (n_a + n_b),
    M = M_a + M_b + δ² n_a n_b / (n_a + n_b)          (Chan, Golub, LeVeque 1979).

Tensors may be slices over the channels of a larger channels-last tensor: each comes with the stride
of its pixels.  Of `slices` the gradients are written into one memory (slices.py).

Backward of y = act(w x̂ + b), x̂ = (x − mean) ρ, ρ = 1/√(var + ε), with g = act′ dy and means over
the group:

    dw = Σ g x̂,  db = Σ g,  dx = ρ (w g − mean(w g) − x̂ mean(w g x̂)).

dw and db are summed over the pixels by the program of a sample and over the batch afterwards; the
order is fixed, so the results repeat bit for bit.  Scale and shift may also be given for each
sample, (batch, channels), and so are their gradients then: `per_sample` makes that of many vectors
and sums the gradients of all of them over the batch at once.
"""

from gdeq.fast.kernels.norms.affine import per_sample, per_sample_plain
from gdeq.fast.kernels.norms.batch import BatchSource, Running, batch_norms, batch_norms_plain
from gdeq.fast.kernels.norms.fusion import Source, fuse, fuse_plain
from gdeq.fast.kernels.norms.residual import block_end, block_end_for, block_end_plain
from gdeq.fast.kernels.norms.single import norm_act, norm_act_plain
from gdeq.fast.kernels.norms.slices import slices
from gdeq.fast.kernels.norms.tensors import empty_channels_last
from gdeq.fast.kernels.norms.tiles import TUNING, choose_tile, room_beside

__all__ = [
    "TUNING",
    "BatchSource",
    "Running",
    "Source",
    "batch_norms",
    "batch_norms_plain",
    "block_end",
    "block_end_for",
    "block_end_plain",
    "choose_tile",
    "empty_channels_last",
    "fuse",
    "fuse_plain",
    "norm_act",
    "norm_act_plain",
    "per_sample",
    "per_sample_plain",
    "room_beside",
    "slices",
]

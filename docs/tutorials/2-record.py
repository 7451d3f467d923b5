# %% [markdown]
# # What the record tells you, and a cell that does not converge
#
# A solve that fails does not raise an error: other samples of the batch may be fine, and training
# often recovers. So look at the record. It says for every sample how the solve ended.

# %%
import torch
from matplotlib import pyplot as plt

import gdeq

torch.manual_seed(0)
A = torch.randn(16, 16, dtype=torch.float64) / 4  # its largest eigenvalue is about 1
x = torch.randn(6, 16, dtype=torch.float64)
zeros = torch.zeros_like(x)


def cell(strength):
    return lambda z: torch.tanh(strength * z @ A.T + x)


# %% [markdown]
# ## A solve that ends well
#
# `gdeq.solve` finds a fixed point without a layer. Its result prints as a sentence.

# %%
solution = gdeq.solve(cell(0.8), zeros, gdeq.Broyden(max_iter=30, tol=1e-6))
print(solution)

# %% [markdown]
# Per-sample fields are tensors: `converged`, `residual`, `steps`, and `trace` with the residual
# after each step. The residual is ‖f(z) − z‖ relative to the size of z and f(z).
#
# A small residual does not always mean a small error. After `Broyden`, `error` estimates how far
# z is from the fixed point. We can check it against a much tighter solve.

# %%
exact = gdeq.solve(cell(0.8), zeros, gdeq.Broyden(max_iter=60, tol=1e-13)).z
true_error = (solution.z - exact).norm(dim=1) / exact.norm(dim=1)
for i in range(3):
    print(
        f"sample {i}: {solution.steps[i]} steps, residual {solution.residual[i]:.1e}, "
        f"estimated error {solution.error[i]:.1e}, true error {true_error[i]:.1e}"
    )

# %% [markdown]
# ## A solve that fails
#
# If we make the cell stronger, it is no longer a contraction, and the plain iteration z ← f(z)
# never settles. The record says what happened and what to try.

# %%
plain = gdeq.solve(cell(6.0), zeros, gdeq.Picard(max_iter=100, tol=1e-6))
print(plain)

# %% [markdown]
# Every sample has a status. `str(status)` is the sentence; the
# [troubleshooting guide](../guides/troubleshooting.md) goes through all of them.

# %%
print(plain.status[0].name, "-", plain.status[0])

# %% [markdown]
# ## What helps
#
# First look at the cell: `gdeq.spectral_radius` measures the largest eigenvalue of ∂f/∂z. Above 1
# the plain iteration cannot converge, and other solvers have a harder time.

# %%
for strength in (0.8, 2.0, 6.0):
    radius = gdeq.spectral_radius(cell(strength), exact, generator=torch.manual_seed(0))
    print(f"strength {strength}: spectral radius {radius.max():.2f}")

# %% [markdown]
# Then try another solver: quasi-Newton methods do not need a contraction. A sample that has
# converged is frozen, so its line stays level while others are still being solved.

# %%
tries = {
    "Picard": gdeq.Picard(max_iter=100, tol=1e-6),
    "Anderson": gdeq.Anderson(max_iter=100, tol=1e-6),
    "Broyden": gdeq.Broyden(max_iter=100, tol=1e-6),
    "Broyden, line search": gdeq.Broyden(max_iter=100, tol=1e-6, line_search=3),
}
for name, solver in tries.items():
    found = gdeq.solve(cell(2.0), zeros, solver)
    plt.semilogy(range(1, len(found.trace) + 1), found.trace[:, 0], label=name)
    converged = int(found.converged.sum())
    print(f"{name}: {converged} of 6 converged, {found.evals} evaluations of f")
plt.xlabel("solver step")
plt.ylabel("residual of sample 0")
plt.legend()

# %% [test]
assert solution.converged.all()
assert true_error.max() < 1e-4
assert not plain.converged.any()
assert gdeq.solve(cell(2.0), zeros, tries["Broyden"]).converged.float().mean() > 0.5

# %% [markdown]
# In training, keep the cell well behaved instead: end it in a norm, or penalise the residual.
# The [stability guide](../guides/stability.md) shows how.
#
# ## The backward record
#
# After `backward()` the record also holds what the gradient cost, and how good it is.

# %%
leaf = x.clone().requires_grad_()
deq = gdeq.DEQ(lambda z, x: torch.tanh(0.8 * z @ A.T + x), gradient=gdeq.GDEQ(refine=2))
deq(leaf).square().sum().backward()
print(deq.solution.backward)
print("residual of w:", [f"{r:.1e}" for r in deq.solution.backward.residual.tolist()])

# %% [markdown]
# For a logger, `batch_error` is a single number. With one VJP, 0.1 to 0.6 is usual. Near 1, raise
# `refine`.

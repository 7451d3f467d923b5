# %% [markdown]
# # The paper's four gradients, on a map small enough to check by hand
#
# Differentiating z\* = f(z\*, x) gives every gradient of a DEQ from one vector
#
# ```text
# w = (I − J)⁻ᵀ v,    J = ∂f/∂z at z*,    v = ∂loss/∂z*.
# ```
#
# Methods differ in how they compute w. Here f is linear and z has two entries, so you can check
# everything with pencil and paper.

# %%
import torch
from matplotlib import pyplot as plt

import gdeq

torch.set_default_dtype(torch.float64)
A = torch.tensor([[0.5, 0.25], [0.0, 0.5]])
x = torch.tensor([[1.0, 1.0]], requires_grad=True)  # a batch of one
v = torch.tensor([[1.0, 0.0]])  # the loss is the first entry of z

# %% [markdown]
# f(z) = Az + x has J = A everywhere. By hand,
#
# ```text
# I − A = [[½, −¼], [0, ½]],    z* = (I − A)⁻¹ x = (3, 2),    w = (I − A)⁻ᵀ v = (2, 1).
# ```
#
# Since ∂f/∂x = I, the gradient that arrives at x is w itself: we can read it off `x.grad`.


# %%
def gradient_by(method, solver=None):
    solver = solver or gdeq.Broyden(max_iter=10, tol=1e-12)
    z0 = torch.zeros(1, 2)
    solution = gdeq.fixed_point(lambda z: z @ A.T + x, z0, solver, method)
    (w,) = torch.autograd.grad((solution.z * v).sum(), x)
    return solution, w


methods = {
    "Implicit": gdeq.Implicit(),
    "GDEQ": gdeq.GDEQ(),
    "JFB": gdeq.JFB(),
    "NPG, 5 terms": gdeq.NPG(steps=5, damping=1.0),
}
exact = torch.tensor([[2.0, 1.0]])
for name, method in methods.items():
    solution, w = gradient_by(method)
    error = (w - exact).norm() / exact.norm()
    print(f"{name:12}  w = {[round(e, 4) for e in w[0].tolist()]}   error {error:.1e}")
print(f"z* = {[round(e, 4) for e in solution.z[0].tolist()]}")

# %% [markdown]
# - **Implicit** solves the linear system, and is exact.
# - **JFB** takes w = v, as if J were zero. It misses the second entry altogether.
# - **NPG** sums the Neumann series v + Jᵀv + (Jᵀ)²v + … to five terms. Check it:
#   1 + ½ + ¼ + ⅛ + 1⁄16 = 1.9375.
# - **GDEQ** reuses what Broyden's method learned about the inverse in the forward pass, at no
#   cost. In two dimensions, after enough steps, that is everything there is to know.

# %% [markdown]
# ## Where plain reuse falls short
#
# In a real model z has thousands of entries and the solver takes a few steps. Broyden's inverse
# then knows only the directions in which the solver moved, and v lies mostly elsewhere. The cure
# is to continue Broyden's method on the backward equation for one or two VJPs: `refine`. `JFB` can
# be refined in the same way.

# %%
torch.manual_seed(0)
d = 200
B = 0.9 * torch.linalg.qr(torch.randn(d, d))[0] @ torch.diag(torch.rand(d))
B = B.requires_grad_()
inputs, slope = torch.randn(8, d), torch.randn(8, d)


def gradient_of(method):
    solution = gdeq.fixed_point(
        lambda z: torch.tanh(z @ B.T + inputs),
        z0=torch.zeros(8, d),
        solver=gdeq.Broyden(18, 1e-6),
        gradient=method,
    )
    (grad,) = torch.autograd.grad((solution.z * slope).sum(), B)
    return grad


exact = gradient_of(gdeq.Implicit(gdeq.GMRES(max_iter=100, tol=1e-12)))
spent = (0, 1, 2, 4)
curves = {
    "JFB": [gdeq.JFB(refine=k) for k in spent],
    "GDEQ": [gdeq.GDEQ(refine=k) for k in spent],
    "NPG": [gdeq.NPG(steps=k + 1) for k in spent],
}
errors = {}
for name, methods in curves.items():
    grads = [gradient_of(method) for method in methods]
    errors[name] = [((grad - exact).norm() / exact.norm()).item() for grad in grads]
    plt.semilogy(spent, errors[name], "o-", label=name)
    shown = zip(spent, errors[name], strict=True)
    print(f"{name:4}", *(f"  {k} VJPs: {error:.3f}" for k, error in shown))
plt.xticks(spent)
plt.xlabel("VJPs spent")
plt.ylabel("relative error of the weight gradient")
plt.legend()

# %% [test]
assert torch.allclose(gradient_by(gdeq.Implicit())[1], torch.tensor([[2.0, 1.0]]))
assert abs(gradient_by(gdeq.NPG(5, 1.0))[1][0, 0].item() - 1.9375) < 1e-12
assert torch.allclose(gradient_by(gdeq.JFB())[1], torch.tensor([[1.0, 0.0]]))
assert errors["GDEQ"] == sorted(errors["GDEQ"], reverse=True)
assert errors["GDEQ"][1] < errors["GDEQ"][0] / 2.5
assert errors["NPG"][1] > errors["JFB"][1] > errors["GDEQ"][1]
torch.set_default_dtype(torch.float32)

# %% [markdown]
# The first VJP cuts the error of `JFB` and `GDEQ` to about a third, and so does each further one.
# `NPG` takes shorter steps, so it needs more VJPs for the same error.
#
# For numbers on real models, see [gradient quality](../gradient-quality.md).

"""How good is each gradient at equal numbers of VJPs, over spectral radius and forward steps?

For v from a cross-entropy loss, every method turns v into w with exactly k VJPs.  Measured are

    rel   ‖∇ − ∇*‖ / ‖∇*‖ of the parameter gradient ∇ = (∂f/∂θ)ᵀw against the exact one,
    cos   the cosine of the two,
    res   the adjoint residual ‖(I − Jᵀ)w − v‖ / ‖v‖,

medians over all seeds (rel, cos: one per seed and its batch; res: one per sample).  The exact w is
solved to 1e-12 in float64 at the z that the forward solve returned, so that all methods are judged
on the same equation; the column `z` says how far that z still is from the fixed point.

Many seeds are solved as one batch: samples are independent systems, and `torch.func.vmap` gives
each seed its own weights.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_leaves, tree_map

import gdeq
from common import COLORS, MultiscaleCell, Report, TanhCell, parser, pyplot

Operator = Callable[[Tensor], Tensor]

COUNTS = (0, 1, 2, 3, 5, 20)
RADII = (0.3, 0.6, 0.9, 0.97)
OURS = "GDEQ(refine)"
# The methods that GDEQ(refine=k) is held against at the same k; then other ways to refine.
RIVALS = ("Broyden", "NPG", "Neumann", "GMRES")
VARIANTS = ("refine: Broyden", "refine: GMRES", "refine: FOM")


@dataclass(frozen=True)
class Forward:
    steps: int
    tol: float = 0.0
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        text = f"{self.steps}"
        text += f" tol {self.tol:g}" if self.tol else ""
        return text + (" f32" if self.dtype == torch.float32 else "")


FORWARDS = (
    Forward(6),
    Forward(9),
    Forward(18),
    Forward(27),
    Forward(27, tol=1e-3),
    Forward(27, dtype=torch.float32),  # iterated on into the rounding of f
)


class Problem:
    """Cells of many seeds, each with its own batch, as one batched fixed-point problem."""

    def __init__(self, make: Callable[[], Any], seeds: range, batch: int, cotangent: str) -> None:
        cells, inputs, heads, labels = [], [], [], []
        for seed in seeds:
            torch.manual_seed(seed)
            cell = make().double()
            d = sum(leaf[0].numel() for leaf in tree_leaves(cell.initial_state(1)))
            cells.append(cell)
            inputs.append(tree_map(lambda leaf: leaf.double(), cell.draw_input(batch)))
            heads.append(torch.randn(10, d).double() / d**0.5)
            labels.append(torch.randint(10, (batch,)))
        self.cell = cells[0]
        self.seeds, self.batch, self.cotangent = len(cells), batch, cotangent
        self.parameters, self.buffers = stack_module_state(cells)
        self.x = tree_map(lambda *leaves: torch.stack(leaves), *inputs)
        self.z0 = self.cell.initial_state(len(cells) * batch)
        self.head, self.label = torch.stack(heads), torch.cat(labels)

    def to(self, where: torch.device | torch.dtype) -> Problem:
        """A copy on a device or in a dtype."""

        def move(leaf: Tensor) -> Tensor:
            return leaf.detach().to(where) if leaf.is_floating_point() else leaf

        made = copy.copy(self)
        made.parameters = {k: move(p).requires_grad_() for k, p in self.parameters.items()}
        made.buffers = tree_map(move, self.buffers)
        made.x, made.z0 = tree_map(move, self.x), tree_map(move, self.z0)
        made.head = move(self.head)
        made.label = self.label.to(where) if isinstance(where, torch.device) else self.label
        return made

    def f(self, z: Any) -> Any:
        def one(parameters: Any, buffers: Any, z: Any, x: Any) -> Any:
            return functional_call(self.cell, (parameters, buffers), (z, x))

        z = tree_map(lambda leaf: leaf.unflatten(0, (self.seeds, self.batch)), z)
        out = vmap(one)(self.parameters, self.buffers, z, self.x)
        return tree_map(lambda leaf: leaf.flatten(0, 1), out)

    def tune(self, target: float, rounds: int) -> Tensor:  # -> (seeds · batch,)
        """Set each seed's gain so that the mean radius of its samples is the target."""
        start = 0.5 if isinstance(self.cell, MultiscaleCell) else 1.3
        gain = torch.full_like(self.buffers["gain"], start * target)
        z, solver = self.z0, gdeq.Broyden(max_iter=60, tol=1e-7)
        for last in [False] * rounds + [True]:
            self.buffers["gain"] = gain
            z = gdeq.solve(self.f, z, solver).z
            radius = gdeq.spectral_radius(self.f, z, 200 if last else 60)
            mean = radius.view(self.seeds, self.batch).mean(1)
            gain = gain * (target / mean).clamp(0.5, 2.0) ** 0.8
        return radius

    def loss_gradient(self, z: Tensor) -> Tensor:  # (rows, d) -> (rows, d)
        if self.cotangent == "gaussian":
            return torch.randn(z.shape, dtype=z.dtype).to(z.device)
        point = z.detach().requires_grad_()
        logits = point.view(self.seeds, self.batch, -1) @ self.head.transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.label, reduction="sum")
        return torch.autograd.grad(loss, point)[0]

    def linearize(self, z: Tensor) -> tuple[Operator, Operator]:
        """u ↦ Jᵀu and u ↦ (∂f/∂θ)ᵀu at z (rows, d); the latter one row for each seed."""
        point = z.detach().requires_grad_()
        shapes = [leaf.shape for leaf in tree_leaves(self.z0)]
        parts = point.split([shape[1:].numel() for shape in shapes], dim=1)
        leaves = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        out = _vector(self.f(tuple(leaves) if isinstance(self.z0, tuple) else leaves[0]))
        weights = list(self.parameters.values())

        def vjp(u: Tensor) -> Tensor:
            return torch.autograd.grad(out, point, u, retain_graph=True)[0]

        def pull(u: Tensor) -> Tensor:
            found = torch.autograd.grad(out, weights, u, retain_graph=True)
            return torch.cat([g.reshape(self.seeds, -1) for g in found], dim=1)

        return vjp, pull


def _vector(z: Any) -> Tensor:  # -> (rows, d)
    return torch.cat([leaf.flatten(1) for leaf in tree_leaves(z)], dim=1)


def _dot(a: Tensor, b: Tensor) -> Tensor:  # -> (rows, 1)
    return (a * b).sum(1, keepdim=True)


# The baselines and variants that are not in the library, on the adjoint equation
# (I − Jᵀ) w = v with residual r(w) = v − w + Jᵀw.  Each spends k VJPs; where the method knows a
# residual at the end, one last step along it needs no VJP.


def broyden(
    v: Tensor, vjp: Operator, k: int, base: Operator | None = None, base_t: Operator | None = None
) -> Tensor:
    """Broyden's good method; from v and −I, or from the estimate ``base`` of (Jᵀ − I)⁻¹."""
    base, base_t = base or torch.neg, base_t or torch.neg
    pairs: list[tuple[Tensor, Tensor]] = []

    def apply(x: Tensor) -> Tensor:
        return base(x) + sum(u * _dot(t, x) for u, t in pairs)

    def apply_t(x: Tensor) -> Tensor:
        return base_t(x) + sum(t * _dot(u, x) for u, t in pairs)

    w = -base(v)
    if k == 0:
        return w
    r = v - w + vjp(w)
    for _ in range(k - 1):
        s = -apply(r)
        w = w + s
        r, r_old = v - w + vjp(w), r
        by = apply(r - r_old)
        scale = _dot(s, by)
        update = torch.where(scale == 0, 0.0, (s - by) / scale)  # exact already
        pairs.append((update, apply_t(s)))
    return w - apply(r)


def krylov(
    v: Tensor,
    vjp: Operator,
    k: int,
    inverse: Operator | None = None,
    *,
    galerkin: bool = False,
    last: bool = False,
) -> Tensor:
    """From the k directions P q that Arnoldi's method tries: the w of smallest residual (GMRES), or
    the one whose residual is orthogonal to what the directions came from (``galerkin``, FOM).

    inverse: P ≈ (I − Jᵀ)⁻¹, identity if None.  last: add the free step P r at the end.
    """
    precondition: Operator = inverse or (lambda x: x)
    size = v.norm(dim=1)
    basis, directions = [v / size.unsqueeze(1)], []
    h = v.new_zeros(len(v), k + 1, k)
    for j in range(k):
        directions.append(precondition(basis[j]))
        image = directions[j] - vjp(directions[j])
        for _ in range(2):  # Gram-Schmidt twice keeps the basis orthogonal
            for i, q in enumerate(basis):
                overlap = _dot(q, image)
                h[:, i, j] += overlap.squeeze(1)
                image = image - overlap * q
        h[:, j + 1, j] = image.norm(dim=1)
        basis.append(image / h[:, j + 1, j, None].clamp(min=torch.finfo(v.dtype).tiny))
    right = torch.zeros_like(h[:, :, :1])
    right[:, 0, 0] = size
    kept = k if galerkin else k + 1
    y = torch.linalg.pinv(h[:, :kept]) @ right[:, :kept]  # pinv: some have converged before k
    left = right - h @ y  # (rows, k + 1, 1)
    w = (torch.stack(directions, dim=2) @ y).squeeze(2)
    return w + precondition((torch.stack(basis, dim=2) @ left).squeeze(2)) if last else w


def methods(
    v: Tensor, vjp: Operator, solution: gdeq.Solution
) -> Iterator[tuple[str, int, Callable[[Operator], Tensor]]]:
    """(name, k, how to get w from a VJP) for every method at every count."""
    assert solution.inverse is not None
    estimate = solution.inverse.vectors

    def library(gradient: gdeq.Gradient) -> Callable[[Operator], Tensor]:
        return lambda vjp: gradient.cotangent(v, vjp, solution).w

    def reuse(x: Tensor) -> Tensor:
        return -estimate.rmatvec(x)

    yield "JFB", 0, library(gdeq.JFB())
    for k in COUNTS:
        yield OURS, k, library(gdeq.GDEQ(refine=k))  # k = 0: plain reuse, the paper's GDEQ
        if k:
            yield "NPG", k, library(gdeq.NPG(steps=k + 1, damping=0.5))
            yield "Neumann", k, library(gdeq.NPG(steps=k + 1, damping=1.0))
            yield "Broyden", k, lambda vjp, k=k: broyden(v, vjp, k)
            yield "GMRES", k, lambda vjp, k=k: krylov(v, vjp, k)
            yield (
                "refine: Broyden",
                k,
                lambda vjp, k=k: broyden(v, vjp, k, estimate.rmatvec, estimate.matvec),
            )
            yield "refine: GMRES", k, lambda vjp, k=k: krylov(v, vjp, k, reuse, last=True)
            yield (
                "refine: FOM",
                k,
                lambda vjp, k=k: krylov(v, vjp, k, reuse, galerkin=True, last=True),
            )


def measure(
    problem: Problem, forward: Forward, guess: Tensor | None, report: Report
) -> tuple[list[dict[str, Any]], Tensor]:
    """One row for each method and count, and the exact w, a good guess for the next one."""
    solver = gdeq.Broyden(max_iter=forward.steps, tol=forward.tol)
    work = problem.to(forward.dtype)
    solution = gdeq.solve(work.f, work.z0, solver)
    z = _vector(solution.z)
    v = work.loss_gradient(z)
    vjp, _ = work.linearize(z)

    # The judge computes in float64, at the same z and for the same v.
    judge_vjp, pull = problem.linearize(z.double())
    exact = _exact(v.double(), judge_vjp, solution, guess, report)
    truth = pull(exact)
    size = truth.norm(dim=1)
    rows = []
    for name, k, solve in methods(v, vjp, solution):
        spent = 0

        def counted(u: Tensor) -> Tensor:
            nonlocal spent
            spent += 1
            return vjp(u)

        w = solve(counted).double()
        if spent != k:
            report(f"WARNING: {name} spent {spent} VJPs, not {k}")
        found = pull(w)
        relative = (found - truth).norm(dim=1) / size
        cosine = torch.cosine_similarity(found, truth, dim=1)
        # 1 − cos loses all digits near 1; for unit vectors it is half the squared distance.
        apart = (found / found.norm(dim=1, keepdim=True) - truth / size.unsqueeze(1)).norm(dim=1)
        residual = (v.double() - w + judge_vjp(w)).norm(dim=1) / v.double().norm(dim=1)
        low, high = (relative.quantile(q).item() for q in (0.25, 0.75))
        rows.append(
            {
                "forward": str(forward),
                "z": solution.residual.median().item(),
                "method": name,
                "vjps": k,
                "rel": relative.median().item(),
                "rel_q1": low,
                "rel_q3": high,
                "cos": cosine.median().item(),
                "one_minus_cos": (apart**2 / 2).median().item(),
                "res": residual.median().item(),
            }
        )
    return rows, exact


def _exact(
    v: Tensor, vjp: Operator, solution: gdeq.Solution, guess: Tensor | None, report: Report
) -> Tensor:
    """w to 1e-12, by restarted Broyden: what it claims is checked with one VJP."""
    exact = gdeq.Implicit(gdeq.Broyden(max_iter=150, tol=1e-12))
    float64 = copy.copy(solution)
    float64.precision = torch.finfo(torch.float64).eps
    w = v if guess is None else guess
    worst = 1.0
    for _ in range(5):
        r = v - w + vjp(w)
        worst = (r.norm(dim=1) / v.norm(dim=1)).max().item()
        if worst < 2e-12:
            return w
        w = w + exact.cotangent(r, vjp, float64).w
    report(f"WARNING: the exact solve stopped at a residual of {worst:.1e}")
    return w


# What is said about it

METRICS = {"rel": "relative error", "one_minus_cos": "1 - cosine", "res": "adjoint residual"}


def noise(metric: str, row: dict[str, Any]) -> float:
    """Below this, who is better is a matter of rounding, or of what "exact" means."""
    level = 1e-6 if "f32" in row["forward"] else 1e-10
    return level**2 if metric == "one_minus_cos" else level  # that is quadratic in the error


def verdict(metric: str, ours: dict[str, Any], other: dict[str, Any]) -> tuple[float, str]:
    """How many times larger the other's error is, and whether ours is at least as good."""
    factor = other[metric] / max(ours[metric], 1e-300)
    if max(ours[metric], other[metric]) < noise(metric, ours) or 0.99 <= factor < 1:
        return factor, "tie"
    return factor, "yes" if factor >= 1 else "NO"


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each row how GDEQ(refine=k) stands to it at the same count."""
    by_key = {_key(row): row for row in rows}
    for row in rows:
        ours = by_key[*_key(row)[:3], OURS, row["vjps"]]
        for metric in METRICS:
            factor, word = verdict(metric, ours, row)
            row[f"factor_{metric}"], row[f"ours_as_good_{metric}"] = factor, word
    return rows


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["map"], row["target"], row["forward"], row["method"], row["vjps"]


def show(rows: list[dict[str, Any]], report: Report) -> None:
    by_key = {_key(row): row for row in rows}
    cases = dict.fromkeys(_key(row)[:3] for row in rows)
    report(
        "\nMedians over seeds.  rel, 1-cos, res: GDEQ(refine=k), k=0 is plain reuse.  Then the "
        "relative error\nof each other method divided by ours (above 1: ours is better), and "
        "whether ours is at least as good\nas Broyden, NPG (0.5) and Neumann in rel / cos / res; "
        "'NO' names who is better."
    )
    for group in dict.fromkeys(case[:2] for case in cases):
        table = []
        for case in (case for case in cases if case[:2] == group):
            table += [_line(case, k, by_key) for k in COUNTS]
        first = by_key[*next(case for case in cases if case[:2] == group), OURS, 0]
        low, high = first["radius_min"], first["radius_max"]
        report(
            f"\n{group[0]}, spectral radius {first['radius']:.2f} (samples {low:.2f}-{high:.2f})"
        )
        report.table(table)


def _line(case: tuple[Any, ...], k: int, by_key: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    ours = by_key[*case, OURS, k]
    line: dict[str, Any] = {
        "forward": case[2],
        "z": f"{ours['z']:.0e}",
        "VJPs": k,
        "rel": ours["rel"],
        "1-cos": ours["one_minus_cos"],
        "res": ours["res"],
    }
    for name in ("JFB", *RIVALS, *VARIANTS):
        other = by_key.get((*case, name, k))
        line[name] = f"{other['factor_rel']:.3g}" if other else "-"
    asked = RIVALS[:3] if k else ("JFB",)
    words = []
    for metric in METRICS:
        better = [n for n in asked if by_key[*case, n, k][f"ours_as_good_{metric}"] == "NO"]
        words.append("NO: " + ", ".join(better) if better else "yes")
    line["at least as good?"] = " / ".join(words)
    return line


def summarize(rows: list[dict[str, Any]], report: Report) -> None:
    report(
        "\nGDEQ(refine=k) against each method at equal VJPs (k >= 1), over all maps, radii and "
        "forward settings:\ncases in which ours is better or equal / tied within 1 % / worse, and "
        "the median and worst factor"
    )
    table = []
    for name in (*RIVALS, *VARIANTS):
        line: dict[str, Any] = {"method": name}
        mine = [row for row in rows if row["method"] == name and row["vjps"] > 0]
        for metric, title in METRICS.items():
            words = [row[f"ours_as_good_{metric}"] for row in mine]
            seen = [row for row in mine if row[metric] > noise(metric, row)]
            factors = sorted(row[f"factor_{metric}"] for row in seen)
            count = "/".join(str(words.count(word)) for word in ("yes", "tie", "NO"))
            line[title] = f"{count}  x{factors[len(factors) // 2]:.2f} (x{factors[0]:.2f})"
        table.append(line)
    report.table(table)
    _choose(rows, report)
    plain = [row for row in rows if row["method"] == OURS and row["vjps"] == 0]
    jfb = {_key(row)[:3]: row for row in rows if row["method"] == "JFB"}
    gains = sorted(jfb[_key(row)[:3]]["rel"] / row["rel"] for row in plain)
    report(
        f"\nPlain GDEQ (0 VJPs) against JFB: JFB's relative error is x{gains[len(gains) // 2]:.2f} "
        f"of ours in the median case, x{gains[0]:.2f} to x{gains[-1]:.2f}"
    )
    report("\nWhere GDEQ(refine=k) is worse than Broyden, NPG or Neumann in relative error:")
    lost = [
        {
            "map": row["map"],
            "radius": row["target"],
            "forward": row["forward"],
            "VJPs": row["vjps"],
            "better": row["method"],
            "factor rel": row["factor_rel"],
            "factor 1-cos": row["factor_one_minus_cos"],
        }
        for row in rows
        if row["method"] in RIVALS[:3] and row["vjps"] and row["ours_as_good_rel"] == "NO"
    ]
    report.table(lost) if lost else report("nowhere")


def _choose(rows: list[dict[str, Any]], report: Report) -> None:
    report(
        "\nWays to refine: in how many cases each is worse (by more than 1 %) than the best of "
        "Broyden, NPG\nand Neumann at the same count, and by which factor at most"
    )
    by_key = {_key(row): row for row in rows}
    cases = dict.fromkeys((*_key(row)[:3], row["vjps"]) for row in rows if row["vjps"])
    table = []
    for name in (OURS, *VARIANTS):
        line: dict[str, Any] = {"method": name, "cases": len(cases)}
        for metric, title in METRICS.items():
            lost = []
            for *case, k in cases:
                others = [by_key[*case, rival, k] for rival in RIVALS[:3]]
                best = min(others, key=lambda row: row[metric])
                factor, word = verdict(metric, by_key[*case, name, k], best)
                lost += [1 / factor] if word == "NO" else []
            line[title] = f"{len(lost)} (x{max(lost):.2f})" if lost else "0"
        table.append(line)
    report.table(table)


def draw(rows: list[dict[str, Any]], forward: str, report: Report) -> None:
    plt = pyplot()
    maps = list(dict.fromkeys(row["map"] for row in rows))
    targets = list(dict.fromkeys(row["target"] for row in rows))
    looks: dict[str, tuple[str, str, str]] = {
        "NPG": (COLORS["NPG"], "^", "NPG, λ = 0.5"),
        "Neumann": (COLORS["Neumann"], "v", "Neumann series"),
        "GMRES": (COLORS["GMRES"], "s", "Implicit: GMRES, truncated"),
        "Broyden": (COLORS["Implicit"], "D", "Implicit: Broyden, truncated"),
        OURS: (COLORS["GDEQ"], "o", "GDEQ(refine = VJPs)"),
        "JFB": (COLORS["JFB"], "x", "JFB"),
    }
    height = len(METRICS) * len(maps)
    figure, axes = plt.subplots(
        height,
        len(targets),
        figsize=(3.4 * len(targets), 2.4 * height),
        sharex=True,
        squeeze=False,
    )
    places = {k: i for i, k in enumerate(COUNTS)}
    lines = [(metric, name) for metric in ("res", "rel", "one_minus_cos") for name in maps]
    for line, (metric, name) in enumerate(lines):
        for column, target in enumerate(targets):
            axis = axes[line, column]
            for method, (color, marker, label) in looks.items():
                points = [
                    (places[row["vjps"]], max(row[metric], 1e-16))
                    for row in rows
                    if _key(row)[:4] == (name, target, forward, method)
                ]
                width = 2.6 if method == OURS else 1.4
                axis.plot(
                    *zip(*points, strict=True),
                    color=color,
                    marker=marker,
                    linewidth=width,
                    label=label,
                )
            axis.set_yscale("log")
            floor = 1e-12 if metric == "one_minus_cos" else 1e-8
            axis.set_ylim(bottom=max(floor, axis.get_ylim()[0]), top=2)
            axis.set_xticks(list(places.values()), [str(k) for k in COUNTS])
            if line == 0:
                axis.set_title(f"spectral radius ≈ {target}")
        axes[line, 0].set_ylabel(f"{name}\n{METRICS[metric]}")
    for axis in axes[-1]:
        axis.set_xlabel("VJPs")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(looks))
    figure.suptitle(
        f"Gradients at equal numbers of VJPs, lower is better: {forward} Broyden steps forward, "
        f"median of {rows[0]['seeds']} seeds"
    )
    report.figure(figure)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=20, help="how many random maps of each kind")
    options.add_argument("--batch", type=int, default=2, help="samples that share a map")
    options.add_argument(
        "--cotangent",
        choices=("loss", "gaussian"),
        default="loss",
        help="v: the gradient of a cross-entropy loss, or noise",
    )
    args: argparse.Namespace = options.parse_args()
    report = Report("gradients", args)
    forwards, radii, rounds, sizes = FORWARDS, RADII, 6, (300, 8)
    if args.quick:
        args.seeds, args.batch = min(args.seeds, 3), min(args.batch, 2)
        forwards, radii, rounds, sizes = (FORWARDS[0], FORWARDS[2]), (0.3, 0.9), 2, (40, 4)
    report(
        f"{args.seeds} seeds, {args.batch} samples each, v: {args.cotangent}; "
        f"tanh d={sizes[0]}, multiscale 8x{sizes[1]}x{sizes[1]} + 8x{sizes[1] // 2}x{sizes[1] // 2}"
    )
    kinds: dict[str, Callable[[], Any]] = {
        "tanh": lambda: TanhCell(sizes[0]),
        "multiscale": lambda: MultiscaleCell((8, 8), sizes[1]),
    }
    rows: list[dict[str, Any]] = []
    for name, make in kinds.items():
        problem = Problem(
            make, range(args.seed, args.seed + args.seeds), args.batch, args.cotangent
        )
        problem = problem.to(torch.device(args.device))
        for target in radii:
            radius = problem.tune(target, rounds)
            about = {
                "map": name,
                "seeds": args.seeds,
                "target": target,
                "radius": radius.median().item(),
                "radius_min": radius.min().item(),
                "radius_max": radius.max().item(),
            }
            exact = None
            for forward in forwards:
                found, exact = measure(problem, forward, exact, report)
                rows += [about | row for row in found]
    rows = compare(rows)
    show(rows, report)
    summarize(rows, report)
    report.csv(rows)
    draw(rows, str(FORWARDS[2]), report)
    report.close()


if __name__ == "__main__":
    main()

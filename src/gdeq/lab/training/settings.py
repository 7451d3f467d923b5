"""The settings that every run has, whatever its task: typed, frozen, written into the run folder.

A task adds its own by a subclass of `Config`.  The comment beside a setting is its help text.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from gdeq import (
    GDEQ,
    GMRES,
    JFB,
    NPG,
    Anderson,
    Broyden,
    Gradient,
    Implicit,
    Picard,
    Solver,
    Unrolled,
)
from gdeq.fixed_point import check_pair
from gdeq.lab.files import LabError
from gdeq.options import check_choice, check_flag, check_integer, check_real, options


class ConfigError(LabError, ValueError):
    """A setting that does not exist or does not fit."""


@options
class SolverConfig:
    """How the fixed point is found.

    Of a section, ``short`` is the setting that its name alone stands for (solver=picard), and
    ``read_by`` names the choices that read a setting, where the others pass over it.
    """

    name: str = "broyden"  # broyden, anderson, picard
    max_iter: int = 18  # maximum number of steps
    tol: float = 1e-3  # relative residual at which a sample has converged; 0: make all steps
    memory: int | None = None  # steps to keep; null: all (anderson: 5)
    step_bits: int = 16  # broyden, on a GPU in half precision: keep steps in 16 or 8 bits
    damping: float = 1.0  # picard: share of the new value in each step, up to 1
    short: ClassVar = "name"
    read_by: ClassVar = {
        "memory": ("broyden", "anderson"),
        "step_bits": ("broyden",),
        "damping": ("picard",),
    }

    def __post_init__(self) -> None:
        check_choice(self, "name", ("broyden", "anderson", "picard"))
        Broyden(step_bits=self.step_bits)  # whatever the name: nobody else would look
        Picard(damping=self.damping)
        self.build()

    def build(self) -> Solver:
        # Of the whole state: what all figures of docs/results.md and the targets of adapt are of.
        shared: dict[str, Any] = {"max_iter": self.max_iter, "tol": self.tol, "stop": "whole"}
        if self.name == "picard":
            return Picard(damping=self.damping, **shared)
        if self.name == "anderson":
            return Anderson(memory=5 if self.memory is None else self.memory, **shared)
        return Broyden(memory=self.memory, step_bits=self.step_bits, **shared)


@options
class GradientConfig:
    """How ∂ℓ/∂z becomes a gradient.  Each name reads only the settings that it needs."""

    name: str = "gdeq"  # gdeq, implicit, jfb, npg, unrolled
    refine: int = 0  # gdeq, jfb: VJPs in every training step (1 by default in a plain DEQ)
    tolerance: float | None = None  # gdeq: refine until the backward residual is below this
    max_refine: int | None = None  # gdeq, with a tolerance: maximum number of VJPs to refine with
    max_iter: int = 20  # implicit: maximum number of steps of the backward solve
    tol: float = 1e-6  # implicit: relative residual at which the backward solve ends
    solver: str = "broyden"  # implicit: broyden, gmres, anderson, picard
    steps: int = 5  # npg: terms of the series; unrolled: layers
    damping: float = 0.5  # npg, unrolled: share of the new value in each step, up to 1
    short: ClassVar = "name"
    read_by: ClassVar = {
        "refine": ("gdeq", "jfb"),
        **dict.fromkeys(("tolerance", "max_refine"), ("gdeq",)),
        **dict.fromkeys(("max_iter", "tol", "solver"), ("implicit",)),
        **dict.fromkeys(("steps", "damping"), ("npg", "unrolled")),
    }

    def __post_init__(self) -> None:
        check_choice(self, "name", ("gdeq", "implicit", "jfb", "npg", "unrolled"))
        check_choice(self, "solver", ("broyden", "gmres", "anderson", "picard"))
        self.build()

    def build(self) -> Gradient:
        if self.name == "gdeq":
            return GDEQ(self.refine, self.tolerance, self.max_refine)
        if self.name == "jfb":
            return JFB(self.refine)
        if self.name == "npg":
            return NPG(self.steps, self.damping)
        if self.name == "unrolled":
            return Unrolled(self.steps, self.damping)
        kinds = {"broyden": Broyden, "gmres": GMRES, "anderson": Anderson, "picard": Picard}
        solver = kinds[self.solver](max_iter=self.max_iter, tol=self.tol)
        # Training takes no second derivatives; leaving them out saves an evaluation of f.
        return Implicit(solver, double_backward=False)


@options
class OptimizerConfig:
    """The optimiser and its schedule, which runs over the whole training."""

    name: str = "adam"  # adam, sgd, muon
    lr: float = 1e-3  # largest learning rate
    weight_decay: float = 0.0  # applies to all weight matrices and convolutions
    momentum: float = 0.9  # for sgd, muon
    adam_lr: float = 2e-3  # muon: learning rate of biases, norms, gains, first and last layer
    schedule: str = "cosine"  # cosine, onecycle, constant
    warmup: float = 0.0  # share of the steps in which the learning rate rises
    clip: float | None = None  # largest norm of the gradient; null: no limit
    short: ClassVar = "name"
    read_by: ClassVar = {"momentum": ("sgd", "muon"), "adam_lr": ("muon",)}

    def __post_init__(self) -> None:
        check_choice(self, "name", ("adam", "sgd", "muon"))
        for name in ("lr", "adam_lr"):
            check_real(self, name, 0.0, open_low=True)
        check_real(self, "weight_decay", 0.0)
        check_real(self, "momentum", 0.0, 1.0)
        check_choice(self, "schedule", ("cosine", "onecycle", "constant"))
        check_real(self, "warmup", 0.0, 1.0)
        if self.clip is not None:
            check_real(self, "clip", 0.0, open_low=True)


@options
class AdaptConfig:
    """Forward steps, refinement and penalty that follow residual and error (training.adapting).

    For gradient=gdeq and jfb.  ``solver.max_iter`` and ``gradient.refine`` are then not read: it
    begins in the middle of ``steps`` and ``refine``, the lower one of two, or, with a target that
    is wider at first, on the lowest.  A test is solved with the steps then in use.
    """

    enabled: bool = False  # adapt solver steps, VJPs and penalty to the measured residual and error
    forward: float = 1e-2  # target: mean relative residual of the fixed point
    backward: float = 0.3  # target: estimated error of a batch's gradient (`batch_error`)
    forward_at_first: float | None = None  # target at the start, falling evenly; null: forward
    backward_at_first: float | None = None  # the same for backward
    every: int = 50  # training steps between two decisions
    steps: tuple[int, ...] = (4, 5, 6, 7, 9, 12, 15, 18)  # values of solver.max_iter to choose from
    refine: tuple[int, ...] = (0, 1, 2, 3, 5)  # values of gradient.refine to choose from
    room: float = 0.3  # below this share of the target, the next lower value is tried
    patience: int = 2  # decisions in a row below that share before it is tried
    penalty_least: float = 1.0  # first residual_weight, if the most steps are not enough
    penalty_most: float = 64.0  # largest residual_weight

    def __post_init__(self) -> None:
        check_flag(self, "enabled")
        for name in ("forward", "penalty_least"):
            check_real(self, name, 0.0, open_low=True)
        check_real(self, "backward", 0.0, 1.0, open_low=True)  # an error of 1 is that of w = 0
        if self.forward_at_first is not None:
            check_real(self, "forward_at_first", self.forward)
        if self.backward_at_first is not None:
            check_real(self, "backward_at_first", self.backward, 1.0)
        check_integer(self, "every", 1)
        check_integer(self, "patience", 1)
        check_real(self, "room", 0.0, 1.0)
        check_real(self, "penalty_most", self.penalty_least)
        for name, least in (("steps", 1), ("refine", 0)):
            rungs = getattr(self, name)
            whole = all(isinstance(n, int) and not isinstance(n, bool) for n in rungs)
            if not whole or not rungs or min(rungs) < least or list(rungs) != sorted(set(rungs)):
                raise ValueError(
                    f"AdaptConfig.{name} must be rising integers of at least {least}, such as "
                    f"[{least + 3}, {least + 4}, {least + 6}], got {rungs!r}"
                )


@options
class Config:
    """One training run.  A task with settings of its own subclasses this."""

    task: str = "images"  # images, bytes, words, sudoku, imaging, or a file with your own
    epochs: int = 20  # passes over the training samples
    batch_size: int = 64  # total over all processes
    seed: int = 0  # of weights, order of samples, augmentation and dropout
    device: str = "auto"  # auto, cpu, cuda
    precision: str = "float32"  # float32, tf32, bf16
    graph: bool = True  # on a GPU, capture the step as a CUDA graph (gdeq.capture)
    pretrain_steps: int = 0  # steps at the start in which the cell is unrolled, without a solver
    pretrain_layers: int = 5  # evaluations of the cell in those steps
    ema: float = 0.0  # decay of the averaged weights that are tested; 0: no averaging
    residual_weight: float = 0.0  # weight of the residual penalty, which pulls f(z) towards z
    residual_every: int = 5  # training steps from one residual penalty to the next
    measure_every: int = 1  # training steps from one measured backward residual to the next
    log_every: int = 10  # training steps from one line of metrics to the next
    test_every: int = 1  # epochs from one test to the next; the last epoch is always tested
    checkpoint_seconds: float = 60.0  # seconds from one checkpoint to the next
    timeout_seconds: float = 600.0  # a process of several that is silent for so long is lost
    snapshots: tuple[int, ...] = (1, 10, 20, 50)  # epochs whose weights are kept (gdeq similarity)
    solver: SolverConfig = field(default_factory=SolverConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    # What a saved state depends on: it stays when a run is resumed.
    fixed: ClassVar[tuple[str, ...]] = ("task", "batch_size", "seed", "optimizer.name", "ema")

    def __post_init__(self) -> None:
        every = (f"{what}_every" for what in ("residual", "measure", "log", "test"))
        for name in ("epochs", "batch_size", "pretrain_layers", *every):
            check_integer(self, name, 1)
        for name in ("seed", "pretrain_steps"):
            check_integer(self, name, 0)
        for name in ("residual_weight", "checkpoint_seconds"):
            check_real(self, name, 0.0)
        check_real(self, "ema", 0.0, 0.999999)
        check_real(self, "timeout_seconds", 1.0, 1e6)
        if self.device not in ("auto", "cpu") and not str(self.device).startswith("cuda"):
            raise ValueError(f"Config.device must be auto, cpu or cuda, got {self.device!r}")
        check_choice(self, "precision", ("float32", "tf32", "bf16"))
        check_flag(self, "graph")
        try:
            check_pair(self.solver.build(), self.gradient.build())
        except ValueError as problem:
            raise ValueError(
                f"gradient={self.gradient.name} reuses the inverse that Broyden's method builds, "
                f"and solver={self.solver.name} builds none; use solver=broyden, gradient.refine=1 "
                "(which begins without one there), or another gradient such as gradient=jfb"
            ) from problem
        self._check_adapt()
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.snapshots):
            raise ValueError(f"Config.snapshots are epochs from 1 on, got {self.snapshots!r}")

    def _check_adapt(self) -> None:
        if not self.adapt.enabled:
            return
        if self.gradient.name not in ("gdeq", "jfb") or self.gradient.tolerance is not None:
            raise ValueError(
                "adapt.enabled chooses the refinement of gradient=gdeq or jfb: for another "
                "gradient, or with gradient.tolerance, set adapt.enabled=false"
            )
        # With samples that stop there, the mean hardly comes to where fewer steps are tried.
        room = self.adapt.room * self.adapt.forward
        if self.solver.tol > room:
            raise ValueError(
                f"solver.tol={self.solver.tol:g} stops each solve before adapt.room * "
                f"adapt.forward = {room:g} is reached, below which fewer steps are tried: lower "
                "solver.tol (0: all steps), or raise adapt.forward"
            )
        # A refinement estimates its error at each step; what has no VJP has its residual alone.
        seldom = self.measure_every > 1 and self.measure_every >= self.adapt.every
        if seldom and 0 in self.adapt.refine:
            raise ValueError(
                f"adapt looks every {self.adapt.every} steps, and with measure_every="
                f"{self.measure_every} the residual of a gradient without VJPs may not be measured "
                f"in between: lower measure_every to {max(1, self.adapt.every - 1)} or less, or "
                "take 0 out of adapt.refine"
            )

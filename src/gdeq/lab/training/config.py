"""What a run is: typed, frozen, and printed whole into the run folder."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import field
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from gdeq.fixed_point import check_pair
from gdeq.gradients import GDEQ, JFB, NPG, Gradient, Implicit, Unrolled
from gdeq.lab.training.presets import PRESETS
from gdeq.options import check_choice, check_flag, check_integer, check_real, options
from gdeq.solvers import GMRES, Anderson, Broyden, Picard, Solver


class ConfigError(ValueError):
    """A setting that does not exist or does not fit."""


@options
class SolverConfig:
    """How the fixed point is found."""

    name: str = "broyden"  # broyden, anderson, picard
    max_iter: int = 18  # steps at most
    tol: float = 1e-3  # a sample is done at this relative residual; 0: always all steps
    memory: int | None = None  # steps remembered; null: all of them (anderson: 5)
    step_bits: int = 16  # broyden, on a GPU in half precision: a step is kept in 16 or 8 bits

    def __post_init__(self) -> None:
        check_choice(self, "name", ("broyden", "anderson", "picard"))
        Broyden(step_bits=self.step_bits)  # whatever the name: nobody else would look
        self.build()

    def build(self) -> Solver:
        # Of the whole state: what all figures of docs/results.md and the targets of adapt are of.
        shared: dict[str, Any] = {"max_iter": self.max_iter, "tol": self.tol, "stop": "whole"}
        if self.name == "picard":
            return Picard(**shared)
        if self.name == "anderson":
            return Anderson(memory=5 if self.memory is None else self.memory, **shared)
        return Broyden(memory=self.memory, step_bits=self.step_bits, **shared)


@options
class GradientConfig:
    """How ∂ℓ/∂z becomes a gradient.  Each name reads only the settings that it needs."""

    name: str = "gdeq"  # gdeq, implicit, jfb, npg, unrolled
    refine: int = 0  # gdeq, jfb: VJPs spent on every step
    tolerance: float | None = None  # gdeq: bound on the backward residual
    max_refine: int | None = None  # gdeq, with a tolerance: VJPs spent on refining at most
    max_iter: int = 20  # implicit: steps of the backward solve at most
    tol: float = 1e-6  # implicit: relative residual at which the backward solve ends
    solver: str = "broyden"  # implicit: broyden, gmres, anderson, picard
    steps: int = 5  # npg, unrolled: terms of the series, or layers
    damping: float = 0.5  # npg, unrolled: share of the new value in each step, up to 1

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
    weight_decay: float = 0.0  # of all weight matrices and convolutions
    momentum: float = 0.9  # sgd, muon
    scale: str = "shape"  # muon: size of an update, by the matrix's shape or relative to itself
    adam_lr: float = 2e-3  # muon: of biases, norms, gains, the first and the last layer
    schedule: str = "cosine"  # cosine, onecycle, constant
    warmup: float = 0.0  # share of the steps over which the rate rises
    clip: float | None = None  # largest gradient norm

    def __post_init__(self) -> None:
        check_choice(self, "name", ("adam", "sgd", "muon"))
        check_choice(self, "scale", ("shape", "relative"))
        check_real(self, "adam_lr", 0.0, open_low=True)
        check_real(self, "lr", 0.0, open_low=True)
        check_real(self, "weight_decay", 0.0)
        check_real(self, "momentum", 0.0, 1.0)
        check_choice(self, "schedule", ("cosine", "onecycle", "constant"))
        check_real(self, "warmup", 0.0, 1.0)
        if self.clip is not None:
            check_real(self, "clip", 0.0, open_low=True)


@options
class ModelConfig:
    """Which MDEQ."""

    size: str = "small"  # small (0.09 M parameters), tiny (0.16 M), large (11.1 M)
    weight_norm: bool = True  # normalise the weights of the cell
    dropout: float = 0.0  # share of channels dropped in the cell, the same during a solve
    outer_norm: str = "group"  # of stem and head: group, or batch as published

    def __post_init__(self) -> None:
        check_choice(self, "outer_norm", ("group", "batch"))
        check_choice(self, "size", ("small", "tiny", "large"))
        check_flag(self, "weight_norm")
        check_real(self, "dropout", 0.0, 0.99)


@options
class AugmentConfig:
    """Changes to training images, drawn anew for each."""

    crop: int = 0  # pixels of padding before a random crop
    flip: bool = False  # left and right exchanged, half of the time
    cutout: int = 0  # side of the square cut out, in pixels
    fill: str = "zeros"  # what the padding of a crop is: zeros (black), reflect
    cutmix: float = 0.0  # share of images with a rectangle, and that much of the label, of another
    alternate: bool = False  # with flip: each image flipped in every second epoch, not by chance

    def __post_init__(self) -> None:
        check_integer(self, "crop", 0)
        check_choice(self, "fill", ("zeros", "reflect"))
        check_flag(self, "flip")
        check_integer(self, "cutout", 0)
        check_real(self, "cutmix", 0.0, 1.0)
        check_flag(self, "alternate")
        if self.alternate and not self.flip:
            raise ValueError(
                "AugmentConfig.alternate says in which epochs images are flipped, and "
                "augment.flip=false flips none: set augment.flip=true, or leave alternate out"
            )


@options
class AdaptConfig:
    """Forward steps, refinement and penalty that follow residual and error (training.adapting).

    For gradient=gdeq and jfb.  ``solver.max_iter`` and ``gradient.refine`` are then not read: it
    begins in the middle of ``steps`` and ``refine``, the lower one of two, or, with a target that
    is wider at first, on the lowest.  A test is solved with the steps then in use.
    """

    enabled: bool = False  # choose steps, refinement and penalty by residual and error
    forward: float = 1e-2  # wanted: mean relative residual of the fixed point
    backward: float = 0.3  # wanted: error of a batch's gradient, about (`batch_error`)
    forward_at_first: float | None = (
        None  # wanted at the first step, then evenly less; none: forward
    )
    backward_at_first: float | None = None  # the same of backward
    every: int = 50  # training steps between two looks
    steps: tuple[int, ...] = (4, 5, 6, 7, 9, 12, 15, 18)  # for solver.max_iter; last: the budget
    refine: tuple[int, ...] = (0, 1, 2, 3, 5)  # the rungs for gradient.refine
    room: float = 0.3  # below this share of the target one rung down is tried
    patience: int = 2  # looks in a row with such room before that
    penalty_least: float = 1.0  # residual_weight when the last of steps does not suffice, at first
    penalty_most: float = 64.0  # residual_weight at most

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
    """One training run."""

    data: str = "digits"  # digits, fashion-mnist, cifar10
    epochs: int = 20  # passes over the training images
    batch_size: int = 64  # over all processes together
    seed: int = 0  # of weights, order, augmentation and dropout
    device: str = "auto"  # auto, cpu, cuda
    precision: str = "float32"  # float32, tf32, bf16
    graph: bool = True  # on a GPU, record a step once and replay it (gdeq.capture)
    pretrain_steps: int = 0  # first so many steps as an unrolled weight-tied network
    pretrain_layers: int = 5  # depth of that network
    label_smoothing: float = 0.0  # share of the target that goes to all classes
    ema: float = 0.0  # decay of the averaged weights that are evaluated; 0: none
    jacobian_weight: float = 0.0  # weight of the Jacobian penalty
    jacobian_every: int = 5  # the Jacobian penalty is taken at every so many steps
    jacobian_step: float | None = None  # penalty by differences of this share of z; else exact
    residual_weight: float = 0.0  # weight of the residual penalty, which draws f(z) to z
    residual_every: int = 5  # the residual penalty is taken at every so many steps
    measure_every: int = 1  # the gradient's residual is measured at one of so many steps
    log_every: int = 10  # steps from one line of metrics to the next
    test_every: int = 1  # epochs from one test to the next; the last one is always tested
    checkpoint_seconds: float = 60.0  # from one checkpoint to the next
    snapshots: tuple[int, ...] = (1, 10, 20, 50)  # epochs whose weights are kept, for similarity
    model: ModelConfig = field(default_factory=ModelConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)

    def __post_init__(self) -> None:
        check_choice(self, "data", ("digits", "fashion-mnist", "cifar10"))
        check_integer(self, "epochs", 1)
        check_integer(self, "batch_size", 1)
        check_integer(self, "seed", 0)
        if self.device not in ("auto", "cpu") and not str(self.device).startswith("cuda"):
            raise ValueError(f"Config.device must be auto, cpu or cuda, got {self.device!r}")
        check_choice(self, "precision", ("float32", "tf32", "bf16"))
        check_flag(self, "graph")
        check_integer(self, "pretrain_steps", 0)
        check_integer(self, "pretrain_layers", 1)
        check_real(self, "label_smoothing", 0.0, 0.99)
        check_real(self, "ema", 0.0, 0.999999)
        check_real(self, "jacobian_weight", 0.0)
        check_integer(self, "jacobian_every", 1)
        check_real(self, "residual_weight", 0.0)
        check_integer(self, "residual_every", 1)
        if self.jacobian_step is not None:
            check_real(self, "jacobian_step", 0.0, open_low=True)
        check_integer(self, "measure_every", 1)
        check_integer(self, "log_every", 1)
        check_integer(self, "test_every", 1)
        check_real(self, "checkpoint_seconds", 0.0)
        solver, gradient = self.solver.build(), self.gradient.build()
        if gradient.needs_inverse and not solver.keeps_inverse:
            raise ValueError(
                f"gradient={self.gradient.name} reuses the inverse that Broyden's method builds, "
                f"and solver={self.solver.name} builds none; use solver=broyden, gradient.refine=1 "
                "(which begins without one there), or another gradient such as gradient=jfb"
            )
        check_pair(solver, gradient)
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


# Settings that some names of their section pass over, and the names that read them.
READ_BY: dict[str, tuple[str, ...]] = {
    "solver.memory": ("broyden", "anderson"),
    "solver.step_bits": ("broyden",),
    "gradient.refine": ("gdeq", "jfb"),
    "gradient.tolerance": ("gdeq",),
    "gradient.max_refine": ("gdeq",),
    "gradient.max_iter": ("implicit",),
    "gradient.tol": ("implicit",),
    "gradient.solver": ("implicit",),
    "gradient.steps": ("npg", "unrolled"),
    "gradient.damping": ("npg", "unrolled"),
    "optimizer.momentum": ("sgd", "muon"),
    "optimizer.scale": ("muon",),
    "optimizer.adam_lr": ("muon",),
}
# What a section alone stands for: gradient=jfb, model=large.
SHORT = {"model": "size", "solver": "name", "gradient": "name", "optimizer": "name"}


def check_names(size: str, precision: str) -> None:
    """For a command that takes these two without a configuration."""
    _build(Config, {"precision": precision, "model": {"size": size}}, "")


def load(
    source: str = "digits",
    overrides: list[str] | None = None,
    gradients: Sequence[str] = (),
) -> Config:
    """A preset or a YAML file, with ``key=value`` settings on top (``optimizer.lr=0.01``).

    gradients: those that the command goes through, where that is not for ``gradient.name`` to say.
    """
    settings = _source(source)
    given: set[str] = set()
    for text in overrides or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not a setting; write key=value, such as epochs=5")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as problem:
            raise ConfigError(f"{key.strip()}: cannot read the value {value!r}") from problem
        given |= _put(settings, key.strip(), parsed)
    config = from_dict(settings)
    _check_read(config, given, gradients)
    return config


# In the files of runs made before: nothing reads them any more.
GONE = {"adapt.jacobian_least", "adapt.jacobian_most"}


def from_dict(settings: dict[str, Any]) -> Config:
    built: Config = _build(Config, settings, "")
    return built


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data, as YAML writes it."""
    settings = dataclasses.asdict(config)
    settings["snapshots"] = list(config.snapshots)
    for name in ("steps", "refine"):
        settings["adapt"][name] = list(settings["adapt"][name])
    return settings


def replace(config: Config, **settings: Any) -> Config:
    """The same run with other settings; ``optimizer__lr`` stands for ``optimizer.lr``."""
    changed = to_dict(config)
    for key, value in settings.items():
        _put(changed, key.replace("__", "."), value)
    return from_dict(changed)


def differences(before: Config, after: Config) -> list[str]:
    """The settings in which two runs differ: ``epochs: 1 -> 2``."""
    pairs = {key: (attrgetter(key)(before), attrgetter(key)(after)) for key in all_keys()}
    return [f"{key}: {old} -> {new}" for key, (old, new) in pairs.items() if old != new]


def _source(source: str) -> dict[str, Any]:
    if source in PRESETS:
        copied: dict[str, Any] = yaml.safe_load(yaml.safe_dump(PRESETS[source]))
        return copied
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        try:
            settings = yaml.safe_load(path.read_text())
        except OSError as problem:
            raise ConfigError(f"cannot read {source}: {problem.strerror}") from problem
        except (yaml.YAMLError, UnicodeDecodeError) as problem:
            raise ConfigError(f"{source} is not valid YAML: {problem}") from problem
        if settings is None:
            settings = {}
        if not isinstance(settings, dict):
            raise ConfigError(f"{source} must hold settings, one 'key: value' a line")
        return settings
    near = difflib.get_close_matches(source, list(PRESETS), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{source!r} is neither a preset ({', '.join(PRESETS)}) nor a YAML file{hint}"
    )


def all_keys(kind: type = Config, prefix: str = "") -> list[str]:
    """Every setting there is, dotted."""
    keys = []
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        inner = hints[item.name]
        if dataclasses.is_dataclass(inner):
            keys += all_keys(typing.cast(type, inner), f"{prefix}{item.name}.")
        else:
            keys.append(prefix + item.name)
    return keys


def _unknown(key: str) -> ConfigError:
    return ConfigError(f"there is no setting {key!r}{_hint(key)} (`gdeq train --help` lists them)")


def _hint(key: str) -> str:
    """The nearest setting or section; where the section is clear alone, what it has."""
    known = all_keys()
    section, dot, last = key.partition(".")
    sections = list(dict.fromkeys(k.partition(".")[0] for k in known if "." in k))
    near: list[str] = []
    if not dot:
        last = section
        words = [*sections, *(k for k in known if "." not in k)]
        near = difflib.get_close_matches(key, words, n=1)
    elif right := difflib.get_close_matches(section, sections, n=1):
        inner = [k.partition(".")[2] for k in known if k.startswith(f"{right[0]}.")]
        near = [f"{right[0]}.{k}" for k in difflib.get_close_matches(last, inner, n=1, cutoff=0.5)]
        if not near and right[0] == section:
            return f"; {section} has {', '.join(inner)}"
        near = near or right
    # The last part alone is what people remember.
    near = near or [k for k in known if k.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _put(settings: dict[str, Any], key: str, value: Any) -> set[str]:
    """Set it; returns the keys that were set, written out."""
    known = all_keys()
    if key not in known and key not in {k.split(".")[0] for k in known}:
        raise _unknown(key)
    *parents, last = key.split(".")
    place = settings
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise _unknown(key)
        place = inner
    if key in SHORT and isinstance(value, str):
        place.setdefault(key, {})[SHORT[key]] = value
        return {f"{key}.{SHORT[key]}"}
    place[last] = value
    return {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}


def _check_read(config: Config, given: set[str], gradients: Sequence[str]) -> None:
    """What was asked for must be read by someone.

    Only of settings given by hand: a preset holds those of several gradients, to switch between.
    To give one its default takes back what a preset says, and asks for nothing.
    """
    if gradients and "gradient.name" in given:
        raise ConfigError(
            f"this command takes the gradients {', '.join(gradients)} in turn; leave "
            f"gradient={config.gradient.name} out"
        )
    default = Config()
    asked = {key for key in given if attrgetter(key)(config) != attrgetter(key)(default)}
    idle = sorted(key for key in asked if key.startswith("adapt."))
    if idle and not config.adapt.enabled and "adapt.enabled" not in given:
        raise ConfigError(
            f"{idle[0]} is read with adapt.enabled=true alone: add that, or leave {idle[0]} out"
        )
    for key in sorted(asked & READ_BY.keys()):
        section = key.partition(".")[0]
        chosen = [getattr(config, section).name]
        if section == "gradient" and gradients:
            chosen = list(gradients)
        readers = READ_BY[key]
        if not set(readers) & set(chosen):
            listed = " and ".join(f"{section}={name}" for name in readers)
            raise ConfigError(
                f"{key} is read by {listed} alone, and this is {section}={' or '.join(chosen)}: "
                f"leave {key} out, or choose {section}={readers[0]}"
            )


def _build(kind: type, settings: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if f"{prefix}{key}" in GONE:
            continue
        if key not in hints:
            raise _unknown(f"{prefix}{key}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                inner = ", ".join(all_keys(typing.cast(type, hint), f"{prefix}{key}."))
                raise ConfigError(f"{prefix}{key} holds settings, got {value!r}; it has {inner}")
            values[key] = _build(typing.cast(type, hint), value, f"{prefix}{key}.")
        else:
            values[key] = _coerce(value, hint, f"{prefix}{key}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as problem:
        # GradientConfig.name, GDEQ.refine: the user knows them as gradient.name, gradient.refine.
        owner = rf"^[A-Z]\w*\.(?=(?:{'|'.join(hints)})\b)"
        raise ConfigError(re.sub(owner, prefix, str(problem))) from problem


def _coerce(value: Any, hint: Any, key: str) -> Any:
    if typing.get_origin(hint) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(value)
        raise ConfigError(f"{key} must be a list such as [1,10], got {value!r}")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    if float in kinds and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            pass
    if any(isinstance(value, k) for k in kinds) and not (
        isinstance(value, bool) and bool not in kinds
    ):
        return value
    names = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
    raise ConfigError(f"{key} must be {names}, got {value!r}")

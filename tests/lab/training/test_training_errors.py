"""Every mistake has a sentence that says what to do; these tests read it."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import TINY, begun

from gdeq.lab import files
from gdeq.lab.report.tables import csv_text
from gdeq.lab.tasks.images import ImageConfig
from gdeq.lab.training import config as configs
from gdeq.lab.training import process, runs
from gdeq.lab.training.config import all_keys
from gdeq.lab.training.folder import RunFolder

ADAPT = "adapt.enabled=true solver.tol=0 adapt.every=1"


def refused(gdeq, *args):
    said = gdeq.refused(*args)
    assert "error: " in said
    return said.replace("\n", " ")


def test_every_error_of_a_setting_reaches_the_command_line(gdeq):
    said = refused(gdeq, "train", "epoch=3", "--dry-run")
    assert "error: there is no setting 'epoch'; did you mean 'epochs'? (`gdeq train --help`" in said


# Settings that are wrong, with a part of what is said.
SETTINGS = [
    # Names; what is meant is named.
    ("epoch=3", "there is no setting 'epoch'; did you mean 'epochs'? (`gdeq train --help`"),
    ("batchsize=3", "'batchsize'; did you mean 'batch_size'?"),
    ("optimzer.lr=1", "'optimzer.lr'; did you mean 'optimizer.lr'?"),
    ("augmnt.crp=4", "'augmnt.crp'; did you mean 'augment.crop'?"),
    ("optimzer=sgd", "'optimzer'; did you mean 'optimizer'?"),
    ("solvr.zzzz=3", "'solvr.zzzz'; did you mean 'solver'?"),
    ("optimiser.lr=1", "'optimiser.lr'; did you mean 'optimizer.lr'?"),
    ("solver.maxiter=1", "'solver.maxiter'; did you mean 'solver.max_iter'?"),
    ("lr=0.1", "'lr'; did you mean 'optimizer.lr'?"),
    ("model.dropuot=0.1", "'model.dropuot'; did you mean 'model.dropout'?"),
    ("gradient.refin=1", "'gradient.refin'; did you mean 'gradient.refine'?"),
    ("max_refine=1", "'max_refine'; did you mean 'gradient.max_refine'?"),
    ("augment.zzzz=1", "no setting 'augment.zzzz'; augment has crop, flip"),
    ("zzzz=3", "there is no setting 'zzzz' (`gdeq train --help`"),
    ("epochs.inner=3", "there is no setting 'epochs.inner'"),
    ("epochs", "'epochs' is not a setting; write key=value, such as epochs=5"),
    # Values.
    ("epochs=many", "epochs must be int, got 'many'"),
    ("epochs=1.5", "epochs must be int, got 1.5"),
    ("epochs=true", "epochs must be int, got True"),
    ("epochs=0", "epochs must be at least 1, got 0"),
    ("optimizer.lr=fast", "optimizer.lr must be float, got 'fast'"),
    ("optimizer.lr=-1", "optimizer.lr must be above 0, got -1.0"),
    ("optimizer.lr=.nan", "optimizer.lr must be above 0, got nan"),
    ("optimizer.clip=big", "optimizer.clip must be float or nothing, got 'big'"),
    ("augment.flip=1", "augment.flip must be bool, got 1"),
    ("augment.cutmix=1.5", "augment.cutmix must be at least 0 and at most 1, got 1.5"),
    ("augment.alternate=true", "augment.alternate says in which epochs images are flipped"),
    ("augment.alternate=true", "set augment.flip=true, or leave alternate out"),
    ("snapshots=3", "snapshots must be a list such as [1,10], got 3"),
    ("snapshots=[0]", "snapshots are epochs from 1 on, got (0,)"),
    ("snapshots=[a]", "snapshots are epochs from 1 on, got ('a',)"),
    ("solver=newton", "solver.name must be 'broyden' or 'anderson' or 'picard'"),
    ("gradient=foo", "gradient.name must be 'gdeq' or 'implicit' or 'jfb' or 'npg' or"),
    ("model=foo", "model.size must be 'small' or 'tiny' or 'large', got 'foo'"),
    ("optimizer=foo", "optimizer.name must be 'adam' or 'sgd' or 'muon', got 'foo'"),
    ("augment=flip", "augment holds settings, got 'flip'; it has augment.crop, augment.flip"),
    ("solver.memory=0", "solver.memory must be at least 1, got 0"),
    ("gradient.refine=-1", "gradient.refine must be at least 0, got -1"),
    ("solver=3", "solver holds settings, got 3; it has solver.name, solver.max_iter"),
    ("device=tpu", "device must be auto, cpu or cuda, got 'tpu'"),
    ("data=mnist", "data must be 'digits'"),
    ("epochs=[1", "epochs: cannot read the value '[1'"),
    ("epochs=" + "[" * 500, "more than 20 levels of nesting"),
    ("epochs=2024-02-31", "day is out of range"),
    ("epochs=!!bool\xa0abc", "epochs: cannot read the value '!!bool abc'"),
    ("epochs=" + "9" * 5000, "epochs: cannot read the value '999"),
    ("epochs=0x" + "f" * 5000, "a whole number of more than 64 bits"),
    ("seed=18446744073709551616", "a whole number of more than 64 bits"),
    ("snapshots=[&a\xa0[1],*a]", "aliases (*name) are not allowed"),
    ("optimizer.lr=1" + 300 * ":1" + ".5", "cannot read the value '1:1:1"),
    ("optimizer.lr=1e308", "optimizer.lr must be at most 1e+30, got '1e308'"),
    ("task=[1]", "there is no task [1]"),
    ("task=" + "x" * 5000 + ".py", "cannot read the task xxx"),
    ("timeout_seconds=0", "timeout_seconds must be at least 1"),
    ("solver=picard", "=picard builds none; use solver=broyden, gradient.refine=1 (which"),
    ("solver=anderson", "=anderson builds none; use solver=broyden, gradient.refine=1 (which"),
    ("solver=anderson solver.step_bits=4", "step_bits must be 16 or 8"),
    ("gradient.tolerance=-1", "tolerance must be above 0 and at most 1, got -1.0"),
    # What nothing reads.
    ("gradient=implicit gradient.refine=2", "alone, and this is gradient=implicit: leave"),
    ("gradient={name:\xa0implicit,refine:\xa02}", "gradient.refine is read by gradient=gdeq"),
    ("gradient.tol=1e-3", "gradient.tol is read by gradient=implicit alone"),
    ("gradient.steps=3", "read by gradient=npg and gradient=unrolled alone, and this is gra"),
    ("solver=picard gradient=jfb solver.memory=3", "solver.memory is read by"),
    ("solver=anderson gradient=jfb solver.step_bits=8", "step_bits is read by solver=broyden"),
    ("optimizer.momentum=0.5", "is read by optimizer=sgd and optimizer=muon alone, and this"),
    ("optimizer.adam_lr=0.5", "is read by optimizer=muon alone, and this is optimizer=adam"),
    ("adapt.backward=0.2", "adapt.backward is read with adapt.enabled=true alone"),
    # The adaptive method.
    ("adapt.steps=[4,4]", "at least 1, such as [4, 5, 7], got (4, 4)"),
    ("adapt.steps=[]", "adapt.steps must be rising integers"),
    ("adapt.refine=[-1,1]", "adapt.refine must be rising integers of at least 0"),
    ("adapt.steps=5", "adapt.steps must be a list such as"),
    ("adapt.forward=0", "adapt.forward must be above 0"),
    ("adapt.backward=1.5", "adapt.backward must be above 0"),
    ("adapt.forward_at_first=0.005", "adapt.forward_at_first must be at least 0.01"),
    ("adapt.backward_at_first=0.2", "adapt.backward_at_first must be at least 0.3"),
    ("adapt.backward_at_first=1.2", "and at most 1"),
    ("adapt.penalty_most=0.01", "adapt.penalty_most must be at least 1"),
    ("adapt.enabled=1", "adapt.enabled must be bool"),
    (f"{ADAPT} gradient=npg", "for another gradient, or with gradient.tolerance, set adapt."),
    (f"{ADAPT} gradient.tolerance=0.1", "with gradient.tolerance, set adapt.enabled=false"),
    (f"{ADAPT} solver.tol=0.02", "stops each solve before adapt.room * adapt.forward = 0.003"),
    (f"{ADAPT} solver.tol=0.004", "lower solver.tol (0: all steps), or raise adapt.forward"),
    (f"{ADAPT} measure_every=2", "lower measure_every to 1 or less"),
]


@pytest.mark.parametrize(("given", "message"), SETTINGS)
def test_a_setting_that_does_not_fit(given, message):
    with pytest.raises(configs.ConfigError) as refusal:
        configs.load("digits", [text.replace("\xa0", " ") for text in given.split(" ")])
    assert message in str(refusal.value)


PRESETS = "digits, cifar10, cifar10-fast, cifar10-paper, cifar10-adaptive, chars"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train cifar-10", f"'cifar-10' is neither a preset ({PRESETS}"),
        ("train cifar-10", "did you mean 'cifar10'?"),
        ("train none.yaml", "cannot read none.yaml: No such file"),
        ("train data=\x1b[31mred", "cannot read the value '\\x1b[31mred'"),
        ("train --resume auto", "--resume auto needs --out DIR"),
        ("compare gradient=jfb", "the gradients implicit, jfb, npg, gdeq in turn; leave"),
    ],
)
def test_an_argument_that_does_not_fit(gdeq, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(gdeq, *arguments.split(" "), "--dry-run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"epochs: [1\n", "is not valid YAML"),
        (b"\xff\xfe\x00binary", "is not valid YAML"),
        (b"- 1\n- 2\n", "must hold settings, one 'key: value' a line"),
        (b"epochz: 1\n", "there is no setting 'epochz'; did you mean 'epochs'?"),
        (b"solvr:\n  tol: 1\n", "there is no setting 'solvr'; did you mean 'solver'?"),
        (b"solver:\n  tool: 1\n", "there is no setting 'solver.tool'; did you mean 'solver.tol'?"),
        (b"model: large\n", "model holds settings, got 'large'"),
        (b"", "must hold settings, one 'key: value' a line"),
        (b"a: &a [x,x]\nb: &b [*a,*a]\n", "aliases (*name) are not allowed"),
        (b"epochs: 1\n" * 200_000, "has 2,000,000 bytes, where at most 1,048,576 belong"),
    ],
)
def test_an_unreadable_file(gdeq, tmp_path, content, message):
    path = tmp_path / "own.yaml"
    path.write_bytes(content)
    said = refused(gdeq, "train", path, "--dry-run")
    assert message in said
    assert "own.yaml" in said or "setting" in message or "holds" in message


def test_a_long_number_is_refused_before_it_is_read(monkeypatch):
    """PyYAML reads 1:1:1:... in a time that grows as the square of its length."""
    monkeypatch.setattr(files._Plain, "construct_yaml_int", lambda *_: pytest.fail("it was read"))
    with pytest.raises(files.FileError, match="a whole number of more than 64 bits"):
        files.load_yaml("1" + 100 * ":1")


@pytest.mark.parametrize("name", ["x" * 300, "nul\0byte", "not-utf8-\udcff", "esc\x1b[2J\x07"])
@pytest.mark.parametrize(
    "command", [["train"], ["train", "--resume"], ["evaluate"], ["report"], ["train", "--out"]]
)
def test_a_path_that_no_file_can_have(gdeq, tmp_path, monkeypatch, name, command):
    monkeypatch.setattr(runs, "train", lambda path, *_, **__: path.exists() or {})
    said = gdeq(*command, tmp_path / name)[1]
    assert "Traceback" not in said
    assert "\x1b" not in said
    assert "\x07" not in said
    assert said.isascii() or "\udcff" not in said


KEYS = [*all_keys(ImageConfig), "solver", "model", "nothing", "adapt.steps.x", "", "."]
PIECES = [*"[]{},~é?|>'", "&a", "*a", "!!int", "!!binary", "1e400", "-0x1", "2001-13-45", "1:60"]
PIECES += ["true", "small", ": ", '"', "\0", "\udc80", "9" * 400]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KEYS), st.lists(st.sampled_from(PIECES), max_size=6), st.text(max_size=5))
def test_any_setting_gets_a_sentence_or_is_one(key, pieces, text):
    with contextlib.suppress(configs.ConfigError):
        configs.load("digits", [f"{key}={''.join(pieces)}{text}"])


def test_an_interrupt_at_any_time_is_no_traceback(gdeq, monkeypatch):
    def struck(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(configs, "load", struck)
    code, said = gdeq("train", "epochs=1")
    assert (code, said) == (130, "interrupted\n")


def test_an_interrupt_while_it_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-m", "gdeq", "data"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "a: &a [*a]\n"),
        ("config.yaml", "a: " + "[" * 5000),
        ("config.yaml", 'task: "\\ud800"\n'),
        ("summary.json", '{"epochs": 1, "task": "\\ud800", "device": "\\ud800"}'),
        ("metrics.jsonl", '{"kind": "\\ud800\\u001b[2J"}\n'),
    ],
)
def test_a_report_on_hostile_files(gdeq, tmp_path, name, content):
    run = begun(tmp_path / "run\x1b[2J")
    (run / name).write_text(content)
    code, said = gdeq("report", run, "--out", tmp_path / "page")
    assert code in (0, 1)
    assert "Traceback" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.jsonl"])
def test_a_report_on_half_of_a_character(gdeq, tmp_path, reference, name):
    """Also in the name of the folder, which need not be UTF-8."""
    run = tmp_path / "run\udcff"
    shutil.copytree(reference, run)
    text = (run / name).read_text()
    changes = {
        "config.yaml": lambda text: text.replace("task: images", 'task: "\\ud800"'),
        "summary.json": lambda text: text.replace('"gradient": "', '"gradient": "\\ud800'),
        "metrics.jsonl": lambda text: text + '{"kind": "\\ud800"}\n',
    }
    changed = changes[name](text)
    assert changed != text
    (run / name).write_text(changed)
    if name == "config.yaml":
        assert "is not valid YAML: half of a char" in gdeq.refused("report", run, "--out", tmp_path)
        return
    gdeq.ok("report", run, "--out", tmp_path / "page")
    assert b"run\\udcff" in (tmp_path / "page/report.html").read_bytes()


def test_csv_cells_are_no_formulas(tmp_path):
    cells = ["=1+1", "+cmd", "-x", "@a", "-1.5", "plain", -2, None]
    assert csv_text(["=h"], [cells]) == "'=h\n'=1+1,'+cmd,'-x,'@a,-1.5,plain,-2,\n"


def thesis(place):
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")


TAKEN = [
    (thesis, "run", "{run} exists already and is left as it is; choose another folder with --out"),
    (begun, "run", "continue it with `gdeq train --resume {run}`, or choose another folder"),
    (Path.touch, "run", "{run} exists already and is a file, not a folder: choose another"),
    (Path.touch, "run/in", "cannot make the run folder {run}/in: {run}: Not a directory"),
]


@pytest.mark.parametrize(("made", "out", "message"), TAKEN)
def test_a_place_that_is_taken(gdeq, tmp_path, few_images, made, out, message):
    made(tmp_path / "run")
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    for dry in ([], ["--dry-run"]):
        said = refused(gdeq, "train", *TINY, "--out", tmp_path / out, *dry)
        assert message.format(run=tmp_path / "run") in said
    assert before == {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}


@contextlib.contextmanager
def as_somebody():
    """Root may write anywhere: as another user for a while."""
    root = os.geteuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


def test_a_place_where_nothing_may_be_written(gdeq, few_images):
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o555)
        with as_somebody():
            said = refused(gdeq, "train", *TINY, "--out", f"{place}/runs/one", "--dry-run")
        Path(place).chmod(0o755)
    assert f"cannot make the run folder {place}/runs/one: {place}: Permission denied" in said


def test_a_run_that_may_only_be_read(gdeq, few_images):
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        assert gdeq("train", *TINY, "epochs=1", "--out", run)[0] == 0
        for each in (Path(place), run, *run.rglob("*")):
            each.chmod(0o555)
        with as_somebody():
            said = refused(gdeq, "train", "--resume", run, "epochs=2")
            looked = refused(gdeq, "similarity", run)
        for each in (Path(place), run, *run.rglob("*")):
            each.chmod(0o755)
    assert "Permission denied; change its permissions, or work on a copy" in said
    assert f"{run} may not be written to" in looked  # before any work


def test_what_was_killed_before_it_began_may_begin_again(gdeq, tmp_path, few_images):
    (tmp_path / "config.yaml.part").write_text("epo")
    gdeq.ok("train", *TINY, "epochs=1", "--out", tmp_path)


NO_RUN = [
    (Path.mkdir, "is not a run folder: it holds no config.yaml"),
    (Path.touch, "is a file, not a run folder"),
    (lambda place: None, "does not exist"),
]


@pytest.mark.parametrize("command", [["train", "--resume"], ["evaluate"], ["similarity"]])
@pytest.mark.parametrize(("made", "message"), NO_RUN)
def test_a_folder_that_is_no_run(gdeq, tmp_path, command, made, message):
    made(tmp_path / "run")
    assert f"error: {tmp_path / 'run'} {message}" in refused(gdeq, *command, tmp_path / "run")
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["epochs=2", "seeds"], "'seeds' is not a setting"),
        (["digits"], "--resume takes no preset and no file, since it uses the run's own config"),
        (["own.yaml"], "leave own.yaml out"),
        (["--out", "other"], "leave --out out"),
    ],
)
def test_resume_takes_only_settings(gdeq, tmp_path, given, message):
    begun(tmp_path / "run")
    assert message in refused(gdeq, "train", *given, "--resume", tmp_path / "run")


@pytest.mark.parametrize(
    "setting", ["data=cifar10", "batch_size=3", "seed=1", "model=large", "optimizer=sgd", "ema=0.5"]
)
def test_what_a_resumed_run_cannot_change(gdeq, tmp_path, setting):
    before = (begun(tmp_path) / "config.yaml").read_text()
    said = refused(gdeq, "train", "--resume", tmp_path, setting)
    assert "cannot change in the middle of a run" in said
    assert setting.split("=")[0] in said
    assert (tmp_path / "config.yaml").read_text() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(gdeq, tmp_path):
    said = refused(gdeq, "train", "device=cuda", "--out", tmp_path / "run")
    assert "device=cuda was asked for, but PyTorch sees no GPU here" in said
    assert "use device=cpu or device=auto" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["evaluate", "similarity"])
def test_a_gpu_that_is_not_there_by_option(gdeq, tmp_path, command):
    """Their advice is the option that they have."""
    begun(tmp_path)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "epoch-001.safetensors").write_text("")
    said = refused(gdeq, command, tmp_path, "--device", "cuda")
    assert "PyTorch sees no GPU here; use --device cpu or --device auto" in said
    assert "device=" not in said
    RunFolder(tmp_path).write_config(configs.load("digits", ["device=cuda"]))
    assert "use --device cpu" in refused(gdeq, command, tmp_path)
    for device in ("gpu", "meta", "cpu:x"):
        said = refused(gdeq, command, tmp_path, "--device", device)
        assert f"there is no device {device!r}: write cpu, cuda or cuda:0; use --device cpu" in said


def test_a_gpu_number_that_is_not_there(gdeq, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(process.DeviceError, match="there is no GPU 5: this machine has 2"):
        process.start("cuda:5")
    said = refused(gdeq, "train", "device=cuda-x", "--out", tmp_path / "run")
    assert "there is no device 'cuda-x': write cpu, cuda or cuda:0; use device=cpu" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["cifar10", "device=cpu"], "gdeq data cifar10"),
        (
            [*TINY, "batch_size=500"],
            "batch_size 500 is larger than the data set (12 samples)",
        ),
    ],
)
def test_data_that_does_not_suffice(gdeq, tmp_path, few_images, given, message):
    for dry in ([], ["--dry-run"]):
        place = ["--out", tmp_path / "run", "--data", tmp_path, *dry]
        said = refused(gdeq, "train", *given, *place)
        assert message in said
        assert "drop_last" not in said
    assert not (tmp_path / "run").exists()


def test_weights_that_are_missing_or_damaged(gdeq, tmp_path, few_images):
    run = tmp_path / "run"
    runs.train(run, configs.load("digits", [*TINY, "epochs=1", "snapshots=[]"]))
    said = refused(gdeq, "similarity", run)
    assert f"{run} holds no snapshots; train with snapshots=" in said
    os.truncate(run / "weights.safetensors", 1000)
    assert "weights.safetensors is damaged or cut short" in refused(gdeq, "evaluate", run)
    (run / "weights.safetensors").unlink()
    said = refused(gdeq, "evaluate", run)
    assert f"it is not finished; continue it with `gdeq train --resume {run}`" in said

"""Every mistake has a sentence that says what to do; these tests read it."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import TINY, begun

from gdeq.lab.report.tables import csv_text
from gdeq.lab.tasks.images import ImageConfig, Images
from gdeq.lab.training import config as configs
from gdeq.lab.training import process, runs
from gdeq.lab.training.config import all_keys
from gdeq.lab.training.folder import RunFolder

BUILD = Images.model


def refused(gdeq, *args):
    said = gdeq.refused(*args)
    assert "error: " in said
    assert "Traceback" not in said
    return said.replace("\n", " ")


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("epoch=3", "epochs"),
        ("batchsize=3", "batch_size"),
        ("optimzer.lr=1", "optimizer.lr"),
        ("augmnt.crp=4", "augment.crop"),
        ("optimzer=sgd", "optimizer"),
        ("solvr.zzzz=3", "solver"),
        ("optimiser.lr=1", "optimizer.lr"),
        ("solver.maxiter=1", "solver.max_iter"),
        ("lr=0.1", "optimizer.lr"),
        ("model.dropuot=0.1", "model.dropout"),
        ("gradient.refin=1", "gradient.refine"),
        ("max_refine=1", "gradient.max_refine"),
    ],
)
def test_an_unknown_key_suggests_the_right_one(gdeq, setting, nearest):
    key = setting.split("=")[0]
    said = refused(gdeq, "train", setting, "--dry-run")
    assert f"there is no setting '{key}'" in said
    assert f"did you mean '{nearest}'?" in said
    assert "gdeq train --help" in said


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs=many", "epochs must be int, got 'many'"),
        ("epochs=1.5", "epochs must be int, got 1.5"),
        ("epochs=true", "epochs must be int, got True"),
        ("epochs=0", "error: epochs must be at least 1, got 0"),
        ("optimizer.lr=fast", "optimizer.lr must be float, got 'fast'"),
        ("optimizer.lr=-1", "error: optimizer.lr must be above 0, got -1.0"),
        ("optimizer.lr=.nan", "error: optimizer.lr must be above 0, got nan"),
        ("optimizer.clip=big", "optimizer.clip must be float or nothing, got 'big'"),
        ("augment.flip=1", "augment.flip must be bool, got 1"),
        ("augment.cutmix=1.5", "augment.cutmix must be at least 0 and at most 1, got 1.5"),
        ("augment.alternate=true", "augment.alternate says in which epochs images are flipped"),
        ("augment.alternate=true", "set augment.flip=true, or leave alternate out"),
        ("snapshots=3", "snapshots must be a list such as [1,10], got 3"),
        ("snapshots=[0]", "error: snapshots are epochs from 1 on, got (0,)"),
        ("snapshots=[a]", "snapshots are epochs from 1 on, got ('a',)"),
        ("solver=newton", "error: solver.name must be 'broyden' or 'anderson' or 'picard'"),
        ("gradient=foo", "error: gradient.name must be 'gdeq' or 'implicit' or 'jfb' or 'npg' or"),
        ("model=foo", "error: model.size must be 'small' or 'tiny' or 'large', got 'foo'"),
        ("optimizer=foo", "error: optimizer.name must be 'adam' or 'sgd' or 'muon', got 'foo'"),
        ("augment=flip", "augment holds settings, got 'flip'; it has augment.crop, augment.flip"),
        ("solver.memory=0", "error: solver.memory must be at least 1, got 0"),
        ("gradient.refine=-1", "error: gradient.refine must be at least 0, got -1"),
        ("solver=3", "solver holds settings, got 3; it has solver.name, solver.max_iter"),
        ("epochs.inner=3", "there is no setting 'epochs.inner'"),
        ("device=tpu", "error: device must be auto, cpu or cuda, got 'tpu'"),
        ("data=mnist", "error: data must be 'digits'"),
        ("epochs=[1", "epochs: cannot read the value '[1'"),
        ("epochs=" + "[" * 500, "more than 20 levels of nesting"),
        ("epochs=2024-02-31", "day is out of range"),
        ("epochs=!!bool abc", "epochs: cannot read the value '!!bool abc'"),
        ("epochs=" + "9" * 5000, "epochs: cannot read the value '999"),
        ("epochs=0x" + "f" * 5000, "a whole number of more than 64 bits"),
        ("seed=18446744073709551616", "a whole number of more than 64 bits"),
        ("snapshots=[&a [1], *a]", "aliases (*name) are not allowed"),
        ("optimizer.lr=1e308", "optimizer.lr must be at most 1e+30, got '1e308'"),
        ("task=[1]", "there is no task [1]"),
        ("task=" + "x" * 5000 + ".py", "cannot read the task xxx"),
        ("data=\x1b[31mred", "cannot read the value '\\x1b[31mred'"),
        ("timeout_seconds=0", "error: timeout_seconds must be at least 1"),
        ("solver=picard", "=picard builds none; use solver=broyden, gradient.refine=1 (which"),
        ("solver=anderson", "=anderson builds none; use solver=broyden, gradient.refine=1 (which"),
        ("gradient.tolerance=-1", "tolerance must be above 0 and at most 1, got -1.0"),
    ],
)
def test_a_value_that_does_not_fit(gdeq, setting, message):
    assert message in refused(gdeq, "train", setting, "--dry-run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["gradient=implicit", "gradient.refine=2"], "alone, and this is gradient=implicit: leave"),
        (["gradient={name: implicit, refine: 2}"], "gradient.refine is read by gradient=gdeq"),
        (["gradient.tol=1e-3"], "gradient.tol is read by gradient=implicit alone"),
        (["gradient.steps=3"], "read by gradient=npg and gradient=unrolled alone, and this is gra"),
        (["solver=picard", "gradient=jfb", "solver.memory=3"], "solver.memory is read by"),
        (["optimizer.momentum=0.5"], "is read by optimizer=sgd and optimizer=muon alone, and this"),
        (["optimizer.adam_lr=0.5"], "is read by optimizer=muon alone, and this is optimizer=adam"),
    ],
)
def test_a_setting_that_nothing_reads(gdeq, settings, message):
    assert message in refused(gdeq, "train", *settings, "--dry-run")


def test_a_resumed_run_refuses_what_it_does_not_read(gdeq, tmp_path):
    begun(tmp_path, "gradient=implicit")
    said = refused(gdeq, "train", "--resume", tmp_path, "gradient.refine=2")
    assert "gradient.refine is read by gradient=gdeq and gradient=jfb alone, and this is " in said
    assert "gradient=implicit: leave gradient.refine out, or choose gradient=gdeq" in said


PRESETS = "digits, cifar10, cifar10-fast, cifar10-paper, cifar10-adaptive, chars"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "augment.zzzz=1"], "no setting 'augment.zzzz'; augment has crop, flip"),
        (["train", "zzzz=3"], "there is no setting 'zzzz' (`gdeq train --help`"),
        (["train", "digits", "epochs"], "'epochs' is not a setting; write key=value, such as ep"),
        (["train", "cifar-10"], f"'cifar-10' is neither a preset ({PRESETS}"),
        (["train", "cifar-10"], "did you mean 'cifar10'?"),
        (["train", "none.yaml"], "cannot read none.yaml: No such file"),
        (["compare", "gradient=jfb"], "the gradients implicit, jfb, npg, gdeq in turn; leave"),
    ],
)
def test_an_argument_that_does_not_fit(gdeq, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(gdeq, *arguments, "--dry-run")


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


@pytest.mark.parametrize("name", ["x" * 300, "nul\0byte", "not-utf8-\udcff", "esc\x1b[2J"])
@pytest.mark.parametrize(
    "command", [["train"], ["train", "--resume"], ["evaluate"], ["report"], ["train", "--out"]]
)
def test_a_path_that_no_file_can_have(gdeq, tmp_path, monkeypatch, name, command):
    monkeypatch.setattr(runs, "train", lambda path, *_, **__: path.exists() or {})
    said = gdeq(*command, tmp_path / name)[1]
    assert "Traceback" not in said
    assert "\x1b" not in said
    assert said.isascii() or "\udcff" not in said


SETTINGS = [*all_keys(ImageConfig), "solver", "model", "nothing", "adapt.steps.x", "", "."]
PIECES = [
    "[",
    "]",
    "{",
    "}",
    ",",
    "&a",
    "*a",
    "!!int",
    "!!binary",
    "~",
    "1e400",
    "-0x1",
    "é",
    "2001-13-45",
    "?",
    "|",
    ">",
    "'",
    "true",
    "small",
    "1:60",
]
PIECES += [": ", '"', "\0", "\udc80", "9" * 400]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(SETTINGS), st.lists(st.sampled_from(PIECES), max_size=6), st.text(max_size=5)
)
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


def test_csv_cells_are_no_formulas(tmp_path):
    cells = ["=1+1", "+cmd", "-x", "@a", "-1.5", "plain", -2, None]
    assert csv_text(["=h"], [cells]) == "'=h\n'=1+1,'+cmd,'-x,'@a,-1.5,plain,-2,\n"


def test_a_run_folder_that_exists_is_left_alone(gdeq, tmp_path, few_images):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("years of work")
    said = refused(gdeq, "train", *TINY, "--out", run)
    assert f"{run} exists already and is left as it is" in said
    assert "--resume" not in said  # it is no run
    assert "choose another folder with --out" in said
    assert [(p.name, p.read_text()) for p in run.iterdir()] == [("thesis.txt", "years of work")]


def test_a_run_that_is_there_can_be_continued(gdeq, tmp_path, few_images):
    begun(tmp_path)
    said = refused(gdeq, "train", *TINY, "--out", tmp_path)
    assert f"continue it with `gdeq train --resume {tmp_path}`, or choose another folder" in said


def test_a_file_where_the_run_folder_should_be(gdeq, tmp_path, few_images):
    (tmp_path / "file").write_text("")
    said = refused(gdeq, "train", *TINY, "--out", tmp_path / "file")
    assert f"{tmp_path / 'file'} exists already and is a file, not a folder" in said
    assert "--resume" not in said
    said = refused(gdeq, "train", *TINY, "--out", tmp_path / "file" / "run")
    assert "cannot make the run folder" in said
    assert f"{tmp_path / 'file'}: Not a directory" in said
    dry = refused(gdeq, "train", *TINY, "--out", tmp_path / "file" / "run", "--dry-run")
    assert dry == said


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


@pytest.mark.parametrize("command", [["train", "--resume"], ["evaluate"], ["similarity"]])
def test_a_folder_that_is_no_run(gdeq, tmp_path, command):
    said = refused(gdeq, *command, tmp_path)
    assert f"{tmp_path} is not a run folder: it holds no config.yaml" in said
    assert not list(tmp_path.iterdir())
    said = refused(gdeq, *command, tmp_path / "none")
    assert f"error: {tmp_path / 'none'} does not exist" in said
    (tmp_path / "file").write_text("")
    said = refused(gdeq, *command, tmp_path / "file")
    assert f"error: {tmp_path / 'file'} is a file, not a run folder" in said


def test_resume_takes_only_settings(gdeq, tmp_path):
    begun(tmp_path)
    said = refused(gdeq, "train", "epochs=2", "seeds", "--resume", tmp_path)
    assert "'seeds' is not a setting" in said
    for source in ("digits", "own.yaml"):
        said = refused(gdeq, "train", source, "--resume", tmp_path)
        assert (
            "--resume takes no preset and no file, since it uses the run's own configuration"
            in said
        )
        assert f"leave {source} out" in said
    said = refused(gdeq, "train", "--resume", tmp_path, "--out", tmp_path / "other")
    assert "leave --out out" in said


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


def test_a_data_set_that_is_missing(gdeq, tmp_path):
    said = refused(
        gdeq, "train", "cifar10", "device=cpu", "--out", tmp_path / "run", "--data", tmp_path
    )
    assert "gdeq data cifar10" in said
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_set(gdeq, tmp_path, few_images):
    said = refused(gdeq, "train", *TINY, "batch_size=500", "--out", tmp_path / "run")
    assert "batch_size 500 is larger than the data set (12 samples): lower batch_size" in said
    assert "drop_last" not in said
    assert not (tmp_path / "run").exists()
    dry = refused(gdeq, "train", *TINY, "batch_size=500", "--out", tmp_path / "run", "--dry-run")
    assert "batch_size 500 is larger than the data set (12 samples)" in dry


def expanding(task):
    """A model whose f has no fixed point within reach."""
    model = BUILD(task)
    for name, parameter in model.deq.cell.named_parameters():
        if name.endswith("original0"):  # the lengths of the normalised weights
            parameter.data *= 1000
    return model


def test_a_solver_that_stops_converging_is_told(gdeq, tmp_path, few_images, monkeypatch):
    said = gdeq.ok("train", *TINY, "epochs=1", "--out", tmp_path / "good")
    assert "warning" not in said
    monkeypatch.setattr(Images, "model", expanding)
    settings = [*TINY, "epochs=1", "gradient=jfb", "solver=picard"]
    said = gdeq.ok(
        "train", *settings, "--out", tmp_path / "bad"
    )  # it may recover: a warning, not an end
    assert "warning: the solver no longer converges (mean residual" in said
    assert "at step 1): raise solver.max_iter" in said
    assert "residual_weight=5" in said
    # While it is unrolled there is no solver to complain of.
    said = gdeq.ok("train", *settings, "pretrain_steps=3", "--out", tmp_path / "unrolled")
    assert "the solver no longer converges" not in said
    assert "warning: all 3 steps are unrolled" in said


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

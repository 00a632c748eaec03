"""The run store: loads, resumes, notices damage, survives being killed, and computes a run once."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import timm.layers
import torch
from accelerate.state import AcceleratorState
from torch.nn.attention import SDPBackend, sdpa_kernel

import standin
from interruption import interrupted
from skiplab import files
from skiplab.companion import job, runs
from skiplab.errors import InputError
from skiplab.studies.anti_oversmoothing import costs as anti_oversmoothing_costs
from skiplab.studies.token_graying import costs
from skiplab.training import checkpoint, data, loop
from test_loop import TINY, but


def load_or_run(*configs, workers=0, said=None):
    return runs.load_or_run(
        loop.train, configs or [TINY], workers=workers, report=None if said is None else said.append
    )


def test_a_second_call_computes_nothing(store, monkeypatch):
    said = []
    (first,) = load_or_run(said=said)
    assert said[0] == "0 of 1 runs loaded from the store, 1 to compute"
    assert sorted(path.name for path in first.folder.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "provenance.json",
        "result.json",
    ]
    monkeypatch.setattr(job.Job, "execute", None)
    said.clear()
    assert load_or_run(said=said) == [first]
    assert said == ["1 of 1 runs loaded from the store, 0 to compute"]


def test_a_run_knows_where_it_comes_from(store):
    (run,) = load_or_run()
    provenance = json.loads((run.folder / "provenance.json").read_text())
    assert provenance["versions"]["torch"] == torch.__version__.split("+")[0]
    assert provenance["data"] == loop.dataset(TINY).digest and provenance["seed"] == TINY.seed
    assert provenance["machine"]["device"] == "cpu" and provenance["process_peak_memory_bytes"] > 1e8
    assert set(provenance["git"]) == {"commit", "dirty"} and len(provenance["seconds_per_epoch"]) == TINY.epochs
    assert json.loads((run.folder / "config.json").read_text()) == dataclasses.asdict(TINY)


@pytest.mark.parametrize("variable, value", [("MIXED_PRECISION", "bf16"), ("GRADIENT_ACCUMULATION_STEPS", "8")])
def test_accelerates_environment_changes_no_number(store, monkeypatch, variable, value):
    (expected,) = load_or_run()
    AcceleratorState._reset_state(reset_partial_state=True)  # else it is as it was set up first in this process
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    monkeypatch.setenv("COMPANION_RUNS", str(store / "again"))
    (run,) = load_or_run()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert run.hash == expected.hash and run.history == expected.history and run.result == expected.result


@contextlib.contextmanager
def switched(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


AROUND = {
    "float64": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a device": lambda: torch.device("meta"),
    "low precision": lambda: switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "no fused attention": lambda: switched(timm.layers.use_fused_attn, timm.layers.set_fused_attn, False),
    "attention by its formula": lambda: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_set_around_the_call_changes_no_bit(store, monkeypatch, name):
    (expected,) = load_or_run(but(epochs=1))
    data._load.cache_clear()
    monkeypatch.setenv("COMPANION_RUNS", str(store / "again"))
    with AROUND[name]():
        (run,) = load_or_run(but(epochs=1))
        assert all(
            torch.equal(one, other)
            for one, other in zip(run.load_model().parameters(), expected.load_model().parameters(), strict=True)
        )
        assert {parameter.dtype for parameter in run.load_model().parameters()} == {torch.float32}
    assert run.hash == expected.hash and run.history == expected.history and run.result == expected.result
    data._load.cache_clear()


def test_timms_environment_changes_no_bit_in_a_worker(store, monkeypatch):
    (expected,) = load_or_run(but(epochs=1))
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    monkeypatch.setenv("COMPANION_RUNS", str(store / "again"))
    (run,) = load_or_run(but(epochs=1), workers=1)
    assert run.hash == expected.hash
    if "MKL_CBWR" in os.environ:
        assert run.history == expected.history and run.result == expected.result
    else:  # the matrix products of two processes are then not promised the same bits
        assert run.history[-1]["train_loss"] == pytest.approx(expected.history[-1]["train_loss"], rel=1e-3)


@pytest.mark.parametrize("name", AROUND)
def test_what_is_set_around_a_run_without_the_store_changes_no_bit(tmp_path, name):
    expected = loop.train(but(epochs=1), tmp_path / "a")
    with AROUND[name]():
        found = loop.train(but(epochs=1), tmp_path / "b")
    assert found | {"seconds": 0} == expected | {"seconds": 0}


def test_what_splits_a_model_is_refused(store, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match="^ACCELERATE_USE_FSDP is set; .*data parallelism only: unset it"):
        load_or_run()


def test_a_relative_data_folder_is_the_one_seen_from_here_under_a_launcher_too(store, monkeypatch, tmp_path):
    standin.make_folder(tmp_path / "pictures", {"train/cat": 40, "train/dog": 40, "test/cat": 8, "test/dog": 8})
    monkeypatch.chdir(tmp_path)
    config = but(data="pictures", train_images=None, test_images=None, channels=1, img_size=28, epochs=1)
    (here,) = load_or_run(config)
    monkeypatch.setenv("COMPANION_RUNS", str(store / "again"))
    monkeypatch.setenv("COMPANION_LAUNCH", shlex.quote(sys.executable))
    (launched,) = load_or_run(config)
    assert launched.hash == here.hash
    # The same pictures; the bits of what is computed from them follow the number of threads.
    assert launched.history[-1]["train_loss"] == pytest.approx(here.history[-1]["train_loss"], rel=1e-3)


def test_a_stored_model_scores_what_its_result_says(store):
    (run,) = load_or_run()
    ((images, labels),) = loop.dataset(TINY).test.batches(100, device="cpu", train=False)
    with torch.no_grad():
        top1 = 100 * (run.load_model()(images).argmax(1) == labels).float().mean().item()
    assert top1 == pytest.approx(run.result["test_top1"])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"skip": "none"},
        {"train_images": 120},
        {"weight_decay": 0.1},
        {"model_args": TINY.model_args | {"depth": 1}},
    ],
)
def test_the_hash_follows_the_configuration(store, change):
    assert job.place(loop.train, TINY)[0] != job.place(loop.train, but(**change))[0]


def test_the_hash_follows_data_code_and_versions(store, monkeypatch):
    hashes = {job.place(loop.train, TINY)[0]}
    with monkeypatch.context() as patch:
        patch.setattr(job, "_code", lambda module: "other")
        hashes.add(job.place(loop.train, TINY)[0])
    with monkeypatch.context() as patch:
        patch.setattr(job.provenance, "versions", lambda: {"torch": "0"})
        hashes.add(job.place(loop.train, TINY)[0])
    with monkeypatch.context() as patch:
        data = dataclasses.replace(loop.dataset(TINY), digest="other")
        patch.setattr(loop, "dataset", lambda config: data)
        hashes.add(job.place(loop.train, TINY)[0])
    assert len(hashes) == 4


def test_code_that_changed_under_a_running_notebook_is_noticed(store, monkeypatch):
    begun = job.Job(loop.train, TINY, *job.place(loop.train, TINY))
    monkeypatch.setattr(job, "_code", lambda module: "what a worker that started later has loaded")
    with pytest.raises(InputError, match="code changed since this notebook started: restart the kernel"):
        begun.execute()
    assert not begun.folder.exists()


def test_code_edited_after_it_was_loaded_is_noticed(store, monkeypatch):
    job._code.cache_clear()
    assert Path(loop.__file__) in job._LOADED
    monkeypatch.setitem(job._LOADED, Path(loop.__file__), "what was loaded before the edit")
    with pytest.raises(InputError, match="loop.py changed since this notebook started: restart the kernel"):
        load_or_run()


def test_code_edited_before_it_is_imported_is_noticed(store, monkeypatch):
    """As a module that a notebook imports after the store, or a function imports when it is called."""
    job._code.cache_clear()
    path = Path(runs.__file__).with_name("replication.py")
    monkeypatch.setitem(job._LOADED, path, "what it was when the notebook started")
    with pytest.raises(InputError, match="replication.py changed since this notebook started: restart the kernel"):
        job._code("skiplab.companion.replication")
    job._code(loop.train.__module__)  # which does not import it


@pytest.mark.parametrize("given, expected", [("~/r", "home/r"), ("r", "work/r")])
def test_the_store_is_expanded_and_stays_where_it_is(monkeypatch, tmp_path, given, expected):
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COMPANION_RUNS", given)
    monkeypatch.chdir(tmp_path / "work")
    job._absolute.cache_clear()
    assert runs.store() == tmp_path / expected
    monkeypatch.chdir(tmp_path)
    assert runs.store() == tmp_path / expected


def test_an_empty_store_is_the_usual_one_and_an_unknown_home_is_refused(monkeypatch):
    monkeypatch.setenv("COMPANION_RUNS", "")
    assert runs.store() == files.ROOT / "data" / "runs"
    monkeypatch.setenv("COMPANION_RUNS", "~nobody-of-this-name/r")
    with pytest.raises(InputError, match="COMPANION_RUNS is '~nobody-of-this-name/r'"):
        runs.store()


@pytest.mark.parametrize(
    "program, words",
    [
        (
            "import sys; print('warning', file=sys.stderr); import nothing_of_this_name",
            "failed: ModuleNotFoundError: No module named",
        ),
        ("import sys; print('starting\\nbad luck\\n====', file=sys.stderr); sys.exit(3)", "failed: bad luck"),
        ("raise SystemExit(1)", "failed: it said nothing"),
    ],
)
def test_a_launchers_last_informative_line_is_shown(store, monkeypatch, program, words):
    monkeypatch.setenv("COMPANION_LAUNCH", shlex.join([sys.executable, "-c", program]))
    with pytest.raises(InputError) as error:
        load_or_run()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_failure_in_a_launched_process_keeps_its_kind(store, monkeypatch):
    """Whatever its words: a damaged checkpoint is set aside, the run computed again."""
    code = textwrap.dedent("""
        import json, pathlib, sys
        kept = pathlib.Path(sys.argv[-1]).parent / "second"
        folder = pathlib.Path(sys.argv[-1])
        if kept.exists():
            (folder / "failure.json").write_text(json.dumps({"kind": "InputError", "message": "the second"}))
        else:
            kept.write_text("")
            (folder / "failure.json").write_text(json.dumps({"kind": "CorruptFile", "message": "kaputt"}))
        sys.exit(1)""")
    monkeypatch.setenv("COMPANION_LAUNCH", shlex.join([sys.executable, "-c", code]))
    with pytest.raises(InputError, match="^the second$"):
        load_or_run()
    assert [path.name.partition(".")[2] for path in (store / "train").iterdir() if path.is_dir()] == ["damaged-1"]


def test_data_that_changed_under_a_running_notebook_are_noticed(store):
    name, folder, digest, code = job.place(loop.train, TINY)
    with pytest.raises(InputError, match="the data changed since this notebook loaded them: restart the kernel"):
        job.Job(loop.train, TINY, name, folder, "another digest", code).execute()
    assert not folder.exists()


def test_a_run_that_another_process_finished_meanwhile_is_not_computed_again(store, monkeypatch):
    load_or_run()
    late = job.Job(loop.train, TINY, *job.place(loop.train, TINY))
    monkeypatch.setattr(job.Job, "_compute", None)
    assert late.execute() == []


def cut(text):
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    "name, damage",
    [
        ("metrics.jsonl", cut),
        ("metrics.jsonl", lambda content: content.replace(b'"epoch": 1', b'"epoch": 7')),
        ("result.json", cut),
        ("result.json", lambda content: b"{}"),
        ("result.json", lambda content: b"[]"),
        ("result.json", lambda content: content.replace(b'"test_top1": ', b'"test_top1": 9')),
        ("config.json", lambda content: b""),
        ("model.safetensors", cut),
        ("provenance.json", None),
    ],
)
def test_a_damaged_run_is_set_aside_recomputed_and_named(store, name, damage):
    (first,) = load_or_run()
    path = first.folder / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    said = []
    (again,) = load_or_run(said=said)
    assert again == first
    assert said[0] == "0 of 1 runs loaded from the store, 1 to compute"
    assert f"run {first.hash} is damaged" in said[1] and f"set aside as {first.hash}.damaged-1" in said[1]
    assert first.folder.with_name(f"{first.hash}.damaged-1").is_dir()


def test_a_damaged_checkpoint_is_set_aside_and_the_run_starts_over(store, monkeypatch):
    with interrupted(monkeypatch, after=2):
        load_or_run()
    (half,) = store.glob("train/*/checkpoint.safetensors")
    half.write_bytes(half.read_bytes()[:-7])
    said = []
    (again,) = load_or_run(said=said)
    assert "checkpoint" in said[1] and "set aside" in said[1]
    assert again.result["test_top1"] == loop.train(TINY, store / "reference")["test_top1"]


def test_a_run_of_another_schema_is_refused_in_words(store):
    (run,) = load_or_run()
    path = run.folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 0}))
    with pytest.raises(InputError, match="has schema 0, this version reads 1; move the folder away"):
        load_or_run()


def test_no_runs_and_bad_configurations_leave_nothing(store):
    with pytest.raises(InputError, match="are the seeds empty"):
        runs.load_or_run(loop.train, [])
    with pytest.raises(InputError, match="did you mean 'no_sab'"):
        load_or_run(but(skip="no_sap"))
    assert not list(store.glob("train/*"))


def test_more_test_images_than_there_are_are_refused_before_training(store):
    with pytest.raises(
        InputError, match="^101 test images are to be looked at after training, but fashion_mnist has only"
    ):
        runs.load_or_run(loop.train, [TINY], workers=0, test_images=101)
    assert not store.exists()
    (run,) = runs.load_or_run(loop.train, [but(epochs=1)], workers=0, test_images=100)
    assert run.history


def test_a_full_disk_is_one_clear_error_and_the_next_try_succeeds(store, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            files.StorageError, match="No space left on device; free space there, or set COMPANION_RUNS"
        ):
            load_or_run()
    assert not list(store.rglob("*.tmp"))
    assert load_or_run()[0].result["test_top1"] > 0


@pytest.mark.parametrize(
    "options, refused, reason, saved",
    [
        ("size=48k", "train/HASH/checkpoint.safetensors", "No space left on device", []),
        (
            "size=250k",
            "train/HASH/checkpoint.safetensors",
            "No space left on device",
            [1],
        ),  # no room for a second beside it
        ("ro", ".locks", "Read-only file system", []),
    ],
    ids=["full", "full later", "read-only"],
)
def test_a_store_on_such_a_disk_is_one_clear_error_and_the_next_try_succeeds(
    disk, monkeypatch, tmp_path, options, refused, reason, saved
):
    folder = disk(options)
    monkeypatch.setenv("COMPANION_RUNS", str(folder / "runs"))
    with pytest.raises(files.StorageError) as error:
        load_or_run()
    path = runs.store() / refused.replace("HASH", job.place(loop.train, TINY)[0])
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"cannot write {path}: {reason}; free space there, or set COMPANION_RUNS")
    assert not list(folder.rglob("*.tmp"))
    assert [checkpoint.read(path)["epoch"] for path in folder.rglob("checkpoint.safetensors")] == saved
    disk("rw,size=20m")
    whole = loop.train(TINY, tmp_path)
    assert load_or_run()[0].history == whole["history"]
    disk("ro")
    assert load_or_run()[0].history == whole["history"]  # what the store holds needs no writing


@pytest.fixture
def name():
    """Return the hash of a run whose data and code are loaded: later another user may not be able to read them."""
    return job.place(loop.train, TINY)[0]


def test_a_store_without_permission_is_one_clear_error(name, as_nobody, monkeypatch):
    monkeypatch.setenv("COMPANION_RUNS", str(as_nobody / "kept" / "runs"))
    with pytest.raises(
        files.StorageError, match=r"^cannot write .*/kept/runs/\.locks: Permission denied; .*COMPANION_RUNS"
    ):
        load_or_run()
    assert os.listdir(as_nobody / "kept") == ["file.txt"]


def test_a_store_of_another_user_is_one_clear_error(name, as_nobody, monkeypatch):
    monkeypatch.setenv("COMPANION_RUNS", str(as_nobody / "others"))
    folder = runs.store() / "train" / name
    with pytest.raises(InputError, match=rf"^cannot read {folder}/result\.json: Permission denied; .*COMPANION_RUNS"):
        load_or_run()


@pytest.mark.parametrize("leftover", ["checkpoint.safetensors", "attention.json"])
def test_what_a_run_needed_while_it_was_unfinished_is_removed_even_after_a_kill(store, leftover):
    (run,) = load_or_run()
    names = sorted(path.name for path in run.folder.iterdir())
    (run.folder / leftover).write_text("killed before this was removed")
    assert load_or_run() == [run] and sorted(path.name for path in run.folder.iterdir()) == names


def test_a_store_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPANION_RUNS", str(tmp_path / "file" / "runs"))
    with pytest.raises(files.StorageError, match="cannot write .*Not a directory"):
        load_or_run()


def use_threads(monkeypatch):
    """Compute in threads, and end no process for them: what is ended would be the workers of other tests."""
    monkeypatch.setattr(runs, "_pool", functools.cache(lambda _: concurrent.futures.ThreadPoolExecutor(1)))
    monkeypatch.setattr(runs.multiprocessing, "active_children", list)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_system_without_locks_is_one_clear_error(store, monkeypatch, number, workers):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if workers:  # which are other processes
        use_threads(monkeypatch)
    with pytest.raises(
        InputError, match=r"^cannot lock .*its file system has no locks .*set COMPANION_RUNS to a folder"
    ):
        load_or_run(workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_for_another_process_is_said(store, monkeypatch, workers):
    (run,) = load_or_run()
    path, said = store / ".locks" / f"{run.hash}.lock", []
    shutil.rmtree(run.folder)
    if workers:
        use_threads(monkeypatch)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(1, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        load_or_run(workers=workers, said=said)
    assert any("another process computes it; waiting" in line for line in said)


def test_tables_hold_what_the_runs_hold(store):
    both = load_or_run(TINY, but(skip="none"))
    table = runs.table(both)
    assert list(table.skip) == ["both", "none"] and list(table.depth) == [2, 2]
    assert list(table.test_top1) == [run.result["test_top1"] for run in both]
    history = runs.history(both)
    assert len(history) == 8 and list(history.epoch[:4]) == [0, 1, 2, 3]
    assert len(runs.log_kappa(both)) == 2 * 4 * 4 * 2
    assert set(runs.block_gradient_norms(both).epoch) == {1, 2, 3}


def test_jobs_are_named_by_what_differs():
    assert runs._labels([TINY, but(skip="none")]) == ["skip both", "skip none"]
    assert runs._labels([but(model_args=TINY.model_args | {"depth": d}) for d in (1, 2)]) == ["depth 1", "depth 2"]
    assert runs._labels([TINY]) == ["model vit"]


SCRIPT = """
import sys
import textwrap
from test_loop import TINY, but
from skiplab.companion import runs
from skiplab.training import loop
if __name__ == "__main__":
    configs = [but(epochs=6), but(epochs=6, skip="none")]
    found = runs.load_or_run(loop.train, configs, workers=int(sys.argv[1]), report=print)
    print("DONE", [run.hash for run in found])
"""


def start(store, tmp_path, workers):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"COMPANION_RUNS": str(store), "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, script, str(workers)],
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def numbers(store):
    """Return everything stored that must not depend on interruptions."""
    return {
        path.relative_to(store): path.read_bytes()
        for name in ("metrics.jsonl", "model.safetensors", "config.json")
        for path in store.glob(f"train/*/{name}")
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_random_moments_it_resumes_to_the_same_numbers(tmp_path, how):
    """Kill the whole process group at three moments spread over the run; rerun; compare with an undisturbed run."""
    whole = start(tmp_path / "whole", tmp_path, workers=0)
    begin = time.monotonic()
    assert "DONE" in whole.communicate(timeout=300)[0]
    duration = time.monotonic() - begin
    chance = random.Random(0)
    for part in range(3):
        process = start(tmp_path / "parts", tmp_path, workers=2)
        time.sleep(duration * (part + chance.random()) / 3)
        os.killpg(process.pid, how)
        process.communicate(timeout=60)
    last = start(tmp_path / "parts", tmp_path, workers=2)
    assert "DONE" in last.communicate(timeout=300)[0]
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    left = {path.name for path in (tmp_path / "parts").rglob("*") if path.is_file() and ".locks" not in path.parts}
    assert left == {"config.json", "metrics.jsonl", "model.safetensors", "provenance.json", "result.json"}


@pytest.mark.slow
def test_two_processes_share_the_work_and_the_folder(tmp_path):
    both = [start(tmp_path / "store", tmp_path, workers=0) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert all("DONE" in output for output in outputs)
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    assert len(list((tmp_path / "store" / "train").iterdir())) == 2
    left = {path.name for path in (tmp_path / "store" / "train").rglob("*") if path.is_file()}
    assert left == {"config.json", "metrics.jsonl", "model.safetensors", "provenance.json", "result.json"}


@pytest.mark.slow
def test_workers_die_with_their_parent(tmp_path):
    process = start(tmp_path / "store", tmp_path, workers=2)
    while not list((tmp_path / "store").glob("train/*/checkpoint.safetensors")):
        assert process.poll() is None
        time.sleep(0.05)
    children = subprocess.run(
        ["ps", "-o", "pid=", "-g", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert len(children) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(alive(int(child)) for child in children):
        time.sleep(0.1)
    assert not [child for child in children if alive(int(child))]


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def killed(config, folder, report):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_is_one_clear_error(store):
    with pytest.raises(InputError, match="a worker process was killed"):
        runs.load_or_run(killed, [TINY, but(seed=9)], workers=1)


def where(value):
    return os.getpid(), value


def refuses(value):
    raise InputError(f"{value!r} is not allowed")


def test_a_gpu_is_used_from_a_process_of_its_own_and_a_cpu_from_this_one():
    model = torch.nn.Linear(3, 2)
    process, found = runs.on_device("cuda", where, model)
    assert process != os.getpid() and torch.equal(found.weight, model.weight) and not model.weight.is_shared()
    assert runs.on_device("cpu", where, model) == (os.getpid(), model)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bad_input_on_a_device_is_one_line(device):
    with pytest.raises(InputError, match="^'x' is not allowed$") as caught:
        runs.on_device(device, refuses, "x")
    assert caught.value._render_traceback_() == ["InputError: 'x' is not allowed"]


def test_timings_on_a_gpu_are_left_to_that_process(monkeypatch):
    called = []
    for module in (costs, runs):
        monkeypatch.setattr(
            module, "on_device", lambda device, function, *given: called.append((device, function.__name__, given))
        )
    costs.graying_times("cuda", 1)
    costs.step_ratios("vit_tiny_patch16_224", "cuda", 1)
    anti_oversmoothing_costs.step_costs({}, torch.zeros(1), "cuda", 1)
    assert [(device, name) for device, name, _ in called] == [
        ("cuda", "_graying_times"),
        ("cuda", "_step_ratios"),
        ("cuda", "_step_costs"),
    ]


def ends_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_on_a_device_is_one_clear_error():
    with pytest.raises(InputError, match="the process that computes on the GPU was killed"):
        runs.on_device("cuda", ends_itself)

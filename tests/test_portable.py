"""COMPANION_PORTABLE, and the processors that `make test-cpus` simulates."""

import os
import subprocess
import sys

import pytest

from skiplab import files, portable
from skiplab.errors import InputError
from workflow import bits, cpus


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """An environment without any of the settings, and a processor that has AVX2."""
    for name in (portable.SWITCH, *portable.SETTINGS):
        monkeypatch.delenv(name, raising=False)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx avx2 fma\n", encoding="utf-8")
    return cpuinfo


def settings():
    return {name: os.environ[name] for name in portable.SETTINGS if name in os.environ}


def test_it_is_on_by_default_and_keeps_what_is_set(environment, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    portable.settle(environment)
    assert settings() == portable.SETTINGS | {"MKL_CBWR": "COMPATIBLE"}


def test_it_can_be_switched_off(environment, monkeypatch):
    monkeypatch.setenv(portable.SWITCH, "0")
    portable.settle(environment)
    assert not settings()


@pytest.mark.parametrize("flags", ["flags\t\t: fpu avx fma\n", None])
def test_a_processor_without_avx2_is_left_alone(environment, flags):
    environment.unlink() if flags is None else environment.write_text(flags, encoding="utf-8")
    portable.settle(environment)
    assert not settings()


@pytest.mark.parametrize("value", ["", "yes", "2"])
def test_another_value_is_one_clear_line(environment, monkeypatch, value):
    monkeypatch.setenv(portable.SWITCH, value)
    with pytest.raises(InputError, match=f"COMPANION_PORTABLE is '{value}'; it must be 0 .* or 1 "):
        portable.settle(environment)


def test_importing_the_library_settles_it_before_torch_computes():
    code = "import skiplab, torch; print(torch.backends.cpu.get_cpu_capability())"
    capabilities = {}
    for switch in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=files.ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={name: value for name, value in os.environ.items() if name not in portable.SETTINGS}
            | {portable.SWITCH: switch},
        )
        capabilities[switch] = done.stdout.strip()
    assert capabilities["1"] in ("AVX2", capabilities["0"])


PARTS = dict.fromkeys([*bits.DRAWN, *bits.COMPUTED], "a")


def test_the_table_says_where_bits_differ():
    found = {"avx2": PARTS, "oldest": PARTS | {"a grayed batch, SVD": "b"}}
    lines = cpus.table(found, "avx2").splitlines()
    assert lines[0] == "| part of a run | avx2 | oldest |" and len(lines) == 2 + len(PARTS)
    assert [line for line in lines if "other" in line] == ["| a grayed batch, SVD | same | other |"]
    assert not cpus.differing(found, "avx2")


def test_a_drawn_part_that_differs_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(cpus, "digests", lambda names: {names[0]: PARTS, names[1]: PARTS | {"masks": "b"}})
    with pytest.raises(InputError, match="masks on widest: must be the same bits on every machine"):
        cpus.check(["oldest", "widest"], ["bits"])


def test_failed_tests_and_notebooks_are_named(monkeypatch):
    failing = lambda name: "FAILED tests/test_a.py" if name == "mixed" else None  # noqa: E731
    monkeypatch.setattr(cpus, "fast_tests", failing)
    monkeypatch.setattr(cpus, "notebooks", lambda name: None)
    with pytest.raises(InputError, match="^tests on mixed: FAILED tests/test_a.py$"):
        cpus.check(["oldest", "mixed"], ["tests", "notebooks"])
    assert cpus.check(["oldest"], ["tests", "notebooks"]) == "tests, notebooks hold on oldest"


def test_processors_that_cannot_be_had_are_named(monkeypatch):
    with pytest.raises(InputError, match="unknown processor 'avx'.*did you mean"):
        cpus.check(["avx"], ["bits"])
    monkeypatch.setattr(cpus, "available", lambda: ["oldest"])
    with pytest.raises(InputError, match="avx512 needs avx512f, which this machine lacks"):
        cpus.check(["avx512"], ["bits"])


@pytest.mark.slow
def test_what_is_drawn_is_the_same_on_the_oldest_and_the_widest_processor():
    found = cpus.digests(["oldest", "widest"])
    assert not cpus.differing(found, "oldest")
    assert set(found["oldest"]) == set(PARTS)

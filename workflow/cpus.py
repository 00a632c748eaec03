"""Run the fast tests, two notebooks and the numerics as other processors would: `make test-cpus`.

    python -m workflow.cpus                          everything under every simulated processor
    python -m workflow.cpus oldest widest --tests    the fast tests under two of them, as .ci/run does
    python -m workflow.cpus --bits                   only which parts of a run are the same bits where

A processor is simulated by environment alone: each numerical library takes the instructions that it is told to. Where
Debian's qemu-user is installed, the numerics also run on an emulated Haswell and an emulated EPYC, which differ in
more: Intel's library takes other ways on the processors of its own maker.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skiplab import files, portable
from skiplab.errors import InputError, run_command, unknown
from workflow import bits

NOTEBOOKS = ("01_skip_removal", "04_bounds")
NBVAL = ("-m", "pytest", "-p", "no:cacheprovider", "-n0", "--nbval", "--nbval-cell-timeout=600")
QEMU = "qemu-x86_64"


@dataclass(frozen=True)
class Processor:
    """What simulates it: environment variables, or the name by which qemu knows it; and the flag it needs here."""

    about: str
    environment: dict[str, str]
    emulated: str = ""
    needs: str = ""


def _libraries(torch: str, mkl: str, onednn: str, openblas: str, without: str = "") -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": torch,
        "MKL_CBWR": mkl,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "OPENBLAS_CORETYPE": openblas,
        "NPY_DISABLE_CPU_FEATURES": without,
    }


PROCESSORS = {
    "oldest": Processor(
        "SSE only", _libraries("default", "COMPATIBLE", "SSE41", "Nehalem", "AVX512F AVX512CD AVX2 FMA3")
    ),
    "mixed": Processor(
        "AVX2 for torch, SSE for the matrix products",
        _libraries("avx2", "COMPATIBLE", "AVX", "Sandybridge", "AVX512F AVX512CD"),
    ),
    "avx2": Processor(
        "AVX2 throughout, the default of COMPANION_PORTABLE",
        _libraries("avx2", "AVX2", "AVX2", "Haswell", "AVX512F AVX512CD"),
        needs="avx2",
    ),
    "avx512": Processor(
        "AVX-512 throughout", _libraries("avx512", "AVX512", "AVX512_CORE", "SkylakeX"), needs="avx512f"
    ),
    "widest": Processor("whatever this processor has", {portable.SWITCH: "0"}),
    "haswell": Processor("an emulated Intel", {}, emulated="Haswell", needs=QEMU),
    "epyc": Processor("an emulated AMD", {}, emulated="EPYC-Rome", needs=QEMU),
}


def available() -> list[str]:
    """Return the names of the processors that can be simulated on this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else []
    return [
        name
        for name, processor in PROCESSORS.items()
        if not processor.needs or processor.needs in flags or shutil.which(processor.needs)
    ]


def run(processor: Processor, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run this Python with `arguments` on a simulated processor, from the project's folder."""
    command = [QEMU, "-cpu", processor.emulated] if processor.emulated else []
    cleared = {name: value for name, value in os.environ.items() if name not in portable.SETTINGS}
    return subprocess.run(
        [*command, sys.executable, *arguments],
        cwd=files.ROOT,
        capture_output=True,
        text=True,
        env=cleared | processor.environment | environment,
        encoding="utf-8",
    )


def fast_tests(name: str) -> str | None:
    """Run the fast tests on a simulated processor; return what failed, None where nothing did."""
    done = run(PROCESSORS[name], "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider")
    lines = done.stdout.splitlines()
    print(f"{name}: {lines[-1] if lines else done.stderr.strip()}", flush=True)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n".join(failed or [f"pytest ended with {done.returncode}"]) if done.returncode else None


def notebooks(name: str) -> str | None:
    """Compare two notebooks' outputs in the smoke preset with the stored ones; return what failed, if anything."""
    with tempfile.TemporaryDirectory() as store:
        done = run(
            PROCESSORS[name],
            *NBVAL,
            *(f"notebooks/{notebook}.ipynb" for notebook in NOTEBOOKS),
            COMPANION_PRESET="smoke",
            COMPANION_RUNS=store,
        )
    print(f"{name}: {' and '.join(NOTEBOOKS)}: {done.stdout.splitlines()[-1]}", flush=True)
    return done.stdout[-3000:] if done.returncode else None


def digests(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return each processor's digests of the parts of a run."""
    found = {}
    for name in names:
        done = run(PROCESSORS[name], "-m", "workflow.bits")
        if done.returncode:
            raise InputError(f"the numerics failed on {name}: {done.stderr.strip().splitlines()[-1]}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, str]], reference: str) -> str:
    """Return, for each part and processor, whether the bits are those of `reference`, as a Markdown table."""
    lines = [["part of a run", *found], ["---"] * (len(found) + 1)]
    for part, expected in found[reference].items():
        lines.append([part, *("same" if parts[part] == expected else "other" for parts in found.values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def differing(found: dict[str, dict[str, str]], reference: str) -> list[str]:
    """Return the parts that must be the same bits everywhere and are not, with the processors."""
    return [
        f"{part} on {name}"
        for name, parts in found.items()
        for part in bits.DRAWN
        if parts[part] != found[reference][part]
    ]


def check(names: Sequence[str], parts: Sequence[str]) -> str:
    """Run `parts` ("tests", "notebooks", "bits") on the processors; raise InputError naming all that failed."""
    for name in names:
        if name not in PROCESSORS:
            raise unknown("processor", name, PROCESSORS)
        if name not in available():
            raise InputError(
                f"{name} needs {PROCESSORS[name].needs}, which this machine lacks; it can simulate "
                f"{', '.join(available())}"
            )
    failed = {}
    for name in [name for name in names if not PROCESSORS[name].emulated]:
        for part, function in (("tests", fast_tests), ("notebooks", notebooks)):
            if part in parts and (problem := function(name)):
                failed[f"{part} on {name}"] = problem
    if "bits" in parts:
        found = digests(names)
        print(table(found, names[0]))
        failed |= dict.fromkeys(differing(found, names[0]), "must be the same bits on every machine")
    if failed:
        raise InputError("\n".join(f"{name}: {problem}" for name, problem in failed.items()))
    return f"{', '.join(parts)} hold on {', '.join(names)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow.cpus", description=__doc__.splitlines()[0])
    parser.add_argument("processors", nargs="*", help=f"of {', '.join(PROCESSORS)}; all that this machine can")
    for part in ("tests", "notebooks", "bits"):
        parser.add_argument(f"--{part}", dest="parts", action="append_const", const=part)
    arguments, started = parser.parse_args(), time.monotonic()
    done = run_command(check, arguments.processors or available(), arguments.parts or ["tests", "notebooks", "bits"])
    print(f"{time.monotonic() - started:.0f} s")
    return done


if __name__ == "__main__":
    sys.exit(main())

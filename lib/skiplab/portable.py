"""Have torch compute alike on all x86 processors of one maker: by the instructions that all of the last ten years have.

Left alone, torch, MKL and oneDNN take the widest vectors that a processor has, sums are added in another order, and
after some steps of training the numbers are others. Which parts of a run are the same bits on which processors is
measured by `make test-cpus`. It works through environment variables that the libraries read when they first compute.
"""

import os
from pathlib import Path

from skiplab.errors import InputError

SWITCH = "COMPANION_PORTABLE"  # 0: as fast as this processor can; 1, the default: alike
SETTINGS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def settle(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Set the variables that are not set yet, where COMPANION_PORTABLE is not 0 and the processor has AVX2.

    Raises InputError for another value of the switch than 0 or 1.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise InputError(f"{SWITCH} is {switch!r}; it must be 0 (as fast as possible) or 1 (portable, the default)")
    if switch == "1" and cpuinfo.exists() and " avx2 " in cpuinfo.read_text(encoding="utf-8"):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)

"""The workflow on a real cluster manager: a SLURM of one node, started here, runs notebooks, loses one, and resumes.

Needs Debian's slurmctld, slurmd and munge, and root. Skipped where they are missing, unless COMPANION_REQUIRE_SLURM
is set.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skiplab.files import ROOT

pytestmark = pytest.mark.slow
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo", "scontrol")
MUNGE = Path("/run/munge/munge.socket.2")  # where slurmd looks before it has a configuration
TARGETS = ["build/smoke/01_skip_removal.ipynb", "build/smoke/04_bounds.ipynb"]
SETTINGS = """
ClusterName=companion
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmctldParameters=enable_configless
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def refuse(reason):
    if os.environ.get("COMPANION_REQUIRE_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.3)
    raise TimeoutError(what)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Return the environment in which SLURM's commands find a cluster of one node, this machine."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")]
    if missing or os.geteuid():
        refuse(f"SLURM cannot start here: {', '.join(missing) or 'it needs root'}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    ports = free_port(), free_port()
    (folder / "slurm.conf").write_text(
        SETTINGS.format(
            host=socket.gethostname().split(".")[0],
            folder=folder,
            ports=ports,
            cores=os.cpu_count(),
            memory=max(16000, memory),
        )
    )  # declared at least as large as the jobs ask for; SLURM only books it
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    MUNGE.parent.mkdir(exist_ok=True)
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={folder}/key",
        f"--socket={MUNGE}",
        f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/munge.seed",
    ]
    slurmd = ["slurmd", "-D", "--conf-server", f"127.0.0.1:{ports[0]}"]
    programs = []
    with open(folder / "log", "w") as log:
        try:
            for command, ready in (
                (munged, lambda: MUNGE.exists()),
                (["slurmctld", "-D"], lambda: up(environment)),
                (slurmd, lambda: idle(environment)),
            ):
                # slurmd fetches its configuration from slurmctld and leaves it where the jobs' srun looks for it.
                visible = {
                    name: value for name, value in environment.items() if (name, command[0]) != ("SLURM_CONF", "slurmd")
                }
                programs.append(subprocess.Popen(command, env=visible, stdout=log, stderr=log))
                try:
                    wait_for(ready, 60, command[0])
                except TimeoutError:
                    refuse(
                        f"SLURM cannot start here: {command[0]} is not ready; {(folder / 'log').read_text()[-1500:]}"
                    )
            yield environment
        finally:
            for program in reversed(programs):
                program.terminate()
                program.wait(30)


def up(environment):
    return subprocess.run(["scontrol", "ping"], env=environment, capture_output=True).returncode == 0


def idle(environment):
    return (
        subprocess.run(["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True).stdout.strip()
        == "idle"
    )


def running(environment):
    """Return {snakemake's comment, such as rule_notebook_wildcards_smoke_01_skip_removal: job id} of running jobs."""
    listed = subprocess.run(["squeue", "-h", "-t", "R", "-o", "%k %i"], env=environment, capture_output=True, text=True)
    return dict(line.rsplit(" ", 1) for line in listed.stdout.splitlines() if " " in line)


def test_a_job_cancelled_in_the_middle_is_resumed_by_the_next_run(cluster, tmp_path):
    environment = cluster | {"COMPANION_RUNS": str(tmp_path / "runs")}
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--directory",
        str(tmp_path),
        "--profile",
        str(ROOT / "workflow" / "profiles" / "slurm"),
        "--latency-wait",
        "20",
        "--slurm-init-seconds-before-status-checks",
        "2",
        "--config",
        "preset=smoke",
        "--",
        *TARGETS,
    ]
    with open(tmp_path / "first.log", "w") as log:
        first = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        # Checkpoints appear while the first notebook trains; its job is cancelled then.
        wait_for(
            lambda: list((tmp_path / "runs").glob("train/*/metrics.jsonl")) or first.poll() is not None, 600, "a run"
        )
        job = wait_for(
            lambda: next((job for comment, job in running(environment).items() if "01_skip" in comment), None),
            60,
            "the job of notebook 01",
        )
        subprocess.run(["scancel", job], env=environment, check=True)
        assert first.wait(900) != 0
    said = (tmp_path / "first.log").read_text()
    assert "01_skip_removal" in said and not (tmp_path / TARGETS[0]).exists()
    finished = {path.parent.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("train/*/result.json")}

    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert second.returncode == 0, second.stderr[-3000:]
    assert all((tmp_path / target).exists() for target in TARGETS)
    for name, written in finished.items():  # what was finished before the cancellation was not computed again
        assert (tmp_path / "runs" / "train" / name / "result.json").stat().st_mtime_ns == written
    third = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert third.returncode == 0 and "Nothing to be done" in third.stdout + third.stderr

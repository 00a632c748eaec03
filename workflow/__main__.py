"""What the Makefile and the Snakefile call; each command needs the repository's folder as the current one.

python -m workflow execute NOTEBOOK PRESET OUTPUT
python -m workflow publish
python -m workflow compare
python -m workflow check
python -m workflow benchmark NAME
python -m workflow plan PRESET
python -m workflow failures PRESET
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from skiplab.companion import fingerprint
from skiplab.errors import run_command
from workflow import jobs
from workflow.execute import execute


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workflow")
    commands = parser.add_subparsers(dest="command", required=True)
    executing = commands.add_parser("execute")
    executing.add_argument("notebook")
    executing.add_argument("preset")
    executing.add_argument("output", type=Path)
    executing.add_argument("--gpus", type=int, default=0, help="how many GPUs compute a run together")
    commands.add_parser("publish")
    commands.add_parser("compare")
    commands.add_parser("check")
    commands.add_parser("benchmark").add_argument("name")
    for name in ("plan", "failures"):
        commands.add_parser(name).add_argument("preset", choices=fingerprint.PRESETS)
    return run_command(_command, parser.parse_args())


def _command(arguments: argparse.Namespace) -> str | None:
    """Do what a command asks for; return what to say."""
    if arguments.command == "execute":
        if arguments.gpus > 1:
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(arguments.gpus),
            ]
            os.environ.setdefault("COMPANION_LAUNCH", shlex.join(launcher))
        return execute(arguments.notebook, arguments.preset, arguments.output.resolve())
    if arguments.command == "plan":
        from workflow import costs  # it needs torch

        found = costs.expected(arguments.preset, jobs.BUILD / arguments.preset)
        return jobs.plan(
            arguments.preset,
            {name: one.seconds for name, one in found.items()},
            {name: one.runs for name, one in found.items()},
        )
    if arguments.command == "failures":
        return "\n".join(jobs.failures(arguments.preset))
    from workflow import publish  # it needs pandas

    if arguments.command == "publish":
        return publish.publish()
    if arguments.command == "compare":
        return publish.compare()
    if arguments.command == "benchmark":
        return publish.benchmark(arguments.name)
    problems = [f"{problem}; run: make reproduce" for problem in publish.check()]
    if problems:
        sys.exit("\n".join(problems))
    return "every notebook, figure and ledger entry is there and current"


if __name__ == "__main__":
    sys.exit(main())

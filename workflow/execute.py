"""Execute a notebook in a preset: what each job of the Snakefile does."""

import logging
import os
import sys
import time
from pathlib import Path

import nbformat

from skiplab import files
from skiplab.companion import fingerprint
from skiplab.companion.fingerprint import notebook_path
from skiplab.errors import InputError
from workflow import jobs


def execute(notebook: str, preset: str, output: Path) -> None:
    """Run a notebook in a preset with papermill, which shows its progress; raise InputError where a cell fails."""
    import nbclient.exceptions
    import papermill

    from skiplab.companion import params

    parameters = params.preset_values(notebook, preset, params.stored_declarations(notebook))
    logging.basicConfig(level=logging.WARNING, format=f"{notebook} | %(message)s", stream=sys.stdout)
    logging.getLogger("papermill").setLevel(logging.INFO)
    os.environ.pop(params.PRESET_VARIABLE, None)  # it is for nbval, which cannot inject parameters
    os.environ[params.WORKFLOW_VARIABLE] = "1"
    inputs, started = fingerprint.inputs_fingerprint(notebook, preset), time.monotonic()
    files.make_folder(output.parent)
    unfinished = output.with_suffix(".failed.ipynb")
    try:
        papermill.execute_notebook(
            notebook_path(notebook),
            unfinished,
            parameters,
            cwd=files.ROOT / "notebooks",
            kernel_name="python3",
            log_output=True,
            progress_bar=False,
            extra_arguments=["--log-level=ERROR"],
        )
    except papermill.PapermillExecutionError as error:
        raise InputError(
            f"{notebook} ({preset}) failed in cell {error.exec_count}: {error.ename}: {error.evalue} "
            f"(the notebook so far: {unfinished})"
        ) from None
    except nbclient.exceptions.DeadKernelError:
        raise InputError(
            f"{notebook} ({preset}): the kernel was killed in {_last_cell(unfinished)}; usually it is "
            f"memory that ran out: use fewer workers or a smaller batch (the notebook so far: {unfinished})"
        ) from None
    executed = nbformat.read(unfinished, as_version=4)
    executed.metadata["companion"] = jobs.finished(started, inputs)
    files.write(output, nbformat.writes(executed))
    unfinished.unlink()


def _last_cell(unfinished: Path) -> str:
    """Name the cell that papermill was running when it last saved a notebook."""
    cells = [cell for cell in nbformat.read(unfinished, as_version=4).cells if cell.cell_type == "code"]
    begun = [
        number
        for number, cell in enumerate(cells)
        if cell.metadata.get("papermill", {}).get("status", "pending") != "pending"
    ]
    return f"cell {begun[-1] + 1}, {cells[begun[-1]].source.splitlines()[0]!r}" if begun else "its first cell"

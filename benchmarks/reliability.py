"""What was done to experiments, how often, and whether they came out as if nothing happened: a table from the tests.

python -m benchmarks.reliability [--kills 50]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

# What is done, the tests that do it, and how many times each does it (None: once for each case that pytest counts).
ROWS = {
    "killed (SIGKILL) at a random moment while training or writing a checkpoint, figure or ledger; "
    "rerun to the same bytes": (
        ["test_reliability.py::test_killed_at_random_moments_whatever_it_writes"],
        "kills",
    ),
    "process group killed or interrupted (Ctrl-C) with two workers, resumed to the same metrics and weights": (
        ["test_runs.py::test_killed_at_random_moments_it_resumes_to_the_same_numbers"],
        3,
    ),
    "the same runs started by two processes at once: each run computed once": (
        ["test_runs.py::test_two_processes_share_the_work_and_the_folder"],
        None,
    ),
    "trained by two processes instead of one: the same curves to 1e-5 (SOAP: 1e-3)": (
        [
            "test_distributed.py::test_two_processes_train_as_one_does",
            "test_distributed.py::test_two_processes_mask_and_crop_as_one_does",
        ],
        None,
    ),
    "ledger written 80 times by 4 processes while it is read: always whole": (
        ["test_reliability.py::test_a_ledger_written_by_many_jobs_at_once_is_always_whole"],
        None,
    ),
    "file times in 1970 and 2096, a clock that runs backwards: nothing recomputed, nothing lost": (
        [
            "test_reliability.py::test_a_clock_that_jumps_changes_nothing",
            "test_jobs.py::test_clocks_that_jump_do_not_matter",
        ],
        None,
    ),
    "job of the workflow that fails: named with its last words, the others finish, only it is done again": (
        ["test_jobs.py::test_a_job_that_fails_is_named_the_others_finish_and_only_it_is_done_again"],
        None,
    ),
    "full disk, folder that cannot be written: one line, and the next try succeeds": (
        [
            "test_files.py",
            "test_runs.py::test_a_full_disk_is_one_clear_error_and_the_next_try_succeeds",
            "test_runs.py::test_a_store_on_such_a_disk_is_one_clear_error_and_the_next_try_succeeds",
            "test_runs.py::test_a_store_without_permission_is_one_clear_error",
            "test_runs.py::test_a_store_of_another_user_is_one_clear_error",
            "test_runs.py::test_a_store_that_cannot_be_written_is_one_clear_error",
        ],
        None,
    ),
    "stored run damaged: set aside, named, computed again; of another schema: refused in words": (
        [
            "test_runs.py::test_a_damaged_run_is_set_aside_recomputed_and_named",
            "test_runs.py::test_a_damaged_checkpoint_is_set_aside_and_the_run_starts_over",
            "test_runs.py::test_a_run_of_another_schema_is_refused_in_words",
        ],
        None,
    ),
    "malformed parameter, preset, data set, image, model, setting, claim or ledger file: one line that names it": (
        [
            "test_params.py",
            "test_data.py",
            "test_claims.py::test_a_malformed_file_gets_one_line_that_names_the_entry",
            "test_ledger.py",
            "test_loop.py::test_bad_configurations_are_refused_in_one_line",
            "test_fuzz.py::test_a_preset_file_that_is_none_is_named",
            "test_jobs.py::test_limits_that_make_no_sense_are_named",
        ],
        None,
    ),
    "the same, fuzzed: parameters, presets, checkpoints, images, ledgers": (["test_fuzz.py"], None),
    "ten experiments in one process: resident memory grows by 5 % at most": (
        ["test_reliability.py::test_ten_experiments_in_one_process_do_not_grow"],
        None,
    ),
}


def outcomes(tests: list[str], kills: int) -> tuple[int, int, int]:
    """Run tests; return how many passed, were skipped and failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
                *(f"tests/{test}" for test in tests),
            ],
            capture_output=True,
            env=os.environ | {"COMPANION_KILLS": str(kills)},
        )
        suite = xml.parse(report).getroot().find("testsuite")
    failed, skipped = int(suite.get("failures")) + int(suite.get("errors")), int(suite.get("skipped"))
    return int(suite.get("tests")) - failed - skipped, skipped, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    arguments = parser.parse_args()
    print("| what was done | times | as promised | not |\n|---|---|---|---|")
    for what, (tests, times) in ROWS.items():
        passed, _, failed = outcomes(tests, arguments.kills)
        each = arguments.kills if times == "kills" else times or 1
        print(f"| {what} | {each * (passed + failed)} | {each * passed} | {each * failed} |", flush=True)


if __name__ == "__main__":
    main()

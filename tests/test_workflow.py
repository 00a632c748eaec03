"""Executing, publishing and checking notebooks: nothing stale or missing goes unnoticed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbformat import v4

from skiplab import files
from skiplab.companion import claims, figures, fingerprint, ledger, params
from skiplab.errors import InputError
from workflow import __main__ as command
from workflow import publish
from workflow.execute import execute

NAME = "01_skip_removal"
LOOP_START, LOOP_END = publish.SHOWN["loop"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one small executed notebook, a figure, an empty ledger and a README."""
    claims.claims()  # the real ones, kept from now on: this project has not all of their notebooks
    for module in (files, fingerprint):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "BUILD", tmp_path / "build")
    monkeypatch.setattr(publish, "README", tmp_path / "README.md")
    monkeypatch.setattr(publish, "LEDGER_PAGE", tmp_path / "LEDGER.md")
    monkeypatch.setattr(publish, "BENCHMARKS", tmp_path / "benchmarks")
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "data" / "ledger")
    for name, text in {
        "data/claims.yaml": "claims: {}\n",
        "data/fashion_mnist/SHA256SUMS": "",
        "requirements.lock": "",
        "benchmarks/results/loop.md": "fast\n",
        "README.md": f"before\n{publish.LEDGER_START}old\n{publish.LEDGER_END}between\n"
        f"{LOOP_START}{LOOP_END}{publish.RERUN_START}{publish.RERUN_END}after\n",
    }.items():
        files.write(tmp_path / name, text)
    cells = [
        v4.new_markdown_cell("# Why?"),
        v4.new_code_cell("x: int = 3  # a number", metadata={"tags": ["parameters"]}),
        v4.new_code_cell("print(x)"),
    ]
    notebook = v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    files.write(fingerprint.notebook_path(NAME), nbformat.writes(notebook))
    executed = nbformat.from_dict(json.loads(nbformat.writes(notebook)))
    executed.metadata["companion"] = {"inputs": fingerprint.inputs_fingerprint(NAME, "quick")}
    executed.metadata["papermill"] = {"duration": 1.0, "output_path": "/somewhere"}
    for number, cell in enumerate(executed.cells[1:], 1):
        cell.execution_count = number
    executed.cells[2].outputs = [v4.new_output("stream", name="stdout", text="3\n")]
    files.write(tmp_path / "build" / "quick" / f"{NAME}.ipynb", nbformat.writes(executed))
    figures.save(figures.plt.figure(), "01_one", params.Parameters(notebook=NAME, preset="quick", x=3))
    return tmp_path


def test_publishing_brings_outputs_and_ledger_to_the_reader(project):
    assert publish.check() != []
    assert "1 figures in figures/" in publish.publish()
    text = fingerprint.notebook_path(NAME).read_text()
    published = nbformat.reads(text, as_version=4)
    assert published.cells[2].outputs[0].text == "3\n" and published.cells[2].execution_count == 2
    assert (
        published.metadata.companion["figures"] == ["01_one"] and "papermill" not in text and "/somewhere" not in text
    )
    readme = (project / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n") and "old" not in readme
    assert f"between\n{LOOP_START}fast\n{LOOP_END}" in readme and "No run with other seeds is stored yet." in readme
    assert (project / "LEDGER.md").read_text().startswith("# The ledger\n")
    assert publish.check() == []
    publish.publish()
    assert fingerprint.notebook_path(NAME).read_text() == text and (project / "README.md").read_text() == readme


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda root: (root / "figures/01_one.png").unlink(), "figures/01_one.png or its sidecar is missing"),
        (lambda root: (root / "figures/01_one.json").unlink(), "figures/01_one.png or its sidecar is missing"),
        (
            lambda root: (root / "figures/01_one.png").write_bytes(b"painted over"),
            "not the picture its sidecar describes",
        ),
        (lambda root: files.write(root / "requirements.lock", "torch==9\n"), f"notebooks/{NAME}.ipynb is stale"),
        (lambda root: files.write(root / "requirements.lock", "torch==9\n"), "figures/01_one.png is stale"),
        (lambda root: files.write(root / f"data/ledger/quick/{NAME}.json", "{}"), "is not what the notebook recorded"),
        (lambda root: files.write(root / "README.md", "no table"), "README.md does not show the results"),
        (lambda root: files.write(root / "LEDGER.md", "# The ledger"), "LEDGER.md does not show the results"),
        (lambda root: (root / "LEDGER.md").unlink(), "LEDGER.md does not show the results"),
    ],
)
def test_what_is_missing_or_stale_is_named(project, change, problem):
    publish.publish()
    change(project)
    assert any(problem in line for line in publish.check())


def test_a_notebook_changed_since_it_was_executed_is_not_published(project):
    path = fingerprint.notebook_path(NAME)
    path.write_text(path.read_text().replace("print(x)", "print(-x)"))
    with pytest.raises(InputError, match="executed with other code, rules, data or versions: run make reproduce again"):
        publish.publish()
    assert not (project / "build" / "quick" / f"{NAME}.ipynb").exists()


@pytest.mark.slow
def test_a_failing_notebook_is_named_with_its_cell_and_leaves_no_output(project):
    path = fingerprint.notebook_path(NAME)
    path.write_text(
        path.read_text().replace("print(x)", "from skiplab.errors import InputError; raise InputError('x is bad')")
    )
    output = project / "build" / "quick" / "new.ipynb"
    with pytest.raises(
        InputError, match=rf"{NAME} \(quick\) failed in cell 2: InputError: x is bad .*new.failed.ipynb"
    ):
        execute(NAME, "quick", output)
    assert not output.exists()


@pytest.mark.slow
def test_a_killed_kernel_is_told_in_one_line_with_its_cell(project):
    path = fingerprint.notebook_path(NAME)
    path.write_text(path.read_text().replace("print(x)", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(InputError) as error:
        execute(NAME, "quick", project / "new.ipynb")
    said = str(error.value)
    assert (
        said.startswith(f"{NAME} (quick): the kernel was killed in cell 2, 'import os; ")
        and "usually it is memory" in said
    )
    assert "\n" not in said and not (project / "new.ipynb").exists()


@pytest.mark.slow
def test_a_preset_reaches_the_notebook(project):
    files.write(fingerprint.preset_path(NAME, "gpu"), "x: 41\n")
    execute(NAME, "gpu", project / "out.ipynb")
    assert nbformat.read(project / "out.ipynb", as_version=4).cells[-1].outputs[0].text == "41\n"


@pytest.mark.slow
def test_replicate_runs_the_notebook_with_other_seeds(project):
    path = fingerprint.notebook_path(NAME)
    path.write_text(
        path.read_text()
        .replace("x: int = 3  # a number", "seeds: list[int] = [0, 7]  # some")
        .replace("print(x)", "print(seeds)")
    )
    execute(NAME, "replicate", project / "out.ipynb")
    assert nbformat.read(project / "out.ipynb", as_version=4).cells[-1].outputs[0].text == "[1000, 1007]\n"


def recorded(project, values, preset):
    measured, needs = {"asa.skip.drop_no_sab": ledger.Measurement(values)}, {"learnt": ledger.Need(True, "so")}
    return ledger.record(measured, needs, notebook=NAME, preset=preset)


def test_a_rerun_is_compared_and_the_readme_shows_it(project, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["workflow", "compare"])
    for preset, said in (
        ("quick", "preset quick in .*: run make reproduce"),
        ("replicate", "replicate in .*: run make replicate"),
    ):
        assert command.main() == 1
        assert re.search(
            f"^there are no results of {said}$" if preset == "quick" else said, capsys.readouterr().err.strip()
        )
        recorded(project, (-18, -20, -16), preset)
    published = {path: path.read_bytes() for path in project.rglob("*") if path.is_file() and path.name != "README.md"}
    assert command.main() == 0
    assert "| agree |" in (readme := (project / "README.md").read_text()) and readme.endswith("after\n")
    recorded(project, (3, 1, 2), "replicate")
    assert command.main() == 1
    out, err = capsys.readouterr()
    first = "direction only (-18.0 (-21.4 to -14.6) points)"
    again = "opposite here (+2.0 (+0.3 to +3.7) points)"
    assert err == (
        f"1 of {len(claims.claims())} verdicts are contradicted by other seeds: asa.skip.drop_no_sab: "
        f"{first} in quick, "
        f"{again} with other seeds\n"
    )
    row = f"| asa.skip.drop_no_sab | {first} | {again} |"
    assert row in out and row in (project / "README.md").read_text()
    changed = {path for path, content in published.items() if path.read_bytes() != content}
    assert changed == {project / "data" / "ledger" / "replicate" / f"{NAME}.json"}


def test_an_unknown_preset_is_refused(project):
    with pytest.raises(InputError, match=f"{NAME} has no preset 'gpu'"):
        execute(NAME, "gpu", project / "out.ipynb")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpu", "replicate"])
def test_the_snakefile_plans_every_notebook_once(preset):
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", "--dry-run", "--forceall", "--config", f"preset={preset}"],
        cwd=files.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for notebook in fingerprint.notebooks():
        assert f"output: build/{preset}/{notebook}.ipynb" in done.stdout
    assert f"notebook {len(fingerprint.notebooks())}" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_workflow_runs_in_a_folder_with_spaces_quotes_and_accents(tmp_path):
    root = tmp_path / "My Papérs" / "it's here"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=files.ROOT, capture_output=True, text=True).stdout.split(
        "\0"
    )
    for name in filter(None, listed):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files.ROOT / name, root / name)
    (root / ".venv").symlink_to(sys.prefix)
    target = root / "build" / "smoke" / "07_playground.ipynb"
    environment = os.environ | {"PYTHONPATH": str(root), "COMPANION_RUNS": str(root / "data" / "runs")}
    done = subprocess.run(
        [
            root / ".venv" / "bin" / "python",
            "-m",
            "snakemake",
            "--cores",
            "1",
            "--nolock",
            "--config",
            "preset=smoke",
            "--",
            target.relative_to(root),
        ],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert target.exists() and list((root / "data" / "runs").glob("*/*/result.json"))


def test_several_gpus_are_launched_by_an_interpreter_in_any_folder(monkeypatch):
    monkeypatch.setenv("COMPANION_LAUNCH", "")  # restored afterwards
    monkeypatch.delenv("COMPANION_LAUNCH")
    monkeypatch.setattr(command, "execute", lambda *arguments: None)
    monkeypatch.setattr(sys, "executable", "/My Papers/it's/python")
    monkeypatch.setattr(sys, "argv", ["workflow", "execute", NAME, "gpu", "out.ipynb", "--gpus", "2"])
    command.main()
    assert shlex.split(os.environ["COMPANION_LAUNCH"])[:2] == ["/My Papers/it's/python", "-m"]


def test_the_makefile_quotes_the_folder_it_lies_in():
    lines = (files.ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert all('"$(CURDIR)' in line for line in lines if "$(CURDIR)" in line)


@pytest.mark.parametrize("command", ["failures smoke", "check"])
def test_every_file_is_read_as_utf8_whatever_the_locale(command):
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, "-m", "workflow", *command.split()],
        cwd=files.ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert "Error" not in done.stderr, done.stderr


def test_no_file_of_the_library_is_opened_in_the_locales_encoding():
    # These read ASCII, and data/pretrained was measured with their text.
    kept = {
        files.ROOT / "lib" / "skiplab" / "training" / "photographs.py",
        files.ROOT / "lib" / "skiplab" / "studies" / "low_pass" / "others.py",
    }
    for path in {*(files.ROOT / "lib").rglob("*.py"), *(files.ROOT / "workflow").glob("*.py")} - kept:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"read_text\(\)|write_text\([^,]*\)$", line), (path, line)


def test_the_committed_results_are_current():
    """Figures, ledger, executed notebooks and the README's table belong to the code as it stands."""
    done = subprocess.run(
        [sys.executable, "-m", "workflow", "check"], cwd=files.ROOT, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr

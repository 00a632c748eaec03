"""ARCHITECTURE.md's three walks, each taken in a copy of the project with edits of the files it names and no other."""

import json
import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbformat import v4

from skiplab.files import ROOT

CLAIM = """
  {name}:
    where: Section 9
    statement: It is so.
    unit: points
    notebook: {notebook}
    tier: quick
    rule:
      kind: effect
      statistic: The paired difference; one value a seed.
      seeds: 3
      choose: nothing
      test: {{above: 0, least: 1}}
"""
FAMILY = """
        Family(
            "mixer",
            mlp_mixer.MlpMixer,
            modules=("mlp_mixer",),
            branches=(
                Branches(
                    mlp_mixer.MixerBlock,
                    r"blocks\\.\\d+",
                    lambda block, x: block.drop_path(block.mlp_tokens(block.norm1(x).mT).mT),
                    lambda block, x: block.drop_path(block.mlp_channels(block.norm2(x))),
                    kind="token mixing",
                ),
            ),
            patch_size=lambda model: model.stem.patch_size,
        ),
"""


@pytest.fixture
def project(tmp_path):
    """Return the root of a copy of the project, without what is large."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, listed):
        if not name.startswith(("figures/", "benchmarks/", "tests/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def edit(path, before, after):
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, (path, before)
    path.write_text(text.replace(before, after), encoding="utf-8")


def run(project, *command):
    """Run a command of Python in the copy and return what it prints."""
    environment = os.environ | {"PYTHONPATH": f"{project / 'lib'}{os.pathsep}{project}", "COMPANION_RUNS": str(project)}
    done = subprocess.run(
        [sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_claim_is_added_in_two_files(project):
    claims = project / "data" / "claims.yaml"
    claims.write_text(claims.read_text(encoding="utf-8") + CLAIM.format(name="asa.new", notebook="01_skip_removal"))
    notebook = project / "notebooks" / "01_skip_removal.ipynb"
    cells = nbformat.read(notebook, as_version=4)
    (recording,) = [cell for cell in cells.cells if "ledger.record(" in cell.source]
    recording.source = 'found["asa.new"] = ledger.Measurement((2.0, 2.1, 2.2))\n' + recording.source
    nbformat.write(cells, notebook)
    run(project, "-m", "workflow", "execute", "01_skip_removal", "smoke", "out.ipynb")
    stored = json.loads((project / "build" / "ledger" / "smoke" / "01_skip_removal.json").read_text())
    assert stored["claims"]["asa.new"]["verdict"] == "reproduced"


@pytest.mark.slow
def test_a_family_of_models_is_added_in_one_file(project):
    path = project / "lib" / "skiplab" / "models" / "residual.py"
    edit(path, "from timm.models import cait, convmixer,", "from timm.models import cait, convmixer, mlp_mixer,")
    start = "\nFAMILIES = {\n    family.name: family\n    for family in ("
    edit(path, start, start + FAMILY)
    run(
        project,
        "-c",
        """
import timm, torch
from skiplab.models import create_model
settings = dict(img_size=28, patch_size=7, embed_dim=16, num_blocks=2, in_chans=1, num_classes=10)
torch.manual_seed(0)
plain = timm.models.mlp_mixer.MlpMixer(**settings).eval()
sizes = {key: settings[key] for key in ("patch_size", "embed_dim", "num_blocks")}
make = lambda skip: create_model("mixer", num_classes=10, img_size=28, in_chans=1, skip=skip, **sizes).eval()
both, none = make("both"), make("none")
for model in (both, none):
    model.load_state_dict(plain.state_dict())
x = torch.randn(2, 1, 28, 28)
seen = [model.forward_features(x) for model in (plain, both, none)]
assert torch.equal(seen[0], seen[1]) and not torch.allclose(seen[0], seen[2])
""",
    )


@pytest.mark.slow
def test_a_paper_is_added_in_four_files(project):
    claims = project / "data" / "claims.yaml"
    edit(claims, "\npapers:\n", "\npapers:\n  new: 'A. Author. A New Paper: On Skips. ICLR 2027. arXiv 2700.00001'\n")
    claims.write_text(claims.read_text(encoding="utf-8") + CLAIM.format(name="new.gain", notebook="08_new"))
    study = project / "lib" / "skiplab" / "studies" / "new.py"
    study.write_text("def gains(seeds):\n    return [2.0 + seed / 10 for seed in seeds]\n")
    cells = [
        v4.new_markdown_cell("# A new paper"),
        v4.new_code_cell("from skiplab.companion import ledger, params\nfrom skiplab.studies import new"),
        v4.new_code_cell("seeds: list[int] = [0]  # one value per seed", metadata={"tags": ["parameters"]}),
        v4.new_code_cell('p = params.validate("08_new", seeds=params.between(0))'),
        v4.new_code_cell(
            'found = {"new.gain": ledger.Measurement(new.gains(p.seeds))}\n'
            "print(*ledger.record(found, notebook=p.notebook, preset=p.preset))"
        ),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(v4.new_notebook(cells=cells, metadata=kernel), project / "notebooks" / "08_new.ipynb")
    (project / "notebooks" / "presets" / "smoke" / "08_new.yaml").write_text("seeds: [0, 1, 2]\n")
    run(project, "-m", "workflow", "execute", "08_new", "smoke", "out.ipynb")
    table = run(
        project,
        "-c",
        """
from skiplab.companion import ledger, tables
print(tables.counts(ledger.SCRATCH))
print(ledger.stored("smoke", ledger.SCRATCH)["new.gain"])
""",
    )
    assert "A New Paper" in table and "new.gain: reproduced" in table
    assert "08_new" in run(project, "-m", "workflow", "plan", "smoke")

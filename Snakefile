# One rule: execute a notebook in a preset. `make reproduce` and `make smoke` run it on the local cores.
#
#   snakemake --cores all                          the quick preset
#   snakemake --cores all --config preset=gpu      another preset: smoke, quick, gpu or paper
#
# A job is redone when anything its results depend on has changed: the fingerprint covers the notebook's code,
# its preset, the library modules it imports, the rules of its claims, the data and the pinned versions.
import sys

sys.path.insert(0, workflow.basedir)
from lib.companion import fingerprint

PRESET = config.get("preset", "quick")
if PRESET not in fingerprint.PRESETS:
    raise WorkflowError(f"unknown preset {PRESET!r} (allowed: {', '.join(fingerprint.PRESETS)})")
NOTEBOOKS = fingerprint.notebooks()


rule all:
    input: expand("build/{preset}/{notebook}.ipynb", preset=PRESET, notebook=NOTEBOOKS)


def ledger_sources(wildcards):
    """The overview shows what every other notebook recorded, so it runs after them."""
    others = [name for name in NOTEBOOKS if name != fingerprint.OVERVIEW] if wildcards.notebook == fingerprint.OVERVIEW else []
    return expand("build/{preset}/{notebook}.ipynb", preset=wildcards.preset, notebook=others)


rule notebook:
    input: ledger_sources
    output: "build/{preset}/{notebook}.ipynb"
    params: inputs=lambda wildcards: fingerprint.inputs_fingerprint(wildcards.notebook, wildcards.preset)
    threads: workflow.cores  # a notebook trains its runs side by side on all cores
    shell: "{sys.executable} -m lib.companion.workflow execute {wildcards.notebook} {wildcards.preset} {output}"

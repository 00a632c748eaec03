# One rule: execute a notebook in a preset. `make reproduce` and `make smoke` run it on the local cores.
#
#   snakemake --cores all                                                    the quick preset
#   snakemake --cores all --config preset=gpu                                another one: replicate, smoke, gpu or paper
#   snakemake --profile workflow/profiles/slurm --config preset=gpu          on a cluster
#
# A job is redone when anything its results depend on has changed: the fingerprint covers the notebook's code,
# its preset, the library modules it imports, the rules of its claims, the data and the pinned versions.
import sys

sys.path[:0] = [f"{workflow.basedir}/lib", workflow.basedir]
from skiplab.companion import fingerprint
from workflow import jobs

PRESET = config.get("preset", "quick")
if PRESET not in fingerprint.PRESETS:
    raise WorkflowError(f"unknown preset {PRESET!r} (allowed: {', '.join(fingerprint.PRESETS)})")
ROOT = str(workflow.basedir)  # a job may start in another folder
# :q quotes a path that the shell would take apart.
EXECUTE = ("PYTHONPATH={ROOT:q}/lib:{ROOT:q} {sys.executable:q} -m workflow execute {wildcards.notebook} {wildcards.preset} {output:q} "
           "--gpus {resources.gpu} 2>&1 | tee {log:q}")


wildcard_constraints:
    notebook=r"\d\d_\w+",
    share=r"\d+",


rule all:
    input: expand("build/{preset}/{notebook}.ipynb", preset=PRESET, notebook=fingerprint.notebooks())


def need(name, scale=1):
    return lambda wildcards: round(scale * getattr(jobs.need(wildcards.preset, wildcards.notebook), name))


def inputs(wildcards):
    return fingerprint.inputs_fingerprint(wildcards.notebook, wildcards.preset)


def others(wildcards):
    """The overview shows what every other notebook recorded: it runs after them, and again where one of them did."""
    names = fingerprint.notebooks() if wildcards.notebook == fingerprint.OVERVIEW else []
    return expand("build/{preset}/{notebook}.ipynb", preset=wildcards.preset, notebook=set(names) - {wildcards.notebook})


def shares(wildcards):
    """Return what the jobs write that compute runs of the same notebook beside this one."""
    return [f"build/{wildcards.preset}/{name}" for name in jobs.shares(wildcards.notebook, wildcards.preset)]


rule notebook:
    input: others, shares
    output: "build/{preset}/{notebook}.ipynb"
    log: "build/{preset}/logs/{notebook}.log"
    params: inputs=inputs
    priority: lambda wildcards: jobs.priority(wildcards.notebook)
    threads: workflow.cores or need("cores")  # on one machine a notebook trains its runs side by side on all cores
    resources: mem_mb=need("memory", 1000), disk_mb=need("disk", 1000), runtime=need("minutes"), gpu=need("gpus")
    shell: EXECUTE


rule share:
    # The same notebook once more, beside others: each computes what no other is computing, and all wait for the last.
    output: "build/{preset}/shares/{notebook}.{share}.ipynb"
    log: "build/{preset}/logs/{notebook}.{share}.log"
    params: inputs=inputs
    threads: workflow.cores or need("cores")
    resources: mem_mb=need("memory", 1000), disk_mb=need("disk", 1000), runtime=need("minutes"), gpu=need("gpus")
    shell: EXECUTE

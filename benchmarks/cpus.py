"""Which parts of a run are the same bits on which processors, simulated and emulated."""

from workflow import cpus

if __name__ == "__main__":
    names = [name for name in ("avx2", *cpus.PROCESSORS) if name in cpus.available()]
    print(cpus.table(cpus.digests(list(dict.fromkeys(names))), names[0]))

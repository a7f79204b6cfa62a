"""The ordered table of backends: the first that can and should is taken."""

from relpos.backends import cpu, dense, merged
from relpos.backends._backend import Backend
from relpos.backends._crossover import merged_is_slower

BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", cpu.why_not, cpu.run),
    Backend("merged", merged.why_not, merged.run, merged_is_slower),
    Backend("dense", dense.why_not, dense.run),
)

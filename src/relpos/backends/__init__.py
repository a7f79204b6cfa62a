"""The ordered table of backends: the first that can and should is taken."""

from relpos.backends import cpu, dense, merged, triton
from relpos.backends.backend import Backend
from relpos.backends.merged.crossover import merged_is_slower

BACKENDS: tuple[Backend, ...] = (
    Backend("triton", triton.why_not, triton.run, triton.why_later),
    Backend("cpu", cpu.why_not, cpu.run),
    Backend("merged", merged.why_not, merged.run, merged_is_slower),
    Backend("dense", dense.why_not, dense.run),
)

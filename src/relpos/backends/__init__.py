"""The ordered table of backends: the first without a reason against it is taken."""

from relpos.backends import dense
from relpos.backends._backend import Backend

BACKENDS: tuple[Backend, ...] = (Backend("dense", dense.why_not, dense.run),)

"""The checks of `relpos doctor`: versions, packages, machine, kernels, backends; and advice.

Needs torch alone, so that it runs where other packages are missing.
"""

from relpos._doctor.report import examine, write_report

__all__ = ["examine", "write_report"]

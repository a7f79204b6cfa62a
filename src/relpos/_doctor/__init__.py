"""What `relpos doctor` finds: versions, packages, machine, which backend serves which attention; and advice.

Needs torch alone, since it is asked where something is missing.
"""

from relpos._doctor.report import examine, write_report

__all__ = ["examine", "write_report"]

"""`python -m relpos` is the command `relpos`."""

from _relpos_command import main_of_module

main_of_module()

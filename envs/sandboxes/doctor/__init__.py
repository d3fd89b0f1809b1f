"""Which sandboxes work on this machine, which one is chosen and why, and which limits are really enforced.

What a cell is promised is never inferred from settings: a cell with small limits is made on each backend, and programs
in it try to go beyond them. What else is read (settings, ids, storage) explains what was measured, and says how many
cells the machine has room for.
"""

from palaestra.envs.sandboxes.doctor.diagnosis import diagnose
from palaestra.envs.sandboxes.doctor.report import BackendReport, Check, Report, Status

__all__ = ["BackendReport", "Check", "Report", "Status", "diagnose"]

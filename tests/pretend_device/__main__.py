"""Run a `vla-rl` command with the pretend device, and print what it made the device do.

From the repository's root: PYTHONPATH=.:tests python -m pretend_device train RECIPE device=pretend
"""

import sys

from pretend_device import counting, pretending
from vla_rl.cli import main

with pretending(), counting() as counts:
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code
print(f"{counts.totals}\n{counts.places(40)}", file=sys.stderr)
sys.exit(code)

"""`python -m cuops` is the command cuops."""

import sys

from .cli import command

sys.exit(command())

"""`python -m cuops` is the command cuops."""

import sys

from .cli import main

sys.exit(main())

"""`python -m mpiattn` is `mpiattn`."""

import sys

from .cli import main

sys.exit(main())

"""``python -m dramatiq_guard``, where the console script is not on PATH."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())

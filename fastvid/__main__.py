"""``python -m fastvid`` is the command ``fastvid``."""

import sys

from fastvid.cli.main import main

sys.exit(main())

"""`python -m dstrain` and `accelerate launch -m dstrain`: the command line."""

import sys

from dstrain.cli.main import main

sys.exit(main())

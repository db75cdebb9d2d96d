"""`python -m zcomm` is the command `zcomm`."""

import sys

from zcomm.cli import main

sys.exit(main())

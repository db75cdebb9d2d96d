"""`python -m zcomm.selftest`."""

import sys

from zcomm.selftest.command import main

if __name__ == "__main__":
    sys.exit(main())

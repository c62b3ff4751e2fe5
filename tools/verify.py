"""Prove that no layout changes the numbers: python tools/verify.py --help."""

import os
import sys

# One thread a rank, said before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from parallel3d.verify.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

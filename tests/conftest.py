"""One torch thread: tests of a small model share their cores, and bits depend on the number of threads."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"                 # read when torch is imported, here and in child processes
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

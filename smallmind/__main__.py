import os
import sys

# `python -m` looks for modules in the working directory first, where anybody's files may be.
if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():
    del sys.path[0]

from smallmind.cli import main

sys.exit(main())

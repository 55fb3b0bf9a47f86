import sys

from smallmind.cli import main

sys.exit(main())

"""`python -m drafter.cli` is the `drafter` command."""

import sys

from drafter.cli.main import main

sys.exit(main())

"""`python -m drafter` is the `drafter` command."""

import sys

from drafter.cli.main import main

sys.exit(main())

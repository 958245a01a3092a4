import sys

from drafter.cli.main import main

sys.exit(main(["decode", *sys.argv[1:]]))

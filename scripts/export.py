import sys

from drafter.cli.main import main

sys.exit(main(["export", *sys.argv[1:]]))

import sys

from drafter.cli import main

sys.exit(main(["export", *sys.argv[1:]]))

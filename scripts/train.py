import sys

from drafter.cli import main

sys.exit(main(["train", *sys.argv[1:]]))

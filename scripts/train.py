import sys

from drafter.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))

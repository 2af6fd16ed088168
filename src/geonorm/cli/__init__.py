"""The command line: ``geonorm COMMAND``; one module a command, with its options and its body."""

from geonorm.cli.main import main

__all__ = ["main"]

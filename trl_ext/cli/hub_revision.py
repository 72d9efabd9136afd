"""`--model-revision` of the commands with one model."""

import argparse


def add_model_revision(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    parser.add_argument("--model-revision", metavar="NAME", help="branch, tag or commit on the hub; default: main")

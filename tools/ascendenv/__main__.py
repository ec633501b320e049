"""`python -m ascendenv npu|triton`: makes an environment unless it is there, and prints the path of its Python."""

from __future__ import annotations

import argparse
import sys

from ascendenv.environment import npu_environment, triton_environment
from ascendenv.errors import AscendEnvError

ENVIRONMENTS = {"npu": npu_environment, "triton": triton_environment}


def main() -> int:
    """Status 1 where it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=ENVIRONMENTS)
    arguments = parser.parse_args()
    try:
        print(ENVIRONMENTS[arguments.environment](lambda line: print(line, file=sys.stderr)))
    except AscendEnvError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

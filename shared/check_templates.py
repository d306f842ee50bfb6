"""``python -m sandfleet.shared.check_templates GRAPH…``: whether the sandbox templates of ``SANDFLEET_PROJECT``, whose graphs are
named, can be used. It ends with 0, or says what is wrong. A program, since the infrastructure imports nothing of ours."""

import sys

from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.settings import settings
from sandfleet.shared.templates import read_templates


def main() -> None:
    """Entry point of the process."""
    try:
        read_templates(settings()).check_graphs(sys.argv[1:])
    except SandfleetError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
